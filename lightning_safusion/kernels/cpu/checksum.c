/* CRC-32C (Castagnoli's polynomial, RFC 3720 section 12.1), by the processor's own instructions where it has them.
 *
 * Which ones it has is asked at run time: a library is for all processors of its kind. A single chain of instructions
 * reads several gigabytes per second, and messages are short.
 */
#include "kernels.h"

#if defined(__aarch64__) && defined(__linux__)
#include <sys/auxv.h>
#endif

#define POLYNOMIAL 0x82F63B78u /* the lowest bit first */

static uint64_t word_at(const uint8_t *bytes)
{
    uint64_t word;
    memcpy(&word, bytes, sizeof word);
    return word;
}

#if defined(__x86_64__)
#define HARDWARE __attribute__((target("sse4.2")))
static int has_instructions(void) { return __builtin_cpu_supports("sse4.2"); }
HARDWARE static inline uint32_t of_word(uint32_t crc, uint64_t word)
{
    return (uint32_t)__builtin_ia32_crc32di(crc, word);
}
HARDWARE static inline uint32_t of_byte(uint32_t crc, uint8_t byte) { return __builtin_ia32_crc32qi(crc, byte); }
#elif defined(__aarch64__) && defined(__linux__)
#define HARDWARE
static int has_instructions(void) { return getauxval(AT_HWCAP) >> 7 & 1; } /* HWCAP_CRC32 */
static inline uint32_t of_word(uint32_t crc, uint64_t word)
{
    __asm__(".arch_extension crc\n\tcrc32cx %w0, %w0, %x1" : "+r"(crc) : "r"(word));
    return crc;
}
static inline uint32_t of_byte(uint32_t crc, uint8_t byte)
{
    __asm__(".arch_extension crc\n\tcrc32cb %w0, %w0, %w1" : "+r"(crc) : "r"((uint32_t)byte));
    return crc;
}
#endif

#ifdef HARDWARE
HARDWARE static uint32_t by_instructions(const uint8_t *bytes, int64_t size, uint32_t crc)
{
    for (; size >= 8; size -= 8, bytes += 8) crc = of_word(crc, word_at(bytes));
    for (; size > 0; size--) crc = of_byte(crc, *bytes++);
    return crc;
}
#else
static int has_instructions(void) { return 0; }
static uint32_t by_instructions(const uint8_t *bytes, int64_t size, uint32_t crc)
{
    (void)bytes, (void)size;
    return crc;
}
#endif

/* tables[k][b]: what byte b does to the checksum k bytes later. Threads that fill them at once write the same. */
static uint32_t tables[8][256];

static void fill_tables(void)
{
    for (uint32_t byte = 0; byte < 256; byte++) {
        uint32_t crc = byte;
        for (int bit = 0; bit < 8; bit++) crc = crc >> 1 ^ (crc & 1 ? POLYNOMIAL : 0);
        tables[0][byte] = crc;
    }
    for (int later = 1; later < 8; later++)
        for (uint32_t byte = 0; byte < 256; byte++) {
            uint32_t before = tables[later - 1][byte];
            tables[later][byte] = before >> 8 ^ tables[0][before & 255];
        }
}

/* Eight bytes at a time (Kounavis and Berry, 2005). */
static uint32_t by_tables(const uint8_t *bytes, int64_t size, uint32_t crc)
{
    static int filled;
    if (!__atomic_load_n(&filled, __ATOMIC_ACQUIRE)) {
        fill_tables();
        __atomic_store_n(&filled, 1, __ATOMIC_RELEASE);
    }
    for (; size >= 8; size -= 8, bytes += 8) {
        const uint8_t *b = bytes;
        crc ^= (uint32_t)b[0] | (uint32_t)b[1] << 8 | (uint32_t)b[2] << 16 | (uint32_t)b[3] << 24;
        crc = tables[7][crc & 255] ^ tables[6][crc >> 8 & 255] ^ tables[5][crc >> 16 & 255] ^ tables[4][crc >> 24]
              ^ tables[3][b[4]] ^ tables[2][b[5]] ^ tables[1][b[6]] ^ tables[0][b[7]];
    }
    for (; size > 0; size--) crc = crc >> 8 ^ tables[0][(crc ^ *bytes++) & 255];
    return crc;
}

/* `tables_only`: as on a processor without the instructions. */
int64_t safusion_crc32c(const uint8_t *bytes, int64_t size, int64_t tables_only)
{
    const int instructions = !tables_only && has_instructions();
    return (int64_t)(uint32_t)~(instructions ? by_instructions : by_tables)(bytes, size, ~0u);
}
