/* Wire formats: positions as offsets in blocks, values as codes of a few bits. */
#include "kernels.h"

void safusion_positions(const void *offsets, int64_t offset_bits, const int64_t *counts, int64_t blocks,
                        int64_t first_block, int64_t *positions)
{
    const uint8_t *narrow = offsets;
    const uint16_t *wide = offsets;
    int64_t entry = 0;
    for (int64_t b = 0; b < blocks; b++)
        for (int64_t last = entry + counts[b]; entry < last; entry++)
            positions[entry] = (first_block + b) << offset_bits | (offset_bits == 8 ? narrow[entry] : wide[entry]);
}

/* Counts are zero at first; what lies behind the last block is counted in none. */
void safusion_offsets(const int64_t *positions, int64_t size, int64_t offset_bits, int64_t blocks, void *counts,
                      void *offsets)
{
    for (int64_t entry = 0; entry < size; entry++) {
        uint64_t block = (uint64_t)positions[entry] >> offset_bits;
        if (offset_bits == 8) ((uint8_t *)offsets)[entry] = (uint8_t)positions[entry];
        else ((uint16_t *)offsets)[entry] = (uint16_t)positions[entry];
        if (block >= (uint64_t)blocks) continue;
        if (offset_bits == 8) ((int16_t *)counts)[block]++;
        else ((int32_t *)counts)[block]++;
    }
}

/* Sets a bit for each position below a number; all are zero at first, and the first of a byte is its lowest. */
void safusion_mark(const int64_t *positions, int64_t size, int64_t below, uint8_t *bitmap)
{
    for (int64_t entry = 0; entry < size; entry++) {
        uint64_t position = (uint64_t)positions[entry];
        if (position < (uint64_t)below) bitmap[position >> 3] |= (uint8_t)(1u << (position & 7));
    }
}

/* How many bits of a bitmap are set, and, if there are positions, which. */
int64_t safusion_marked(const uint8_t *bitmap, int64_t bytes, int64_t *positions)
{
    int64_t found = 0;
    for (int64_t byte = 0; byte < bytes; byte += 8) {
        uint64_t word = 0;
        int64_t size = bytes - byte < 8 ? bytes - byte : 8;
        memcpy(&word, bitmap + byte, (size_t)size);
        if (!positions) found += __builtin_popcountll(word);
        else
            for (; word; word &= word - 1) positions[found++] = byte << 3 | __builtin_ctzll(word);
    }
    return found;
}

/* The first entry behind a part that begins at entry `first`, or -1 if positions do not ascend. */
static int64_t end_of_part(const int64_t *positions, int64_t first, int64_t size, int64_t stop)
{
    int64_t entry = first;
    for (; entry < size && positions[entry] < stop; entry++)
        if (entry && positions[entry] <= positions[entry - 1]) return -1;
    return entry;
}

/* What the scale of a part is rounded to: bfloat16, as its bits, and as a float. */
static uint16_t rounded(float *scale)
{
    uint32_t bits;
    memcpy(&bits, scale, sizeof bits);
    bits = (bits + 0x7FFF + (bits >> 16 & 1)) & 0xFFFF0000;
    *scale = as_float(bits);
    return (uint16_t)(bits >> 16);
}

static float scale_of(const float *values, int64_t size, int64_t bits)
{
    if (bits > 1) return as_float((uint32_t)largest((const int32_t *)values, size));
    /* twice the mean: the only level is in the middle */
    double sum = 0;
    int64_t present = 0;
    for (int64_t i = 0; i < size; i++) {
        sum += values[i] < 0 ? -values[i] : values[i];
        present += values[i] != 0;
    }
    return present ? (float)(2 * sum / (double)present) : 0;
}

static void level_table(int64_t bits, float table[16])
{
    const int levels = 1 << (bits - 1);
    for (int code = 0; code < 2 * levels; code++) {
        float level = ((float)(code & (levels - 1)) + 0.5f) / (float)levels;
        table[code] = code < levels ? level : -level;
    }
}

/* Codes are a level, and the sign in the highest bit; the first of a byte is in its lowest bits. Codes are zero at
 * first. */
int64_t safusion_quantize(const int64_t *positions, const float *values, int64_t size, const int64_t *starts,
                          int64_t parts, int64_t bits, uint8_t *codes, uint16_t *scales, float *sent)
{
    const float levels = (float)(1 << (bits - 1)), highest = levels - 1;
    float table[16];
    level_table(bits, table);
    int64_t entry = 0;
    for (int64_t p = 0; p < parts; p++) {
        int64_t last = end_of_part(positions, entry, size, p + 1 < parts ? starts[p + 1] : INT64_MAX);
        if (last < 0) return 0;
        float scale = scale_of(values + entry, last - entry, bits);
        if (!(scale <= FLT_MAX)) return 0;
        scales[p] = rounded(&scale);
        if (!(scale <= FLT_MAX)) return 0;
        const float factor = scale > 0 ? levels / scale : 0;
        for (; entry < last; entry++) {
            int negative = __builtin_signbit(values[entry]) != 0;
            float level = (negative ? -values[entry] : values[entry]) * factor;
            int code = (int)(level < highest ? level : highest) | negative << (bits - 1);
            codes[entry * bits >> 3] |= (uint8_t)(code << (entry * bits & 7));
            sent[entry] = table[code] * scale;
        }
    }
    return 1;
}

int64_t safusion_values(const int64_t *positions, int64_t size, const int64_t *starts, int64_t parts, int64_t bits,
                        const uint8_t *codes, int64_t first_code, const uint16_t *scales, float *values)
{
    const int mask = (1 << bits) - 1;
    float table[16];
    level_table(bits, table);
    int64_t entry = 0;
    for (int64_t p = 0; p < parts; p++) {
        int64_t last = end_of_part(positions, entry, size, p + 1 < parts ? starts[p + 1] : INT64_MAX);
        if (last < 0) return 0;
        float scale = as_float((uint32_t)scales[p] << 16);
        for (; entry < last; entry++) {
            int64_t bit = (first_code + entry) * bits;
            values[entry] = table[codes[bit >> 3] >> (bit & 7) & mask] * scale;
        }
    }
    return entry == size;
}
