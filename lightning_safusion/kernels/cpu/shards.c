/* What workers send to the owners of shards, and what owners take out of these. */
#include "messages.h"

#define SCANNED 64 /* elements of which one that is not zero is looked for together */

/* Where a message of Elias and Fano's positions and of codes is to be written: addresses and numbers, as messages.py
 * gives them. */
struct outgoing {
    int64_t below, runs, run_count, low_bits, room;
    int64_t ranks, rank_bytes, high, high_words, low, low_words;
    int64_t codes, field_bytes, bits, scales, starts, parts; /* codes and scales are one field */
};

/* Messages of entries that are one behind the other, so many each. Returns how many were written before one that has no
 * room for its entries, no codes, or positions that do not ascend in its runs. What is sent may be NULL. */
int64_t safusion_write(const void *positions, int64_t position_bits, const int64_t *counts, const float *values,
                       const struct outgoing *messages, int64_t number, float *sent)
{
    for (int64_t m = 0; m < number; m++) {
        const struct outgoing *to = messages + m;
        const int64_t size = counts[m];
        uint8_t *codes = (uint8_t *)(intptr_t)to->codes;
        if (size > to->room) return m;
        memset(codes, 0, (size_t)to->field_bytes);
        if (!safusion_elias_fano(positions, position_bits, size, to->below, (const struct run *)(intptr_t)to->runs,
                                 to->run_count, to->low_bits, to->room, (void *)(intptr_t)to->ranks, to->rank_bytes,
                                 (uint64_t *)(intptr_t)to->high, to->high_words, (uint32_t *)(intptr_t)to->low,
                                 to->low_words)
            || !safusion_quantize(positions, position_bits, size, values, (const int64_t *)(intptr_t)to->starts,
                                  to->parts, to->bits, codes, (uint16_t *)(intptr_t)to->scales, sent))
            return m;
        positions = (const uint8_t *)positions + size * (position_bits >> 3);
        values += size;
        if (sent) sent += size;
    }
    return number;
}

/* Appends what is not zero of a part of `sums` with other signs; whether there was room. */
INLINE int append_negative(const float *sums, int64_t from, int64_t to, int64_t start, int64_t room, int64_t *found,
                           int64_t *positions, float *values)
{
    for (int64_t at = from; at < to; at += SCANNED) {
        const int64_t stop = to - at < SCANNED ? to : at + SCANNED;
        uint32_t any = 0;
        for (int64_t i = at; i < stop; i++) any |= bits_of(sums[i]);
        if (!(any & MAGNITUDE)) continue;
        for (int64_t i = at; i < stop; i++) {
            if (sums[i] == 0) continue;
            if (*found == room) return 0;
            positions[*found] = start + i;
            values[(*found)++] = -sums[i];
        }
    }
    return 1;
}

CLONES static int64_t leaving(const float *sums, const int64_t *starts, const int64_t *sizes, int64_t pieces,
                              const int64_t *places, const float *delivered, int64_t count, int64_t room,
                              int64_t *positions, float *values)
{
    int64_t found = 0, entry = 0;
    for (int64_t p = 0; p < pieces; sums += sizes[p++]) {
        int64_t at = 0;
        for (; entry < count && places[entry] < starts[p] + sizes[p]; entry++) {
            const int64_t x = places[entry] - starts[p];
            if (x < at || !append_negative(sums, at, x, starts[p], room, &found, positions, values)) return -1;
            const float change = delivered[entry] - sums[x];
            at = x + 1;
            if (change == 0) continue;
            if (found == room) return -1;
            positions[found] = places[entry];
            values[found++] = change;
        }
        if (!append_negative(sums, at, sizes[p], starts[p], room, &found, positions, values)) return -1;
    }
    return entry == count ? found : -1;
}

/* What is delivered (ascending positions, and values), less the sums of pieces that lie one behind the other, where that
 * is not zero. Returns how many elements that are; -1 if there was no room for them, or a position lies in no piece. */
int64_t safusion_leaving(const float *sums, const int64_t *starts, const int64_t *sizes, int64_t pieces,
                         const int64_t *places, const float *delivered, int64_t count, int64_t room,
                         int64_t *positions, float *values)
{
    return leaving(sums, starts, sizes, pieces, places, delivered, count, room, positions, values);
}
