// Attention of a step that holds rows of several sequences of one cache: each tile of rows reads only the K blocks that at least
// one of its rows may see. What a step's mask hides in one piece (the cells of other sequences) is neither loaded nor computed.
// The arithmetic of who computes what is in fattn-share.h.

#pragma once

#include "common.cuh"
#include "fattn-share.h"

#include <cfloat>
#include <cstdlib>

// Op parameter of GGML_OP_FLASH_ATTN_EXT: how many rows a sequence of the step has on average, rounded up; 0: not known.
#define FATTN_VISIBLE_ROWS_PARAM 8

#define FATTN_VISIBLE_MAX_ROWS 256  // More rows are prompts, which see nearly all of the step's cells.
// Below this attention costs about what the search of the mask costs. An H200, one layer of 35B-A3B, without and with lists:
// 32 rows over 262,656 cells 0.52 and 0.17 ms, 8 over 65,792 0.067 and 0.055, but 8 over 12,544 0.032 and 0.039, 2 over 16,640
// 0.018 and 0.028, 32 over 25,088, most of which all rows see, 0.068 and 0.100.
#define FATTN_VISIBLE_MIN_KV   65536
#define FATTN_VISIBLE_LIST_THREADS 1024

// The geometries that have kernels for lists: head sizes of current models, 4 or 8 Q heads for each K/V head.
static constexpr __host__ __device__ bool ggml_cuda_fattn_may_use_visible(const int DKQ, const int DV, const int ncols2) {
    return DKQ == DV && (DKQ == 128 || DKQ == 256) && (ncols2 == 4 || ncols2 == 8);
}

// Whether lists are worth their price: one pass over the mask for each layer. GGML_CUDA_FATTN_VISIBLE is another number of cells
// from which on they are; 0 turns them off.
static inline bool ggml_cuda_fattn_shall_use_visible(const int cc, const ggml_tensor * dst) {
#if defined(GGML_USE_HIP) || defined(GGML_USE_MUSA)
    GGML_UNUSED_VARS(cc, dst);
    return false;
#else
    static const int min_kv = []() {
        const char * value = getenv("GGML_CUDA_FATTN_VISIBLE");
        return value == nullptr ? FATTN_VISIBLE_MIN_KV : atoi(value);
    }();

    const ggml_tensor * Q    = dst->src[0];
    const ggml_tensor * K    = dst->src[1];
    const ggml_tensor * mask = dst->src[3];

    float max_bias      = 0.0f;
    float logit_softcap = 0.0f;
    memcpy(&max_bias,      (const float *) dst->op_params + 1, sizeof(float));
    memcpy(&logit_softcap, (const float *) dst->op_params + 2, sizeof(float));

    return min_kv > 0 && GGML_CUDA_CC_IS_NVIDIA(cc) && mask != nullptr && max_bias == 0.0f && logit_softcap == 0.0f &&
        Q->ne[1] >= 2 && Q->ne[1] <= FATTN_VISIBLE_MAX_ROWS && Q->ne[3] == 1 &&
        K->ne[1] >= min_kv && K->ne[1] % 256 == 0 &&
        mask->ne[0] == K->ne[1] && mask->ne[1] >= Q->ne[1] && mask->ne[2] == 1 && mask->ne[3] == 1;
#endif // defined(GGML_USE_HIP) || defined(GGML_USE_MUSA)
}

// Rows for a tile that is no wider than what one sequence has in the step: the next power of two, at most n_max (which is what
// is returned where nothing is known). A wider tile would read the blocks of several sequences for all its rows, a narrower one
// would read the same blocks several times.
static inline int ggml_cuda_fattn_visible_ncols1(const ggml_tensor * dst, const int n_max) {
    const int32_t n_rows = ggml_get_op_params_i32(dst, FATTN_VISIBLE_ROWS_PARAM);
    if (n_rows <= 0) {
        return n_max;
    }
    int ncols1 = 1;
    while (ncols1 < n_rows && ncols1 < n_max) {
        ncols1 *= 2;
    }
    return ncols1;
}

#if !defined(GGML_USE_HIP) && !defined(GGML_USE_MUSA)

// seen[tile][block]: whether a row of the tile may see something of the K block. One warp for each block.
template <int ncols1>
__launch_bounds__(256, 1)
static __global__ void flash_attn_visible_seen(
        const half * mask_ptr, uint8_t * seen_ptr, int * finished_ptr, const int n_rows, const int n_blocks, const int nbatch_fa,
        const int64_t s31, const int64_t s33, const int ne33) {
    ggml_cuda_pdl_sync();
    const half * GGML_CUDA_RESTRICT mask = mask_ptr;

    if (blockIdx.x == 0 && blockIdx.y == 0 && blockIdx.z == 0 && threadIdx.x == 0 && threadIdx.y == 0) {
        *finished_ptr = 0;
    }

    const int block = blockIdx.x*blockDim.y + threadIdx.y;
    const int jt    = blockIdx.y;
    const int tile  = blockIdx.z*gridDim.y + jt;
    if (block >= n_blocks) {
        return;
    }

    mask += (blockIdx.z % ne33)*s33 + int64_t(jt)*ncols1*s31 + int64_t(block)*nbatch_fa;

    bool visible = false;
#pragma unroll
    for (int j = 0; j < ncols1; ++j) {
        if (jt*ncols1 + j >= n_rows) { // What such a column computes is never written.
            break;
        }
        for (int i = 2*threadIdx.x; i < nbatch_fa; i += 2*WARP_SIZE) {
            const float2 value = __half22float2(*(const half2 *) (mask + j*s31 + i));
            visible = visible || value.x != -INFINITY || value.y != -INFINITY;
        }
    }
    visible = __any_sync(0xFFFFFFFF, visible);

    if (threadIdx.x == 0) {
        seen_ptr[int64_t(tile)*n_blocks + block] = visible;
    }
}

// The sum over all threads before this one; `all` becomes the sum over all.
static __device__ __forceinline__ int flash_attn_visible_scan(const int value, int * sums, int & all) {
    const int lane = threadIdx.x % WARP_SIZE;
    const int warp = threadIdx.x / WARP_SIZE;

    int sum = value;
#pragma unroll
    for (int offset = 1; offset < WARP_SIZE; offset *= 2) {
        const int other = __shfl_up_sync(0xFFFFFFFF, sum, offset);
        sum += lane >= offset ? other : 0;
    }
    if (lane == WARP_SIZE - 1) {
        sums[warp] = sum;
    }
    __syncthreads();

    int before = 0;
    all = 0;
#pragma unroll
    for (int i = 0; i < FATTN_VISIBLE_LIST_THREADS/WARP_SIZE; ++i) {
        before += i < warp ? sums[i] : 0;
        all    += sums[i];
    }
    __syncthreads();

    return before + sum - value;
}

// The list of each tile from what it has seen, in ascending order; the CUDA block that is the last to end adds the counts up.
__launch_bounds__(FATTN_VISIBLE_LIST_THREADS, 1)
static __global__ void flash_attn_visible_lists(const uint8_t * seen_ptr, int * visible, const int n_blocks) {
    ggml_cuda_pdl_sync();

    const int n_tiles = gridDim.x;
    const int tile    = blockIdx.x;
    const int tid     = threadIdx.x;

    volatile int * counts = visible + fattn_share_counts(n_tiles);
    int          * list   = visible + fattn_share_list(n_tiles, n_blocks, tile);
    const uint8_t * seen  = seen_ptr + int64_t(tile)*n_blocks;

    __shared__ int  sums[FATTN_VISIBLE_LIST_THREADS/WARP_SIZE];
    __shared__ bool is_last;

    int count = 0;
    for (int block0 = 0; block0 < n_blocks; block0 += FATTN_VISIBLE_LIST_THREADS) {
        const int  block     = block0 + tid;
        const bool is_listed = block < n_blocks && seen[block];

        int all;
        const int place = count + flash_attn_visible_scan(is_listed, sums, all);
        if (is_listed) {
            list[place] = block;
        }
        count += all;
    }

    if (tid == 0) {
        if (count == 0) {
            list[0] = 0;
        }
        counts[tile] = count > 0 ? count : 1;
        __threadfence();
        is_last = atomicAdd(visible + fattn_share_finished(n_tiles), 1) == n_tiles - 1;
    }
    __syncthreads();

    if (!is_last) {
        return;
    }

    __threadfence();
    int before = 0;
    for (int tile0 = 0; tile0 < n_tiles; tile0 += FATTN_VISIBLE_LIST_THREADS) {
        int all;
        const int value = tile0 + tid < n_tiles ? counts[tile0 + tid] : 0;
        const int place = before + flash_attn_visible_scan(value, sums, all);
        if (tile0 + tid < n_tiles) {
            visible[tile0 + tid] = place;
        }
        before += all;
    }
    if (tid == 0) {
        visible[n_tiles] = before;
    }
}

// Combines the parts of the tiles that several CUDA blocks computed.
template <int D, int ncols1, int ncols2> // D == head size
__launch_bounds__(D, 1)
static __global__ void flash_attn_visible_fixup(
        float * dst_ptr, const float2 * dst_fixup_ptr, const int * visible_ptr,
        const int ne01, const int ne02, const int ne12, const int ne03, const int gqa_ratio) {
    ggml_cuda_pdl_sync();
    constexpr int ncols = ncols1*ncols2;

    float        * GGML_CUDA_RESTRICT dst       = dst_ptr;
    const float2 * GGML_CUDA_RESTRICT dst_fixup = dst_fixup_ptr;

    const int run   = blockIdx.x;
    const int nruns = gridDim.x;
    const int j     = blockIdx.y;
    const int c     = blockIdx.z;
    const int jc    = j*ncols2 + c;
    const int tid   = threadIdx.x;

    const int iter_j     = (ne01      + (ncols1 - 1)) / ncols1;
    const int iter_z_gqa = (gqa_ratio + (ncols2 - 1)) / ncols2;

    const fattn_share_seam seam = fattn_share_seam_of(visible_ptr, iter_j*ne03, iter_z_gqa*ne12, run, nruns);
    if (seam.first_run == run) {
        return;
    }

    const int sequence = seam.tile.tile / iter_j;
    const int jt       = seam.tile.tile % iter_j;
    const int z_KV     = seam.tile.head / iter_z_gqa; // K/V head index
    const int zt_gqa   = seam.tile.head % iter_z_gqa;
    const int zt_Q     = z_KV*gqa_ratio + zt_gqa*ncols2; // Global Q head start index.

    if (jt*ncols1 + j >= ne01 || zt_gqa*ncols2 + c >= gqa_ratio) {
        return;
    }

    dst += sequence*ne02*ne01*D + jt*ne02*(ncols1*D) + zt_Q*D + (j*ne02 + c)*D + tid;

    const float * dst_fixup_data = ((const float *) dst_fixup) + nruns*(2*2*ncols);

    float dst_val = *dst;
    float max_val = dst_fixup[run*ncols + jc].x;
    float rowsum  = dst_fixup[run*ncols + jc].y;

#pragma unroll 8
    for (int other = seam.first_run; other < run; ++other) {
        const float  dst_add = dst_fixup_data[other*ncols*D + jc*D + tid];
        const float2 meta    = dst_fixup[(nruns + other)*ncols + jc];

        const float max_val_new = fmaxf(max_val, meta.x);

        const float diff_val = max_val - max_val_new;
        const float diff_add = meta.x  - max_val_new;

        const float scale_val = diff_val >= SOFTMAX_FTZ_THRESHOLD ? expf(diff_val) : 0.0f;
        const float scale_add = diff_add >= SOFTMAX_FTZ_THRESHOLD ? expf(diff_add) : 0.0f;

        dst_val = scale_val*dst_val + scale_add*dst_add;
        rowsum  = scale_val*rowsum  + scale_add*meta.y;
        max_val = max_val_new;
    }

    *dst = dst_val / rowsum;
}

// Fills `visible` for tiles of ncols1 rows: see fattn-share.h for what lies where.
template <int ncols1>
static void ggml_cuda_fattn_find_visible(
        ggml_backend_cuda_context & ctx, const ggml_tensor * dst, ggml_cuda_pool_alloc<int> & visible, const int nbatch_fa) {
    const ggml_tensor * Q    = dst->src[0];
    const ggml_tensor * K    = dst->src[1];
    const ggml_tensor * mask = dst->src[3];
    GGML_ASSERT(K->ne[1] % nbatch_fa == 0);

    const int n_rows   = Q->ne[1];
    const int n_blocks = K->ne[1] / nbatch_fa;
    const int n_tiles  = ((n_rows + ncols1 - 1) / ncols1) * Q->ne[3];

    visible.alloc(fattn_share_list(n_tiles, n_blocks, n_tiles));
    ggml_cuda_pool_alloc<uint8_t> seen(ctx.pool(), size_t(n_tiles)*n_blocks); // after it, since it is given back before

    const int warps = 256/WARP_SIZE;
    const dim3 grid((n_blocks + warps - 1) / warps, n_tiles/Q->ne[3], Q->ne[3]);
    ggml_cuda_kernel_launch(flash_attn_visible_seen<ncols1>,
        ggml_cuda_kernel_launch_params(grid, dim3(WARP_SIZE, warps, 1), 0, ctx.stream()),
        (const half *) mask->data, seen.ptr, visible.ptr + fattn_share_finished(n_tiles), n_rows, n_blocks, nbatch_fa,
        int64_t(mask->nb[1] / sizeof(half)), int64_t(mask->nb[3] / sizeof(half)), int(mask->ne[3]));
    CUDA_CHECK(cudaGetLastError());

    ggml_cuda_kernel_launch(flash_attn_visible_lists,
        ggml_cuda_kernel_launch_params(dim3(n_tiles, 1, 1), dim3(FATTN_VISIBLE_LIST_THREADS, 1, 1), 0, ctx.stream()),
        (const uint8_t *) seen.ptr, visible.ptr, n_blocks);
    CUDA_CHECK(cudaGetLastError());
}

#endif // !defined(GGML_USE_HIP) && !defined(GGML_USE_MUSA)
