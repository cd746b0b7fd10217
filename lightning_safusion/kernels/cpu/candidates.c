/* Elements that have been found, in lists: positions in the span and bits. */
#include "kernels.h"

#define SHORT 16384 /* elements of a run whose maxima are put together on the stack */
#define FEW 512 /* a sample, and what is looked at one by one */

/* Lists that lie one behind the other, but for those that are left out; NULL for none of them. */
struct lists {
    const int32_t *bits;
    const int64_t *counts;
    const uint8_t *left_out;
    int64_t number;
};

CLONES static int64_t number_above(const int32_t *bits, int64_t size, int32_t floor)
{
    int64_t number = 0;
    for (int64_t i = 0; i < size; i++) number += (bits[i] & MAGNITUDE) > floor;
    return number;
}

static int64_t all_above(struct lists of, int32_t floor)
{
    int64_t number = 0;
    for (int64_t l = 0; l < of.number; of.bits += of.counts[l++])
        if (!of.left_out || !of.left_out[l]) number += number_above(of.bits, of.counts[l], floor);
    return number;
}

/* How many are above the floor of their list; lists whose floor is the known one keep their number. */
void safusion_number_above(const int32_t *bits, const int64_t *counts, const int32_t *floors, const int32_t *known,
                           int64_t lists, int64_t *numbers)
{
    for (int64_t l = 0; l < lists; bits += counts[l++])
        if (floors[l] != known[l]) numbers[l] = number_above(bits, counts[l], floors[l]);
}

/* What is above a floor. Entries are written before it is known whether they stay. */
static int64_t copy_above(const int32_t *places, const int32_t *bits, int64_t size, int32_t floor, int32_t *kept_places,
                          int32_t *kept_bits)
{
    int64_t kept = 0;
    for (int64_t i = 0; i < size; i++) {
        int32_t own = bits[i];
        kept_places[kept] = places[i];
        kept_bits[kept] = own;
        kept += (own & MAGNITUDE) > floor;
    }
    return kept;
}

/* Leaves what is above the floors in the lists, which move together. */
int64_t safusion_keep_above(int32_t *places, int32_t *bits, const int64_t *counts, const int32_t *floors, int64_t lists,
                            int64_t *numbers)
{
    int64_t first = 0, kept = 0;
    for (int64_t l = 0; l < lists; first += counts[l++]) {
        numbers[l] = copy_above(places + first, bits + first, counts[l], floors[l], places + kept, bits + kept);
        kept += numbers[l];
    }
    return kept;
}

/* How floors follow the number of elements above them. Elements above the last floor have been sent, so that many
 * residuals are a little below it and few above, and the next floor may be a little lower or higher: a floor stays where
 * it is while enough elements exceed it, and not too many. Far off, it is unknown and guessed anew. */
#define FALLS 0.93f
#define RISES 1.02f
#define FAR_FROM 8 /* times the elements that are enough: it rises faster */
#define FAR_OFF 64

static int32_t next_floor(int32_t tried, double found, double enough, double most)
{
    /* all non-zeros exceed a floor of 0: there it stays as long as there are not too many of them */
    if (tried < 0 || (tried == 0 && found >= most) || found >= FAR_OFF * enough) return MAGNITUDE;
    if (most > DBL_MAX) return 0;
    float factor = found < enough ? FALLS : found < most ? 1 : RISES;
    if (found >= FAR_FROM * enough) factor = found < 4 * FAR_FROM * enough ? 1.5f : 2;
    float moved = as_float((uint32_t)tried) * factor;
    return moved <= FLT_MAX ? (int32_t)bits_of(moved) : MAGNITUDE;
}

/* The floors that were tried become those of the next step; where one is unknown, it stays what it was. */
void safusion_follow(int32_t *floors, const double *found, const double *enough, const double *most,
                     const int32_t *before, int64_t number)
{
    for (int64_t i = 0; i < number; i++)
        floors[i] = floors[i] == MAGNITUDE ? before[i] : next_floor(floors[i], found[i], enough[i], most[i]);
}

/* Puts longer lists in the place of some, marked. Lists move from the last to the first: there is room behind them. */
void safusion_replace(int32_t *places, int32_t *bits, const int64_t *counts, const uint8_t *marked, int64_t lists,
                      const int32_t *others, const int32_t *other_bits, const int64_t *other_counts)
{
    int64_t from = 0, to = 0, other = 0, next = 0;
    for (int64_t l = 0; l < lists; l++) {
        from += counts[l];
        to += marked[l] ? other_counts[next] : counts[l];
        if (marked[l]) other += other_counts[next++];
    }
    for (int64_t l = lists - 1; l >= 0; l--) {
        int64_t size = marked[l] ? other_counts[--next] : counts[l];
        from -= counts[l];
        to -= size;
        if (marked[l]) other -= size;
        memmove(places + to, marked[l] ? others + other : places + from, sizeof(int32_t) * (size_t)size);
        memmove(bits + to, marked[l] ? other_bits + other : bits + from, sizeof(int32_t) * (size_t)size);
    }
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
static int64_t inside(struct lists of, int32_t low, int32_t high, int64_t stride, int32_t *few)
{
    int64_t number = 0, next = 0;
    for (int64_t l = 0; l < of.number; of.bits += of.counts[l++]) {
        if (of.left_out && of.left_out[l]) continue;
        for (; next < of.counts[l] && number < FEW; next += stride) {
            int32_t magnitude = of.bits[next] & MAGNITUDE;
            uint32_t beyond = (uint32_t)magnitude - (uint32_t)low; /* one branch, which is hardly ever taken */
            if (beyond - 1 < (uint32_t)high - (uint32_t)low) few[number++] = magnitude;
        }
        next -= of.counts[l];
        if (number == FEW) break;
    }
    return number;
}

/* The bits of the rank-th largest magnitude, and how many that are equal to it belong to the largest. To count what is
 * above a number takes a twentieth of the time that sorting it into a histogram takes: samples say which to try. */
static int32_t kth_largest(struct lists of, int64_t size, int64_t rank, int64_t *equals)
{
    int32_t low = -1, high = MAGNITUDE, few[FEW]; /* the one in question is above low and not above high */
    int64_t above_low = size, above_high = 0;
    while (above_low - above_high > FEW && (int64_t)high - low > 1) {
        int64_t left = above_low - above_high, number = inside(of, low, high, left / FEW, few);
        int64_t place = (int64_t)((double)(rank - above_high) / left * number), moved = 0;
        for (int side = 0; side < 3 && !(side == 2 && moved); side++) {
            int64_t at = side ? place + 1 + FEW / 16 : place - FEW / 16;
            int32_t limit = low + (int32_t)(((int64_t)high - low) / 2); /* where samples do not help */
            if (side < 2 && (at < 1 || at > number)) continue;
            if (side < 2) limit = kth_of_few(few, number, at) - side;
            if (limit <= low || limit >= high) continue;
            int64_t above = all_above(of, limit);
            moved = 1;
            if (above >= rank) low = limit, above_low = above;
            else high = limit, above_high = above;
        }
    }
    if ((int64_t)high - low > 1) {
        int64_t number = inside(of, low, high, 1, few);
        high = kth_of_few(few, number, rank - above_high);
        for (int64_t i = 0; i < number; i++) above_high += few[i] > high;
    }
    *equals = rank - above_high;
    return high;
}

static int32_t kth_of_list(const int32_t *bits, int64_t size, int64_t rank, int64_t *equals)
{
    struct lists only = {bits, &size, 0, 1};
    return kth_largest(only, size, rank, equals);
}

/* Of each run of a span, or of each list, the bits of its rank-th largest magnitude. Not exact, those of short runs are
 * that of the maxima of blocks, at least rank of them, which is never larger: they are a part of the elements. */
void safusion_kth_largest(const int32_t *bits, const int64_t *starts, const int64_t *sizes, const int64_t *ranks,
                          int64_t runs, int64_t exact, int32_t *kth)
{
    int64_t equals;
    int32_t maxima[SHORT];
    for (int64_t r = 0; r < runs; r++) {
        int64_t size = sizes[r], width = size / (2 * ranks[r]), blocks = 0;
        const int32_t *run = bits + starts[r];
        if (exact || size > SHORT || width < 2) {
            kth[r] = kth_of_list(run, size, ranks[r], &equals);
            continue;
        }
        for (int64_t at = 0; at < size; at += width)
            maxima[blocks++] = largest(run + at, size - at < width ? size - at : width);
        kth[r] = kth_of_list(maxima, blocks, ranks[r], &equals);
    }
}

/* Keeps what is above the rank-th largest, and the first of those that are equal to it, up to rank in all. */
static int64_t keep_largest(const int32_t *places, const int32_t *bits, int64_t size, int64_t rank,
                            int32_t *kept_places, int32_t *kept_bits)
{
    int64_t kept = 0, equals;
    int32_t kth = kth_of_list(bits, size, rank, &equals);
    if (number_above(bits, size, kth - 1) == rank) /* all of them */
        return copy_above(places, bits, size, kth - 1, kept_places, kept_bits);
    for (int64_t i = 0; i < size; i++) {
        int32_t own = bits[i], magnitude = own & MAGNITUDE;
        int tie = magnitude == kth;
        kept_places[kept] = places[i];
        kept_bits[kept] = own;
        kept += (magnitude > kth) | (tie & (equals > 0));
        equals -= tie;
    }
    return kept;
}

/* Of each list what is above its floor, but no more than its quota; of equals the first. The lists move together. */
int64_t safusion_keep_largest(int32_t *places, int32_t *bits, const int64_t *counts, const int32_t *floors,
                              const int64_t *quotas, int64_t lists)
{
    int64_t kept = 0, first = 0;
    for (int64_t l = 0; l < lists; first += counts[l++]) {
        const int32_t *own = bits + first, *from = places + first;
        int64_t size = counts[l], quota = quotas[l];
        if (quota == 0) continue;
        if (size > quota && number_above(own, size, floors[l]) > quota)
            kept += keep_largest(from, own, size, quota, places + kept, bits + kept);
        else kept += copy_above(from, own, size, floors[l], places + kept, bits + kept);
    }
    return kept;
}

/* Of too many equals of the lowest those that fill a quota stay, and of the others the first: numbers of the lists that
 * are not few are cut, so that they fill the room. Where quotas alone take larger elements' places, nothing is done. */
static void cut_equals(const int32_t *bits, const int64_t *counts, const int64_t *quotas, int64_t lists, int64_t room,
                       int32_t lowest, const uint8_t *few, int64_t *numbers, int64_t *at_least)
{
    for (int64_t l = 0; l < lists; bits += counts[l++]) {
        if (few[l]) continue;
        at_least[l] = number_above(bits, counts[l], lowest);
        if (at_least[l] < quotas[l]) at_least[l] = quotas[l];
        room -= at_least[l];
    }
    if (room < 0) return;
    for (int64_t l = 0; l < lists; l++) {
        if (few[l]) continue;
        int64_t more = numbers[l] - at_least[l];
        if (more > room) more = room;
        numbers[l] = at_least[l] + more;
        room -= more;
    }
}

/* Shares a room: of each list its quota at least, and otherwise the largest of all, of equals the first. Says how many
 * of each list that are, and what these are above. Returns the least magnitude that is among the largest of all. What is
 * few is zero at first; at_least is scratch. */
int64_t safusion_share(const int32_t *bits, const int64_t *counts, const int64_t *quotas, int64_t lists, int64_t room,
                       uint8_t *few, int64_t *at_least, int32_t *floors, int64_t *numbers)
{
    int64_t total = 0, found, equals;
    int32_t lowest = MAGNITUDE;
    for (int64_t l = 0; l < lists; l++) total += counts[l];
    struct lists rest = {bits, &total, 0, 1}; /* all of them */
    for (int more = 1; more;) { /* lists with fewer than their quota among the largest have these alone */
        const int32_t *list = bits;
        lowest = room > 0 ? kth_largest(rest, total, room, &equals) : MAGNITUDE;
        more = 0, found = 0;
        for (int64_t l = 0; l < lists; list += counts[l++]) {
            if (few[l]) continue;
            floors[l] = lowest - 1;
            numbers[l] = number_above(list, counts[l], floors[l]);
            found += numbers[l];
            if (numbers[l] >= quotas[l]) continue;
            floors[l] = kth_of_list(list, counts[l], quotas[l], &equals) - 1;
            numbers[l] = quotas[l];
            room -= quotas[l];
            total -= counts[l];
            few[l] = 1;
            more = 1;
        }
        rest = (struct lists){bits, counts, few, lists};
    }
    if (found > room) cut_equals(bits, counts, quotas, lists, room, lowest, few, numbers, at_least);
    return lowest;
}
