"""Rows of a few numbers are put together on a card by whole CUDA blocks.

Where a step has several tokens of a sequence (drafts), a delta net's convolution lays three old and the new ones of each
channel into a row. llama.cpp starts a CUDA block of 256 threads for each such row of 4 to 8 numbers: 262,144 blocks a layer for
32 streams of 35B-A3B, 65,536 for 8. Here a block takes as many rows as it has room for. Rows of 129 numbers and more are as
before, and what comes out is the same. Not timed on a card yet; a layer of such a step has 17 MB to move, which takes an H200 4
us.

Where a step has one token of each sequence the numbers lie side by side, and llama.cpp finds the row of each by a 64-bit
division: 9 us a layer for 32 streams on an H200, for 8 MB. Less than 2^31 numbers are divided by a multiplication and a shift
here: 4.6 us.
"""

from __future__ import annotations

from native.source_change import Change

_CONCAT = "ggml/src/ggml-cuda/concat.cu"

SHORT_ROWS = (
    Change(
        _CONCAT,
        """template <typename T>
static void concat_cont_cuda(const T * x,
""",
        """// Rows side by side, of less than 2^31 numbers together; `ne0` as fastdiv takes it.
template <typename T>
static __global__ void __launch_bounds__(CUDA_CONCAT_BLOCK_SIZE) concat_rows(
        const T * x, const T * y, T * dst, const uint32_t n, const uint32_t ne00, const uint32_t ne10, const uint3 ne0) {
    const uint32_t i = blockDim.x*blockIdx.x + threadIdx.x;
    if (i >= n) {
        return;
    }
    const uint2 at = fast_div_modulo(i, ne0); // row, and place in it

    ggml_cuda_pdl_sync();
    dst[i] = at.y < ne00 ? x[at.x*ne00 + at.y] : y[at.x*ne10 + at.y - ne00];
}

template <typename T>
static void concat_cont_cuda(const T * x,
""",
    ),
    Change(
        _CONCAT,
        """    if (dim == 0) {
        const ggml_cuda_kernel_launch_params launch_params""",
        """    if (dim == 0 && n > 0 && n <= INT_MAX) {
        const ggml_cuda_kernel_launch_params launch_params =
            ggml_cuda_kernel_launch_params(num_blocks, CUDA_CONCAT_BLOCK_SIZE, 0, stream);
        ggml_cuda_kernel_launch(concat_rows<T>, launch_params,
            x, y, dst, (uint32_t) n, (uint32_t) ne00, (uint32_t) (ne0 - ne00), init_fastdiv_values(ne0));
        return;
    }
    if (dim == 0) {
        const ggml_cuda_kernel_launch_params launch_params""",
    ),
    Change(
        _CONCAT,
        """           int64_t   ne0,
           int64_t /*ne1*/,
           int64_t /*ne2*/,
           int64_t /*ne3*/,
          uint64_t   nb0,
""",
        """           int64_t   ne0,
           int64_t   ne1,
           int64_t /*ne2*/,
           int64_t /*ne3*/,
          uint64_t   nb0,
""",
    ),
    Change(
        _CONCAT,
        """    const int64_t i1 = blockIdx.x;

    const T * x;
""",
        """    const int64_t i1 = (int64_t) blockIdx.x*blockDim.y + threadIdx.y;

    if (i1 >= ne1) {
        return;
    }

    const T * x;
""",
    ),
    Change(
        _CONCAT,
        """        dim3 grid_dim(dst->ne[1], dst->ne[2], dst->ne[3]);
        auto launch_kernel = [&](auto dim) {
            concat_non_cont<T, dim><<<grid_dim, CUDA_CONCAT_BLOCK_SIZE, 0, stream>>>(
""",
        """        // Short rows share a block.
        int threads = CUDA_CONCAT_BLOCK_SIZE;
        while (threads > 4 && threads/2 >= dst->ne[0]) {
            threads /= 2;
        }
        const int rows = CUDA_CONCAT_BLOCK_SIZE/threads;
        dim3 grid_dim((dst->ne[1] + rows - 1)/rows, dst->ne[2], dst->ne[3]);
        dim3 block_dim(threads, rows, 1);
        auto launch_kernel = [&](auto dim) {
            concat_non_cont<T, dim><<<grid_dim, block_dim, 0, stream>>>(
""",
    ),
)
