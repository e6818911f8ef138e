"""Rows of a few numbers are put together on a card by whole CUDA blocks.

Where a step has several tokens of a sequence (drafts), a delta net's convolution lays three old and the new ones of each channel
into a row. llama.cpp starts a CUDA block of 256 threads for each such row of 4 to 8 numbers: 262,144 blocks a layer for 32
streams of 35B-A3B, 65,536 for 8. Here a block takes as many rows as it has room for. Rows of 129 numbers and more are as before,
and what comes out is the same. Not timed on a card yet; a layer of such a step has 17 MB to move, which takes an H200 4 us.
"""

from __future__ import annotations

from native.source_change import Change

_CONCAT = "ggml/src/ggml-cuda/concat.cu"

SHORT_ROWS = (
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
