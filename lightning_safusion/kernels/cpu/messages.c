/* Wire formats: bitmaps, values as codes of a few bits, and what a message adds to a run of elements. */
#include "messages.h"

#define FEW_CODES 256 /* that are made before they are packed */

/* Sets a bit for each position below a number; all are zero at first, and the first of a byte is its lowest. */
void safusion_mark(const void *positions, int64_t position_bits, int64_t size, int64_t below, uint8_t *bitmap)
{
    for (int64_t entry = 0; entry < size; entry++) {
        uint64_t position = (uint64_t)position_of(positions, position_bits, entry);
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
static int64_t end_of_part(const void *positions, int64_t position_bits, int64_t first, int64_t size, int64_t stop)
{
    int64_t entry = first, before = entry ? position_of(positions, position_bits, entry - 1) : INT64_MIN;
    for (; entry < size; entry++) {
        const int64_t position = position_of(positions, position_bits, entry);
        if (position >= stop) break;
        if (position <= before) return -1;
        before = position;
    }
    return entry;
}

/* What the scale of a part is rounded to: bfloat16, as its bits, and as a float. */
static uint16_t rounded(float *scale)
{
    uint32_t bits = bits_of(*scale);
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

/* Codes of four bits: the sign, and the power of two that is nearest to a value's share of the scale. The bits of a
 * float are its logarithm to the base 2, with a mantissa that is linear between two powers. */
CLONES static void code_powers(const float *restrict values, int64_t size, float scale, uint8_t *restrict codes,
                               float *restrict sent)
{
    const int32_t most = (int32_t)bits_of(scale), highest = scale > 0 ? 7 : 0;
    for (int64_t i = 0; i < size; i++) {
        const uint32_t own = bits_of(values[i]);
        int32_t level = 7 + (((int32_t)(own & MAGNITUDE) - most + 0x400000) >> 23);
        level = level < 0 ? 0 : level > highest ? highest : level;
        codes[i] = (uint8_t)((uint32_t)level | own >> 31 << 3);
        float value = as_float((uint32_t)(120 + level) << 23) * scale;
        sent[i] = own >> 31 ? -value : value;
    }
}

/* Codes of fewer bits (a level, and the sign in the highest bit) of values that share a scale, one in each byte, and what
 * they stand for. */
CLONES static void code(const float *restrict values, int64_t size, int64_t bits, float scale, uint8_t *restrict codes,
                        float *restrict sent)
{
    const float levels = (float)(1 << (bits - 1)), highest = levels - 1, factor = scale > 0 ? levels / scale : 0;
    const float step = 1 / levels; /* a power of two: products with it are exact */
    for (int64_t i = 0; i < size; i++) {
        const uint32_t own = bits_of(values[i]), sign = own >> 31;
        float level = as_float(own & MAGNITUDE) * factor;
        int32_t whole = (int32_t)(level < highest ? level : highest);
        codes[i] = (uint8_t)((uint32_t)whole | sign << (bits - 1));
        float value = ((float)whole + 0.5f) * step * scale;
        sent[i] = sign ? -value : value;
    }
}

/* Of codes of four bits those that fill bytes, and one before them. Returns how many that are. */
CLONES static int64_t pack_pairs(const uint8_t *restrict few, int64_t number, int64_t entry, uint8_t *restrict codes)
{
    const int64_t odd = entry & 1 && number;
    if (odd) codes[entry >> 1] |= (uint8_t)(few[0] << 4);
    uint8_t *bytes = codes + ((entry + odd) >> 1);
    const int64_t pairs = (number - odd) >> 1;
    for (int64_t i = 0; i < pairs; i++) bytes[i] = (uint8_t)(few[odd + 2 * i] | few[odd + 2 * i + 1] << 4);
    return odd + 2 * pairs;
}

/* The first code of a byte is in its lowest bits. Codes are zero at first. What is sent may be NULL. */
int64_t safusion_quantize(const void *positions, int64_t position_bits, int64_t size, const float *values,
                          const int64_t *starts, int64_t parts, int64_t bits, uint8_t *codes, uint16_t *scales,
                          float *sent)
{
    uint8_t few[FEW_CODES];
    float few_sent[FEW_CODES];
    int64_t entry = 0;
    for (int64_t p = 0; p < parts; p++) {
        int64_t last = end_of_part(positions, position_bits, entry, size, p + 1 < parts ? starts[p + 1] : INT64_MAX);
        if (last < 0) return 0;
        float scale = scale_of(values + entry, last - entry, bits);
        if (!(scale <= FLT_MAX)) return 0;
        scales[p] = rounded(&scale);
        if (!(scale <= FLT_MAX)) return 0;
        while (entry < last) {
            int64_t number = last - entry < FEW_CODES ? last - entry : FEW_CODES;
            float *echo = sent ? sent + entry : few_sent;
            if (bits == 4) code_powers(values + entry, number, scale, few, echo);
            else code(values + entry, number, bits, scale, few, echo);
            for (int64_t i = bits == 4 ? pack_pairs(few, number, entry, codes) : 0; i < number;) {
                /* byte by byte: to write to memory code by code takes longer */
                int64_t bit = (entry + i) * bits;
                uint32_t together = codes[bit >> 3];
                for (int64_t at = bit & 7; at < 8 && i < number; at += bits) together |= (uint32_t)few[i++] << at;
                codes[bit >> 3] = (uint8_t)together;
            }
            entry += number;
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
        int64_t last = end_of_part(positions, 64, entry, size, p + 1 < parts ? starts[p + 1] : INT64_MAX);
        if (last < 0) return 0;
        float scale = as_float((uint32_t)scales[p] << 16);
        for (; entry < last; entry++) {
            int64_t bit = (first_code + entry) * bits;
            values[entry] = table[codes[bit >> 3] >> (bit & 7) & mask] * scale;
        }
    }
    return entry == size;
}

/* The first entry that is not before a position, of a message that lists them. */
static int64_t first_listed(const struct message *of, int64_t position)
{
    return entry_at((const void *)(intptr_t)of->positions, 64, 0, of->room, position);
}

/* A value for every position. */
CLONES static void add_all(const float *restrict values, int64_t size, float factor, float *restrict target)
{
    for (int64_t i = 0; i < size; i++) target[i] += values[i] * factor;
}

static void add_listed(const struct message *from, int64_t start, int64_t size, float factor, float *target)
{
    const int64_t *positions = (const int64_t *)(intptr_t)from->positions;
    const float *values = (const float *)(intptr_t)from->values;
    for (int64_t entry = first_listed(from, start); entry < from->room; entry++) {
        const int64_t place = positions[entry] - start;
        if ((uint64_t)place >= (uint64_t)size) return;
        target[place] += values[entry] * factor;
    }
}

int add_message(const struct message *from, int64_t start, int64_t size, float factor, float *target, int cached)
{
    if (from->kind == ELIAS_FANO) return add_elias_fano(from, start, size, factor, target, cached);
    if (from->kind == LISTED) add_listed(from, start, size, factor, target);
    else add_all((const float *)(intptr_t)from->values + start, size, factor, target);
    return 1;
}

float largest_value(const struct message *of, int64_t start, int64_t stop)
{
    const void *values = (const void *)(intptr_t)of->values;
    if (start >= stop) return 0;
    int64_t first = start, last = stop;
    if (of->kind == ELIAS_FANO) first = near_entry(of, start, 0), last = near_entry(of, stop - 1, 1);
    if (of->kind == LISTED) first = first_listed(of, start), last = first_listed(of, stop);
    uint32_t bits = 0;
    if (of->value_bits == 32) bits = (uint32_t)largest((const int32_t *)values + first, last - first);
    for (; of->value_bits == 16 && first < last; first++) {
        uint32_t magnitude = (uint32_t)(((const uint16_t *)values)[first] & 0x7FFF) << 16;
        bits = magnitude > bits ? magnitude : bits;
    }
    if (of->value_bits < 16 && of->parts)
        for (int64_t part = part_of(of, start), end = part_of(of, stop - 1); part <= end; part++) {
            uint32_t scale = (uint32_t)((const uint16_t *)(intptr_t)of->scales)[part] << 16 & MAGNITUDE;
            bits = scale > bits ? scale : bits;
        }
    return bits >= INFINITE ? as_float(INFINITE) : as_float(bits);
}

int64_t safusion_add_message(const struct message *from, int64_t size, float factor, float *target)
{
    return add_message(from, 0, size, factor, target, 0);
}
