/* Elias and Fano's positions, written: eliasfano.h says what they are. */
#include "eliasfano.h"

#define FEW 256  /* entries whose bits are found before they are written */

static inline void set_rank(void *ranks, int64_t room, int64_t region, int64_t entries)
{
    if (room >> 16) ((uint32_t *)ranks)[region] = (uint32_t)entries;
    else ((uint16_t *)ranks)[region] = (uint16_t)entries;
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

