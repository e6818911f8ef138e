// How a lane multiplies its weights of a row with the activations of a token.

#pragma once

#include "mmid-grouped-plan.cuh"
#include "vecdotq.cuh"

static __device__ __forceinline__ float2 experts_halves(const int & word) {
    return __half22float2((const half2 &) word);
}

// load(): the lane's weights of a section in shared memory. dot(): adds their product with a column. The operations are written
// out, so that a column has the same bits however many there are.
template <ggml_type type> struct experts_weights {
    static constexpr bool in_registers = false;
};

template <> struct experts_weights<GGML_TYPE_Q4_0> {
    static constexpr bool in_registers = true;
    int   q[8];
    float d[2];

    __device__ __forceinline__ void load(const char * section, const int lane) {
        const int * w = (const int *) section + 9*lane;
        int r[9];
#pragma unroll
        for (int i = 0; i < 9; ++i) {
            r[i] = w[i];
        }
        d[0] = experts_halves(r[0]).x;
        d[1] = experts_halves(r[4]).y;
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            q[i]     = __byte_perm(r[i], r[i + 1], 0x5432);
            q[4 + i] = r[5 + i];
        }
    }

    __device__ __forceinline__ float dot(const int (&y)[EXPERTS_Y], float sum) const {
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            int sumi = 0;
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                sumi = ggml_cuda_dp4a((q[4*h + i] >> 0) & 0x0F0F0F0F, y[9*h + 1 + i], sumi);
                sumi = ggml_cuda_dp4a((q[4*h + i] >> 4) & 0x0F0F0F0F, y[9*h + 5 + i], sumi);
            }
            const float2 ds = experts_halves(y[9*h]);
            sum = __fmaf_rn(d[h], __fmaf_rn((float) sumi, ds.x, -8.0f*ds.y), sum);
        }
        return sum;
    }
};

template <> struct experts_weights<GGML_TYPE_Q8_0> {
    static constexpr bool in_registers = true;
    int   q[16];
    float d[2];

    __device__ __forceinline__ void load(const char * section, const int lane) {
        const int * w = (const int *) section + 17*lane;
        int r[17];
#pragma unroll
        for (int i = 0; i < 17; ++i) {
            r[i] = w[i];
        }
        d[0] = experts_halves(r[0]).x;
        d[1] = experts_halves(r[8]).y;
#pragma unroll
        for (int i = 0; i < 8; ++i) {
            q[i]     = __byte_perm(r[i], r[i + 1], 0x5432);
            q[8 + i] = r[9 + i];
        }
    }

    __device__ __forceinline__ float dot(const int (&y)[EXPERTS_Y], float sum) const {
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            int sumi = 0;
#pragma unroll
            for (int i = 0; i < 8; ++i) {
                sumi = ggml_cuda_dp4a(q[8*h + i], y[9*h + 1 + i], sumi);
            }
            sum = __fmaf_rn(d[h], __fmul_rn((float) sumi, experts_halves(y[9*h]).x), sum);
        }
        return sum;
    }
};

// A quarter of a block: the lower and the upper halves of 32 bytes.
template <> struct experts_weights<GGML_TYPE_Q4_K> {
    static constexpr bool in_registers = true;
    int   q[8];
    float d[2];
    float m[2];

    __device__ __forceinline__ void load(const char * section, const int lane) {
        const block_q4_K * block = (const block_q4_K *) section + lane/4;
        const int j = lane % 4;
        const int4 * from = (const int4 *) (block->qs + 32*j);
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const int4 four = from[i];
            q[4*i + 0] = four.x;
            q[4*i + 1] = four.y;
            q[4*i + 2] = four.z;
            q[4*i + 3] = four.w;
        }
        const uint16_t * scales = (const uint16_t *) block->scales + j % 2;
        const uint32_t s0 = scales[0];
        const uint32_t s2 = scales[2];
        const uint32_t s4 = scales[4];
        const uint32_t scale = j < 2 ? s0 & 0x3F3F : ((s4 >> 0) & 0x0F0F) | ((s0 & 0xC0C0) >> 2);
        const uint32_t min   = j < 2 ? s2 & 0x3F3F : ((s4 >> 4) & 0x0F0F) | ((s2 & 0xC0C0) >> 2);
        const float2 dm = __half22float2(block->dm);
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            d[h] =  dm.x*(float) ((scale >> 8*h) & 0xFF);
            m[h] = -dm.y*(float) ((min   >> 8*h) & 0xFF);
        }
    }

    __device__ __forceinline__ float dot(const int (&y)[EXPERTS_Y], float sum) const {
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            int sumi = 0;
#pragma unroll
            for (int i = 0; i < 8; ++i) {
                sumi = ggml_cuda_dp4a((q[i] >> 4*h) & 0x0F0F0F0F, y[9*h + 1 + i], sumi);
            }
            const float2 ds = experts_halves(y[9*h]);
            sum = __fmaf_rn(d[h], __fmul_rn((float) sumi, ds.x), __fmaf_rn(m[h], ds.y, sum));
        }
        return sum;
    }
};

// All others take the products of MMVQ, with the activations from memory.
template <ggml_type type> struct experts_vec_dot;

#define EXPERTS_VEC_DOT(type, name, vdr_mmvq) \
    template <> struct experts_vec_dot<type> { \
        static constexpr int vdr = vdr_mmvq; \
        static __device__ __forceinline__ float dot(const void * x, const block_q8_1 * y, const int kbx, const int kqs) { \
            return vec_dot_##name##_q8_1(x, y, kbx, kqs); \
        } \
    }

EXPERTS_VEC_DOT(GGML_TYPE_Q4_1,    q4_1,    VDR_Q4_1_Q8_1_MMVQ);
EXPERTS_VEC_DOT(GGML_TYPE_Q5_0,    q5_0,    VDR_Q5_0_Q8_1_MMVQ);
EXPERTS_VEC_DOT(GGML_TYPE_Q5_1,    q5_1,    VDR_Q5_1_Q8_1_MMVQ);
EXPERTS_VEC_DOT(GGML_TYPE_MXFP4,   mxfp4,   VDR_MXFP4_Q8_1_MMVQ);
EXPERTS_VEC_DOT(GGML_TYPE_Q2_K,    q2_K,    VDR_Q2_K_Q8_1_MMVQ);
EXPERTS_VEC_DOT(GGML_TYPE_Q3_K,    q3_K,    VDR_Q3_K_Q8_1_MMVQ);
EXPERTS_VEC_DOT(GGML_TYPE_Q5_K,    q5_K,    VDR_Q5_K_Q8_1_MMVQ);
EXPERTS_VEC_DOT(GGML_TYPE_Q6_K,    q6_K,    VDR_Q6_K_Q8_1_MMVQ);
EXPERTS_VEC_DOT(GGML_TYPE_IQ2_XXS, iq2_xxs, VDR_IQ2_XXS_Q8_1_MMVQ);
EXPERTS_VEC_DOT(GGML_TYPE_IQ2_XS,  iq2_xs,  VDR_IQ2_XS_Q8_1_MMVQ);
EXPERTS_VEC_DOT(GGML_TYPE_IQ2_S,   iq2_s,   VDR_IQ2_S_Q8_1_MMVQ);
EXPERTS_VEC_DOT(GGML_TYPE_IQ3_XXS, iq3_xxs, VDR_IQ3_XXS_Q8_1_MMVQ);
EXPERTS_VEC_DOT(GGML_TYPE_IQ3_S,   iq3_s,   VDR_IQ3_S_Q8_1_MMVQ);
EXPERTS_VEC_DOT(GGML_TYPE_IQ1_S,   iq1_s,   VDR_IQ1_S_Q8_1_MMVQ);
EXPERTS_VEC_DOT(GGML_TYPE_IQ1_M,   iq1_m,   VDR_IQ1_M_Q8_1_MMVQ);
EXPERTS_VEC_DOT(GGML_TYPE_IQ4_NL,  iq4_nl,  VDR_IQ4_NL_Q8_1_MMVQ);
EXPERTS_VEC_DOT(GGML_TYPE_IQ4_XS,  iq4_xs,  VDR_IQ4_XS_Q8_1_MMVQ);

template <ggml_type type> static constexpr __host__ __device__ bool experts_in_registers() {
    return experts_weights<type>::in_registers;
}

// Steps of a stage: what keeps enough bytes under way and two stages of all warps within 48 KiB.
template <ggml_type type> static constexpr __host__ __device__ int experts_steps() {
    return EXPERTS_SECTION/ggml_cuda_type_traits<type>::qk*ggml_cuda_type_traits<type>::bs <= 1152 ? 4 : 2;
}

// Tokens of an item that does not have all of its expert's. What takes several sections has one sum for each token on the way and
// reads the weights anew for more.
static constexpr int experts_item_columns(const experts_shape & s) {
    return s.n_sections > 1 ? EXPERTS_COLUMNS : 2*EXPERTS_COLUMNS;
}

// What follows from the matrix's size.
template <ggml_type type, int steps, bool has_gate>
static void experts_lay_out(experts_shape & s) {
    constexpr int section_bytes = EXPERTS_SECTION/ggml_cuda_type_traits<type>::qk*ggml_cuda_type_traits<type>::bs;

    s.n_sections = (s.ncols + EXPERTS_SECTION - 1)/EXPERTS_SECTION;
    s.lanes      = WARP_SIZE;
    if (experts_in_registers<type>()) {
        while (s.lanes > steps && s.lanes/2*EXPERTS_LANE >= s.ncols) {
            s.lanes /= 2;
        }
    }
    s.step_rows = WARP_SIZE/s.lanes;
    const int group_rows = (has_gate ? steps/2 : steps)*s.step_rows;
    s.n_groups = (s.nrows + group_rows - 1)/group_rows;
    // A step's rows, and what stands before and behind them in their first and last 16 bytes.
    s.slot_bytes = ((s.n_sections == 1 ? s.step_rows*s.row_bytes : section_bytes) + 15)/16*16;
    if (s.row_bytes % 16 != 0 || s.expert_bytes % 16 != 0 || section_bytes % 16 != 0) {
        s.slot_bytes += 16;
    }
    s.y_row_bytes = experts_in_registers<type>() ? s.n_sections*s.lanes*4*EXPERTS_Y : s.ncols/QK8_1*(int) sizeof(block_q8_1);
}
