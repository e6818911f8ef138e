"""A card copies numbers that do not lie side by side with 32-bit arithmetic.

A delta net's convolution keeps the last three inputs of each channel: of 35B-A3B 98 KB for each sequence and layer, out of rows
of four into rows of their own. llama.cpp's kernel for such copies finds a number's place on both sides with six 64-bit
divisions, each tens of instructions of a card, and its CUDA blocks have two warps: of 32 streams 786,432 numbers in each of 30
layers. Copies of less than 2^31 numbers divide by a multiplication and a shift here, as llama.cpp's other kernels do, in blocks
of eight warps. Numbers are the same bit by bit. GGML_CUDA_SCATTERED_COPIES=0 in the engine's environment turns it off.

A layer of such a step has 6 MB to move. On an H200 a step of 32 streams takes 17.9 ms instead of 18.2, one of 8 streams 8.77
instead of 8.88.
"""

from __future__ import annotations

from native.source_change import Change

_CPY = "ggml/src/ggml-cuda/cpy.cu"

SCATTERED_COPIES = (
    Change(
        _CPY,
        """template <typename T>
static __global__ void cpy_scalar_transpose(const char * cx, char * cdst, const int64_t ne,
""",
        """// How one side of a copy is laid out; `ne` as fastdiv takes it.
struct cpy_layout {
    uint3   ne0, ne1, ne2;
    int64_t nb0, nb1, nb2, nb3;
};

static __device__ __forceinline__ int64_t cpy_offset(const uint32_t i, const cpy_layout & of) {
    const uint2 row    = fast_div_modulo(i,     of.ne0);
    const uint2 matrix = fast_div_modulo(row.x, of.ne1);
    const uint2 cube   = fast_div_modulo(matrix.x, of.ne2);
    return row.y*of.nb0 + matrix.y*of.nb1 + cube.y*of.nb2 + cube.x*of.nb3;
}

// cpy_scalar for less than 2^31 numbers.
template <cpy_kernel_t cpy_1>
static __global__ void cpy_scalar_scattered(
        const char * cx, char * cdst, const uint32_t ne, const cpy_layout from, const cpy_layout to) {
    ggml_cuda_pdl_lc();
    const uint32_t i = blockDim.x*blockIdx.x + threadIdx.x;

    if (i >= ne) {
        return;
    }

    const int64_t x_offset   = cpy_offset(i, from);
    const int64_t dst_offset = cpy_offset(i, to);

    ggml_cuda_pdl_sync();
    cpy_1(cx + x_offset, cdst + dst_offset);
}

static bool ggml_cuda_cpy_scattered_is_on() {
    static const bool is_on = [] {
        const char * env = getenv("GGML_CUDA_SCATTERED_COPIES");
        return env == nullptr || atoi(env) != 0;
    }();
    return is_on;
}

template <typename T>
static __global__ void cpy_scalar_transpose(const char * cx, char * cdst, const int64_t ne,
""",
    ),
    Change(
        _CPY,
        """    const auto launch_scalar_generic = [&]() {
""",
        """    const auto launch_scalar_generic = [&]() {
        if (ne > 0 && ne <= INT_MAX && ggml_cuda_cpy_scattered_is_on()) {
            constexpr int n_threads = 256;
            const auto div = [](const int64_t n) { return init_fastdiv_values((uint64_t) n); };
            const cpy_layout from = {div(ne00), div(ne01), div(ne02), nb00, nb01, nb02, nb03};
            const cpy_layout to   = {div(ne10), div(ne11), div(ne12), nb10, nb11, nb12, nb13};
            const ggml_cuda_kernel_launch_params launch_params =
                ggml_cuda_kernel_launch_params(dim3((ne + n_threads - 1)/n_threads), n_threads, 0, stream);
            ggml_cuda_kernel_launch(cpy_scalar_scattered<cpy_1_scalar<src_t, dst_t>>, launch_params,
                cx, cdst, (uint32_t) ne, from, to);
            return;
        }
""",
    ),
)
