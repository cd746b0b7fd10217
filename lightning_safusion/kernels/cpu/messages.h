/* What the sources share that read and write messages. */
#include "kernels.h"

/* Positions have 32 or 64 bits. */
static inline int64_t position_of(const void *positions, int64_t bits, int64_t entry)
{
    return bits == 32 ? ((const int32_t *)positions)[entry] : ((const int64_t *)positions)[entry];
}

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

/* The last of some numbers, so many apart, that is at a position or before it; the first if none is. */
static inline int64_t last_from(const int64_t *starts, int64_t apart, int64_t number, int64_t position)
{
    int64_t low = 0, high = number - 1;
    while (low < high) {
        int64_t middle = low + (high - low + 1) / 2;
        if (starts[middle * apart] <= position) low = middle;
        else high = middle - 1;
    }
    return low;
}

/* What codes stand for, as shares of their scale: powers of two in four bits, else the middles of levels. */
static inline void level_table(int64_t bits, float table[16])
{
    const int levels = 1 << (bits - 1);
    for (int code = 0; code < 2 * levels; code++) {
        int level = code & (levels - 1);
        float share = bits == 4 ? (float)(1 << level) / 128 : ((float)level + 0.5f) / (float)levels;
        table[code] = code < levels ? share : -share;
    }
}

/* The last part that begins at a position, or before it. */
static inline int64_t part_of(const struct message *of, int64_t position)
{
    return last_from((const int64_t *)(intptr_t)of->starts, 1, of->parts, position);
}

static inline float scale_of_part(const struct message *of, int64_t part)
{
    return as_float((uint32_t)((const uint16_t *)(intptr_t)of->scales)[part] << 16);
}

static inline int64_t end_of(const struct message *of, int64_t part)
{
    return part + 1 < of->parts ? ((const int64_t *)(intptr_t)of->starts)[part + 1] : INT64_MAX;
}

/* What a message with Elias and Fano's positions has of a run of elements; whether it is sound. `cached`: the target is
 * in a cache. */
HIDDEN int add_elias_fano(const struct message *from, int64_t start, int64_t size, float factor, float *target, int cached);

/* An entry not behind the first that is not before a position, or, `behind`, not before the last that is not behind it. */
HIDDEN int64_t near_entry(const struct message *of, int64_t position, int behind);

/* Elias and Fano's positions of a message: eliasfano.c. */
struct run;
int64_t safusion_elias_fano(const void *positions, int64_t position_bits, int64_t size, int64_t below,
                            const struct run *runs, int64_t run_count, int64_t low_bits, int64_t room, void *ranks,
                            int64_t rank_bytes, uint64_t *high, int64_t high_words, uint32_t *low, int64_t low_words);

/* Codes of values: messages.c. */
int64_t safusion_quantize(const void *positions, int64_t position_bits, int64_t size, const float *values,
                          const int64_t *starts, int64_t parts, int64_t bits, uint8_t *codes, uint16_t *scales,
                          float *sent);
