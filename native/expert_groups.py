# ruff: noqa: E501 (the lines are those of llama.cpp)
"""Experts on a processor: the tokens that chose the same expert are multiplied with its weights together, not one by one.

Of packed weights llama.cpp multiplies several tokens at once in its plain products only; in those of experts each token unpacks the
expert's weights anew. A prompt's chunk of 512 tokens has 16 for each of 256 experts, of which each token takes 8. Here groups of 4 to
16 tokens of an expert are laid side by side as the kernels of plain products want them; what is left over of them goes one by one.
Results of Q4_0 are the same to the bit; of Q4_K low bits differ between the two kernels, as they do between sizes of batches.

Four layers in the shape of Qwen 3.6 35B-A3B with 64 experts, Q4_0, one thread of a Zen 4, 512 tokens: 1.9 s instead of 2.8.
"""

from __future__ import annotations

from native.source_change import Change

_PACKED = "ggml/src/ggml-cpu/repack.cpp"

_SIDE_BY_SIDE = """#if defined(__AVX2__)
#define GGML_EXPERT_GROUPS 16

// Four quantized rows as ggml_quantize_mat_t lays them, eight values of each in turn.
template <ggml_type PARAM_TYPE>
static void rows_side_by_side(void * to, const char * const * rows, const int64_t n) {
    if constexpr (PARAM_TYPE == GGML_TYPE_Q8_0) {
        block_q8_0x4 * y = (block_q8_0x4 *) to;
        for (int64_t ib = 0; ib < n/QK8_0; ++ib) {
            for (int r = 0; r < 4; ++r) {
                const block_q8_0 * x = (const block_q8_0 *) rows[r] + ib;
                y[ib].d[r] = x->d;
                for (int c = 0; c < QK8_0/8; ++c) {
                    memcpy(y[ib].qs + 32*c + 8*r, x->qs + 8*c, 8);
                }
            }
        }
    } else {
        block_q8_Kx4 * y = (block_q8_Kx4 *) to;
        for (int64_t ib = 0; ib < n/QK_K; ++ib) {
            for (int r = 0; r < 4; ++r) {
                const block_q8_K * x = (const block_q8_K *) rows[r] + ib;
                y[ib].d[r] = x->d;
                for (int c = 0; c < QK_K/8; ++c) {
                    memcpy(y[ib].qs + 32*c + 8*r, x->qs + 8*c, 8);
                }
                for (int c = 0; c < QK_K/64; ++c) {
                    memcpy(y[ib].bsums + 16*c + 4*r, x->bsums + 4*c, 4*sizeof(x->bsums[0]));
                }
            }
        }
    }
}
#endif

"""

_TRAITS = """class tensor_traits_base : public ggml::cpu::tensor_traits {
"""

_ROOM = """                    size += sizeof_mmid_row_mapping*ne02*(ne12 + 1);

"""

_ROOM_AND_GROUPS = """                    size += sizeof_mmid_row_mapping*ne02*(ne12 + 1);

#ifdef GGML_EXPERT_GROUPS
                    size = GGML_PAD(size, 64) + n_threads*group_size(op, n_threads);
#endif

"""

_WORK = """    bool work_size(int /* n_threads */, const struct ggml_tensor * op, size_t & size) override {
"""

_WORK_AND_GROUP = """#ifdef GGML_EXPERT_GROUPS
    // A thread's rows of a group, and what comes out for its columns.
    static size_t group_size(const struct ggml_tensor * op, const int n_threads) {
        const size_t columns = op->src[0]->ne[1]/n_threads + 2*NB_COLS;
        return GGML_PAD(GGML_EXPERT_GROUPS*(ggml_row_size(PARAM_TYPE, op->src[0]->ne[0]) + columns*sizeof(float)), 64);
    }
#endif

    bool work_size(int n_threads, const struct ggml_tensor * op, size_t & size) override {
        GGML_UNUSED(n_threads);
"""

_ONE_BY_ONE = """            for (int ir1 = 0; ir1 < nr1; ir1++) {
                struct mmid_row_mapping row_mapping = MMID_MATRIX_ROW(cur_a, ir1);
"""

_IN_GROUPS = """            int ir1 = 0;

#ifdef GGML_EXPERT_GROUPS
            if constexpr (INTER_SIZE == 8 && NB_COLS == 8) {
                char * const group = (char *) params->wdata +
                    GGML_PAD(GGML_PAD(nbw3, sizeof(int64_t)) + n_as*(ne12 + 1)*sizeof(mmid_row_mapping), 64) + ith*group_size(op, nth);
                float * const out = (float *) (group + GGML_EXPERT_GROUPS*nbw1);
                GGML_ASSERT(group + group_size(op, nth) <= (char *) params->wdata + params->wsize);

                const int64_t ncols = src0_cur_end - src0_cur_start;

                while (nr1 - ir1 >= 4) {
                    const int count = (int) MIN(nr1 - ir1, GGML_EXPERT_GROUPS) & ~3;

                    for (int i = 0; i < count; i += 4) {
                        const char * rows[4];
                        for (int r = 0; r < 4; ++r) {
                            const struct mmid_row_mapping from = MMID_MATRIX_ROW(cur_a, ir1 + i + r);
                            rows[r] = wdata + (from.i1 % ne11)*nbw1 + from.i2*nbw2;
                        }
                        rows_side_by_side<PARAM_TYPE>(group + i*nbw1, rows, ne00);
                    }

                    gemm<BLOC_TYPE, INTER_SIZE, NB_COLS, PARAM_TYPE>(
                        ne00, out, ncols, src0_cur + src0_cur_start*nb01, group, count, ncols);

                    for (int i = 0; i < count; ++i) {
                        const struct mmid_row_mapping into = MMID_MATRIX_ROW(cur_a, ir1 + i);
                        memcpy((float *) ((char *) dst->data + into.i1*nb1 + into.i2*nb2) + src0_cur_start, out + i*ncols, ncols*sizeof(float));
                    }
                    ir1 += count;
                }
            }
#endif

            for (; ir1 < nr1; ir1++) {
                struct mmid_row_mapping row_mapping = MMID_MATRIX_ROW(cur_a, ir1);
"""

EXPERT_GROUPS = (
    Change(_PACKED, _TRAITS, _SIDE_BY_SIDE + _TRAITS),
    Change(_PACKED, _WORK, _WORK_AND_GROUP),
    Change(_PACKED, _ROOM, _ROOM_AND_GROUPS),
    Change(_PACKED, _ONE_BY_ONE, _IN_GROUPS),
)
