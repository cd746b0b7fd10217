/* What the CPU does to every element of a gradient, in as few passes over memory as there can be. Work comes in parts,
 * runs of elements that several threads can take from. */
#include "kernels.h"
#if defined(__SSE2__)
#include <emmintrin.h>
#endif

#define WHOLE 32768   /* elements of a gradient that are looked at before any of it is added */
#define BLOCK 1024    /* elements that stay in the L1 cache, and whose sums are kept in float32 */
#define DECODED 16384 /* elements that are put together in the cache */
#define ROW 32        /* elements that are compared at once */
#define AHEAD 1024    /* elements that are asked for before they are needed: processors stop at the end of a page */
#define LANES 8
#define OFTEN 16 /* more than one of so many elements is above its floor */

CLONES static int32_t largest_of(const int32_t *bits, int64_t size)
{
    int32_t result = 0;
    for (int64_t i = 0; i < size; i++) {
        int32_t magnitude = bits[i] & MAGNITUDE;
        result = magnitude > result ? magnitude : result;
    }
    return result;
}

int32_t largest(const int32_t *bits, int64_t size)
{
    return largest_of(bits, size);
}

typedef float floats __attribute__((vector_size(4 * LANES), aligned(4)));
typedef int32_t ints __attribute__((vector_size(4 * LANES), aligned(4)));

static inline void ask_for(const void *row, int to_write)
{
    for (int line = 0; line < ROW; line += 16)
        if (to_write) __builtin_prefetch((const float *)row + AHEAD + line, 1);
        else __builtin_prefetch((const float *)row + AHEAD + line);
}

/* Where elements above floors are written, those of several runs one behind the other. Half as wide as what is sent:
 * they are several times as many, and are held for the largest buffer. */
struct places {
    int32_t *places, *bits;
    int64_t room, found; /* at most `room` are kept, and ROW more are written; all are counted */
};

static inline void keep_above(struct places *to, const int32_t *row, int32_t floor, int64_t first)
{
    uint32_t hits = 0;
    for (int j = 0; j < ROW; j++) hits |= (uint32_t)((row[j] & MAGNITUDE) > floor) << j;
    int64_t at = to->found;
    to->found += __builtin_popcount(hits);
    if (at > to->room) return;
    /* two without asking whether there are any: a branch that nobody can foresee costs more */
    for (int k = 0; k < 2; k++, hits &= hits - 1) {
        int j = __builtin_ctz(hits | 1u << (ROW - 1));
        to->places[at + k] = (int32_t)(first + j);
        to->bits[at + k] = row[j];
    }
    for (at += 2; hits; at++, hits &= hits - 1) {
        int j = __builtin_ctz(hits);
        to->places[at] = (int32_t)(first + j);
        to->bits[at] = row[j];
    }
}

static inline void keep_if_above(struct places *to, int32_t bits, int32_t floor, int64_t place)
{
    if ((bits & MAGNITUDE) <= floor) return;
    if (to->found <= to->room) {
        to->places[to->found] = (int32_t)place;
        to->bits[to->found] = bits;
    }
    to->found++;
}

CLONES static void above(struct places *to, const float *x, int64_t size, int32_t floor, int64_t first)
{
    struct places kept = *to;
    const int32_t *bits = (const int32_t *)x;
    int64_t i = 0;
    for (; i + ROW <= size; i += ROW) {
        ask_for(x + i, 0);
        keep_above(&kept, bits + i, floor, first + i);
    }
    for (; i < size; i++) keep_if_above(&kept, bits[i], floor, first + i);
    *to = kept;
}

/* memory = decay * memory + grad, and what is above the floor then */
CLONES static void add(struct places *to, float *restrict memory, const float *restrict grad, int64_t size, float decay,
                       int32_t floor, int64_t first)
{
    struct places kept = *to;
    const int32_t *bits = (const int32_t *)memory;
    int64_t i = 0;
    for (; i + ROW <= size; i += ROW) {
        ask_for(memory + i, 1);
        ask_for(grad + i, 0);
        for (int j = 0; j < ROW; j++) memory[i + j] = decay * memory[i + j] + grad[i + j];
        keep_above(&kept, bits + i, floor, first + i);
    }
    for (; i < size; i++) {
        memory[i] = decay * memory[i] + grad[i];
        keep_if_above(&kept, bits[i], floor, first + i);
    }
    *to = kept;
}

CLONES static void sum(const float *x, int64_t size, int32_t mask, double *first, double *second)
{
    floats sums[ROW / LANES] = {0}, squares[ROW / LANES] = {0};
    int64_t i = 0;
    for (; i + ROW <= size; i += ROW) {
        ask_for(x + i, 0);
        for (int j = 0; j < ROW / LANES; j++) {
            floats v = *(const floats *)(x + i + j * LANES);
            sums[j] += (floats)((ints)v & mask);
            squares[j] += v * v;
        }
    }
    for (int j = 1; j < ROW / LANES; j++) {
        sums[0] += sums[j];
        squares[0] += squares[j];
    }
    for (int j = 0; j < LANES; j++) {
        *first += sums[0][j];
        *second += squares[0][j];
    }
    for (; i < size; i++) {
        *first += mask == -1 || x[i] >= 0 ? x[i] : -x[i];
        *second += x[i] * x[i];
    }
}

/* How many magnitudes exceed a limit, and by how much: sums, and sums of squares. */
CLONES static int64_t exceed(const float *x, int64_t size, float limit, double *first, double *second)
{
    floats sums[ROW / LANES] = {0}, squares[ROW / LANES] = {0};
    ints hits[ROW / LANES] = {0};
    int64_t i = 0, count = 0;
    for (; i + ROW <= size; i += ROW) {
        ask_for(x + i, 0);
        for (int j = 0; j < ROW / LANES; j++) {
            floats v = (floats)(*(const ints *)(x + i + j * LANES) & MAGNITUDE) - limit;
            ints hit = (ints)(v > 0);
            v = (floats)((ints)v & hit);
            hits[j] -= hit;
            sums[j] += v;
            squares[j] += v * v;
        }
    }
    for (int j = 0; j < ROW; j++) {
        *first += sums[j / LANES][j % LANES];
        *second += squares[j / LANES][j % LANES];
        count += hits[j / LANES][j % LANES];
    }
    for (; i < size; i++) {
        float excess = (x[i] < 0 ? -x[i] : x[i]) - limit;
        if (!(excess > 0)) continue;
        *first += excess;
        *second += excess * excess;
        count++;
    }
    return count;
}

/* Keys of elements: how far the optimizer would move them. */
CLONES static void weigh(const float *restrict x, const float *restrict moments, int64_t size, float epsilon,
                         float *restrict keys)
{
    for (int64_t i = 0; i < size; i++) keys[i] = x[i] / (__builtin_sqrtf(moments[i]) + epsilon);
}

void safusion_weigh(const float *x, const int64_t *moments, const float *epsilons, const int64_t *starts,
                    const int64_t *sizes, int64_t parts, float *keys)
{
    for (int64_t p = 0; p < parts; p++) {
        const float *moment = (const float *)(intptr_t)moments[p];
        if (moment) weigh(x + starts[p], moment, sizes[p], epsilons[p], keys + starts[p]);
        else memcpy(keys + starts[p], x + starts[p], sizeof(float) * (size_t)sizes[p]);
    }
}

/* What the optimizer divides gradients by, and the floor of the keys. */
struct weights {
    const float *moments;
    float epsilon;
    int32_t floor;
};

/* memory = decay * memory + grad, and the keys above the floor then. Roots and quotients take longer than memory does, and
 * most elements need none: |x| > floor * sqrt(moment), nearly, of all that are above. */
CLONES static void add_weighed(struct places *to, float *restrict memory, const float *restrict grad, int64_t size,
                               float decay, struct weights weights, float bound, int64_t first)
{
    const float *restrict moments = weights.moments;
    for (int64_t i = 0; i < size; i += ROW) {
        const int64_t row = size - i < ROW ? size - i : ROW;
        uint32_t hits = 0;
        ask_for(memory + i, 1);
        ask_for(grad + i, 0);
        ask_for(moments + i, 0);
        if (row == ROW) {
            for (int j = 0; j < ROW; j++) {
                float x = decay * memory[i + j] + grad[i + j];
                memory[i + j] = x;
                hits |= (uint32_t)!(x * x < bound * moments[i + j]) << j;
            }
        } else
            for (int j = 0; j < row; j++) {
                memory[i + j] = decay * memory[i + j] + grad[i + j];
                hits |= 1u << j;
            }
        for (; hits; hits &= hits - 1) {
            const int64_t at = i + __builtin_ctz(hits);
            const float key = memory[at] / (__builtin_sqrtf(moments[at]) + weights.epsilon);
            keep_if_above(to, (int32_t)bits_of(key), weights.floor, first + at);
        }
    }
}

/* Moments are addresses, 0 of parts without, and NULL if no part has any; what is looked for, and summed, is then found
 * in the keys. These are also written, unless `keys` is NULL. */
int64_t safusion_add(const int64_t *grads, int64_t *added, const int64_t *moments, const float *epsilons, float decay,
                     float *memory, float *keys, const int64_t *starts, const int64_t *sizes, int64_t parts,
                     const int32_t *floors, int64_t magnitudes, double *sums, double *squares, int32_t *places,
                     int32_t *bits, int64_t room, int64_t *counts)
{
    struct places to = {places, bits, room, 0};
    float few[BLOCK];
    for (int64_t p = 0; p < parts; p++) {
        const float *grad = (const float *)(intptr_t)grads[p];
        const float *moment = moments ? (const float *)(intptr_t)moments[p] : 0;
        float *target = memory + starts[p];
        int32_t floor = floors ? floors[p] : MAGNITUDE;
        /* a little lower, for what rounding does; not where keys are wanted themselves, or squares overflow */
        const float limit = floor > 0 && floor < INFINITE ? as_float((uint32_t)floor) : 0;
        const float bound = limit * limit * 0.9999f;
        const int squares_tell = bound > 0 && bound <= FLT_MAX && !keys && !sums;
        int rare = squares_tell;
        int64_t checked = 0, before = to.found;
        if (sums) sums[p] = squares[p] = 0;
        for (int64_t at = 0; at < sizes[p]; at += BLOCK) {
            int64_t size = sizes[p] - at < BLOCK ? sizes[p] - at : BLOCK;
            if (at == checked) {
                int64_t next = at ? size : sizes[p] < WHOLE ? sizes[p] : WHOLE;
                if (largest((const int32_t *)grad + at, next) >= INFINITE) break;
                checked += next;
            }
            const float *compared = target + at;
            if (moment && rare) {
                const struct weights weights = {moment + at, epsilons[p], floor};
                const int64_t found = to.found;
                add_weighed(&to, target + at, grad + at, size, decay, weights, bound, starts[p] + at);
                rare = to.found - found < size / OFTEN;
                continue;
            }
            add(&to, target + at, grad + at, size, decay, moment ? MAGNITUDE : floor, starts[p] + at);
            if (moment) {
                float *own = keys ? keys + starts[p] + at : few;
                weigh(compared, moment + at, size, epsilons[p], own);
                const int64_t found = to.found;
                if (floor < MAGNITUDE) above(&to, own, size, floor, starts[p] + at);
                rare = squares_tell && to.found - found < size / OFTEN;
                compared = own;
            } else if (keys) memcpy(keys + starts[p] + at, compared, sizeof(float) * (size_t)size);
            if (sums) sum(compared, size, magnitudes ? MAGNITUDE : -1, sums + p, squares + p);
        }
        added[p] = checked;
        counts[p] = to.found - before;
    }
    return to.found;
}

int64_t safusion_survey(const float *x, const int64_t *starts, const int64_t *sizes, int64_t parts,
                        const int32_t *floors, int64_t magnitudes, double *sums, double *squares, int32_t *places,
                        int32_t *bits, int64_t room, int64_t *counts)
{
    struct places to = {places, bits, room, 0};
    for (int64_t p = 0; p < parts; p++) {
        int64_t before = to.found;
        if (sums) sums[p] = squares[p] = 0;
        for (int64_t at = 0; at < sizes[p]; at += BLOCK) {
            int64_t size = sizes[p] - at < BLOCK ? sizes[p] - at : BLOCK, start = starts[p] + at;
            if (sums) sum(x + start, size, magnitudes ? MAGNITUDE : -1, sums + p, squares + p);
            if (floors && floors[p] < MAGNITUDE) above(&to, x + start, size, floors[p], start);
        }
        counts[p] = to.found - before;
    }
    return to.found;
}

void safusion_tail(const float *x, const int64_t *starts, const int64_t *sizes, int64_t parts, const float *limits,
                   int64_t *counts, double *sums, double *squares)
{
    for (int64_t p = 0; p < parts; p++) {
        counts[p] = sums[p] = squares[p] = 0;
        for (int64_t at = 0; at < sizes[p]; at += BLOCK) {
            int64_t size = sizes[p] - at < BLOCK ? sizes[p] - at : BLOCK;
            counts[p] += exceed(x + starts[p] + at, size, limits[p], sums + p, squares + p);
        }
    }
}

void safusion_largest(const float *x, const int64_t *starts, const int64_t *sizes, int64_t parts, int32_t *bits)
{
    for (int64_t p = 0; p < parts; p++) bits[p] = largest((const int32_t *)x + starts[p], sizes[p]);
}

/* Writes past the caches: whoever reads a large gradient next comes when it has left them anyway. */
static void stream(float *restrict target, const float *restrict source, int64_t size)
{
    int64_t i = 0;
#if defined(__SSE2__)
    if (((uintptr_t)target & 15) == 0)
        for (; i + 4 <= size; i += 4) _mm_stream_ps(target + i, _mm_loadu_ps(source + i));
#endif
    memcpy(target + i, source + i, sizeof(float) * (size_t)(size - i));
}

static int all_finite(const float *x, int64_t size) { return largest((const int32_t *)x, size) < INFINITE; }

int64_t safusion_mean(const int64_t *grads, const int64_t *starts, const int64_t *sizes, int64_t parts,
                      const struct message *messages, int64_t ranks, float scale, int64_t past_caches)
{
    float block[DECODED];
    float bound = 0;
    int64_t from = parts ? starts[0] : 0, to = parts ? starts[parts - 1] + sizes[parts - 1] : 0;
    for (int64_t r = 0; r < ranks; r++) bound += largest_value(messages + r, from, to) * scale;
    int certain = bound <= FLT_MAX, finite = 1, sound = 1; /* no sum is larger than that of the largest */
    for (int64_t p = 0; p < parts; p++) {
        float *grad = (float *)(intptr_t)grads[p];
        for (int64_t at = 0; at < sizes[p]; at += DECODED) {
            int64_t size = sizes[p] - at < DECODED ? sizes[p] - at : DECODED;
            memset(block, 0, sizeof(float) * (size_t)size);
            for (int64_t r = 0; r < ranks; r++)
                sound &= add_message(messages + r, starts[p] + at, size, scale, block, 1);
            finite &= certain || all_finite(block, size);
            if (past_caches) stream(grad + at, block, size);
            else memcpy(grad + at, block, sizeof(float) * (size_t)size);
        }
    }
#if defined(__SSE2__)
    _mm_sfence();
#endif
    return sound ? finite : -1;
}

void safusion_take(const float *x, const int32_t *places, int64_t count, float *values)
{
    for (int64_t i = 0; i < count; i++) values[i] = x[places[i]];
}

void safusion_take_out(float *memory, const int64_t *places, const float *values, int64_t count)
{
    for (int64_t i = 0; i < count; i++) memory[places[i]] -= values[i];
}
