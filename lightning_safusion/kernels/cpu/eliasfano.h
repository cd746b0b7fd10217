/* What the sources share that write and read Elias and Fano's positions: quotients in unary (the high bits), remainders
 * in binary (the low ones). A bucket is 2^l elements of one tensor, and has a 1 for each entry, then a 0: entry e of
 * bucket b is bit e + b. A region is 512 buckets of one tensor; ranks are the entries before each, in 16 bits where there
 * is room for fewer than 2^16. */
#include "messages.h"

#define REGION 9 /* buckets of a region, as a power of two */

/* A tensor: its elements, and the buckets and regions before it. */
struct run {
    int64_t start, stop, bucket, region;
};

static inline int64_t rank_of(const void *ranks, int64_t room, int64_t region)
{
    return room >> 16 ? ((const uint32_t *)ranks)[region] : ((const uint16_t *)ranks)[region];
}

/* Entries before a region of a message. */
static inline int64_t rank_at(const struct message *of, int64_t region)
{
    return rank_of((const void *)(intptr_t)of->ranks, of->room, region);
}

static inline int64_t buckets_of(const struct run *run, int64_t low_bits)
{
    return (run->stop - run->start + (INT64_C(1) << low_bits) - 1) >> low_bits;
}

static inline int64_t regions_of(const struct run *run, int64_t low_bits)
{
    return (buckets_of(run, low_bits) + (1 << REGION) - 1) >> REGION;
}
