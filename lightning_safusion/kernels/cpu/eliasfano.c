/* Positions by Elias and Fano: quotients in unary (the high bits), remainders in binary (the low ones). A bucket is 2^l
 * elements of one tensor, and has a 1 for each of its entries, then a 0: entry e of bucket b is bit e + b. A region is 512
 * buckets of one tensor; ranks are the entries before each. */
#include "messages.h"

#define REGION 9 /* buckets of a region, as a power of two */
#define STEP 56  /* of eight bytes so many bits are valid from any bit of the first on, or more */

/* A tensor: its elements, and the buckets and regions before it. */
struct run {
    int64_t start, stop, bucket, region;
};

static inline uint64_t bits_from(const void *field, int64_t bit)
{
    uint64_t word;
    memcpy(&word, (const uint8_t *)field + (bit >> 3), sizeof word);
    return word >> (bit & 7);
}

static inline int64_t buckets_of(const struct run *run, int64_t low_bits)
{
    return (run->stop - run->start + (INT64_C(1) << low_bits) - 1) >> low_bits;
}

static inline int64_t regions_of(const struct run *run, int64_t low_bits)
{
    return (buckets_of(run, low_bits) + (1 << REGION) - 1) >> REGION;
}

/* Positions ascend, and lie in runs. Fields are whole words, of 64 bits and of 32. */
void safusion_elias_fano(const void *positions, int64_t position_bits, int64_t size, const struct run *runs,
                         int64_t run_count, int64_t low_bits, uint32_t *ranks, int64_t rank_words,
                         uint64_t *high, int64_t high_words, uint32_t *low, int64_t low_words)
{
    const int64_t mask = (INT64_C(1) << low_bits) - 1;
    int64_t entry = 0, region = 0, word_at = 0, low_at = 0, filled = 0;
    uint64_t word = 0, bits = 0;
    memset(high, 0, sizeof *high * (size_t)high_words);
    for (const struct run *run = runs; run < runs + run_count; run++)
        for (; entry < size; entry++) {
            const int64_t x = position_of(positions, position_bits, entry) - run->start;
            if (x >= run->stop - run->start) break;
            const int64_t bit = entry + run->bucket + (x >> low_bits), own = run->region + (x >> (low_bits + REGION));
            while (region <= own) ranks[region++] = (uint32_t)entry;
            if (bit >> 6 != word_at) {
                high[word_at] = word;
                word_at = bit >> 6;
                word = 0;
            }
            word |= UINT64_C(1) << (bit & 63);
            bits |= (uint64_t)(x & mask) << filled;
            for (filled += low_bits; filled >= 32; filled -= 32, bits >>= 32) low[low_at++] = (uint32_t)bits;
        }
    if (entry) high[word_at] = word;
    const struct run *last = runs + run_count - 1;
    const int64_t regions = run_count ? last->region + regions_of(last, low_bits) : 0;
    while (region <= regions) ranks[region++] = (uint32_t)entry;
    while (region < rank_words) ranks[region++] = 0;
    for (; low_at < low_words; bits >>= 32) low[low_at++] = (uint32_t)bits;
}

/* The last run that begins at a position, or before it. */
static inline const struct run *run_of(const struct message *of, int64_t position)
{
    const struct run *runs = (const struct run *)(intptr_t)of->runs;
    int64_t low = 0, high = of->run_count - 1;
    while (low < high) {
        int64_t middle = low + (high - low + 1) / 2;
        if (runs[middle].start <= position) low = middle;
        else high = middle - 1;
    }
    return runs + low;
}

int64_t near_entry(const struct message *of, int64_t position, int behind)
{
    const uint32_t *ranks = (const uint32_t *)(intptr_t)of->ends;
    if (!of->run_count) return 0;
    const struct run *run = run_of(of, position);
    const int64_t x = position - run->start, size = run->stop - run->start;
    if (x < 0) return 0;
    return ranks[run->region + ((x < size ? x : size - 1) >> (of->low_bits + REGION)) + (behind || x >= size)];
}

/* The products of codes, the scale of their part and a factor, each rounded; those of the part that an element is in. */
struct products {
    float levels[16], of[16];
    int64_t part, next;
};

static void next_part(struct products *products, const struct message *from, int64_t position, float factor, int codes)
{
    while (position >= products->next) products->next = end_of(from, ++products->part);
    const float scale = scale_of_part(from, products->part);
    for (int code = 0; code < codes; code++) products->of[code] = products->levels[code] * scale * factor;
}

/* What a message has of the elements [from_x, to_x) of a run; compiled for each kind of values. */
static inline __attribute__((always_inline)) int add_run(const struct message *from, const struct run *run,
                                                         int64_t from_x, int64_t to_x, float factor, float *target,
                                                         struct products *products, const int64_t value_bits,
                                                         const int64_t low_bits)
{
    const uint32_t *ranks = (const uint32_t *)(intptr_t)from->ends;
    const void *high = (const void *)(intptr_t)from->offsets, *low = (const void *)(intptr_t)from->low;
    const void *values = (const void *)(intptr_t)from->values;
    const int64_t bits = from->value_bits, mask = (INT64_C(1) << low_bits) - 1, buckets = buckets_of(run, low_bits);
    const int64_t together = STEP / (low_bits > 7 ? low_bits : 7), codes = INT64_C(1) << (bits & 7);
    for (int64_t region = from_x >> (low_bits + REGION); region <= (to_x - 1) >> (low_bits + REGION); region++) {
        int64_t entry = ranks[run->region + region], before = (region << (low_bits + REGION)) - 1;
        const int64_t last = ranks[run->region + region + 1], first_bucket = region << REGION;
        const int64_t stop = buckets - first_bucket < 1 << REGION ? buckets : first_bucket + (1 << REGION);
        int64_t bit = entry + run->bucket + first_bucket;
        const int64_t end = last + run->bucket + stop;
        if (last > from->room) return 0;
        while (entry < last) {
            const int64_t width = end - bit < STEP ? end - bit : STEP;
            if (width <= 0) return 0; /* fewer entries than ranks say */
            uint64_t word = bits_from(high, bit) & ((UINT64_C(1) << width) - 1);
            const int64_t behind = entry + __builtin_popcountll(word);
            if (behind > last) return 0;
            /* none of these lies in the bucket of the first element or behind it */
            if (bit + width - behind - run->bucket < from_x >> low_bits) entry = behind;
            while (entry < behind) {
                const int64_t stop_at = behind - entry < together ? behind : entry + together;
                uint64_t lows = bits_from(low, entry * low_bits);
                uint64_t coded = value_bits < 16 ? bits_from(values, entry * bits) : 0;
                for (; entry < stop_at; entry++, word &= word - 1, lows >>= low_bits, coded >>= bits & 7) {
                    const int64_t bucket = bit + __builtin_ctzll(word) - entry - run->bucket;
                    const int64_t x = bucket << low_bits | (int64_t)(lows & (uint64_t)mask);
                    if (x <= before) return 0;
                    before = x;
                    if (x < from_x) continue;
                    if (x >= to_x) return x < run->stop - run->start;
                    if (value_bits == 32) target[x] += ((const float *)values)[entry] * factor;
                    else if (value_bits == 16)
                        target[x] += as_float((uint32_t)((const uint16_t *)values)[entry] << 16) * factor;
                    else {
                        if (run->start + x >= products->next)
                            next_part(products, from, run->start + x, factor, (int)codes);
                        target[x] += products->of[coded & (uint64_t)(codes - 1)];
                    }
                }
            }
            bit += width;
        }
    }
    return 1;
}

#define EACH(VALUES, LOW) add_run(from, run, from_x, to_x, factor, own, products, VALUES, LOW)

CLONES static int add_values(const struct message *from, const struct run *run, int64_t from_x, int64_t to_x,
                             float factor, float *own, struct products *products)
{
    if (from->value_bits == 32) return EACH(32, from->low_bits);
    if (from->value_bits == 16) return EACH(16, from->low_bits);
    return EACH(4, from->low_bits);
}

int add_elias_fano(const struct message *from, int64_t start, int64_t size, float factor, float *target)
{
    const struct run *runs = (const struct run *)(intptr_t)from->runs, *end = runs + from->run_count;
    struct products products = {.next = INT64_MAX};
    if (!from->run_count || size <= 0) return 1;
    if (from->value_bits < 16) {
        if (!from->parts) return 1;
        level_table(from->value_bits, products.levels);
        products.part = part_of(from, start);
        products.next = end_of(from, products.part);
        next_part(&products, from, start, factor, 1 << from->value_bits);
    }
    for (const struct run *run = run_of(from, start); run < end && run->start < start + size; run++) {
        const int64_t from_x = start > run->start ? start - run->start : 0;
        const int64_t to_x = (start + size < run->stop ? start + size : run->stop) - run->start;
        if (from_x >= to_x) continue;
        if (!add_values(from, run, from_x, to_x, factor, target + (run->start - start), &products)) return 0;
    }
    return 1;
}
