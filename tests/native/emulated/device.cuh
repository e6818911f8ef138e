// What the attention's kernels themselves use of a card, on the threads of common.cuh: warps, copies that arrive when they are
// waited for, tensor cores.

#pragma once

#include "common.cuh"

#include <type_traits>

#define AMPERE_MMA_AVAILABLE
#define CP_ASYNC_AVAILABLE
#define CUDART_VERSION 13000
#define FATTN_KQ_STRIDE 256
#define GGML_ABORT(...) abort()
#define GGML_CUDA_CC_IS_AMD(cc) false
#define GGML_CUDA_CC_IS_RDNA(cc) false
#define GGML_CUDA_CC_TURING 750
#define GGML_CUDA_MAX_DEVICES 1
#define GGML_UNUSED(x) (void)(x)
#define __align__(n) __attribute__((aligned(n)))

struct int2 { int x, y; };
struct int4 { int x, y, z, w; };
struct nv_bfloat162 { float x, y; };
struct ggml_cuda_device_info { struct { int cc, warp_size, nsm; } devices[1]; };
inline ggml_cuda_device_info ggml_cuda_info() { return {{{900, WARP_SIZE, 3}}}; }
inline int ggml_cuda_get_device() { return 0; }
inline bool turing_mma_available(int) { return true; }
inline bool ampere_mma_available(int) { return true; }
inline bool cp_async_available(int) { return true; }
inline bool volta_mma_available(int) { return false; }
inline bool amd_wmma_available(int) { return false; }
inline bool amd_mfma_available(int) { return false; }
inline bool fast_fp16_available(int) { return false; }
inline int ggml_cuda_highest_compiled_arch(int cc) { return cc; }
constexpr int cudaFuncAttributeMaxDynamicSharedMemorySize = 0;
template <typename... A> int cudaFuncSetAttribute(A...) { return 0; }

constexpr int ggml_cuda_get_physical_warp_size() { return WARP_SIZE; }
constexpr int ggml_cuda_get_max_cpy_bytes() { return 16; }
template <int bytes, int alignment = 0> void ggml_cuda_memcpy_1(void * to, const void * from) { memcpy(to, from, bytes); }
inline void ggml_cuda_mad(float & sum, float a, float b) { sum += a*b; }
inline float get_alibi_slope(float, unsigned, unsigned, float, float) { return 1.0f; }
inline unsigned fastmodulo(unsigned n, uint3 divisor) { return n % divisor.z; }
template <int n> struct ggml_cuda_unroll {
    template <typename F> void operator()(const F & f) const {
        f(n - 1);
        if constexpr (n > 1) { ggml_cuda_unroll<n - 1>{}(f); }
    }
};

// --- warps -----------------------------------------------------------------------------------------

inline int bits_of(float value) { int bits; memcpy(&bits, &value, sizeof(bits)); return bits; }
inline float value_of(int bits) { float value; memcpy(&value, &bits, sizeof(value)); return value; }

inline float __shfl_xor_sync(unsigned, float value, int offset, int = WARP_SIZE) {
    return warp_together(bits_of(value), [=](const int * all, unsigned lane) { return value_of(all[lane ^ offset]); });
}
template <int width, typename F> float warp_reduce(float value, F together) {
    return warp_together(bits_of(value), [=](const int * all, unsigned lane) {
        float result = value_of(all[lane/width*width]);
        for (unsigned i = 1; i < width; ++i) { result = together(result, value_of(all[lane/width*width + i])); }
        return result;
    });
}
template <int width> float warp_reduce_max(float value) {
    return warp_reduce<width>(value, [](float a, float b) { return fmaxf(a, b); });
}
template <int width> float warp_reduce_sum(float value) { // in llama.cpp's order
    for (int apart = width/2; apart > 0; apart /= 2) { value += __shfl_xor_sync(0xffffffff, value, apart); }
    return value;
}

// Each lane lends something of its own, and one works with all of it.
static void * lent[1024];
template <typename T, typename F> void warp_lends(T & own, F work) {
    const unsigned first = thread_number()/WARP_SIZE*WARP_SIZE;
    barrier & warp = of_warp[thread_number()/WARP_SIZE];
    lent[thread_number()] = &own;
    warp.wait(WARP_SIZE);
    if (thread_number() == first) { work((T **) &lent[first]); }
    warp.wait(WARP_SIZE);
}

// --- shared memory and copies into it -----------------------------------------------------------------

alignas(128) static char dynamic_shared[256 << 10];

struct copy { unsigned to; const void * from; };
static std::vector<copy> copies[1024];

inline unsigned ggml_cuda_cvta_generic_to_shared(void * place) {
    const std::ptrdiff_t offset = (char *) place - dynamic_shared;
    assert(offset >= 0 && offset < std::ptrdiff_t(sizeof(dynamic_shared)));
    return offset;
}
template <int preload> void cp_async_cg_16(unsigned to, const void * from) {
    copies[thread_number()].push_back({to, from});
    memset(dynamic_shared + to, 0xFF, 16); // not a number until it has arrived
}
// Copies arrive as late as they may: when all but the last `n` groups are waited for.
static std::vector<size_t> groups[1024]; // how many copies each has
inline void emulated_copies_commit() {
    size_t n = copies[thread_number()].size();
    for (const size_t each : groups[thread_number()]) { n -= each; }
    groups[thread_number()].push_back(n);
}
inline void emulated_copies_arrive(size_t n_groups) {
    auto & own = copies[thread_number()];
    size_t n = 0;
    for (size_t i = 0; i < n_groups; ++i) { n += groups[thread_number()][i]; }
    for (size_t i = 0; i < n; ++i) { memcpy(dynamic_shared + own[i].to, own[i].from, 16); }
    own.erase(own.begin(), own.begin() + n);
    groups[thread_number()].erase(groups[thread_number()].begin(), groups[thread_number()].begin() + n_groups);
}
inline void emulated_copies_wait(size_t n) {
    const size_t all = groups[thread_number()].size();
    emulated_copies_arrive(all > n ? all - n : 0);
}
inline void cp_async_wait_all() {
    emulated_copies_commit();
    emulated_copies_wait(0);
}

inline void __syncwarp() { of_warp[thread_number()/WARP_SIZE].wait(WARP_SIZE); }

// --- tensor cores -------------------------------------------------------------------------------------

// n matrices of 8 x 8 halves; lane i gives the address of row i % 8 of matrix i / 8. The order of the results is the caller's.
inline void emulated_ldmatrix(int * to, int n, bool transposed, const void * row) {
    struct { int * to; const uint16_t * row; } own{to, (const uint16_t *) row};
    assert((uintptr_t) row % 16 == 0);
    warp_lends(own, [=](auto ** all) {
        for (int lane = 0; lane < WARP_SIZE; ++lane) {
            for (int matrix = 0; matrix < n; ++matrix) {
                uint16_t pair[2];
                for (int i = 0; i < 2; ++i) {
                    const int r = lane/4, c = 2*(lane % 4) + i;
                    pair[i] = all[8*matrix + (transposed ? c : r)]->row[transposed ? r : c];
                }
                const int place = transposed && (matrix == 1 || matrix == 2) ? 3 - matrix : matrix;
                memcpy(&all[lane]->to[place], pair, sizeof(pair));
            }
        }
    });
}

inline int emulated_movmatrix(int x) {
    struct { int given, result; } own{x, 0};
    warp_lends(own, [](auto ** all) {
        for (int lane = 0; lane < WARP_SIZE; ++lane) {
            uint16_t pair[2];
            for (int i = 0; i < 2; ++i) {
                const int r = 2*(lane % 4) + i, c = lane/4;
                memcpy(&pair[i], (const char *) &all[4*r + c/2]->given + 2*(c % 2), sizeof(pair[i]));
            }
            memcpy(&all[lane]->result, pair, sizeof(pair));
        }
    });
    return own.result;
}

// D[i][n] += sum over k of A[i][k] B[n][k], whatever the tiles' shapes are; where an element lies is said by the tiles themselves.
template <typename D, typename A, typename B> void emulated_mma(D & d, const A & a, const B & b) {
    static_assert(A::J == B::J);
    constexpr int K = 2*A::J;
    struct { D * d; const A * a; const B * b; } own{&d, &a, &b};
    warp_lends(own, [](auto ** all) {
        static float left[A::I][K], right[B::I][K];
        const uint3 own_index = threadIdx;
        for (int lane = 0; lane < WARP_SIZE; ++lane) {
            threadIdx.x = lane;
            const auto take = [](auto & matrix, const auto & tile) {
                for (int l = 0; l < tile.ne; ++l) {
                    matrix[tile.get_i(l)][2*tile.get_j(l)]     = tile.x[l].x;
                    matrix[tile.get_i(l)][2*tile.get_j(l) + 1] = tile.x[l].y;
                }
            };
            take(left, *all[lane]->a);
            take(right, *all[lane]->b);
        }
        const auto product = [](int i, int n) {
            float sum = 0.0f;
            for (int k = 0; k < K; ++k) { sum += left[i][k]*right[n][k]; }
            return sum;
        };
        for (int lane = 0; lane < WARP_SIZE; ++lane) {
            threadIdx.x = lane;
            D & tile = *all[lane]->d;
            for (int l = 0; l < tile.ne; ++l) {
                const int i = tile.get_i(l), n = tile.get_j(l);
                if constexpr (std::is_arithmetic_v<std::remove_reference_t<decltype(tile.x[0])>>) {
                    tile.x[l] += product(i, n);
                } else {
                    tile.x[l] = make_half2(tile.x[l].x + product(i, 2*n), tile.x[l].y + product(i, 2*n + 1));
                }
            }
        }
        threadIdx = own_index;
    });
}
