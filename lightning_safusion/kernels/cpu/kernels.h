/* What the sources of the compiled kernels share.
 *
 * Plain C without Python's headers: it is built where there is a compiler (setup.py), loaded with ctypes, which lets
 * other threads run meanwhile, and called by elements.py and messages.py, which say what the arguments mean.
 * Vectors are the compiler's own (GCC and Clang): a function marked CLONES is compiled for several processors, and
 * the loader takes the one that fits. Such functions are static, because Clang gives others a name of its own.
 *
 * Built with -ffp-contract=off: products and sums are rounded one by one, as PyTorch's are, so that workers with and
 * without this library decode the same means.
 */
#include <float.h>
#include <stdint.h>
#include <string.h>

#define VERSION 18 /* of the functions and their arguments; library.py has the same number */

#if defined(__x86_64__) && defined(__linux__) && defined(__GLIBC__)
#define CLONES __attribute__((target_clones("avx512f", "avx2", "default")))
#else
#define CLONES
#endif

#define INLINE static inline __attribute__((always_inline)) /* a part of what CLONES compiles, or of several kinds */
#define HIDDEN __attribute__((visibility("hidden"))) /* between these sources */
#define MAGNITUDE 0x7FFFFFFF /* the bits of a float without its sign: as integers they order magnitudes */
#define INFINITE 0x7F800000

/* Bits of the largest magnitude. */
HIDDEN int32_t largest(const int32_t *bits, int64_t size);

static inline float as_float(uint32_t bits)
{
    float number;
    memcpy(&number, &bits, sizeof number);
    return number;
}

static inline uint32_t bits_of(float number)
{
    uint32_t bits;
    memcpy(&bits, &number, sizeof bits);
    return bits;
}

/* What a rank has sent, still encoded: addresses and numbers. ../fields.py says what each is. */
enum { EVERY, LISTED, ELIAS_FANO };
struct message {
    int64_t kind, values, value_bits, room, positions;
    int64_t scales, starts, parts;
    int64_t ranks, regions, low, low_bits, runs, run_count;
};

/* target[position - start] += factor * value for what a message has of a run of elements; whether it is sound. */
HIDDEN int add_message(const struct message *from, int64_t start, int64_t size, float factor, float *target, int cached);

/* No value that a message has of a run of elements has a larger magnitude; infinite for NaN. */
HIDDEN float largest_value(const struct message *of, int64_t start, int64_t stop);
