// What the attention's CUDA files take from llama.cpp and CUDA, for a processor: the threads of a CUDA block are fibers that run
// in turn up to a barrier or to what a warp does together. Blocks run one after the other, the last first.

#pragma once

#include <cassert>
#include <cfloat>
#include <climits>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <ucontext.h>
#include <vector>

#define __host__
#define __device__
#define __global__
#define __shared__ static // blocks run one at a time
#define __forceinline__ inline
#define __launch_bounds__(...)
#define GGML_CUDA_RESTRICT
#define FLASH_ATTN_AVAILABLE
#define TURING_MMA_AVAILABLE
#define NO_DEVICE_CODE abort()
#define WARP_SIZE 32
#define CUDA_CHECK(call) (call)
#define GGML_ASSERT(condition) assert(condition)
#define SOFTMAX_FTZ_THRESHOLD -20.0f
#define FATTN_KQ_MAX_OFFSET (3.0f*0.6931f)
template <typename... T> void unused(const T &...) {}
#define GGML_UNUSED_VARS(...) unused(__VA_ARGS__)

struct dim3 { unsigned x = 1, y = 1, z = 1; dim3(unsigned x, unsigned y = 1, unsigned z = 1) : x(x), y(y), z(z) {} };
struct uint3 { unsigned x, y, z; };
struct float2 { float x, y; };
inline float2 make_float2(float x, float y) { return {x, y}; }

// --- half precision ---------------------------------------------------------------------------------

inline uint16_t half_of(float value) { // to nearest, ties to even
    uint32_t bits;
    memcpy(&bits, &value, sizeof(bits));
    const uint32_t sign = (bits >> 16) & 0x8000, fraction = bits & 0x7fffff;
    const int exponent = int((bits >> 23) & 255) - 112;
    if (exponent == 255 - 112) { return sign | 0x7c00 | (fraction ? 1 : 0); }
    if (exponent <= 0) { return sign | uint32_t(nearbyintf(fabsf(value)*16777216.0f)); }
    const uint32_t rest = fraction & 0x1fff;
    uint32_t whole = uint32_t(exponent) << 10 | fraction >> 13;
    whole += rest > 0x1000 || (rest == 0x1000 && (whole & 1));
    return sign | (whole < 0x7c00 ? whole : 0x7c00);
}
inline float float_of(uint16_t bits) {
    const int exponent = (bits >> 10) & 31;
    const float sign = bits & 0x8000 ? -1.0f : 1.0f, fraction = bits & 1023;
    if (exponent == 31) { return fraction != 0.0f ? NAN : sign*INFINITY; }
    return sign*(exponent == 0 ? fraction/16777216.0f : ldexpf(1024.0f + fraction, exponent - 25));
}
struct half {
    uint16_t bits;
    half() = default;
    half(float value) : bits(half_of(value)) {}
    operator float() const { return float_of(bits); }
};
struct half2 {
    half x, y;
    half2 & operator*=(half2 other) { x = float(x)*float(other.x); y = float(y)*float(other.y); return *this; }
};
inline half2 operator*(half2 a, half2 b) { return a *= b; }
inline half2 make_half2(float x, float y) { return {x, y}; }
inline float __half2float(half value) { return value; }
inline float2 __half22float2(half2 value) { return {value.x, value.y}; }

extern dim3 gridDim, blockDim;
extern uint3 blockIdx, threadIdx;

// --- fibers ---------------------------------------------------------------------------------------

struct fiber { ucontext_t context; std::vector<char> stack; uint3 index; bool ended; };
extern std::vector<fiber> fibers;
extern ucontext_t scheduler;
extern unsigned running;

inline void let_others_run() { swapcontext(&fibers[running].context, &scheduler); }

// All of the group's threads come here before one goes on.
struct barrier {
    unsigned arrived = 0, round = 0;
    void wait(unsigned members) {
        const unsigned mine = round;
        if (++arrived == members) { arrived = 0; ++round; return; }
        while (round == mine) { let_others_run(); }
    }
};
extern barrier of_block, of_warp[32];
extern int exchanged[1024];

inline unsigned thread_number() { return running; }
inline void __syncthreads() { of_block.wait(fibers.size()); }
inline void __threadfence() {}
inline void ggml_cuda_pdl_sync() {}
inline void ggml_cuda_pdl_lc() {}
inline int atomicAdd(int * place, int value) { const int old = *place; *place += value; return old; }
inline int cudaGetLastError() { return 0; }

template <typename F> auto warp_together(int value, F answer) {
    barrier & warp = of_warp[thread_number()/WARP_SIZE];
    exchanged[thread_number()] = value;
    warp.wait(WARP_SIZE);
    const auto result = answer(&exchanged[thread_number()/WARP_SIZE*WARP_SIZE], thread_number()%WARP_SIZE);
    warp.wait(WARP_SIZE);
    return result;
}
inline bool __any_sync(unsigned, bool value) {
    return warp_together(value, [](const int * all, unsigned) {
        bool any = false;
        for (int i = 0; i < WARP_SIZE; ++i) { any = any || all[i]; }
        return any;
    });
}
inline int __shfl_up_sync(unsigned, int value, unsigned offset) {
    return warp_together(value, [=](const int * all, unsigned lane) { return all[lane >= offset ? lane - offset : lane]; });
}

void run_kernel(dim3 grid, dim3 block, const std::function<void()> & kernel);

// --- what llama.cpp's host code gives ---------------------------------------------------------------

struct ggml_tensor {
    int64_t ne[4]; size_t nb[4]; void * data; int32_t op_params[16]; const ggml_tensor * src[5]; int type; void * buffer;
    int op, flags;
};
inline int32_t ggml_get_op_params_i32(const ggml_tensor * tensor, int i) { return tensor->op_params[i]; }
#define GGML_CUDA_CC_IS_NVIDIA(cc) ((cc) > 0)

using cudaStream_t = int;
struct ggml_cuda_pool { std::vector<void *> taken; }; // given back in reverse order, as the card's pool demands
struct ggml_backend_cuda_context {
    ggml_cuda_pool the_pool;
    ggml_cuda_pool & pool() { return the_pool; }
    cudaStream_t stream() { return 0; }
    int device = 0;
};
// Memory is full of nonsense, and what lies behind it is checked at the end.
template <typename T> struct ggml_cuda_pool_alloc {
    static constexpr size_t fence = 64;
    ggml_cuda_pool & pool;
    T * ptr = nullptr;
    size_t size = 0;
    ggml_cuda_pool_alloc(ggml_cuda_pool & pool) : pool(pool) {}
    ggml_cuda_pool_alloc(ggml_cuda_pool & pool, size_t n) : pool(pool) { alloc(n); }
    T * alloc(size_t n) {
        size = n*sizeof(T);
        ptr = (T *) malloc(size + fence);
        memset((void *) ptr, 0xA5, size + fence);
        pool.taken.push_back(ptr);
        return ptr;
    }
    T * get() { return ptr; }
    ~ggml_cuda_pool_alloc() {
        if (ptr != nullptr) {
            assert(pool.taken.back() == ptr);
            pool.taken.pop_back();
        }
        for (size_t i = 0; i < (ptr ? fence : 0); ++i) { assert(((unsigned char *) ptr)[size + i] == 0xA5); }
        free(ptr);
    }
};
struct ggml_cuda_kernel_launch_params {
    dim3 grid, block;
    ggml_cuda_kernel_launch_params(dim3 grid, dim3 block, size_t, cudaStream_t) : grid(grid), block(block) {}
};
template <typename... P, typename... A> void ggml_cuda_kernel_launch(
        void (*kernel)(P...), const ggml_cuda_kernel_launch_params & params, A... arguments) {
    run_kernel(params.grid, params.block, [=]() { kernel(arguments...); });
}
