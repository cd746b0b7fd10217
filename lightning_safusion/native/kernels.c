/* What the CPU does to every element of a gradient, in as few passes over memory as there can be.
 *
 * Plain C without Python's headers: it is built where there is a compiler (setup.py), loaded with ctypes, which lets
 * other threads run meanwhile, and called by elements.py and messages.py, which say what the arguments mean. Work comes in
 * parts, runs of elements that several threads can take from. Vectors are the compiler's own (GCC and Clang): a
 * function marked CLONES is compiled for several processors, and the loader takes the one that fits.
 *
 * Built with -ffp-contract=off: products and sums are rounded one by one, as PyTorch's are, so that workers with and
 * without this library decode the same means.
 */
#include <stddef.h>
#include <stdint.h>
#include <string.h>
#if defined(__SSE2__)
#include <emmintrin.h>
#endif

#define VERSION 3 /* of the functions below and their arguments; library.py has the same number */

#if defined(__x86_64__) && defined(__linux__) && defined(__GLIBC__)
#define CLONES __attribute__((target_clones("avx512f", "avx2", "default")))
#else
#define CLONES
#endif

#define MAGNITUDE 0x7FFFFFFF /* the bits of a float without its sign: as integers they order magnitudes */
#define INFINITE 0x7F800000
#define CHECKED 32768 /* elements that are looked at before any of them is added; half of them stay in the L2 cache */
#define CACHED 4096   /* elements that stay in the L1 cache, and whose sums are kept in float32 */
#define DECODED 16384 /* elements that are put together in the cache */
#define LANES 16
#define ROOM 32 /* elements that are compared at once */

typedef float floats __attribute__((vector_size(4 * LANES), aligned(4)));
typedef int32_t ints __attribute__((vector_size(4 * LANES), aligned(4)));

int64_t safusion_version(void) { return VERSION; }

CLONES static int32_t largest(const int32_t *bits, int64_t size)
{
    int32_t result = 0;
    for (int64_t i = 0; i < size; i++) {
        int32_t magnitude = bits[i] & MAGNITUDE;
        result = magnitude > result ? magnitude : result;
    }
    return result;
}

CLONES static void add(float *restrict memory, const float *restrict grad, int64_t size, float decay)
{
    if (decay == 1.0f)
        for (int64_t i = 0; i < size; i++) memory[i] += grad[i];
    else
        for (int64_t i = 0; i < size; i++) memory[i] = decay * memory[i] + grad[i];
}

/* The first places above a floor, at most `room` (and ROOM more are written); the number of all of them. */
CLONES static int64_t above(const int32_t *x, int64_t size, int32_t floor, int64_t first, int64_t *places,
                            int32_t *bits, int64_t room)
{
    int64_t found = 0, i = 0;
    for (; i + ROOM <= size; i += ROOM) {
        uint32_t hits = 0;
        for (int j = 0; j < ROOM; j++) hits |= (uint32_t)((x[i + j] & MAGNITUDE) > floor) << j;
        int count = __builtin_popcount(hits);
        if (found > room) { /* no more than counted */
            found += count;
            continue;
        }
        /* two without asking whether there are any: a branch that nobody can foresee costs more */
        for (int k = 0; k < 2; k++, hits &= hits - 1) {
            int j = __builtin_ctz(hits | 1u << (ROOM - 1));
            places[found + k] = first + i + j;
            bits[found + k] = x[i + j];
        }
        for (int64_t k = found + 2; hits; k++, hits &= hits - 1) {
            int j = __builtin_ctz(hits);
            places[k] = first + i + j;
            bits[k] = x[i + j];
        }
        found += count;
    }
    for (; i < size; i++)
        if ((x[i] & MAGNITUDE) > floor) {
            if (found <= room) {
                places[found] = first + i;
                bits[found] = x[i];
            }
            found++;
        }
    return found;
}

int64_t safusion_add(const int64_t *grads, float *memory, const int64_t *starts, const int64_t *sizes, int64_t parts,
                     float decay, int64_t *added, const int32_t *floors, int64_t base, int64_t *places, int32_t *bits,
                     int64_t room, int64_t *counts)
{
    int64_t found = 0;
    for (int64_t p = 0; p < parts; p++) {
        const float *grad = (const float *)(intptr_t)grads[p];
        float *target = memory + starts[p];
        int64_t checked = 0;
        counts[p] = 0;
        for (int64_t at = 0; at < sizes[p]; at += CACHED) {
            int64_t size = sizes[p] - at < CACHED ? sizes[p] - at : CACHED;
            if (at == checked) {
                int64_t next = sizes[p] - at < CHECKED ? sizes[p] - at : CHECKED;
                if (largest((const int32_t *)grad + at, next) >= INFINITE) break;
                checked = at + next;
            }
            add(target + at, grad + at, size, decay);
            if (floors && floors[p] < MAGNITUDE) {
                int64_t kept = found <= room ? found : room + 1;
                int64_t more = above((const int32_t *)target + at, size, floors[p], starts[p] - base + at,
                                     places + kept, bits + kept, room - kept);
                counts[p] += more;
                found += more;
            }
        }
        added[p] = checked;
    }
    return found;
}

CLONES static void sum(const float *x, int64_t size, int32_t mask, double *first, double *second)
{
    floats a = {0}, b = {0}, c = {0}, d = {0};
    int64_t i = 0;
    for (; i + 2 * LANES <= size; i += 2 * LANES) {
        floats v = (floats)(*(const ints *)(x + i) & mask), w = (floats)(*(const ints *)(x + i + LANES) & mask);
        a += v;
        b += *(const floats *)(x + i) * *(const floats *)(x + i);
        c += w;
        d += *(const floats *)(x + i + LANES) * *(const floats *)(x + i + LANES);
    }
    a += c;
    b += d;
    for (int j = 0; j < LANES; j++) {
        *first += a[j];
        *second += b[j];
    }
    for (; i < size; i++) {
        *first += mask == -1 || x[i] >= 0 ? x[i] : -x[i];
        *second += x[i] * x[i];
    }
}

int64_t safusion_survey(const float *x, const int64_t *starts, const int64_t *sizes, const int32_t *floors,
                        int64_t parts, int64_t magnitudes, double *sums, double *squares, int64_t *places,
                        int32_t *bits, int64_t room, int64_t *counts)
{
    int64_t found = 0;
    for (int64_t p = 0; p < parts; p++) {
        counts[p] = 0;
        if (sums) sums[p] = squares[p] = 0;
        for (int64_t at = 0; at < sizes[p]; at += CACHED) {
            int64_t size = sizes[p] - at < CACHED ? sizes[p] - at : CACHED, start = starts[p] + at;
            if (sums) sum(x + start, size, magnitudes ? MAGNITUDE : -1, sums + p, squares + p);
            if (floors && floors[p] < MAGNITUDE) {
                int64_t kept = found <= room ? found : room + 1;
                int64_t more = above((const int32_t *)x + start, size, floors[p], start, places + kept, bits + kept,
                                     room - kept);
                counts[p] += more;
                found += more;
            }
        }
    }
    return found;
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

int64_t safusion_mean(const int64_t *grads, const int64_t *starts, const int64_t *sizes, int64_t parts,
                      const int64_t *places, const int64_t *values, const int64_t *cuts, int64_t ranks, float scale,
                      int64_t past_caches)
{
    float block[DECODED];
    int32_t highest = 0;
    for (int64_t p = 0; p < parts; p++) {
        float *grad = (float *)(intptr_t)grads[p];
        for (int64_t at = 0; at < sizes[p]; at += DECODED) {
            int64_t size = sizes[p] - at < DECODED ? sizes[p] - at : DECODED, start = starts[p] + at;
            memset(block, 0, sizeof(float) * (size_t)size);
            for (int64_t r = 0; r < ranks; r++) {
                const int64_t *place = (const int64_t *)(intptr_t)places[r];
                const float *value = (const float *)(intptr_t)values[r];
                int64_t entry = cuts[r * (parts + 1) + p], last = cuts[r * (parts + 1) + p + 1];
                /* entries before this block have been taken: find the first of the others */
                for (int64_t step = last - entry; at && step > 0;) {
                    int64_t half = step / 2;
                    if (place[entry + half] < start) entry += half + 1, step -= half + 1;
                    else step = half;
                }
                for (; entry < last; entry++) {
                    uint64_t at = (uint64_t)(place[entry] - start);
                    if (at >= (uint64_t)size) break;
                    block[at] += value[entry] * scale;
                }
            }
            int32_t bits = largest((const int32_t *)block, size);
            highest = bits > highest ? bits : highest;
            if (past_caches) stream(grad + at, block, size);
            else memcpy(grad + at, block, sizeof(float) * (size_t)size);
        }
    }
#if defined(__SSE2__)
    _mm_sfence();
#endif
    return highest < INFINITE;
}

void safusion_take_out(float *memory, const int64_t *places, const float *values, int64_t count)
{
    for (int64_t i = 0; i < count; i++) memory[places[i]] -= values[i];
}

void safusion_positions(const void *offsets, int64_t offset_bits, const int64_t *counts, int64_t blocks,
                        int64_t *positions)
{
    const uint8_t *narrow = offsets;
    const uint16_t *wide = offsets;
    int64_t entry = 0;
    for (int64_t b = 0; b < blocks; b++)
        for (int64_t last = entry + counts[b]; entry < last; entry++)
            positions[entry] = b << offset_bits | (offset_bits == 8 ? narrow[entry] : wide[entry]);
}

/* Codes are a level, and the sign in the highest bit; the first of a byte is in its lowest bits. */
void safusion_codes(const float *values, const float *scales, const int64_t *counts, int64_t parts, int64_t bits,
                    uint8_t *codes)
{
    const float levels = (float)(1 << (bits - 1)), highest = levels - 1;
    int64_t entry = 0;
    for (int64_t p = 0; p < parts; p++) {
        const float factor = scales[p] > 0 ? levels / scales[p] : 0;
        for (int64_t last = entry + counts[p]; entry < last; entry++) {
            int negative = __builtin_signbit(values[entry]) != 0;
            float level = (negative ? -values[entry] : values[entry]) * factor;
            int code = (int)(level < highest ? level : highest) | negative << (bits - 1);
            codes[entry * bits >> 3] |= (uint8_t)(code << (entry * bits & 7));
        }
    }
}

void safusion_values(const uint8_t *codes, const float *scales, const int64_t *counts, int64_t parts, int64_t bits,
                     float *values)
{
    const int levels = 1 << (bits - 1), mask = 2 * levels - 1;
    float table[16];
    int64_t entry = 0;
    for (int code = 0; code <= mask; code++) {
        float level = ((float)(code & (levels - 1)) + 0.5f) / (float)levels;
        table[code] = code < levels ? level : -level;
    }
    for (int64_t p = 0; p < parts; p++)
        for (int64_t last = entry + counts[p]; entry < last; entry++)
            values[entry] = table[codes[entry * bits >> 3] >> (entry * bits & 7) & mask] * scales[p];
}
