/* Elements that have been found, in lists: positions and bits. */
#include "kernels.h"

#define FEW 512 /* a sample, and what is looked at one by one */

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

/* Keeps what is above a floor: entries are written before it is known whether they stay. */
static int64_t keep_above(const int64_t *places, const int32_t *bits, int64_t size, int32_t floor, int64_t *kept_places,
                          int32_t *kept_bits)
{
    int64_t kept = 0;
    for (int64_t i = 0; i < size; i++) {
        kept_places[kept] = places[i];
        kept_bits[kept] = bits[i];
        kept += (bits[i] & MAGNITUDE) > floor;
    }
    return kept;
}

int64_t safusion_keep_above(const int64_t *places, const int32_t *bits, const int64_t *counts, const int32_t *floors,
                            int64_t lists, int64_t *kept_places, int32_t *kept_bits, int64_t *kept_counts)
{
    int64_t entry = 0, kept = 0;
    for (int64_t l = 0; l < lists; entry += counts[l], kept += kept_counts[l], l++)
        kept_counts[l] =
            keep_above(places + entry, bits + entry, counts[l], floors[l], kept_places + kept, kept_bits + kept);
    return kept;
}

/* The rank-th largest of a few; changes their order. */
static int32_t kth_of_few(int32_t *few, int64_t size, int64_t rank)
{
    int64_t low = 0, high = size - 1, target = rank - 1;
    while (low < high) {
        int64_t left = low, right = high;
        int32_t pivot = few[low + (high - low) / 2];
        while (left <= right) {
            while (few[left] > pivot) left++;
            while (few[right] < pivot) right--;
            if (left > right) break;
            int32_t other = few[left];
            few[left++] = few[right];
            few[right--] = other;
        }
        if (target <= right) high = right;
        else if (target >= left) low = left;
        else break;
    }
    return few[target];
}

/* Every so many of the magnitudes above low and not above high, as long as there is room. */
static int64_t inside(const int32_t *bits, int64_t size, int32_t low, int32_t high, int64_t stride, int32_t *few)
{
    int64_t number = 0;
    for (int64_t i = 0; i < size && number < FEW; i += stride) {
        uint32_t beyond = (uint32_t)(bits[i] & MAGNITUDE) - (uint32_t)low; /* one branch, which is hardly ever taken */
        if (beyond - 1 < (uint32_t)high - (uint32_t)low) few[number++] = bits[i] & MAGNITUDE;
    }
    return number;
}

/* The bits of the rank-th largest magnitude, and how many that are equal to it belong to the largest. To count what is
 * above a number takes a twentieth of the time that sorting it into a histogram takes: samples say which to try. */
static int32_t kth_largest(const int32_t *bits, int64_t size, int64_t rank, int64_t *equals)
{
    int32_t low = -1, high = MAGNITUDE, few[FEW]; /* the one in question is above low and not above high */
    int64_t above_low = size, above_high = 0;
    while (above_low - above_high > FEW && (int64_t)high - low > 1) {
        int64_t left = above_low - above_high, number = inside(bits, size, low, high, left / FEW, few);
        int64_t place = (int64_t)((double)(rank - above_high) / left * number), moved = 0;
        for (int side = 0; side < 3 && !(side == 2 && moved); side++) {
            int64_t at = side ? place + 1 + FEW / 16 : place - FEW / 16;
            int32_t limit = low + (int32_t)(((int64_t)high - low) / 2); /* where samples do not help */
            if (side < 2 && (at < 1 || at > number)) continue;
            if (side < 2) limit = kth_of_few(few, number, at) - side;
            if (limit <= low || limit >= high) continue;
            int64_t above = number_above(bits, size, limit);
            moved = 1;
            if (above >= rank) low = limit, above_low = above;
            else high = limit, above_high = above;
        }
    }
    if ((int64_t)high - low > 1) {
        int64_t number = inside(bits, size, low, high, 1, few);
        high = kth_of_few(few, number, rank - above_high);
        for (int64_t i = 0; i < number; i++) above_high += few[i] > high;
    }
    *equals = rank - above_high;
    return high;
}

/* Keeps what is above the rank-th largest, and the first of those that are equal to it, up to rank in all. */
static int64_t keep_largest(const int64_t *places, const int32_t *bits, int64_t size, int64_t rank,
                            int64_t *kept_places, int32_t *kept_bits)
{
    int64_t kept = 0, equals;
    int32_t kth = kth_largest(bits, size, rank, &equals);
    if (number_above(bits, size, kth - 1) == rank) /* all of them */
        return keep_above(places, bits, size, kth - 1, kept_places, kept_bits);
    for (int64_t i = 0; i < size; i++) {
        int32_t magnitude = bits[i] & MAGNITUDE;
        int tie = magnitude == kth;
        kept_places[kept] = places[i];
        kept_bits[kept] = bits[i];
        kept += (magnitude > kth) | (tie & (equals > 0));
        equals -= tie;
    }
    return kept;
}

/* Of each list what is above its floor, but no more than its quota. */
int64_t safusion_keep_largest(const int64_t *places, const int32_t *bits, const int64_t *counts, const int32_t *floors,
                              const int64_t *quotas, int64_t lists, int64_t *kept_places, int32_t *kept_bits)
{
    int64_t kept = 0;
    for (int64_t l = 0; l < lists; places += counts[l], bits += counts[l], l++) {
        int64_t size = counts[l], quota = quotas[l], *to_places = kept_places + kept;
        int32_t *to_bits = kept_bits + kept;
        if (quota == 0) continue;
        if (size > quota && number_above(bits, size, floors[l]) > quota)
            kept += keep_largest(places, bits, size, quota, to_places, to_bits);
        else kept += keep_above(places, bits, size, floors[l], to_places, to_bits);
    }
    return kept;
}
