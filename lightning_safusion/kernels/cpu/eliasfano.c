/* Positions by Elias and Fano: quotients in unary (the high bits), remainders in binary (the low ones). A bucket is 2^l
 * elements of one tensor, and has a 1 for each of its entries, then a 0: entry e of bucket b is bit e + b. A region is 512
 * buckets of one tensor; ranks are the entries before each. */
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

/* The entries of a run up to `end`; compiled for each kind of positions. */
static inline __attribute__((always_inline)) void write_run(struct written *to, const void *positions, int64_t end,
                                                            const struct run *run, int64_t low_bits, uint64_t *high,
                                                            uint32_t *low, const int64_t position_bits)
{
    const int64_t mask = (INT64_C(1) << low_bits) - 1;
    struct written now = *to;
    int64_t at[FEW];
    uint8_t narrow[FEW];
    while (now.entry < end) {
        const int64_t number = end - now.entry < FEW ? end - now.entry : FEW, first = now.entry + run->bucket;
        for (int64_t i = 0; i < number; i++) {
            const int64_t x = position_of(positions, position_bits, now.entry + i) - run->start;
            at[i] = first + i + (x >> low_bits);
            narrow[i] = (uint8_t)(x & mask);
        }
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
        for (; i < number; i++) {
            const int64_t x = position_of(positions, position_bits, now.entry + i) - run->start;
            append(&now, low, (uint64_t)(x & mask), low_bits);
        }
        now.entry += number;
    }
    *to = now;
}

/* Positions ascend, and lie in runs. Fields are whole words, of 64 bits and of 32. */
CLONES void safusion_elias_fano(const void *positions, int64_t position_bits, int64_t size, const struct run *runs,
                                int64_t run_count, int64_t low_bits, uint32_t *ranks, int64_t rank_words,
                                uint64_t *high, int64_t high_words, uint32_t *low, int64_t low_words)
{
    struct written to = {0};
    memset(high, 0, sizeof *high * (size_t)high_words);
    memset(ranks, 0, sizeof *ranks * (size_t)rank_words);
    for (const struct run *run = runs; run < runs + run_count; run++) {
        const int64_t regions = regions_of(run, low_bits);
        int64_t end = to.entry;
        for (int64_t region = 0; region < regions; region++) {
            ranks[run->region + region] = (uint32_t)end;
            int64_t next = run->start + ((region + 1) << (low_bits + REGION));
            end = entry_at(positions, position_bits, end, size, next < run->stop ? next : run->stop);
        }
        ranks[run->region + regions] = (uint32_t)end;
        if (position_bits == 32) write_run(&to, positions, end, run, low_bits, high, low, 32);
        else write_run(&to, positions, end, run, low_bits, high, low, 64);
    }
    if (to.entry) high[to.word_at] = to.word;
    for (; to.low_at < low_words; to.bits >>= 32) low[to.low_at++] = (uint32_t)to.bits;
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

/* What a message has of the elements [from_x, to_x) of a run; compiled for each kind of values, and for so many entries
 * at once that their low bits are in one word. Here y are elements from from_x on. */
static inline __attribute__((always_inline)) int add_run(const struct message *from, const struct run *run,
                                                         int64_t from_x, int64_t to_x, float factor,
                                                         float *restrict target, struct products *products,
                                                         const int64_t value_bits, const int64_t together)
{
    const uint32_t *ranks = (const uint32_t *)(intptr_t)from->ends;
    const void *high = (const void *)(intptr_t)from->offsets, *low = (const void *)(intptr_t)from->low;
    const void *values = (const void *)(intptr_t)from->values;
    const int64_t low_bits = from->low_bits, buckets = buckets_of(run, low_bits), bits = from->value_bits & 7;
    const int64_t origin = run->start + from_x, size = to_x - from_x;
    const uint64_t mask = (UINT64_C(1) << low_bits) - 1, codes = (UINT64_C(1) << bits) - 1;
    const float *own = products->of;
    int64_t limit = value_bits < 16 ? up_to(products->next - origin, size) : size;
    for (int64_t region = from_x >> (low_bits + REGION); region <= (to_x - 1) >> (low_bits + REGION); region++) {
        const int64_t first_bucket = region << REGION, last = ranks[run->region + region + 1];
        const int64_t stop = buckets - first_bucket < 1 << REGION ? buckets : first_bucket + (1 << REGION);
        int64_t entry = ranks[run->region + region], bit = entry + run->bucket + first_bucket;
        int64_t before = (first_bucket << low_bits) - from_x - 1, disorder = 0;
        const int64_t end = last + run->bucket + stop;
        if (last > from->room) return 0;
        while (entry < last) {
            const int64_t width = up_to(end - bit, STEP);
            uint64_t word = bits_from(high, bit) & ((UINT64_C(1) << width) - 1);
            const int64_t found = __builtin_popcountll(word);
            int64_t bucket = bit - run->bucket - entry; /* that of a 1 in the first bit */
            if (width == 0 || entry + found > last) return 0; /* not as many as the ranks say */
            /* all of them lie before the bucket of the first element */
            if (bucket + width - found < from_x >> low_bits || found == 0) {
                entry += found;
                bit += width;
                continue;
            }
            uint64_t lows = bits_from(low, entry * low_bits);
            uint64_t coded = value_bits < 16 ? bits_from(values, entry * bits) : 0;
#define ENTRIES(NUMBER)                                                                                             \
    for (int64_t i = 0; i < NUMBER; i++, entry++, word &= word - 1, lows >>= low_bits, coded >>= bits) {            \
        const int64_t y = ((bucket-- + __builtin_ctzll(word)) << low_bits) + (int64_t)(lows & mask) - from_x;       \
        disorder |= y - 1 - before; /* negative if y is not larger */                                               \
        before = y;                                                                                                 \
        if ((uint64_t)y >= (uint64_t)limit) {                                                                       \
            if (y < 0) continue;                                                                                    \
            if (y >= size) return disorder >= 0 && y < run->stop - origin;                                          \
            go_to_part(products, from, origin + y, factor);                                                         \
            limit = up_to(products->next - origin, size);                                                           \
        }                                                                                                           \
        if (value_bits == 32) target[y] += ((const float *)values)[entry] * factor;                                 \
        else if (value_bits == 16)                                                                                  \
            target[y] += as_float((uint32_t)((const uint16_t *)values)[entry] << 16) * factor;                      \
        else target[y] += own[coded & codes];                                                                       \
    }
            const uint64_t all = word;
            if (found >= together) { ENTRIES(together) }
            else { ENTRIES(found) }
            bit += word ? 64 - __builtin_clzll(all ^ word) : width;
        }
        if (disorder < 0) return 0;
    }
    return 1;
}

#define TOGETHER(VALUES)                                                                               \
    if (from->low_bits <= STEP / 8) return add_run(from, run, from_x, to_x, factor, target, products, VALUES, 8);  \
    if (from->low_bits <= STEP / 4) return add_run(from, run, from_x, to_x, factor, target, products, VALUES, 4);  \
    return add_run(from, run, from_x, to_x, factor, target, products, VALUES, 2)

CLONES static int add_values(const struct message *from, const struct run *run, int64_t from_x, int64_t to_x,
                             float factor, float *target, struct products *products)
{
    if (from->value_bits == 32) { TOGETHER(32); }
    if (from->value_bits == 16) { TOGETHER(16); }
    TOGETHER(4);
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
        go_to_part(&products, from, start, factor);
    }
    for (const struct run *run = run_of(from, start); run < end && run->start < start + size; run++) {
        const int64_t from_x = start > run->start ? start - run->start : 0;
        const int64_t to_x = (start + size < run->stop ? start + size : run->stop) - run->start;
        if (from_x >= to_x) continue;
        if (!add_values(from, run, from_x, to_x, factor, target + (run->start + from_x - start), &products)) return 0;
    }
    return 1;
}
