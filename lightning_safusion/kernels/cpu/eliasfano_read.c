/* Elias and Fano's positions, read: eliasfano.h says what they are. Entries come in batches: which bits they have, then
 * which elements they are; nothing of a batch is added before all of that is known to be sound. */
#include "eliasfano.h"

#define TAKEN 32          /* bytes of high bits that are read together: the number of a bit of them fits in a byte */
#define BATCH (8 * TAKEN) /* entries at most */
#define TAKEN_FAR 8       /* bytes where elements come from memory: more would be asked for than can be on their way */
#define LATE 3            /* batches that are found while these elements come */

/* Which bits of a byte are set, each in a byte of a word, one behind the other. */
#define SET(byte, bit, before) ((uint64_t)((byte) >> bit & 1) * bit << 8 * (before))
#define ONES(byte, bit) ((byte) >> bit & 1)
#define ONES_2(byte) (ONES(byte, 0) + ONES(byte, 1))
#define ONES_4(byte) (ONES_2(byte) + ONES(byte, 2) + ONES(byte, 3))
#define ONES_6(byte) (ONES_4(byte) + ONES(byte, 4) + ONES(byte, 5))
#define ALL_SET(byte)                                                                                     \
    SET(byte, 1, ONES(byte, 0)) | SET(byte, 2, ONES_2(byte)) | SET(byte, 3, ONES_2(byte) + ONES(byte, 2)) \
        | SET(byte, 4, ONES_4(byte)) | SET(byte, 5, ONES_4(byte) + ONES(byte, 4))                         \
        | SET(byte, 6, ONES_6(byte)) | SET(byte, 7, ONES_6(byte) + ONES(byte, 6))
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
    return runs + last_from(&runs->start, sizeof *runs / sizeof runs->start, of->run_count, position);
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
    for (int code = 0; code < 16; code++) products->of[code] = products->levels[code] * scale * factor;
}

/* Entries of a run that lie in a few of its buckets. */
struct batch {
    int64_t entry, number;  /* of the first, and how many */
    uint8_t bits[BATCH];    /* of high bits that are read together */
    uint32_t places[BATCH]; /* elements behind place 0, the first of the bucket that bit 0 would mean */
    int64_t first, stop;    /* those that are wanted */
    int64_t position;       /* of place 0 */
    float *target;          /* element of place 0 */
};

INLINE uint8_t *put_set(uint8_t *to, uint8_t byte, uint64_t before)
{
    const uint64_t bits = all_set[byte] + before * UINT64_C(0x0101010101010101);
    memcpy(to, &bits, sizeof bits);
    return to + __builtin_popcount(byte);
}

/* Which bits are set of those from one on, as far as they are taken, up to an end. */
INLINE void find_bits(struct batch *batch, const uint8_t *high, int64_t bit, int64_t end, int64_t most)
{
    const uint8_t *bytes = high + (bit >> 3), first = (uint8_t)(0xFF << (bit & 7));
    const int64_t all = ((end + 7) >> 3) - (bit >> 3), taken = all < most ? all : most;
    const uint8_t last = all <= most ? (uint8_t)(0xFF >> (-end & 7)) : 0xFF;
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
INLINE uint64_t apart(uint64_t word, int64_t bits)
{
    const uint64_t four = (UINT64_C(1) << 4 * bits) - 1;
    const uint64_t two = ((UINT64_C(1) << 2 * bits) - 1) * UINT64_C(0x0000000100000001);
    const uint64_t one = ((UINT64_C(1) << bits) - 1) * UINT64_C(0x0001000100010001);
    word = (word & four) | (word >> 4 * bits & four) << 32;
    word = (word & two) | (word >> 2 * bits & two) << 16;
    return (word & one) | (word >> bits & one) << 8;
}

/* Which elements the entries are: eight places at once, if they have fewer than eight bits in a bucket. */
INLINE void find_near(struct batch *batch, const struct message *from)
{
    const int64_t low_bits = from->low_bits, number = batch->number, bit = batch->entry * low_bits;
    const uint8_t *low = (const uint8_t *)(intptr_t)from->low + (bit >> 3);
    uint8_t inside[BATCH], ones = 0;
    for (int64_t i = 0; i < number; i += 8, low += low_bits) { /* eight have as many bits as one has bytes */
        const uint64_t eight = apart(bits_from(low, bit & 7), low_bits);
        memcpy(inside + i, &eight, sizeof eight);
    }
    for (int64_t i = 0; i < number; i++)
        batch->places[i] = (uint32_t)(uint8_t)(batch->bits[i] - ones++) << low_bits | inside[i];
}

INLINE void find_far(struct batch *batch, const struct message *from)
{
    const void *low = (const void *)(intptr_t)from->low;
    const int64_t low_bits = from->low_bits;
    const uint32_t mask = (UINT32_C(1) << low_bits) - 1;
    for (int64_t i = 0; i < batch->number; i++)
        batch->places[i] = (uint32_t)(batch->bits[i] - i) << low_bits
                           | ((uint32_t)bits_from(low, (batch->entry + i) * low_bits) & mask);
}

/* The same, and whether they ascend. */
INLINE int find_places(struct batch *batch, const struct message *from)
{
    if (from->low_bits < 8) find_near(batch, from);
    else find_far(batch, from);
    uint32_t wrong = 0;
    for (int64_t i = 1; i < batch->number; i++) wrong |= batch->places[i] <= batch->places[i - 1];
    return !wrong;
}

/* The first entry of a batch from one on that is not before a place. */
static inline int64_t entry_in(const struct batch *batch, int64_t first, int64_t place)
{
    if (place <= 0) return first;
    for (int64_t left = batch->number - first; left > 0;) {
        const int64_t half = left / 2;
        if (batch->places[first + half] < place) first += half + 1, left -= half + 1;
        else left = half;
    }
    return first;
}

/* What is read, and where its elements go. */
struct reading {
    const struct message *from;
    float *target, factor;
    int64_t start, size; /* of what is wanted */
    int64_t taken;       /* bytes of high bits that are read together */
    struct products products;
    int cached;
    int64_t found, added; /* batches, which take turns */
    struct batch batches[LATE + 1];
};

/* Entries of a part whose values share a scale. */
INLINE void add_codes(const struct reading *at, const struct batch *batch, int64_t i, int64_t stop, const int64_t bits)
{
    const void *codes = (const void *)(intptr_t)at->from->values;
    const uint32_t *places = batch->places;
    const float *products = at->products.of;
    const uint64_t mask = (UINT64_C(1) << bits) - 1;
    float *target = batch->target;
    for (; i + 8 <= stop; i += 8) {
        const uint64_t eight = bits_from(codes, (batch->entry + i) * bits);
        for (int64_t j = 0; j < 8; j++) target[places[i + j]] += products[eight >> j * bits & mask];
    }
    if (i == stop) return;
    for (uint64_t rest = bits_from(codes, (batch->entry + i) * bits); i < stop; i++, rest >>= bits)
        target[places[i]] += products[rest & mask];
}

INLINE void add_coded(struct reading *at, const struct batch *batch)
{
    struct products *products = &at->products;
    for (int64_t i = batch->first, stop; i < batch->stop; i = stop) {
        if (batch->position + batch->places[i] >= products->next)
            go_to_part(products, at->from, batch->position + batch->places[i], at->factor);
        const int all = batch->position + batch->places[batch->stop - 1] < products->next;
        stop = all ? batch->stop : entry_in(batch, i, products->next - batch->position);
        if (at->from->value_bits == 4) add_codes(at, batch, i, stop, 4); /* shifts by a constant take less time */
        else add_codes(at, batch, i, stop, at->from->value_bits);
    }
}

CLONES static void add_batch(struct reading *at, const struct batch *batch)
{
    const void *values = (const void *)(intptr_t)at->from->values;
    const float factor = at->factor, *wide = (const float *)values + batch->entry;
    const uint16_t *half = (const uint16_t *)values + batch->entry;
    float *target = batch->target;
    if (at->from->value_bits == 32)
        for (int64_t i = batch->first; i < batch->stop; i++) target[batch->places[i]] += wide[i] * factor;
    else if (at->from->value_bits == 16)
        for (int64_t i = batch->first; i < batch->stop; i++)
            target[batch->places[i]] += as_float((uint32_t)half[i] << 16) * factor;
    else add_coded(at, batch);
}

/* Adds what is wanted of batches, but for some of the latest. */
INLINE void add_found(struct reading *at, int64_t late)
{
    for (; at->added + late < at->found; at->added++) add_batch(at, at->batches + at->added % (LATE + 1));
}

/* Adds what is wanted of the next batch, at once or, where its elements are asked for first, some batches later. */
INLINE void take_batch(struct reading *at)
{
    struct batch *batch = at->batches + at->found % (LATE + 1);
    const int64_t before = at->start - batch->position, end = before + at->size;
    batch->first = entry_in(batch, 0, before);
    batch->stop = batch->places[batch->number - 1] < end ? batch->number : entry_in(batch, batch->first, end);
    batch->target = at->target - before;
    if (!at->cached)
        for (int64_t i = batch->first; i < batch->stop; i++) __builtin_prefetch(batch->target + batch->places[i], 1);
    at->found++;
    add_found(at, at->cached ? 0 : LATE);
}

/* Whether no bit is set from one on up to an end. */
INLINE int none_set(const uint8_t *high, int64_t bit, int64_t end)
{
    uint32_t set = 0;
    for (int64_t byte = bit >> 3; byte < (end + 7) >> 3; byte++) {
        uint32_t own = high[byte];
        if (byte == bit >> 3) own &= UINT32_C(0xFF) << (bit & 7);
        if (byte == end >> 3) own &= (UINT32_C(1) << (end & 7)) - 1;
        set |= own;
    }
    return !set;
}

/* Adds what a message has of a region, of which elements are wanted from a bucket on; whether it is sound. What comes
 * behind its last entry is looked at by whom the region's last element belongs to. */
INLINE int add_region(struct reading *at, const struct run *run, int64_t region, int64_t first_bucket)
{
    const struct message *from = at->from;
    const int64_t low_bits = from->low_bits, buckets = buckets_of(run, low_bits), bucket = region << REGION;
    const int64_t stop = buckets - bucket < 1 << REGION ? buckets : bucket + (1 << REGION);
    const int64_t last = rank_at(from, run->region + region + 1), end = last + run->bucket + stop;
    int64_t entry = rank_at(from, run->region + region), before = run->start + (bucket << low_bits) - 1;
    const int64_t filled = run->start + (stop << low_bits), behind = filled < run->stop ? filled : run->stop;
    if (last > from->room) return 0;
    int64_t bit = entry + run->bucket + bucket;
    while (entry < last && before < at->start + at->size - 1) {
        struct batch *batch = at->batches + at->found % (LATE + 1);
        if (bit >= end) return 0; /* not as many as the ranks say */
        find_bits(batch, (const uint8_t *)(intptr_t)from->positions, bit, end, at->taken);
        const int64_t number = batch->number, zeros = (bit & ~INT64_C(7)) - run->bucket - entry;
        bit = (bit & ~INT64_C(7)) + 8 * at->taken;
        batch->entry = entry;
        entry += number;
        if (entry > last) return 0;
        if (number == 0 || zeros + batch->bits[number - 1] - (number - 1) < first_bucket) continue; /* none is wanted */
        batch->position = run->start + zeros * (INT64_C(1) << low_bits); /* may be before the run */
        if (!find_places(batch, from) || batch->position + batch->places[0] <= before) return 0;
        before = batch->position + batch->places[number - 1];
        if (before >= behind) return 0;
        take_batch(at);
    }
    if (at->start + at->size < behind) return 1;
    return entry == last && none_set((const uint8_t *)(intptr_t)from->positions, bit, end);
}

CLONES static int add_runs(struct reading *at)
{
    const struct message *from = at->from;
    const struct run *runs = (const struct run *)(intptr_t)from->runs, *run = run_of(from, at->start);
    const int64_t end = at->start + at->size, low_bits = from->low_bits;
    for (; run < runs + from->run_count && run->start < end; run++) {
        const int64_t first = at->start > run->start ? at->start - run->start : 0;
        const int64_t last = (end < run->stop ? end : run->stop) - 1 - run->start;
        if (first > last) continue;
        for (int64_t region = first >> (low_bits + REGION); region <= last >> (low_bits + REGION); region++)
            if (!add_region(at, run, region, first >> low_bits)) return 0;
    }
    add_found(at, 0);
    return 1;
}

int add_elias_fano(const struct message *from, int64_t start, int64_t size, float factor, float *target, int cached)
{
    struct reading at;
    if (!from->run_count || size <= 0) return 1;
    at.from = from, at.target = target, at.factor = factor, at.start = start, at.size = size, at.cached = cached;
    at.taken = cached ? TAKEN : TAKEN_FAR, at.found = at.added = 0;
    at.products = (struct products){0};
    if (from->value_bits < 16) {
        if (!from->parts) return 1;
        level_table(from->value_bits, at.products.levels);
        at.products.part = part_of(from, start);
        at.products.next = end_of(from, at.products.part);
        go_to_part(&at.products, from, start, factor);
    }
    return add_runs(&at);
}
