// The tensor core kernel over lists of visible K blocks (fattn-visible.cuh): which part of which tile a CUDA block computes comes
// from the lists; how a part is computed is the same function as in flash_attn_ext_f16.

#pragma once

template<int DKQ, int DV, int ncols1, int ncols2>
__launch_bounds__(ggml_cuda_fattn_mma_get_nthreads(DKQ, DV, ncols1*ncols2), ggml_cuda_fattn_mma_get_occupancy(DKQ, DV, ncols1*ncols2))
static __global__ void flash_attn_ext_f16_visible(
        const char * Q_ptr,
        const char * K_ptr,
        const char * V_ptr,
        const char * mask_ptr,
        const char * sinks_ptr,
        const int  * visible_ptr,
        float      * dst_ptr,
        float2     * dst_meta_ptr,
        const float scale,
        const float max_bias,
        const float m0,
        const float m1,
        const uint32_t n_head_log2,
        const float logit_softcap,
        const int32_t ne00, const uint3   ne01, const int32_t ne02, const int32_t ne03,
                            const int32_t nb01, const int32_t nb02, const int32_t nb03,
        const int32_t ne10, const int32_t ne11, const int32_t ne12, const int32_t ne13,
                            const int32_t nb11, const int32_t nb12, const int64_t nb13,
                            const int32_t nb21, const int32_t nb22, const int64_t nb23,
                            const int32_t ne31, const int32_t ne32, const int32_t ne33,
                            const int32_t nb31, const int32_t nb32, const int64_t nb33) {
    ggml_cuda_pdl_sync();
#if defined(FLASH_ATTN_AVAILABLE) && defined(TURING_MMA_AVAILABLE)
    const char * GGML_CUDA_RESTRICT Q        = Q_ptr;
    const char * GGML_CUDA_RESTRICT K        = K_ptr;
    const char * GGML_CUDA_RESTRICT V        = V_ptr;
    const char * GGML_CUDA_RESTRICT mask     = mask_ptr;
    const char * GGML_CUDA_RESTRICT sinks    = sinks_ptr;
    const int  * GGML_CUDA_RESTRICT visible  = visible_ptr;
    float      * GGML_CUDA_RESTRICT dst      = dst_ptr;
    float2     * GGML_CUDA_RESTRICT dst_meta = dst_meta_ptr;

#if __CUDA_ARCH__ == GGML_CUDA_CC_TURING
    if (ncols1*ncols2 > 32) {
        NO_DEVICE_CODE;
        return;
    }
#endif // __CUDA_ARCH__ == GGML_CUDA_CC_TURING

    constexpr int  warp_size         = ggml_cuda_get_physical_warp_size();
    constexpr int  ncols             = ncols1 * ncols2;
    constexpr int  nbatch_fa         = ggml_cuda_fattn_mma_get_nbatch_fa(DKQ, DV, ncols);
    constexpr int  nthreads          = ggml_cuda_fattn_mma_get_nthreads(DKQ, DV, ncols);
    constexpr int  nwarps            = nthreads / warp_size;
    constexpr bool use_logit_softcap = false;
    constexpr bool V_is_K_view       = false;
    constexpr bool use_sparse        = false;
    constexpr bool use_list          = true;

    const int gqa_ratio = ne02 / ne12; // With grouped query attention there are > 1 Q matrices per K, V matrix.

    const int stride_Q1   = nb01 / sizeof(float2);
    const int stride_Q2   = nb02 / sizeof(float2);
    const int stride_K    = nb11 / sizeof(half2);
    const int stride_V    = nb21 / sizeof(half2);
    const int stride_mask = nb31 / sizeof(half);

    const int n_blocks   = ne11 / nbatch_fa;
    const int iter_j     = (ne01.z    + (ncols1 - 1)) / ncols1;
    const int iter_z_gqa = (gqa_ratio + (ncols2 - 1)) / ncols2;
    const int n_tiles    = iter_j*ne03;

    const fattn_share_run run = fattn_share_run_of(blockIdx.x, gridDim.x, iter_z_gqa*ne12*visible[n_tiles]);

    for (int unit = run.first; unit < run.stop;) {
        const fattn_share_part part = fattn_share_part_of(visible, n_tiles, unit, run.stop);

        const int sequence = part.tile.tile / iter_j;
        const int jt       = part.tile.tile % iter_j;     // token position start index
        const int z_KV     = part.tile.head / iter_z_gqa; // K/V head index
        const int zt_gqa   = part.tile.head % iter_z_gqa; // Q head start index per K/V head
        const int zt_Q     = z_KV*gqa_ratio + zt_gqa*ncols2; // Global Q head start index.

        const float2 * Q_f2    = (const float2 *) (Q + nb03*sequence + nb02*zt_Q);
        const half2  * K_h2    = (const half2  *) (K + nb13*sequence + nb12*z_KV);
        const half2  * V_h2    = (const half2  *) (V + nb23*sequence + nb22*z_KV);
        const half   * mask_h  = (const half   *) (mask + nb33*(sequence % ne33));
        const float  * sinks_f = sinks ? (const float *) sinks + zt_Q : nullptr;
        float2       * dstk    = ((float2 *) dst) + (sequence*ne01.z*ne02 + zt_Q) * (DV/2);
        const int    * list    = visible + fattn_share_list(n_tiles, n_blocks, part.tile.tile);

        constexpr float slope = 1.0f;

        if (!part.ends()) {
            constexpr bool needs_fixup = false;
            constexpr bool is_fixup    = true; // To the block's own place, another one writes the result.
            flash_attn_ext_f16_process_tile<DKQ, DV, ncols1, ncols2, nwarps, use_logit_softcap, V_is_K_view, use_sparse, needs_fixup, is_fixup, use_list>
                (Q_f2, K_h2, V_h2, mask_h, list, sinks_f, dstk, dst_meta, scale, slope, logit_softcap,
                 ne01, ne02, gqa_ratio, ne11, stride_Q1, stride_Q2, stride_K, stride_V, stride_mask, jt, zt_gqa, part.first, part.stop);
        } else if (part.begins()) {
            constexpr bool needs_fixup = false; // The whole tile.
            constexpr bool is_fixup    = false;
            flash_attn_ext_f16_process_tile<DKQ, DV, ncols1, ncols2, nwarps, use_logit_softcap, V_is_K_view, use_sparse, needs_fixup, is_fixup, use_list>
                (Q_f2, K_h2, V_h2, mask_h, list, sinks_f, dstk, dst_meta, scale, slope, logit_softcap,
                 ne01, ne02, gqa_ratio, ne11, stride_Q1, stride_Q2, stride_K, stride_V, stride_mask, jt, zt_gqa, part.first, part.stop);
        } else {
            constexpr bool needs_fixup = true; // The beginning is missing.
            constexpr bool is_fixup    = false;
            flash_attn_ext_f16_process_tile<DKQ, DV, ncols1, ncols2, nwarps, use_logit_softcap, V_is_K_view, use_sparse, needs_fixup, is_fixup, use_list>
                (Q_f2, K_h2, V_h2, mask_h, list, sinks_f, dstk, dst_meta, scale, slope, logit_softcap,
                 ne01, ne02, gqa_ratio, ne11, stride_Q1, stride_Q2, stride_K, stride_V, stride_mask, jt, zt_gqa, part.first, part.stop);
        }

        unit = part.tile.first + part.stop;
        __syncthreads(); // The next part writes to the shared memory that this one read.
    }
    GGML_UNUSED_VARS(max_bias, m0, m1, n_head_log2, ne00, ne10, ne13, ne31, ne32, nb32);
#else
    GGML_UNUSED_VARS(Q_ptr, K_ptr, V_ptr, mask_ptr, sinks_ptr, visible_ptr, dst_ptr, dst_meta_ptr, scale,
        max_bias, m0, m1, n_head_log2, logit_softcap,
        ne00, ne01, ne02, ne03,
              nb01, nb02, nb03,
        ne10, ne11, ne12, ne13,
              nb11, nb12, nb13,
              nb21, nb22, nb23,
              ne31, ne32, ne33,
              nb31, nb32, nb33);
    NO_DEVICE_CODE;
#endif // defined(FLASH_ATTN_AVAILABLE) && defined(TURING_MMA_AVAILABLE)
}
