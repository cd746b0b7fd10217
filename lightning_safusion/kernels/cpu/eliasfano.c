/* Positions by Elias and Fano: quotients in unary (the high bits), remainders in binary (the low ones). A bucket is 2^l
 * elements of one tensor, and has a 1 for each of its entries, then a 0: entry e of bucket b is bit e + b. A region is
 * 512 buckets of one tensor; ranks are the entries before each, in 16 bits where there is room for fewer than 2^16. */
#include "messages.h"

#define REGION 9 /* buckets of a region, as a power of two */
#define FEW 256  /* entries whose bits are found before they are written */
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

static inline int64_t rank_of(const void *ranks, int64_t room, int64_t region)
{
    return room >> 16 ? ((const uint32_t *)ranks)[region] : ((const uint16_t *)ranks)[region];
}

/* Entries before a region of a message. */
static inline int64_t rank_at(const struct message *of, int64_t region)
{
    return rank_of((const void *)(intptr_t)of->ends, of->room, region);
}

static inline void set_rank(void *ranks, int64_t room, int64_t region, int64_t entries)
{
    if (room >> 16) ((uint32_t *)ranks)[region] = (uint32_t)entries;
    else ((uint16_t *)ranks)[region] = (uint16_t)entries;
}

static inline int64_t buckets_of(const struct run *run, int64_t low_bits)
{
    return (run->stop - run->start + (INT64_C(1) << low_bits) - 1) >> low_bits;
}

static inline int64_t regions_of(const struct run *run, int64_t low_bits)
{
    return (buckets_of(run, low_bits) + (1 << REGION) - 1) >> REGION;
}

/* What is written so far, and what is still in registers. */
struct written {
    int64_t entry, word_at, low_at, filled;
    uint64_t word, bits;
};

/* The first entry from one on that is not before a position. */
static inline int64_t entry_at(const void *positions, int64_t position_bits, int64_t first, int64_t size,
                               int64_t position)
{
    for (int64_t left = size - first; left > 0;) {
        int64_t half = left / 2;
        if (position_of(positions, position_bits, first + half) < position) first += half + 1, left -= half + 1;
        else left = half;
    }
    return first;
}

static inline void append(struct written *to, uint32_t *low, uint64_t bits, int64_t number)
{
    to->bits |= bits << to->filled;
    to->filled += number;
    if (to->filled < 32) return;
    low[to->low_at++] = (uint32_t)to->bits;
    to->bits >>= 32;
    to->filled -= 32;
}

/* The lowest bits, up to eight, of four bytes, one behind the other. */
static inline uint64_t joined(const uint8_t *four, int64_t bits)
{
    const uint32_t one = ((1U << bits) - 1) * 0x00010001U, two = (UINT32_C(1) << 2 * bits) - 1;
    uint32_t word;
    memcpy(&word, four, sizeof word);
    word = (word & one) | (word >> (8 - bits) & one << bits);
    return (word & two) | (uint64_t)(word >> 16 & two) << 2 * bits;
}

/* The entries of a run up to `end`, and whether they ascend in it; compiled for each kind of positions. */
static inline __attribute__((always_inline)) int write_run(struct written *to, const void *positions, int64_t end,
                                                           const struct run *run, int64_t low_bits, uint64_t *high,
                                                           uint32_t *low, const int64_t position_bits)
{
    const int64_t mask = (INT64_C(1) << low_bits) - 1, last = run->stop - run->start - 1;
    struct written now = *to;
    int64_t at[FEW], xs[FEW + 1], wrong = 0; /* of elements of the run, the first is that before */
    uint8_t narrow[FEW];
    xs[0] = -1;
    while (now.entry < end) {
        const int64_t number = end - now.entry < FEW ? end - now.entry : FEW, first = now.entry + run->bucket;
        for (int64_t i = 0; i < number; i++) {
            const int64_t x = xs[i + 1] = position_of(positions, position_bits, now.entry + i) - run->start;
            at[i] = first + i + (x >> low_bits);
            narrow[i] = (uint8_t)(x & mask);
        }
        for (int64_t i = 0; i < number; i++) wrong |= (xs[i + 1] - 1 - xs[i]) | (last - xs[i + 1]); /* negative */
        if (wrong < 0) return 0;
        for (int64_t i = 0; i < number; i++) {
            if (at[i] >> 6 != now.word_at) {
                high[now.word_at] = now.word;
                now.word_at = at[i] >> 6;
                now.word = 0;
            }
            now.word |= UINT64_C(1) << (at[i] & 63);
        }
        int64_t i = 0;
        for (; low_bits <= 8 && i + 4 <= number; i += 4) append(&now, low, joined(narrow + i, low_bits), 4 * low_bits);
        for (; i < number; i++) append(&now, low, (uint64_t)(xs[i + 1] & mask), low_bits);
        now.entry += number;
        xs[0] = xs[number];
    }
    *to = now;
    return 1;
}

/* Fields of bits are whole words, of 64 bits and of 32. Returns whether positions below a number ascend and lie in runs;
 * what is behind it is left out. */
CLONES int64_t safusion_elias_fano(const void *positions, int64_t position_bits, int64_t size, int64_t below,
                                   const struct run *runs, int64_t run_count, int64_t low_bits, int64_t room,
                                   void *ranks, int64_t rank_bytes, uint64_t *high, int64_t high_words, uint32_t *low,
                                   int64_t low_words)
{
    struct written to = {0};
    int sound = 1;
    memset(high, 0, sizeof *high * (size_t)high_words);
    memset(ranks, 0, (size_t)rank_bytes);
    for (const struct run *run = runs; sound && run < runs + run_count; run++) {
        const int64_t regions = regions_of(run, low_bits);
        int64_t end = to.entry;
        for (int64_t region = 0; region < regions; region++) {
            set_rank(ranks, room, run->region + region, end);
            int64_t next = run->start + ((region + 1) << (low_bits + REGION));
            end = entry_at(positions, position_bits, end, size, next < run->stop ? next : run->stop);
        }
        set_rank(ranks, room, run->region + regions, end);
        if (position_bits == 32) sound = write_run(&to, positions, end, run, low_bits, high, low, 32);
        else sound = write_run(&to, positions, end, run, low_bits, high, low, 64);
    }
    if (to.entry) high[to.word_at] = to.word;
    for (; to.low_at < low_words; to.bits >>= 32) low[to.low_at++] = (uint32_t)to.bits;
    return sound && (to.entry == size || position_of(positions, position_bits, to.entry) >= below);
}

/* How many messages have ranks that ascend from 0, and no more entries than there is room for, before one that has not. */
int64_t safusion_sound(const struct message *messages, int64_t number)
{
    for (int64_t m = 0; m < number; m++) {
        const struct message *of = messages + m;
        int wrong = rank_at(of, 0) != 0 || rank_at(of, of->blocks) > of->room;
        for (int64_t region = 0; region < of->blocks; region++) wrong |= rank_at(of, region) > rank_at(of, region + 1);
        if (wrong) return m;
    }
    return number;
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

static inline int64_t up_to(int64_t number, int64_t most) { return number < 0 ? 0 : number < most ? number : most; }

/* The products of codes, the scale of their part and a factor, each rounded, and where that part ends. */
struct products {
    float levels[16], of[16];
    int64_t part, next;
};

static void go_to_part(struct products *products, const struct message *from, int64_t position, float factor)
{
    while (position >= products->next) products->next = end_of(from, ++products->part);
    const float scale = scale_of_part(from, products->part);
    for (int code = 0; code < 1 << from->value_bits; code++)
        products->of[code] = products->levels[code] * scale * factor;
}

#define LATE 256 /* entries that are read ahead, so that their elements arrive from memory meanwhile */

/* Elements that have been asked for, and what is added to them. */
struct late {
    int64_t number;
    float *elements[LATE], values[LATE];
};

static inline void add_late(struct late *late)
{
    for (int64_t i = 0; i < late->number; i++) *late->elements[i] += late->values[i];
    late->number = 0;
}

/* Where the decoding of a run is. Elements count from the first that is wanted, `from_x` of the run. */
struct reading {
    const struct message *from;
    const struct run *run;
    float *target, factor;
    struct products *products;
    struct late *late;        /* 0 where the target is in a cache */
    int64_t from_x, size;     /* of what is wanted */
    int64_t limit;            /* elements that need no other part's scale, and are wanted */
    int64_t entry, bucket;    /* the next entry, and the bucket that a 1 in the first bit of the word would mean */
    int64_t before, disorder; /* the latest element; negative as soon as one was not behind that before it */
    uint64_t word;            /* high bits of the next entries */
};

/* The next entries. Returns 0 behind what is wanted. */
static inline __attribute__((always_inline)) int add_entries(struct reading *at, int64_t number,
                                                             const int64_t value_bits)
{
    const struct message *from = at->from;
    const void *values = (const void *)(intptr_t)from->values;
    const int64_t low_bits = from->low_bits, bits = value_bits == 4 ? 4 : from->value_bits & 7;
    const uint64_t mask = (UINT64_C(1) << low_bits) - 1, codes = (UINT64_C(1) << bits) - 1;
    uint64_t lows = bits_from((const void *)(intptr_t)from->low, at->entry * low_bits);
    uint64_t coded = value_bits < 16 ? bits_from(values, at->entry * bits) : 0;
    for (int64_t i = 0; i < number; i++, at->word &= at->word - 1, lows >>= low_bits, coded >>= bits) {
        const int64_t entry = at->entry++, bucket = at->bucket-- + __builtin_ctzll(at->word);
        const int64_t y = (bucket << low_bits) + (int64_t)(lows & mask) - at->from_x;
        at->disorder |= y - 1 - at->before;
        at->before = y;
        if ((uint64_t)y >= (uint64_t)at->limit) {
            const int64_t origin = at->run->start + at->from_x;
            if (y < 0) continue;
            if (y >= at->size) return 0;
            go_to_part(at->products, from, origin + y, at->factor);
            at->limit = up_to(at->products->next - origin, at->size);
        }
        const float value = value_bits == 32   ? ((const float *)values)[entry] * at->factor
                            : value_bits == 16 ? as_float((uint32_t)((const uint16_t *)values)[entry] << 16) * at->factor
                                               : at->products->of[coded & codes];
        if (at->late) {
            __builtin_prefetch(at->target + y, 1);
            at->late->elements[at->late->number] = at->target + y;
            at->late->values[at->late->number++] = value;
        }
        else at->target[y] += value;
    }
    return 1;
}

/* What a message has of a run, and whether it is sound; compiled for each kind of values, and for so many entries at once
 * that their low bits are in one word. */
static inline __attribute__((always_inline)) int add_run(struct reading *shared, const int64_t value_bits,
                                                         const int64_t together)
{
    struct reading at = *shared;
    const struct run *run = at.run;
    const int64_t low_bits = at.from->low_bits, buckets = buckets_of(run, low_bits), origin = run->start + at.from_x;
    const int64_t last_region = (at.from_x + at.size - 1) >> (low_bits + REGION);
    at.limit = value_bits < 16 ? up_to(at.products->next - origin, at.size) : at.size;
    for (int64_t region = at.from_x >> (low_bits + REGION); region <= last_region; region++) {
        const int64_t first_bucket = region << REGION, last = rank_at(at.from, run->region + region + 1);
        const int64_t stop = buckets - first_bucket < 1 << REGION ? buckets : first_bucket + (1 << REGION);
        const int64_t end = last + run->bucket + stop;
        if (last > at.from->room) return 0;
        at.entry = rank_at(at.from, run->region + region);
        at.before = (first_bucket << low_bits) - at.from_x - 1;
        at.disorder = 0;
        for (int64_t bit = at.entry + run->bucket + first_bucket; at.entry < last;) {
            const int64_t width = up_to(end - bit, STEP);
            const uint64_t all = bits_from((const void *)(intptr_t)at.from->offsets, bit) & ((UINT64_C(1) << width) - 1);
            const int64_t found = __builtin_popcountll(all);
            if (width == 0 || at.entry + found > last) return 0; /* not as many as the ranks say */
            at.word = all;
            at.bucket = bit - run->bucket - at.entry;
            if (found == 0 || at.bucket + width - found < at.from_x >> low_bits) { /* none is wanted */
                at.entry += found;
                bit += width;
                continue;
            }
            if (!add_entries(&at, found < together ? found : together, value_bits))
                return at.disorder >= 0 && at.before < run->stop - origin;
            if (at.late && at.late->number > LATE - together) add_late(at.late);
            bit += at.word ? 64 - __builtin_clzll(all ^ at.word) : width;
        }
        if (at.disorder < 0) return 0;
    }
    return 1;
}

#define ADD_RUN(VALUE_BITS)                                               \
    return at->from->low_bits <= STEP / 8   ? add_run(at, VALUE_BITS, 8) \
           : at->from->low_bits <= STEP / 4 ? add_run(at, VALUE_BITS, 4) \
                                            : add_run(at, VALUE_BITS, 2)

CLONES static int add_any_run(struct reading *at)
{
    if (at->from->value_bits == 32) ADD_RUN(32);
    if (at->from->value_bits == 16) ADD_RUN(16);
    if (at->from->value_bits == 4) ADD_RUN(4); /* the usual ones: shifts by a constant take less time */
    ADD_RUN(1);
}

int add_elias_fano(const struct message *from, int64_t start, int64_t size, float factor, float *target, int cached)
{
    struct late late;
    int sound = 1;
    late.number = 0;
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
        struct reading at = {
            from, run, wanted, factor, &products, cached ? 0 : &late, from_x, to_x - from_x, 0, 0, 0, 0, 0, 0};
        if (at.size > 0) sound = add_any_run(&at);
    }
    add_late(&late);
    return sound;
}
