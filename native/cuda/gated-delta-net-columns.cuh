// gated_delta_net.cu's kernel with several columns of a state in each warp, for steps of many states.

#pragma once

#include "common.cuh"

#include <cstdlib>

constexpr int GDN_COLUMNS = 2; // of a warp
constexpr int GDN_WARPS   = 4; // of a CUDA block

// Parameters, layouts and the order of each sum are those of gated_delta_net_cuda, so that its bits come out.
template <int S_v, int columns, bool keep_rs_t>
static __global__ void __launch_bounds__(WARP_SIZE*GDN_WARPS, 8)
gated_delta_net_columns(
        const float * q, const float * k, const float * v, const float * g, const float * beta, const float * curr_state,
        float * dst, float * state, int64_t H, int64_t n_tokens, int64_t n_seqs, int64_t sq1, int64_t sq2, int64_t sq3,
        int64_t sv1, int64_t sv2, int64_t sv3, int64_t sb1, int64_t sb2, int64_t sb3,
        const uint3 neqk1_magic, const uint3 rq3_magic, float scale, int64_t state_slot_stride, int K) {
    static_assert(S_v % (columns*GDN_WARPS) == 0 && S_v % WARP_SIZE == 0, "a warp has whole columns");
    constexpr int rows_per_lane = S_v/WARP_SIZE;

    const uint32_t h_idx    = blockIdx.x;
    const uint32_t sequence = blockIdx.y;
    const int      lane     = threadIdx.x;
    const int      col      = (blockIdx.z*GDN_WARPS + threadIdx.y)*columns;

    const uint32_t iq1 = fastmodulo(h_idx, neqk1_magic);
    const uint32_t iq3 = fastdiv(sequence, rq3_magic);

    // of this warp's first column
    const int64_t state_offset = (sequence*H + h_idx)*S_v*S_v + col*S_v;
    state      += state_offset;
    curr_state += state_offset;
    dst        += (sequence*n_tokens*H + h_idx)*S_v + col;

    float s_shard[columns][rows_per_lane];

    ggml_cuda_pdl_sync();
#pragma unroll
    for (int c = 0; c < columns; ++c) {
#pragma unroll
        for (int r = 0; r < rows_per_lane; ++r) {
            s_shard[c][r] = curr_state[c*S_v + r*WARP_SIZE + lane];
        }
    }

    for (int t = 0; t < n_tokens; ++t) {
        const float * q_t = q + iq3*sq3 + t*sq2 + iq1*sq1;
        const float * k_t = k + iq3*sq3 + t*sq2 + iq1*sq1;
        const float * v_t = v + sequence*sv3 + t*sv2 + h_idx*sv1 + col;

        const int64_t gb_offset = sequence*sb3 + t*sb2 + h_idx*sb1;
        const float   beta_val  = beta[gb_offset];
        const float   g_val     = expf(g[gb_offset]);

        float k_reg[rows_per_lane];
        float q_reg[rows_per_lane];
#pragma unroll
        for (int r = 0; r < rows_per_lane; ++r) {
            k_reg[r] = k_t[r*WARP_SIZE + lane];
            q_reg[r] = q_t[r*WARP_SIZE + lane];
        }
        float v_reg[columns];
#pragma unroll
        for (int c = 0; c < columns; ++c) {
            v_reg[c] = v_t[c];
        }

        float kv_col[columns];
#pragma unroll
        for (int c = 0; c < columns; ++c) {
            float kv_shard = 0.0f;
#pragma unroll
            for (int r = 0; r < rows_per_lane; ++r) {
                kv_shard += s_shard[c][r] * k_reg[r];
            }
            kv_col[c] = warp_reduce_sum<WARP_SIZE>(kv_shard);
        }

        float attn_col[columns];
#pragma unroll
        for (int c = 0; c < columns; ++c) {
            const float delta_col = (v_reg[c] - g_val * kv_col[c]) * beta_val;

            float attn_partial = 0.0f;
#pragma unroll
            for (int r = 0; r < rows_per_lane; ++r) {
                s_shard[c][r] = g_val * s_shard[c][r] + k_reg[r] * delta_col;
                attn_partial += s_shard[c][r] * q_reg[r];
            }
            attn_col[c] = warp_reduce_sum<WARP_SIZE>(attn_partial);
        }
        if (lane == 0) {
#pragma unroll
            for (int c = 0; c < columns; ++c) {
                dst[c] = attn_col[c] * scale;
            }
        }
        dst += S_v*H;

        // slot 0 is the last state, slot s that of s tokens before
        const int slot = keep_rs_t ? (int) n_tokens - 1 - t : 0;
        if (keep_rs_t ? slot < K : t == n_tokens - 1) {
            float * out = state + (keep_rs_t ? slot*state_slot_stride : 0);
#pragma unroll
            for (int c = 0; c < columns; ++c) {
#pragma unroll
                for (int r = 0; r < rows_per_lane; ++r) {
                    out[c*S_v + r*WARP_SIZE + lane] = s_shard[c][r];
                }
            }
        }
    }

    GGML_UNUSED(n_seqs);
}

// Whether there are more columns than the card has room for warps: with fewer, each is best in a warp of its own.
static bool gdn_takes_columns(const int64_t S_v, const int64_t H, const int64_t n_seqs, const int warp_size, const int64_t n_sms) {
    constexpr int64_t warps_of_sm = 40; // of 48 registers for each thread, in blocks of four warps
    static const bool is_on = [] {
        const char * env = getenv("GGML_CUDA_GDN_COLUMNS");
        return env == nullptr || atoi(env) != 0;
    }();
    return is_on && S_v == 128 && warp_size == WARP_SIZE && S_v*H*n_seqs > warps_of_sm*n_sms;
}
