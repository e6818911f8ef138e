"""Products of Q4_1 and Q6_K weights with several tokens on a processor: a row of weights is unpacked once for up to four of them.

llama.cpp has such kernels for many types of weights; of these it multiplies each row with each token anew, most of whose work is
to read and unpack the row. Here tiles of four rows and up to four tokens keep their sums in registers. Each sum is made of the
same steps in the same order, so results are the same to the bit. What comes next of the weights is asked for ahead, which is
what a single token waits for. Processors without AVX2, FMA and F16C compute as before, and Q6_K (`six_bit_tiles`) those without
AVX-512 VNNI.
"""

from __future__ import annotations

from native.six_bit_tiles import SIX_BIT_TILE
from native.source_change import Change

_KERNELS = "ggml/src/ggml-cpu/arch/x86/quants.c"
_HEADER = "ggml/src/ggml-cpu/quants.h"
_PRODUCT = "ggml/src/ggml-cpu/ggml-cpu.c"

_TILE = """#ifdef GGML_Q4_1_TILES
// Four rows of weights times `cols` columns. Each product is summed as ggml_vec_dot_q4_1_q8_1 sums it; what is unpacked of a row
// serves all columns, and what is read of a column all rows.
static inline __attribute__((always_inline)) void q4_1_q8_1_tile(
        const int cols, const int nb, const char * vx, const size_t bx, const void * const * vy, float * const * s) {
    __m256 acc[4][4];
    __m128 sums[4];

    for (int r = 0; r < 4; ++r) {
        sums[r] = _mm_setzero_ps();
        for (int c = 0; c < cols; ++c) {
            acc[r][c] = _mm256_setzero_ps();
        }
    }

    for (int ib = 0; ib < nb; ++ib) {
        // scale and sum of a column's block lie side by side
        uint32_t ds[4] = { 0, 0, 0, 0 };
        for (int c = 0; c < cols; ++c) {
            memcpy(&ds[c], (const block_q8_1 *) vy[c] + ib, sizeof(ds[c]));
        }
        const __m256 dsf  = _mm256_cvtph_ps(_mm_set_epi32((int) ds[3], (int) ds[2], (int) ds[1], (int) ds[0]));
        const __m128 ds01 = _mm256_castps256_ps128(dsf);
        const __m128 ds23 = _mm256_extractf128_ps(dsf, 1);
        const __m128 d1   = _mm_shuffle_ps(ds01, ds23, _MM_SHUFFLE(2, 0, 2, 0));
        const __m128 s1   = _mm_shuffle_ps(ds01, ds23, _MM_SHUFFLE(3, 1, 3, 1));

        const __m256 d1v[4] = {
            _mm256_broadcastss_ps(d1),
            _mm256_broadcastss_ps(_mm_shuffle_ps(d1, d1, _MM_SHUFFLE(1, 1, 1, 1))),
            _mm256_broadcastss_ps(_mm_shuffle_ps(d1, d1, _MM_SHUFFLE(2, 2, 2, 2))),
            _mm256_broadcastss_ps(_mm_shuffle_ps(d1, d1, _MM_SHUFFLE(3, 3, 3, 3))),
        };

        for (int r = 0; r < 4; ++r) {
            const block_q4_1 * x = (const block_q4_1 *) (vx + r*bx) + ib;

            // the next tile's rows mostly follow
            _mm_prefetch((const char *) x + 4*bx, _MM_HINT_T0);

            const __m256  d0v = _mm256_set1_ps(GGML_CPU_FP16_TO_FP32(x->d));
            const __m128  m0v = _mm_set1_ps(GGML_CPU_FP16_TO_FP32(x->m));
            const __m256i qx  = bytes_from_nibbles_32(x->qs);

            sums[r] = _mm_fmadd_ps(m0v, s1, sums[r]);

            for (int c = 0; c < cols; ++c) {
                const __m256i qy = _mm256_loadu_si256((const __m256i *) ((const block_q8_1 *) vy[c])[ib].qs);
                acc[r][c] = _mm256_fmadd_ps(_mm256_mul_ps(d0v, d1v[c]), mul_sum_us8_pairs_float(qx, qy), acc[r][c]);
            }
        }
    }

    for (int r = 0; r < 4; ++r) {
        float sum[4];
        _mm_storeu_ps(sum, sums[r]);
        for (int c = 0; c < cols; ++c) {
            s[c][r] = hsum_float_8(acc[r][c]) + sum[c];
        }
    }
}

void ggml_mul_tile_q4_1_q8_1(int n, float * const * s, const void * vx, size_t bx, int rows, const void * const * vy, int cols) {
    const int nb = n / QK8_1;

    int r = 0;
    for (; r + 4 <= rows; r += 4) {
        const char * x = (const char *) vx + r*bx;
        float * const at[4] = { s[0] + r, s[1] + r, s[2] + r, s[3] + r };
        switch (cols) {
            case 4:  q4_1_q8_1_tile(4, nb, x, bx, vy, at); break;
            case 3:  q4_1_q8_1_tile(3, nb, x, bx, vy, at); break;
            case 2:  q4_1_q8_1_tile(2, nb, x, bx, vy, at); break;
            default: q4_1_q8_1_tile(1, nb, x, bx, vy, at); break;
        }
    }
    for (; r < rows; ++r) {
        for (int c = 0; c < cols; ++c) {
            ggml_vec_dot_q4_1_q8_1(n, s[c] + r, 0, (const char *) vx + r*bx, 0, vy[c], 0, 1);
        }
    }
}
#endif

"""

_ONE_CHUNK = """static void ggml_compute_forward_mul_mat_one_chunk(
    const struct ggml_compute_params * params,
    struct ggml_tensor * dst,
    const enum ggml_type type,
"""

_ONE_CHUNK_BY_TILES = """#ifdef GGML_Q4_1_TILES
static ggml_mul_tile_t ggml_mul_tile_of(const enum ggml_type type) {
    switch (type) {
        case GGML_TYPE_Q4_1: return ggml_mul_tile_q4_1_q8_1;
#ifdef GGML_Q6_K_TILES
        case GGML_TYPE_Q6_K: return ggml_mul_tile_q6_K_q8_K;
#endif
        default:             return NULL;
    }
}

// The part of a product in which all columns meet the same rows, `wdata` the quantized columns one behind the other.
static void ggml_compute_forward_mul_mat_tiles(
    struct ggml_tensor * dst,
    const ggml_mul_tile_t mul_tile,
    const char * wdata,
    const size_t row_size,
    const int64_t ir0_start,
    const int64_t ir0_end,
    const int64_t ir1_start,
    const int64_t ir1_end) {

    const struct ggml_tensor * src0 = dst->src[0];

    GGML_TENSOR_LOCALS(int64_t, ne, dst, ne)
    GGML_TENSOR_LOCALS(size_t,  nb, dst, nb)

    float tile[4][16];
    float * const part[4] = { tile[0], tile[1], tile[2], tile[3] };

    for (int64_t iir1 = ir1_start; iir1 < ir1_end; iir1 += 16) {
        const int64_t end1 = MIN(iir1 + 16, ir1_end);
        for (int64_t iir0 = ir0_start; iir0 < ir0_end; iir0 += 16) {
            const int rows = (int) MIN(16, ir0_end - iir0);
            for (int64_t ir1 = iir1; ir1 < end1; ir1 += 4) {
                const int cols = (int) MIN(4, end1 - ir1);

                const void * col[4] = { NULL, NULL, NULL, NULL };
                for (int c = 0; c < cols; ++c) {
                    col[c] = wdata + (ir1 + c) * row_size;
                }
                mul_tile(
                    (int) src0->ne[0], part, (const char *) src0->data + iir0 * src0->nb[1], src0->nb[1], rows, col, cols);
                for (int c = 0; c < cols; ++c) {
                    const int64_t i3 = (ir1 + c) / (ne2 * ne1);
                    const int64_t i2 = (ir1 + c - i3 * ne2 * ne1) / ne1;
                    const int64_t i1 = (ir1 + c - i3 * ne2 * ne1 - i2 * ne1);
                    memcpy((float *) ((char *) dst->data + i1 * nb1 + i2 * nb2 + i3 * nb3) + iir0, part[c], rows * sizeof(float));
                }
            }
        }
    }
}
#endif

"""

QUANT_TILES = (
    Change(
        _KERNELS,
        """        const float d1 = GGML_CPU_FP16_TO_FP32(y[ib].d);

        summs += GGML_CPU_FP16_TO_FP32(x[ib].m) * GGML_CPU_FP16_TO_FP32(y[ib].s);

        const __m256 d0v = _mm256_set1_ps( d0 );
        const __m256 d1v = _mm256_set1_ps( d1 );

        // Compute combined scales
        const __m256 d0d1 = _mm256_mul_ps( d0v, d1v );

        // Load 16 bytes""",
        """        const float d1 = GGML_CPU_FP16_TO_FP32(y[ib].d);

        // rows are mostly read one behind the other
        _mm_prefetch((const char *) &x[ib] + 2048, _MM_HINT_T0);

        summs += GGML_CPU_FP16_TO_FP32(x[ib].m) * GGML_CPU_FP16_TO_FP32(y[ib].s);

        const __m256 d0v = _mm256_set1_ps( d0 );
        const __m256 d1v = _mm256_set1_ps( d1 );

        // Compute combined scales
        const __m256 d0d1 = _mm256_mul_ps( d0v, d1v );

        // Load 16 bytes""",
    ),
    Change(
        _KERNELS,
        "void ggml_vec_dot_mxfp4_q8_0(int n,",
        _TILE + "void ggml_vec_dot_mxfp4_q8_0(int n,",
    ),
    Change(_KERNELS, "void ggml_vec_dot_iq2_xxs_q8_K(int n,", SIX_BIT_TILE + "void ggml_vec_dot_iq2_xxs_q8_K(int n,"),
    Change(
        _HEADER,
        "void ggml_vec_dot_q4_1_q8_1(int n,",
        """#if defined(__AVX2__) && defined(__FMA__) && defined(__F16C__)
#define GGML_Q4_1_TILES
// `rows` rows of weights, `bx` bytes apart, times 1 to 4 columns; s[c] takes the products of column c. All four of `s` are given.
typedef void (*ggml_mul_tile_t)(
    int n, float * const * s, const void * vx, size_t bx, int rows, const void * const * vy, int cols);
void ggml_mul_tile_q4_1_q8_1(int n, float * const * s, const void * vx, size_t bx, int rows, const void * const * vy, int cols);
#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512DQ__) && defined(__AVX512VNNI__)
#define GGML_Q6_K_TILES
void ggml_mul_tile_q6_K_q8_K(int n, float * const * s, const void * vx, size_t bx, int rows, const void * const * vy, int cols);
#endif
#endif
void ggml_vec_dot_q4_1_q8_1(int n,""",
    ),
    Change(_PRODUCT, _ONE_CHUNK, _ONE_CHUNK_BY_TILES + _ONE_CHUNK),
    Change(
        _PRODUCT,
        """    // block-tiling attempt
    const int64_t blck_0 = 16;
    const int64_t blck_1 = 16;

    const size_t src1_col_stride =""",
        """#ifdef GGML_Q4_1_TILES
    const ggml_mul_tile_t mul_tile = ggml_mul_tile_of(type);
    if (mul_tile && ne02 == 1 && ne03 == 1 && src1->type != vec_dot_type && ir1_end - ir1_start > 1) {
        ggml_compute_forward_mul_mat_tiles(dst, mul_tile, wdata, row_size, ir0_start, ir0_end, ir1_start, ir1_end);
        return;
    }
#endif

    // block-tiling attempt
    const int64_t blck_0 = 16;
    const int64_t blck_1 = 16;

    const size_t src1_col_stride =""",
    ),
)
