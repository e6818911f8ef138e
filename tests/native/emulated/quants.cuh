// What the products of quantized weights use of a card besides the threads: bytes of words, and half precision.

#pragma once

#include "device.cuh"

#include <algorithm>

struct uint2 { unsigned x, y; };
struct char4 { signed char x, y, z, w; };
inline int2 make_int2(int x, int y) { return {x, y}; }
inline char4 make_char4(int x, int y, int z, int w) { return {(signed char) x, (signed char) y, (signed char) z, (signed char) w}; }
inline float __low2float(half2 value) { return value.x; }
inline float __high2float(half2 value) { return value.y; }
inline half __low2half(half2 value) { return value.x; }
inline half2 __hmul2(half2 a, half2 b) { return a*b; }
inline int __popc(unsigned value) { return __builtin_popcount(value); }
inline float __fmaf_rn(float a, float b, float c) { return fmaf(a, b, c); }
inline float __fmul_rn(float a, float b) { return a*b; }
inline float __int_as_float(int bits) { return value_of(bits); }

inline int ggml_cuda_dp4a(int a, int b, int c) {
    for (int i = 0; i < 32; i += 8) { c += int((signed char) (a >> i))*int((signed char) (b >> i)); }
    return c;
}
inline unsigned __byte_perm(unsigned x, unsigned y, unsigned which) {
    const uint64_t all = uint64_t(y) << 32 | x;
    unsigned result = 0;
    for (int i = 0; i < 4; ++i) { result |= unsigned(all >> 8*(which >> 4*i & 7) & 255) << 8*i; }
    return result;
}
inline int __vsub4(unsigned a, unsigned b) {
    unsigned result = 0;
    for (int i = 0; i < 32; i += 8) { result |= ((a >> i) - (b >> i) & 255) << i; }
    return result;
}
inline unsigned __vcmpne4(unsigned a, unsigned b) {
    unsigned result = 0;
    for (int i = 0; i < 32; i += 8) { result |= ((a >> i ^ b >> i) & 255 ? 255u : 0u) << i; }
    return result;
}
inline float ggml_cuda_e8m0_to_fp32(uint8_t x) { return value_of(x == 0 ? 0x00400000 : x << 23); }
inline float ggml_cuda_ue4m3_to_fp32(uint8_t) { abort(); } // of a type that is not tried

// --- what the host's side of a product takes -----------------------------------------------------------

#define GGML_PAD(x, n) (((x) + (n) - 1)/(n)*(n))
#define GGML_CUDA_CC_AMPERE 800
#define GGML_LOG_WARN(...) fprintf(stderr, __VA_ARGS__)
#define GGML_BACKEND_BUFFER_USAGE_COMPUTE 2
inline int ggml_backend_buffer_get_usage(const void *) { return 0; }
inline bool ggml_is_contiguous(const ggml_tensor *) { return true; }
inline bool ggml_are_same_stride(const ggml_tensor *, const ggml_tensor *) { return true; }
template <typename... A> int cudaOccupancyMaxActiveBlocksPerMultiprocessor(int * blocks, A...) { *blocks = 1; return 0; }
