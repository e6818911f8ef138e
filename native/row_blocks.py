# ruff: noqa: E501 (the lines are those of llama.cpp)
"""Each row of a step reads the blocks of cells that it may see: what our builds change of CUDA's attention.

In a cache that all sequences share, a step's rows are shown all cells of the step's span with a mask; ggml's flash attention
walks all of them for every tile of rows, and puts rows of several sequences into one tile. With these changes a pass over the mask
lists for each tile the blocks of cells that at least one of its rows may see, the kernels walk the lists, CUDA blocks share what
is listed evenly, and a tile is no wider than what one sequence has in the step. Lists and not a first and a last block: tokens
that streams generate side by side lie behind all prompts, so the span of a row reaches from its own prompt to the end.

What a row sums stays: a block that is left out has the weight 0 for all rows of the tile, and a tile that sees nothing still
reads one block. Where sums are cut into parts is another place, so low bits differ as they do between batch sizes.

For steps of 2 to 256 rows over 65,536 cells or more, head sizes 128 and 256, 3 or more Q heads for each K/V head: tensor cores
(sm_75 and newer) and the tile kernel (P100). Everything else runs the kernels it ran before. GGML_CUDA_FATTN_VISIBLE in the
engine's environment is another number of cells; 0 turns the lists off. On an H200 all 96 cases of
tests/native/attention_on_card.cpp agree with the processor, and 32 streams of 8,192 tokens spend a third of the time in attention.
"""

from __future__ import annotations

from pathlib import Path

from native.source_change import Change

_SOURCES = Path(__file__).resolve().parent / "cuda"
_CUDA = "ggml/src/ggml-cuda"
_COMMON = f"{_CUDA}/fattn-common.cuh"
_MMA = f"{_CUDA}/fattn-mma-f16.cuh"
_TILE = f"{_CUDA}/fattn-tile.cuh"
_SELECT = f"{_CUDA}/fattn.cu"
_GRAPH = "src/llama-graph.cpp"

_FILES = tuple(
    Change(f"{_CUDA}/{name}", "", (_SOURCES / name).read_text(encoding="utf-8"))
    for name in ("fattn-share.h", "fattn-visible.cuh", "fattn-mma-visible.cuh")
)

# The step tells how many rows a sequence has in it. It is a hint: a graph that serves another step keeps tokens and sequences.
_HINT = (
    Change(
        _GRAPH,
        """        ggml_flash_attn_ext_set_n_kv_max(cur, static_cast<int32_t>(n_kv_max));
""",
        """        ggml_flash_attn_ext_set_n_kv_max(cur, static_cast<int32_t>(n_kv_max));
        if (n_stream == 1 && ubatch.n_seqs_unq > 1) {
            // how many rows a sequence has in the step: FATTN_VISIBLE_ROWS_PARAM of the CUDA backend
            cur->op_params[8] = (int32_t) ((ubatch.n_tokens + ubatch.n_seqs_unq - 1)/ubatch.n_seqs_unq);
        }
""",
    ),
)

# What all kernels share: searching the mask, how many CUDA blocks there are, and combining their parts.
_LAUNCH = (
    Change(
        _COMMON,
        """template <int DV, int ncols1, int ncols2>
void launch_fattn(
""",
        """#include "fattn-visible.cuh"

template <int DV, int ncols1, int ncols2>
void launch_fattn(
""",
    ),
    Change(
        _COMMON,
        """    const int warp_size = WARP_SIZE
) {
    constexpr int ncols = ncols1 * ncols2;
""",
        """    const int warp_size = WARP_SIZE, const bool use_visible = false
) {
    constexpr int ncols = ncols1 * ncols2;
""",
    ),
    Change(
        _COMMON,
        """    // Optional optimization where the mask is scanned to determine whether part of the calculation can be skipped.
""",
        """#if !defined(GGML_USE_HIP) && !defined(GGML_USE_MUSA)
    if constexpr (ggml_cuda_fattn_may_use_visible(DV, DV, ncols2)) {
        if (use_visible) {
            ggml_cuda_fattn_find_visible<ncols1>(ctx, dst, KV_max, nbatch_fa);
        }
    }
#endif // !defined(GGML_USE_HIP) && !defined(GGML_USE_MUSA)

    // Optional optimization where the mask is scanned to determine whether part of the calculation can be skipped.
""",
    ),
    Change(
        _COMMON,
        """    if (!use_sparse && mask && K->ne[1] % FATTN_KQ_STRIDE == 0 && (Q->ne[1] >= 1024 || Q->ne[3] > 1)) {
""",
        """    if (!use_visible && !use_sparse && mask && K->ne[1] % FATTN_KQ_STRIDE == 0 && (Q->ne[1] >= 1024 || Q->ne[3] > 1)) {
""",
    ),
    Change(
        _COMMON,
        """        blocks_num.x = ntiles_dst;
        blocks_num.y = 1;
        blocks_num.z = 1;

        if(use_stream_k) {
""",
        """        blocks_num.x = ntiles_dst;
        blocks_num.y = 1;
        blocks_num.z = 1;

        if (use_visible) {
            // The card shares out what is listed, whatever the number of tiles is.
            blocks_num.x = std::min(max_blocks, ntiles_KV*ntiles_dst);
            dst_tmp_meta.alloc((size_t(blocks_num.x) * ncols * (2 + DV/2)));
        } else if(use_stream_k) {
""",
    ),
    Change(
        _COMMON,
        """        if (ntiles_dst % blocks_num.x != 0) { // Fixup is only needed if the SMs work on fractional tiles.
""",
        """        if (!use_visible && ntiles_dst % blocks_num.x != 0) { // Fixup is only needed if the SMs work on fractional tiles.
""",
    ),
    Change(
        _COMMON,
        """    if (stream_k) {
        if ((int)blocks_num.x % ntiles_dst == 0 && (int)blocks_num.x > ntiles_dst) {
""",
        """    if (stream_k && use_visible) {
#if !defined(GGML_USE_HIP) && !defined(GGML_USE_MUSA)
        if constexpr (ggml_cuda_fattn_may_use_visible(DV, DV, ncols2)) {
            const dim3 block_dim_combine(DV, 1, 1);
            const dim3 blocks_num_combine = {blocks_num.x, ncols1, ncols2};

            const ggml_cuda_kernel_launch_params launch_params = ggml_cuda_kernel_launch_params(blocks_num_combine, block_dim_combine, 0, main_stream);
            ggml_cuda_kernel_launch(flash_attn_visible_fixup<DV, ncols1, ncols2>, launch_params,
                (float *) KQV->data, (const float2 *) dst_tmp_meta.ptr, (const int *) KV_max.ptr,
                int(Q->ne[1]), int(Q->ne[2]), int(K->ne[2]), int(Q->ne[3]), gqa_ratio);
        }
#endif // !defined(GGML_USE_HIP) && !defined(GGML_USE_MUSA)
    } else if (stream_k) {
        if ((int)blocks_num.x % ntiles_dst == 0 && (int)blocks_num.x > ntiles_dst) {
""",
    ),
)

# Tensor cores: a part of a tile is computed over listed blocks; the next block is known in time to be loaded ahead.
_TENSOR_CORES = (
    Change(
        _MMA,
        """        const int kb0,
        const int k_VKQ_sup) {
""",
        """        const int kb0,
        const int k_VKQ_sup,
        const int kb0_next = -1) { // the block of the next iteration if it is not the one behind
""",
    ),
    Change(
        _MMA,
        """                    (mask_h, tile_mask, stride_mask, k_VKQ_0 + nbatch_fa, k_VKQ_sup, jt*ncols1, ne01, nullptr);
""",
        """                    (mask_h, tile_mask, stride_mask, kb0_next < 0 ? k_VKQ_0 + nbatch_fa : kb0_next*nbatch_fa, k_VKQ_sup, jt*ncols1, ne01, nullptr);
""",
    ),
    Change(
        _MMA,
        """                (K_h2, tile_K, nbatch_K2, stride_K, k_VKQ_0 + nbatch_fa, k_VKQ_sup, nullptr);
""",
        """                (K_h2, tile_K, nbatch_K2, stride_K, kb0_next < 0 ? k_VKQ_0 + nbatch_fa : kb0_next*nbatch_fa, k_VKQ_sup, nullptr);
""",
    ),
    Change(
        _MMA,
        """bool V_is_K_view, bool use_sparse, bool needs_fixup, bool is_fixup>
static __device__ __forceinline__ void flash_attn_ext_f16_process_tile(
""",
        """bool V_is_K_view, bool use_sparse, bool needs_fixup, bool is_fixup, bool use_list = false>
static __device__ __forceinline__ void flash_attn_ext_f16_process_tile(
""",
    ),
    Change(
        _MMA,
        """    int kb0 = kb0_start;

""",
        """    int kb0 = kb0_start;

    // With use_list kb0 is a place in the list of visible blocks that `indices` is.
    const int kb_first = use_list ? indices[kb0_start] : kb0_start;

""",
    ),
    Change(
        _MMA,
        """                (mask_h, tile_mask, stride_mask, kb0*nbatch_fa, k_VKQ_sup, jt*ncols1, ne01, nullptr);
""",
        """                (mask_h, tile_mask, stride_mask, kb_first*nbatch_fa, k_VKQ_sup, jt*ncols1, ne01, nullptr);
""",
    ),
    Change(
        _MMA,
        """            (K_h2, tile_K, nbatch_K2, stride_K, kb0*nbatch_fa, k_VKQ_sup, nullptr);
""",
        """            (K_h2, tile_K, nbatch_K2, stride_K, kb_first*nbatch_fa, k_VKQ_sup, nullptr);
""",
    ),
    Change(
        _MMA,
        """    if constexpr (ncols2 == 1 || use_sparse) {
        constexpr bool oob_check = true;
""",
        """    if constexpr (use_list) {
        static_assert(ncols2 > 1 && !use_sparse, "lists are of whole blocks");
        constexpr bool oob_check = false;
        constexpr int  k_VKQ_sup = nbatch_fa;
        int kb_this = kb_first;
        for (; kb0 < kb0_stop-1; ++kb0) {
            constexpr bool last_iter = false;
            const int kb_next = indices[kb0 + 1];
            flash_attn_ext_f16_iter
                <DKQ, DV, ncols1, ncols2, nwarps, use_logit_softcap, V_is_K_view, use_sparse, needs_fixup, is_fixup, last_iter, oob_check,
                 T_A_KQ, T_B_KQ, T_C_KQ, T_A_VKQ, T_B_VKQ, T_C_VKQ>
                (Q_f2, K_h2, V_h2, mask_h, nullptr, dstk, dstk_fixup, scale, slope, logit_softcap,
                 ne01, ne02, stride_K, stride_V, stride_mask, tile_Q, tile_K, tile_V, tile_mask, Q_B, VKQ_C,
                 KQ_max, KQ_rowsum, jt, kb_this, k_VKQ_sup, kb_next);
            kb_this = kb_next;
        }
        constexpr bool last_iter = true;
        flash_attn_ext_f16_iter
            <DKQ, DV, ncols1, ncols2, nwarps, use_logit_softcap, V_is_K_view, use_sparse, needs_fixup, is_fixup, last_iter, oob_check,
             T_A_KQ, T_B_KQ, T_C_KQ, T_A_VKQ, T_B_VKQ, T_C_VKQ>
            (Q_f2, K_h2, V_h2, mask_h, nullptr, dstk, dstk_fixup, scale, slope, logit_softcap,
             ne01, ne02, stride_K, stride_V, stride_mask, tile_Q, tile_K, tile_V, tile_mask, Q_B, VKQ_C,
             KQ_max, KQ_rowsum, jt, kb_this, k_VKQ_sup);
    } else if constexpr (ncols2 == 1 || use_sparse) {
        constexpr bool oob_check = true;
""",
    ),
    Change(
        _MMA,
        """bool ggml_cuda_flash_attn_ext_mma_f16_shall_use_sparse(const int cc, const ggml_tensor * dst, const int ncols1, const int ncols2);
""",
        """#include "fattn-mma-visible.cuh"

bool ggml_cuda_flash_attn_ext_mma_f16_shall_use_sparse(const int cc, const ggml_tensor * dst, const int ncols1, const int ncols2);
""",
    ),
    Change(
        _MMA,
        """    launch_fattn<DV, ncols1, ncols2>
        (ctx, dst, fattn_kernel, nwarps, nbytes_shared_total, nbatch_fa, true, true, true, use_sparse, warp_size_host);
}
""",
        """#if !defined(GGML_USE_HIP) && !defined(GGML_USE_MUSA)
    if constexpr (ggml_cuda_fattn_may_use_visible(DKQ, DV, ncols2)) {
        if (!use_sparse && turing_mma_available(cc) && ggml_cuda_fattn_shall_use_visible(cc, dst)) {
            fattn_kernel = flash_attn_ext_f16_visible<DKQ, DV, ncols1, ncols2>;

            static bool shared_memory_limit_raised[GGML_CUDA_MAX_DEVICES] = {false};
            if (!shared_memory_limit_raised[id]) {
                CUDA_CHECK(cudaFuncSetAttribute(reinterpret_cast<fattn_kernel_ptr_t>(fattn_kernel), cudaFuncAttributeMaxDynamicSharedMemorySize, nbytes_shared_total));
                shared_memory_limit_raised[id] = true;
            }

            launch_fattn<DV, ncols1, ncols2>
                (ctx, dst, fattn_kernel, nwarps, nbytes_shared_total, nbatch_fa, true, true, true, use_sparse, warp_size_host, true);
            return;
        }
    }
#endif // !defined(GGML_USE_HIP) && !defined(GGML_USE_MUSA)

    launch_fattn<DV, ncols1, ncols2>
        (ctx, dst, fattn_kernel, nwarps, nbytes_shared_total, nbatch_fa, true, true, true, use_sparse, warp_size_host);
}
""",
    ),
    Change(
        _SELECT,
        """    if constexpr (ncols2 <= 8) {
        if (turing_mma_available(cc) && Q->ne[1] <= 8/ncols2) {
""",
        """    // With lists of visible blocks a tile is no wider than what a sequence has in the step. The widest tile is chosen below.
    if constexpr (ggml_cuda_fattn_may_use_visible(DKQ, DV, ncols2)) {
        if (turing_mma_available(cc) && ggml_cuda_fattn_shall_use_visible(cc, dst)) {
            const int ncols1 = ggml_cuda_fattn_visible_ncols1(dst, 64/ncols2);
            if (ncols1 <= 8/ncols2) {
                ggml_cuda_flash_attn_ext_mma_f16_case<DKQ, DV, 8/ncols2, ncols2>(ctx, dst);
                return;
            }
            if (ncols1 <= 16/ncols2) {
                ggml_cuda_flash_attn_ext_mma_f16_case<DKQ, DV, 16/ncols2, ncols2>(ctx, dst);
                return;
            }
            if (ncols1 <= 32/ncols2) {
                ggml_cuda_flash_attn_ext_mma_f16_case<DKQ, DV, 32/ncols2, ncols2>(ctx, dst);
                return;
            }
        }
    }

    if constexpr (ncols2 <= 8) {
        if (turing_mma_available(cc) && Q->ne[1] <= 8/ncols2) {
""",
    ),
)

# Cards without tensor cores: the parallel blocks of a tile take the places of its list in turn.
_TILES = (
    Change(
        _TILE,
        """template<int DKQ, int DV, int ncols1, int ncols2, bool use_logit_softcap> // D == head size
__launch_bounds__(ggml_cuda_fattn_tile_get_nthreads(DKQ, DV, ncols1*ncols2), ggml_cuda_fattn_tile_get_occupancy(DKQ, DV, ncols1*ncols2))
""",
        """template<int DKQ, int DV, int ncols1, int ncols2, bool use_logit_softcap, bool use_list = false> // D == head size
__launch_bounds__(ggml_cuda_fattn_tile_get_nthreads(DKQ, DV, ncols1*ncols2), ggml_cuda_fattn_tile_get_occupancy(DKQ, DV, ncols1*ncols2))
""",
    ),
    Change(
        _TILE,
        """    const int k_VKQ_max = KV_max ? KV_max[sequence*gridDim.x + blockIdx.x] : ne11;
    if (ncols2 == 1) {
""",
        """    const int k_VKQ_max = KV_max && !use_list ? KV_max[sequence*gridDim.x + blockIdx.x] : ne11;
    if constexpr (use_list) {
        static_assert(ncols2 > 1, "lists are of whole blocks");
        const int   n_tiles = gridDim.x*ne03;
        const int   tile    = sequence*gridDim.x + blockIdx.x;
        const int   n       = KV_max[fattn_share_counts(n_tiles) + tile];
        const int * list    = KV_max + fattn_share_list(n_tiles, ne11/nbatch_fa, tile);
        for (int place = blockIdx.y; place < n; place += gridDim.y) {
            constexpr bool oob_check = false;
            flash_attn_tile_iter<warp_size, nwarps, ncols1, ncols2, DKQ, DV, nbatch_fa, nbatch_K, use_logit_softcap, oob_check>
                (Q_tmp, K_h2, V_h2, maskh, ne01, logit_softcap, slope, KQ, KV_tmp,
                stride_K2, stride_V2, stride_mask, KQ_max, KQ_sum, VKQ, list[place]*nbatch_fa, k_VKQ_max, col_Q_0);
        }
    } else if (ncols2 == 1) {
""",
    ),
    Change(
        _TILE,
        """template <int DKQ, int DV, int ncols2, bool use_logit_softcap>
static void launch_fattn_tile_switch_ncols1(ggml_backend_cuda_context & ctx, ggml_tensor * dst) {
    const ggml_tensor * Q = dst->src[0];
""",
        """#if !defined(GGML_USE_HIP) && !defined(GGML_USE_MUSA)
template <int DKQ, int DV, int cols_per_block, int ncols2>
static void launch_fattn_tile_visible(ggml_backend_cuda_context & ctx, ggml_tensor * dst, const int cc) {
    const int warp_size = 32;
    const int nwarps    = ggml_cuda_fattn_tile_get_nthreads (DKQ, DV, cols_per_block, cc) / warp_size;
    const int nbatch_fa = ggml_cuda_fattn_tile_get_nbatch_fa(DKQ, DV, cols_per_block, cc);
    fattn_kernel_t fattn_kernel = flash_attn_tile<DKQ, DV, cols_per_block/ncols2, ncols2, false, true>;
    launch_fattn<DV, cols_per_block/ncols2, ncols2>
        (ctx, dst, fattn_kernel, nwarps, 0, nbatch_fa, true, true, false, false, warp_size, true);
}
#endif // !defined(GGML_USE_HIP) && !defined(GGML_USE_MUSA)

template <int DKQ, int DV, int ncols2, bool use_logit_softcap>
static void launch_fattn_tile_switch_ncols1(ggml_backend_cuda_context & ctx, ggml_tensor * dst) {
    const ggml_tensor * Q = dst->src[0];
""",
    ),
    Change(
        _TILE,
        """    constexpr size_t nbytes_shared = 0;

#ifdef GGML_USE_HIP
    if constexpr (DKQ <= 128) {
""",
        """    constexpr size_t nbytes_shared = 0;

#if !defined(GGML_USE_HIP) && !defined(GGML_USE_MUSA)
    // With lists of visible blocks a tile is no wider than what a sequence has in the step.
    if constexpr (ggml_cuda_fattn_may_use_visible(DKQ, DV, ncols2) && !use_logit_softcap) {
        if (ggml_cuda_fattn_shall_use_visible(cc, dst)) {
            const int n_max  = Q->ne[1] > 16/ncols2 ? 32/ncols2 : 16/ncols2;
            const int ncols1 = ggml_cuda_fattn_visible_ncols1(dst, n_max);
            if (ncols1 <= 8/ncols2) {
                launch_fattn_tile_visible<DKQ, DV, 8, ncols2>(ctx, dst, cc);
            } else if (ncols1 <= 16/ncols2) {
                launch_fattn_tile_visible<DKQ, DV, 16, ncols2>(ctx, dst, cc);
            } else {
                launch_fattn_tile_visible<DKQ, DV, 32, ncols2>(ctx, dst, cc);
            }
            return;
        }
    }
#endif // !defined(GGML_USE_HIP) && !defined(GGML_USE_MUSA)

#ifdef GGML_USE_HIP
    if constexpr (DKQ <= 128) {
""",
    ),
)

ROW_BLOCKS = _FILES + _HINT + _LAUNCH + _TENSOR_CORES + _TILES
