/* Elias and Fano's positions, written: eliasfano.h says what they are. */
#include "eliasfano.h"

#define FEW 256 /* entries whose bits are found before they are written */

static inline void set_rank(void *ranks, int64_t room, int64_t region, int64_t entries)
{
    if (room >> 16) ((uint32_t *)ranks)[region] = (uint32_t)entries;
    else ((uint16_t *)ranks)[region] = (uint16_t)entries;
}

/* What is written so far, and what is still in registers. */
struct written {
    uint64_t *high;
    uint8_t *low;
    int64_t low_bytes, entry, word_at, low_at, filled;
    uint64_t word, bits;
};

/* Writes up to 56 of the low bits. */
INLINE void append(struct written *to, uint64_t bits, int64_t number)
{
    const int64_t left = to->low_bytes - to->low_at;
    to->bits |= bits << to->filled;
    to->filled += number;
    if (left >= 8) memcpy(to->low + to->low_at, &to->bits, 8);
    else if (left > 0) memcpy(to->low + to->low_at, &to->bits, (size_t)left);
    to->low_at += to->filled >> 3;
    to->bits >>= to->filled & ~INT64_C(7);
    to->filled &= 7;
}

/* The lowest bits, up to eight, of eight bytes, one behind the other. */
INLINE uint64_t joined(const uint8_t *eight, int64_t bits)
{
    const uint64_t one = ((UINT64_C(1) << bits) - 1) * UINT64_C(0x0001000100010001);
    const uint64_t two = ((UINT64_C(1) << 2 * bits) - 1) * UINT64_C(0x0000000100000001);
    const uint64_t four = (UINT64_C(1) << 4 * bits) - 1;
    uint64_t word;
    memcpy(&word, eight, sizeof word);
    word = (word & one) | (word >> (8 - bits) & one << bits);
    word = (word & two) | (word >> (16 - 2 * bits) & two << 2 * bits);
    return (word & four) | (word >> (32 - 4 * bits) & four << 4 * bits);
}

/* Entries of a run that are written together. */
struct chunk {
    int64_t number, word;  /* of high bits that the first has its bit in */
    int64_t origin, last;  /* positions: where the bucket of the first begins, and of the last */
    uint32_t places[FEW];  /* elements behind the origin */
    uint32_t bits[FEW];    /* of high bits, from the first of the word on */
    uint8_t lowest[FEW];   /* bits of places */
};

/* The next entries of a run, behind a position; whether they ascend in it. Compiled for each kind of positions. */
INLINE int find_chunk(struct chunk *chunk, const void *positions, int64_t entry, int64_t end, const struct run *run,
                      int64_t before, int64_t low_bits, const int64_t position_bits)
{
    const int64_t first = position_of(positions, position_bits, entry);
    if (first <= before) return 0;
    const int64_t bucket = (first - run->start) >> low_bits, origin = run->start + (bucket << low_bits);
    const int64_t bit = entry + run->bucket + bucket;
    int64_t number = end - entry < FEW ? end - entry : FEW;
    int wrong = 0;
    while (number > 1 && position_of(positions, position_bits, entry + number - 1) - origin > INT32_MAX) number /= 2;
    const int64_t last = position_of(positions, position_bits, entry + number - 1);
    for (int64_t i = entry + 1; i < entry + number; i++)
        wrong |= position_of(positions, position_bits, i) <= position_of(positions, position_bits, i - 1);
    if (wrong || last >= run->stop) return 0;
    uint32_t ones = (uint32_t)(bit & 63);
    for (int64_t i = 0; i < number; i++) {
        const uint32_t place = (uint32_t)position_of(positions, position_bits, entry + i) - (uint32_t)origin;
        chunk->places[i] = place;
        chunk->bits[i] = ones++ + (place >> low_bits);
        chunk->lowest[i] = (uint8_t)place;
    }
    chunk->number = number, chunk->word = bit >> 6, chunk->origin = origin, chunk->last = last;
    return 1;
}

/* The places of entries in their buckets. */
INLINE void write_low(struct written *to, const struct chunk *chunk, int64_t low_bits)
{
    const uint32_t mask = (UINT32_C(1) << low_bits) - 1;
    int64_t i = 0;
    if (low_bits < 8)
        for (; i + 8 <= chunk->number; i += 8) append(to, joined(chunk->lowest + i, low_bits), 8 * low_bits);
    for (; i < chunk->number; i++) append(to, chunk->places[i] & mask, low_bits);
}

/* One number or another, without a branch that nobody can foresee. */
INLINE uint64_t chosen(int first, uint64_t one, uint64_t other)
{
    return other ^ ((one ^ other) & -(uint64_t)first);
}

/* Sets the bits of entries, eight at once where they lie in 64: a word is written again whenever it gets more. */
INLINE void write_high(struct written *to, const struct chunk *chunk)
{
    const uint32_t *bits = chunk->bits;
    uint64_t word = to->word;
    int64_t word_at = to->word_at;
    for (int64_t i = 0, together; i < chunk->number; i += together) {
        const uint32_t first = bits[i], shift = first & 63;
        const int64_t own = chunk->word + (first >> 6);
        uint64_t set = 1;
        together = i + 8 <= chunk->number && bits[i + 7] - first < 64 ? 8 : 1;
        if (together == 8)
            for (int j = 1; j < 8; j++) set |= UINT64_C(1) << (bits[i + j] - first);
        to->high[own] = word = chosen(own == word_at, word, 0) | set << shift;
        word_at = chunk->word + (bits[i + together - 1] >> 6);
        to->high[word_at] = word = chosen(own == word_at, word, set >> 1 >> (63 - shift));
    }
    to->word = word;
    to->word_at = word_at;
}

/* Entries of a run up to `end`, and those before each of its regions. Returns whether they ascend in it. */
INLINE int write_run(struct written *to, const void *positions, int64_t end, const struct run *run, int64_t low_bits,
                     void *ranks, int64_t room, const int64_t position_bits)
{
    const int64_t regions = regions_of(run, low_bits), length = INT64_C(1) << (low_bits + REGION);
    struct written now = *to;
    struct chunk chunk;
    int64_t region = 0, begin = run->start; /* of the next region */
    for (chunk.last = run->start - 1; now.entry < end; now.entry += chunk.number) {
        if (!find_chunk(&chunk, positions, now.entry, end, run, chunk.last, low_bits, position_bits)) return 0;
        for (; begin <= chunk.last; begin += length) {
            const int64_t first = entry_at(chunk.places, 32, 0, chunk.number, begin - chunk.origin);
            set_rank(ranks, room, run->region + region++, now.entry + first);
        }
        write_high(&now, &chunk);
        write_low(&now, &chunk, low_bits);
    }
    for (; region <= regions; region++) set_rank(ranks, room, run->region + region, end);
    *to = now;
    return 1;
}

/* Returns whether the entries of every run ascend in it. */
CLONES static int write_runs(struct written *to, const void *positions, int64_t position_bits, int64_t size,
                             const struct run *runs, int64_t run_count, int64_t low_bits, void *ranks, int64_t room)
{
    int sound = 1;
    for (const struct run *run = runs; sound && run < runs + run_count; run++) {
        const int64_t end = entry_at(positions, position_bits, to->entry, size, run->stop);
        if (position_bits == 32) sound = write_run(to, positions, end, run, low_bits, ranks, room, 32);
        else sound = write_run(to, positions, end, run, low_bits, ranks, room, 64);
    }
    return sound;
}

/* Fields of bits are whole words, of 64 bits and of 32. Returns whether positions below a number ascend and lie in runs;
 * what is behind it is left out. */
int64_t safusion_elias_fano(const void *positions, int64_t position_bits, int64_t size, int64_t below,
                            const struct run *runs, int64_t run_count, int64_t low_bits, int64_t room, void *ranks,
                            int64_t rank_bytes, uint64_t *high, int64_t high_words, uint32_t *low, int64_t low_words)
{
    struct written to = {high, (uint8_t *)low, 4 * low_words, 0, 0, 0, 0, 0, 0};
    memset(high, 0, sizeof *high * (size_t)high_words);
    memset(ranks, 0, (size_t)rank_bytes);
    const int sound = write_runs(&to, positions, position_bits, size, runs, run_count, low_bits, ranks, room);
    if (to.low_at < to.low_bytes) {
        memset(to.low + to.low_at, 0, (size_t)(to.low_bytes - to.low_at));
        to.low[to.low_at] = (uint8_t)to.bits;
    }
    return sound && (to.entry == size || position_of(positions, position_bits, to.entry) >= below);
}

/* How many messages have ranks that ascend from 0, and no more entries than there is room for, before one that has not. */
int64_t safusion_sound(const struct message *messages, int64_t number)
{
    for (int64_t m = 0; m < number; m++) {
        const struct message *of = messages + m;
        int wrong = rank_at(of, 0) != 0 || rank_at(of, of->regions) > of->room;
        for (int64_t region = 0; region < of->regions; region++) wrong |= rank_at(of, region) > rank_at(of, region + 1);
        if (wrong) return m;
    }
    return number;
}

