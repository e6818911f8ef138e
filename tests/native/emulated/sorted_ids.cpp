// A step's tokens by expert on emulated threads, out of a build's mmid-sorted.cuh: against what mm_ids_helper lists.

#include "device.cuh"
#include "fibers.h"

static uint3 init_fastdiv_values(uint64_t divisor) { return {0, 0, (unsigned) divisor}; }
struct uint2 { unsigned x, y; };
static uint2 fast_div_modulo(unsigned n, uint3 divisor) { return {n/divisor.z, n % divisor.z}; }
static int min(int a, int b) { return a < b ? a : b; }
static int __popc(unsigned bits) { return __builtin_popcount(bits); }
static unsigned __ballot_sync(unsigned, bool value) {
    return warp_together(value, [](const int * all, unsigned) {
        unsigned bits = 0;
        for (int i = 0; i < WARP_SIZE; ++i) { bits |= (unsigned) (all[i] != 0) << i; }
        return bits;
    });
}
template <int width> int warp_reduce_sum(int value) {
    return warp_together(value, [](const int * all, unsigned) {
        int sum = 0;
        for (int i = 0; i < WARP_SIZE; ++i) { sum += all[i]; }
        return sum;
    });
}

#include "mmid-sorted.cuh"

// With `unused` some ids are no expert's.
static bool is_same(int tokens, int used, int experts, int channels, bool inverse, bool unused) {
    const int si1 = used + 3, sis1 = 5;
    std::vector<int> ids(tokens*si1, -7);
    unsigned seed = 3;
    for (int it = 0; it < tokens; ++it) {
        for (int i = 0; i < used; ++i) {
            seed = seed*1664525u + 1013904223u;
            ids[it*si1 + i] = unused && (seed >> 20) % 5 == 0 ? -1 : ((seed >> 16) % (experts/used))*used + i;
        }
    }
    std::vector<int> src1(tokens*used, -9), dst = src1, bounds(experts + 1, -9);
    auto src1_wanted = src1, dst_wanted = dst, bounds_wanted = bounds;
    int row = 0;
    for (int i = 0; i < tokens*used; ++i) { row += ids[i/used*si1 + i % used] < 0; }
    for (int expert = 0; expert < experts; ++expert) {
        bounds_wanted[expert] = row;
        for (int i = 0; i < tokens*used; ++i) {
            if (ids[i/used*si1 + i % used] != expert) { continue; }
            dst_wanted[row] = i;
            (inverse ? src1_wanted[i] : src1_wanted[row]) = inverse ? row : i/used*sis1 + i % used % channels;
            ++row;
        }
    }
    bounds_wanted[experts] = row;
    run_kernel(dim3(experts), dim3(WARP_SIZE, MM_IDS_WARPS), [&] {
        mm_ids_sorted(ids.data(), src1.data(), dst.data(), bounds.data(), tokens*used, init_fastdiv_values(used), channels, si1, sis1,
            inverse);
    });
    return src1 == src1_wanted && dst == dst_wanted && bounds == bounds_wanted;
}

int main() {
    int wrong = 0;
    for (const int tokens : {1, 17, 65, 512}) {
        for (const int used : {1, 2, 3, 8, 10}) {
            for (const bool inverse : {false, true}) {
                const bool ok = is_same(tokens, used, 4*used, used, inverse, false) && is_same(tokens, used, 2*used, 1, inverse, true);
                printf("%s %d tokens x %d%s\n", ok ? "ok " : "BAD", tokens, used, inverse ? ", inverse" : "");
                wrong += !ok;
            }
        }
    }
    return wrong != 0;
}
