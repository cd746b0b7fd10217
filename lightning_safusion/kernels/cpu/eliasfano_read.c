/* Elias and Fano's positions, read. Entries come in batches: which bits they are, then which elements; nothing of a batch is
 * added before all of that is known to be sound. */
#include "eliasfano.h"

#define TAKEN 32          /* bytes of high bits that are read together: the number of a bit of them fits in a byte */
#define BATCH (8 * TAKEN) /* entries at most */

/* Which bits of a byte are set, each in a byte of a word, one behind the other. */
#define SET(byte, bit, before) ((uint64_t)((byte) >> bit & 1) * bit << 8 * (before))
#define ONES(byte, bit) ((byte) >> bit & 1)
#define ONES_2(byte) (ONES(byte, 0) + ONES(byte, 1))
#define ONES_4(byte) (ONES_2(byte) + ONES(byte, 2) + ONES(byte, 3))
#define ALL_SET(byte)                                                                                             \
    SET(byte, 1, ONES(byte, 0)) | SET(byte, 2, ONES_2(byte)) | SET(byte, 3, ONES_2(byte) + ONES(byte, 2))         \
        | SET(byte, 4, ONES_4(byte)) | SET(byte, 5, ONES_4(byte) + ONES(byte, 4))                                 \
        | SET(byte, 6, ONES_4(byte) + ONES_2((byte) >> 4)) | SET(byte, 7, ONES_4(byte) + ONES_2((byte) >> 4) + ONES(byte, 6))
#define FOUR(byte) ALL_SET(byte), ALL_SET((byte) + 1), ALL_SET((byte) + 2), ALL_SET((byte) + 3)
#define SIXTEEN(byte) FOUR(byte), FOUR((byte) + 4), FOUR((byte) + 8), FOUR((byte) + 12)
#define QUARTER(byte) SIXTEEN(byte), SIXTEEN((byte) + 16), SIXTEEN((byte) + 32), SIXTEEN((byte) + 48)
static const uint64_t all_set[256] = {QUARTER(0), QUARTER(64), QUARTER(128), QUARTER(192)};

static inline uint64_t bits_from(const void *field, int64_t bit)
{
    uint64_t word;
    memcpy(&word, (const uint8_t *)field + (bit >> 3), sizeof word);
    return word >> (bit & 7);
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
    if (!of->run_count) return 0;
    const struct run *run = run_of(of, position);
    const int64_t x = position - run->start, size = run->stop - run->start;
    if (x < 0) return 0;
    return rank_at(of, run->region + ((x < size ? x : size - 1) >> (of->low_bits + REGION)) + (behind || x >= size));
}

/* The products of codes, the scale of their part and a factor, each rounded, and where that part ends. */
struct products {
    float levels[16], of[16];
    int64_t part, next;
};

static void go_to_part(struct products *products, const struct message *from, int64_t position, float factor)
{
    while (position >= products->next) products->next = end_of(from, ++products->part);
    const float scale = scale_of_part(from, products->part);
    for (int code = 0; code < 16; code++)
        products->of[code] = products->levels[code] * scale * factor;
}

/* Entries of some buckets. */
struct batch {
    int64_t number;
    uint8_t bits[BATCH];     /* of high bits that are read together */
    uint32_t places[BATCH];  /* elements behind the first of the bucket that a 1 in the first of these bits would mean */
};

static inline uint8_t *put_set(uint8_t *to, uint8_t byte, uint64_t before)
{
    const uint64_t bits = all_set[byte] + before * UINT64_C(0x0101010101010101);
    memcpy(to, &bits, sizeof bits);
    return to + __builtin_popcount(byte);
}

/* Which bits are set of those from one on, as far as they are taken, up to an end. */
static inline void find_bits(struct batch *batch, const uint8_t *high, int64_t bit, int64_t end)
{
    const uint8_t *bytes = high + (bit >> 3), first = (uint8_t)(0xFF << (bit & 7));
    const int64_t all = ((end + 7) >> 3) - (bit >> 3), taken = all < TAKEN ? all : TAKEN;
    const uint8_t last = all <= TAKEN ? (uint8_t)(0xFF >> (-end & 7)) : 0xFF;
    uint8_t *to = batch->bits;
    if (taken == 1) to = put_set(to, bytes[0] & first & last, 0);
    else {
        to = put_set(to, bytes[0] & first, 0);
        for (int64_t i = 1; i < taken - 1; i++) to = put_set(to, bytes[i], 8 * (uint64_t)i);
        to = put_set(to, bytes[taken - 1] & last, 8 * (uint64_t)(taken - 1));
    }
    batch->number = to - batch->bits;
}

/* So many numbers of up to eight bits that lie one behind the other, in bytes. */
static inline uint64_t apart(uint64_t word, int64_t bits)
{
    const uint64_t four = (UINT64_C(1) << 4 * bits) - 1;
    const uint64_t two = ((UINT64_C(1) << 2 * bits) - 1) * UINT64_C(0x0000000100000001);
    const uint64_t one = ((UINT64_C(1) << bits) - 1) * UINT64_C(0x0001000100010001);
    word = (word & four) | (word >> 4 * bits & four) << 32;
    word = (word & two) | (word >> 2 * bits & two) << 16;
    return (word & one) | (word >> bits & one) << 8;
}

/* Which elements the entries are: eight places at once, if they have fewer than eight bits in a bucket. */
static inline void find_near(struct batch *batch, const struct message *from, int64_t entry)
{
    const void *low = (const void *)(intptr_t)from->low;
    const int64_t low_bits = from->low_bits, number = batch->number;
    uint8_t inside[BATCH], ones = 0;
    for (int64_t i = 0; i < number; i += 8) {
        const uint64_t eight = apart(bits_from(low, (entry + i) * low_bits), low_bits);
        memcpy(inside + i, &eight, sizeof eight);
    }
    for (int64_t i = 0; i < number; i++)
        batch->places[i] = (uint32_t)(uint8_t)(batch->bits[i] - ones++) << low_bits | inside[i];
}

static inline void find_far(struct batch *batch, const struct message *from, int64_t entry)
{
    const void *low = (const void *)(intptr_t)from->low;
    const int64_t low_bits = from->low_bits;
    const uint32_t mask = (UINT32_C(1) << low_bits) - 1;
    for (int64_t i = 0; i < batch->number; i++)
        batch->places[i] = (uint32_t)(batch->bits[i] - i) << low_bits
                           | ((uint32_t)bits_from(low, (entry + i) * low_bits) & mask);
}

/* The same, and whether they ascend. */
static inline int find_places(struct batch *batch, const struct message *from, int64_t entry)
{
    if (from->low_bits < 8) find_near(batch, from, entry);
    else find_far(batch, from, entry);
    uint32_t wrong = 0;
    for (int64_t i = 1; i < batch->number; i++) wrong |= batch->places[i] <= batch->places[i - 1];
    return !wrong;
}

/* The first entry from one on that is not before a place. */
static inline int64_t entry_at(const struct batch *batch, int64_t first, int64_t place)
{
    if (place <= 0) return first;
    for (int64_t left = batch->number - first; left > 0;) {
        const int64_t half = left / 2;
        if (batch->places[first + half] < place) first += half + 1, left -= half + 1;
        else left = half;
    }
    return first;
}

/* Where the decoding of a run is. Elements count from the first that is wanted, `from_x` of the run. */
struct reading {
    const struct message *from;
    const struct run *run;
    float *target, factor;
    struct products *products;
    struct batch *batch;
    int cached;
    int64_t from_x, size; /* of what is wanted */
    int64_t entry;        /* the first of the batch */
};

/* Adds entries from one of a batch on to before another: `target` is the first element of its places. */
static inline __attribute__((always_inline)) void add_entries(const struct reading *at, int64_t i, int64_t stop,
                                                              float *target, const int64_t value_bits)
{
    const void *values = (const void *)(intptr_t)at->from->values;
    const uint32_t *places = at->batch->places;
    const float *products = at->products->of, factor = at->factor;
    const int64_t bits = value_bits == 4 ? 4 : at->from->value_bits & 7, entry = at->entry;
    const uint64_t mask = (UINT64_C(1) << bits) - 1;
    if (value_bits == 32)
        for (; i < stop; i++) target[places[i]] += ((const float *)values)[entry + i] * factor;
    else if (value_bits == 16)
        for (; i < stop; i++)
            target[places[i]] += as_float((uint32_t)((const uint16_t *)values)[entry + i] << 16) * factor;
    else {
        for (; i + 8 <= stop; i += 8) {
            const uint64_t codes = bits_from(values, (entry + i) * bits);
            for (int64_t j = 0; j < 8; j++) target[places[i + j]] += products[codes >> j * bits & mask];
        }
        for (uint64_t codes = bits_from(values, (entry + i) * bits); i < stop; i++, codes >>= bits)
            target[places[i]] += products[codes & mask];
    }
}

/* Adds what is wanted of a batch, whose places count from element `base` on. */
static inline __attribute__((always_inline)) void add_batch(const struct reading *at, int64_t base,
                                                            const int64_t value_bits)
{
    const struct batch *batch = at->batch;
    const int64_t stop = base + batch->places[batch->number - 1] < at->size ? batch->number
                                                                           : entry_at(batch, 0, at->size - base);
    int64_t i = entry_at(batch, 0, -base);
    float *target = at->target + base;
    if (!at->cached)
        for (int64_t j = i; j < stop; j++) __builtin_prefetch(target + batch->places[j], 1);
    if (value_bits >= 16) {
        add_entries(at, i, stop, target, value_bits);
        return;
    }
    const int64_t origin = at->run->start + at->from_x + base; /* position of place 0 */
    while (i < stop) {
        if (origin + batch->places[i] >= at->products->next)
            go_to_part(at->products, at->from, origin + batch->places[i], at->factor);
        const int64_t limit = at->products->next - origin;
        const int64_t end = batch->places[stop - 1] < limit ? stop : entry_at(batch, i, limit);
        add_entries(at, i, end, target, value_bits);
        i = end;
    }
}

/* What a message has of a run, and whether it is sound; compiled for each kind of values. */
static inline __attribute__((always_inline)) int add_run(struct reading *at, const int64_t value_bits)
{
    const struct message *from = at->from;
    const struct run *run = at->run;
    struct batch *batch = at->batch;
    const int64_t low_bits = from->low_bits, buckets = buckets_of(run, low_bits);
    const int64_t first_bucket = at->from_x >> low_bits, last_region = (at->from_x + at->size - 1) >> (low_bits + REGION);
    for (int64_t region = first_bucket >> REGION; region <= last_region; region++) {
        const int64_t last = rank_at(from, run->region + region + 1), bucket = region << REGION;
        const int64_t stop = buckets - bucket < 1 << REGION ? buckets : bucket + (1 << REGION);
        const int64_t end = last + run->bucket + stop;
        int64_t before = (bucket << low_bits) - at->from_x - 1; /* the latest element */
        if (last > from->room) return 0;
        at->entry = rank_at(from, run->region + region);
        for (int64_t bit = at->entry + run->bucket + bucket; at->entry < last; at->entry += batch->number) {
            if (bit >= end) return 0;
            find_bits(batch, (const uint8_t *)(intptr_t)from->offsets, bit, end);
            const int64_t bits = bit & ~INT64_C(7), number = batch->number, zeros = bits - run->bucket - at->entry;
            bit = bits + BATCH;
            if (at->entry + number > last) return 0; /* not as many as the ranks say */
            if (number == 0 || zeros + batch->bits[number - 1] - (number - 1) < first_bucket) continue; /* not wanted */
            const int64_t base = (zeros << low_bits) - at->from_x;
            if (!find_places(batch, from, at->entry) || base + batch->places[0] <= before) return 0;
            before = base + batch->places[number - 1];
            if (before >= run->stop - run->start - at->from_x) return 0;
            add_batch(at, base, value_bits);
            if (before >= at->size) return 1;
        }
    }
    return 1;
}

CLONES static int add_any_run(struct reading *at)
{
    if (at->from->value_bits == 32) return add_run(at, 32);
    if (at->from->value_bits == 16) return add_run(at, 16);
    if (at->from->value_bits == 4) return add_run(at, 4); /* the usual ones: shifts by a constant take less time */
    return add_run(at, 1);
}

int add_elias_fano(const struct message *from, int64_t start, int64_t size, float factor, float *target, int cached)
{
    struct batch batch;
    int sound = 1;
    const struct run *runs = (const struct run *)(intptr_t)from->runs, *end = runs + from->run_count;
    struct products products = {.next = INT64_MAX};
    if (!from->run_count || size <= 0) return 1;
    if (from->value_bits < 16) {
        if (!from->parts) return 1;
        level_table(from->value_bits, products.levels);
        products.part = part_of(from, start);
        products.next = end_of(from, products.part);
        go_to_part(&products, from, start, factor);
    }
    for (const struct run *run = run_of(from, start); sound && run < end && run->start < start + size; run++) {
        const int64_t from_x = start > run->start ? start - run->start : 0;
        const int64_t to_x = (start + size < run->stop ? start + size : run->stop) - run->start;
        float *wanted = target + (run->start + from_x - start);
        struct reading at = {from, run, wanted, factor, &products, &batch, cached, from_x, to_x - from_x, 0};
        if (at.size > 0) sound = add_any_run(&at);
    }
    return sound;
}
