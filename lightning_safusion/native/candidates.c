/* Elements that have been found, in lists: positions and bits. */
#include "kernels.h"

#define DIGITS 2048 /* of a number of 31 bits in three digits */

CLONES static int64_t number_above(const int32_t *bits, int64_t size, int32_t floor)
{
    int64_t number = 0;
    for (int64_t i = 0; i < size; i++) number += (bits[i] & MAGNITUDE) > floor;
    return number;
}

/* How many are above the floor of their list; lists whose floor is the known one keep their number. */
void safusion_number_above(const int32_t *bits, const int64_t *counts, const int32_t *floors, const int32_t *known,
                           int64_t lists, int64_t *numbers)
{
    for (int64_t l = 0; l < lists; bits += counts[l++])
        if (floors[l] != known[l]) numbers[l] = number_above(bits, counts[l], floors[l]);
}

int64_t safusion_keep_above(const int64_t *places, const int32_t *bits, const int64_t *counts, const int32_t *floors,
                            int64_t lists, int64_t *kept_places, int32_t *kept_bits, int64_t *kept_counts)
{
    int64_t entry = 0, kept = 0;
    for (int64_t l = 0; l < lists; l++) {
        int64_t before = kept;
        for (int64_t last = entry + counts[l]; entry < last; entry++) {
            kept_places[kept] = places[entry];
            kept_bits[kept] = bits[entry];
            kept += (bits[entry] & MAGNITUDE) > floors[l];
        }
        kept_counts[l] = kept - before;
    }
    return kept;
}

/* The bits of the rank-th largest magnitude, and how many that are equal to it belong to the largest. */
static int32_t kth_largest(const int32_t *bits, int64_t size, int64_t rank, int64_t *equals)
{
    static const int shifts[] = {20, 10, 0};
    int32_t known = 0, mask = 0; /* the digits that have been found, from the highest */
    for (int digit = 0; digit < 3; digit++) {
        int64_t numbers[DIGITS] = {0};
        int shift = shifts[digit], place = DIGITS - 1;
        for (int64_t i = 0; i < size; i++) {
            int32_t magnitude = bits[i] & MAGNITUDE;
            numbers[(magnitude & ~mask) >> shift] += (magnitude & mask) == known;
        }
        for (; numbers[place] < rank; place--) rank -= numbers[place];
        known |= place << shift;
        mask |= MAGNITUDE >> shift << shift;
    }
    *equals = rank;
    return known;
}

int64_t safusion_keep_largest(const int64_t *places, const int32_t *bits, const int64_t *counts, const int64_t *quotas,
                              int64_t lists, int64_t *kept_places, int32_t *kept_bits)
{
    int64_t entry = 0, kept = 0;
    for (int64_t l = 0; l < lists; l++) {
        int64_t last = entry + counts[l], equals = counts[l];
        int32_t kth = -1;
        if (quotas[l] == 0) {
            entry = last;
            continue;
        }
        if (counts[l] > quotas[l]) kth = kth_largest(bits + entry, counts[l], quotas[l], &equals);
        for (; entry < last; entry++) {
            int32_t magnitude = bits[entry] & MAGNITUDE;
            int tie = magnitude == kth;
            kept_places[kept] = places[entry];
            kept_bits[kept] = bits[entry];
            kept += (magnitude > kth) | (tie & (equals > 0));
            equals -= tie;
        }
    }
    return kept;
}
