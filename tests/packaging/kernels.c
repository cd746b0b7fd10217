/* Calls functions of a compiled library on numbers that are the same everywhere, and prints a hash of all results.
 *
 * Built for two processors, with their libraries it prints the same lines: replicas on them stay equal.
 */
#include <dlfcn.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define SIZE 70000
#define PARTS 3
#define KEPT 900

static void *library;
static uint32_t state = 12345;

static void *function(const char *name)
{
    void *found = dlsym(library, name);
    if (!found) fprintf(stderr, "no %s\n", name), exit(1);
    return found;
}

static float number(void)
{
    state = state * 1664525u + 1013904223u;
    int32_t wide = (int32_t)(state >> 8) - (1 << 23);
    state = state * 1664525u + 1013904223u;
    return (float)wide / (float)(1 << 20) * (float)((state >> 12) & 1023) / 64.0f;
}

static void print(const char *name, const void *bytes, size_t size)
{
    uint64_t hash = 1469598103934665603u;
    for (size_t i = 0; i < size; i++) hash = (hash ^ ((const unsigned char *)bytes)[i]) * 1099511628211u;
    printf("%s %016llx\n", name, (unsigned long long)hash);
}

int main(int count, char **arguments)
{
    static float x[SIZE], moments[SIZE], keys[SIZE], kept[KEPT], sent[KEPT];
    static int32_t largest[PARTS], kth[PARTS], places[KEPT];
    static int64_t positions[KEPT], found[KEPT];
    static uint8_t bitmap[SIZE / 8], codes[KEPT];
    static uint16_t scales[PARTS];
    const int64_t starts[PARTS] = {0, 1001, 40000}, sizes[PARTS] = {1001, 38999, 30000}, ranks[PARTS] = {7, 300, 29999};
    const float epsilons[PARTS] = {1e-8f, 1e-3f, 0};
    const int64_t addresses[PARTS] = {(int64_t)(intptr_t)moments, (int64_t)(intptr_t)(moments + 1001),
                                      (int64_t)(intptr_t)(moments + 40000)};

    library = count == 2 ? dlopen(arguments[1], RTLD_NOW) : NULL;
    if (!library) return fprintf(stderr, "%s\n", dlerror()), 1;
    for (int64_t i = 0; i < SIZE; i++) x[i] = number();
    for (int64_t i = 0; i < SIZE; i++) moments[i] = number() * number(), moments[i] *= moments[i] < 0 ? -1 : 1;
    for (int64_t i = 0; i < KEPT; i++) positions[i] = 77 * i, places[i] = (int32_t)(77 * i);

    ((void (*)(float *, const int64_t *, const int64_t *, int64_t, int32_t *))function("safusion_largest"))(
        x, starts, sizes, PARTS, largest);
    print("largest", largest, sizeof largest);
    ((void (*)(float *, const int64_t *, const int64_t *, const int64_t *, int64_t, int64_t, int32_t *))function(
        "safusion_kth_largest"))(x, starts, sizes, ranks, PARTS, 1, kth);
    print("kth_largest", kth, sizeof kth);
    ((void (*)(float *, const int64_t *, const float *, const int64_t *, const int64_t *, int64_t, float *))function(
        "safusion_weigh"))(x, addresses, epsilons, starts, sizes, PARTS, keys);
    print("weigh", keys, sizeof keys);
    ((void (*)(float *, const int32_t *, int64_t, float *))function("safusion_take"))(x, places, KEPT, kept);
    print("take", kept, sizeof kept);
    for (int64_t bits = 1; bits <= 4; bits *= 2) {
        memset(codes, 0, sizeof codes);
        int64_t good = ((int64_t(*)(const void *, int64_t, int64_t, const float *, const int64_t *, int64_t, int64_t,
                                    uint8_t *, uint16_t *, float *))function("safusion_quantize"))(
            positions, 64, KEPT, kept, starts, PARTS, bits, codes, scales, sent);
        print(good ? "quantize" : "bad", codes, sizeof codes);
        print("scales", scales, sizeof scales);
        print("sent", sent, sizeof sent);
    }
    ((void (*)(const void *, int64_t, int64_t, int64_t, uint8_t *))function("safusion_mark"))(
        positions, 64, KEPT, SIZE, bitmap);
    print("mark", bitmap, sizeof bitmap);
    int64_t marked = ((int64_t(*)(const uint8_t *, int64_t, int64_t *))function("safusion_marked"))(
        bitmap, sizeof bitmap, found);
    print(marked == KEPT ? "marked" : "bad", found, sizeof found);
    ((void (*)(float *, const int64_t *, const float *, int64_t))function("safusion_take_out"))(x, found, sent, KEPT);
    print("take_out", x, sizeof x);
    return 0;
}
