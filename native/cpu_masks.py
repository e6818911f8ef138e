"""Attention on a processor passes over what a row may not see without looking at each cell.

In one cache of many sequences most cells of a step belong to others. llama.cpp turns the mask of each into a number and compares
it; and computes a tile of 64 rows for all of them if one sees a cell of it, as rows that decode do beside a prompt's. Here masked
cells are passed 16 at a time, and of a tile only those rows are computed that lie between the first and the last one that sees
any of it. What is left out had no part in any sum, so results are the same to the bit.
"""

from __future__ import annotations

from native.source_change import Change

_OPS = "ggml/src/ggml-cpu/ops.cpp"

CPU_MASKS = (
    Change(
        _OPS,
        """static void ggml_compute_forward_flash_attn_ext_f16_one_chunk(
        const ggml_compute_params * params,
        ggml_tensor * dst,
        int ir0, int ir1,
        int64_t ic_start, int64_t ic_end,
        float * partials, int64_t partial_stride) {

    const bool write_partials""",
        """// minus infinity as half-precision bits, which is what a mask has of a cell that a row may not see
static constexpr ggml_fp16_t FA_MASKED = 0xFC00;
static constexpr int64_t     FA_MASKED_STEP = 16;

static inline bool fa_all_masked(const ggml_fp16_t * mp, int64_t n) {
    ggml_fp16_t other = 0;
    for (int64_t i = 0; i < n; ++i) {
        other |= mp[i] ^ FA_MASKED;
    }
    return other == 0;
}

static void ggml_compute_forward_flash_attn_ext_f16_one_chunk(
        const ggml_compute_params * params,
        ggml_tensor * dst,
        int ir0, int ir1,
        int64_t ic_start, int64_t ic_end,
        float * partials, int64_t partial_stride) {

    const bool write_partials""",
    ),
    Change(
        _OPS,
        """        for (int64_t ic = ic_start; ic < ic_end; ++ic) {
            const float mv = mp ?""",
        """        for (int64_t ic = ic_start; ic < ic_end; ++ic) {
            if (mp) {
                while (ic + FA_MASKED_STEP <= ic_end && fa_all_masked(mp + ic, FA_MASKED_STEP)) {
                    ic += FA_MASKED_STEP;
                }
                if (ic >= ic_end) {
                    break;
                }
                if (mp[ic] == FA_MASKED) {
                    continue;
                }
            }
            const float mv = mp ?""",
    ),
    Change(
        _OPS,
        """            // skip the tile entirely if all the masks are -inf
            if (mask) {
                bool can_skip = true;
                for (int tq = 0; tq < tile_rows; tq++) {
                    const ggml_fp16_t * mp_row = (const ggml_fp16_t *)((const char *) mask->data + (iq1 + tq)*mask->nb[1] \
+ (iq2%mask->ne[2])*mask->nb[2] + (iq3%mask->ne[3])*mask->nb[3]);
                    for (int tk = 0; tk < kv_tile; tk++) {
                        mask32[tq * KV_TILE_SZ + tk] = slope * GGML_CPU_FP16_TO_FP32(mp_row[ic + tk]);
                        if (mask32[tq * KV_TILE_SZ + tk] != -INFINITY) {
                            can_skip = false;
                        }
                    }
""",
        """            // of the tile's rows, those from the first to the last one that sees any of these cells
            int row0 = 0;
            int row1 = Q_TILE_SZ;
            if (mask) {
                const auto mask_row = [&](int tq) {
                    return (const ggml_fp16_t *)((const char *) mask->data + (iq1 + tq)*mask->nb[1] \
+ (iq2%mask->ne[2])*mask->nb[2] + (iq3%mask->ne[3])*mask->nb[3]);
                };
                row1 = tile_rows;
                while (row1 > 0 && fa_all_masked(mask_row(row1 - 1) + ic, kv_tile)) {
                    row1--;
                }
                while (row0 < row1 && fa_all_masked(mask_row(row0) + ic, kv_tile)) {
                    row0++;
                }
                const bool can_skip = row0 == row1;
                for (int tq = row0; tq < row1; tq++) {
                    const ggml_fp16_t * mp_row = mask_row(tq);
                    for (int tk = 0; tk < kv_tile; tk++) {
                        mask32[tq * KV_TILE_SZ + tk] = slope * GGML_CPU_FP16_TO_FP32(mp_row[ic + tk]);
                    }
""",
    ),
    Change(
        _OPS,
        """                if (can_skip) {
                    continue;
                }
            }

            // Pack K tile transposed""",
        """                if (can_skip) {
                    continue;
                }
            }
            const int rows = row1 - row0;
            float * KQ_rows = KQ + row0 * KV_TILE_SZ;

            // Pack K tile transposed""",
    ),
    Change(
        _OPS,
        """            memset(KQ, 0, Q_TILE_SZ * KV_TILE_SZ * sizeof(float));
            simd_gemm(KQ, (const float *)Q_q, K_f32, Q_TILE_SZ, DK, KV_TILE_SZ);
            ggml_vec_scale_f32(Q_TILE_SZ * KV_TILE_SZ, KQ, scale);

            if (logit_softcap != 0.0f) {
                ggml_vec_tanh_f32(Q_TILE_SZ * KV_TILE_SZ, KQ, KQ);
                ggml_vec_scale_f32(Q_TILE_SZ * KV_TILE_SZ, KQ, logit_softcap);
            }
""",
        """            memset(KQ_rows, 0, rows * KV_TILE_SZ * sizeof(float));
            simd_gemm(KQ_rows, (const float *)Q_q + row0 * DK, K_f32, rows, DK, KV_TILE_SZ);
            ggml_vec_scale_f32(rows * KV_TILE_SZ, KQ_rows, scale);

            if (logit_softcap != 0.0f) {
                ggml_vec_tanh_f32(rows * KV_TILE_SZ, KQ_rows, KQ_rows);
                ggml_vec_scale_f32(rows * KV_TILE_SZ, KQ_rows, logit_softcap);
            }
""",
    ),
    Change(
        _OPS,
        """                for (int tq = 0; tq < Q_TILE_SZ; tq++) {
                    for (int tk = kv_tile; tk < KV_TILE_SZ; tk++) {
                        KQ[tq * KV_TILE_SZ + tk] = -INFINITY;
""",
        """                for (int tq = row0; tq < row1; tq++) {
                    for (int tk = kv_tile; tk < KV_TILE_SZ; tk++) {
                        KQ[tq * KV_TILE_SZ + tk] = -INFINITY;
""",
    ),
    Change(
        _OPS,
        """                ggml_vec_add_f32(tile_rows * KV_TILE_SZ, KQ, KQ, mask32);
            }

            bool skip[Q_TILE_SZ] = {};

            for (int tq = 0; tq < Q_TILE_SZ; tq++) {
                float * kq_row""",
        """                ggml_vec_add_f32(rows * KV_TILE_SZ, KQ_rows, KQ_rows, mask32 + row0 * KV_TILE_SZ);
            }

            bool skip[Q_TILE_SZ] = {};

            for (int tq = row0; tq < row1; tq++) {
                float * kq_row""",
    ),
    Change(
        _OPS,
        """            for (int tq = 0; tq < Q_TILE_SZ; tq++) {
                if (skip[tq]) {
                    memset(KQ + tq * KV_TILE_SZ, 0, KV_TILE_SZ * sizeof(float));
                }
            }
            simd_gemm(VKQ32, KQ, V32, Q_TILE_SZ, KV_TILE_SZ, DV);
""",
        """            for (int tq = row0; tq < row1; tq++) {
                if (skip[tq]) {
                    memset(KQ + tq * KV_TILE_SZ, 0, KV_TILE_SZ * sizeof(float));
                }
            }
            simd_gemm(VKQ32 + row0 * DV, KQ_rows, V32, rows, KV_TILE_SZ, DV);
""",
    ),
)
