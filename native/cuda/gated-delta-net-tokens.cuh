// gated_delta_net.cu's kernel for steps of many tokens of a sequence, in which each token waits for the one before it.

#pragma once

#include "common.cuh"
#include "cp-async.cuh"

#include <cstdlib>

constexpr int GDN_BLOCK_COLUMNS = 32; // of a CUDA block, which loads keys, queries and values once for all of them
constexpr int GDN_CHUNK         = 4;  // tokens that are loaded together
constexpr int GDN_LOADED        = 16; // tokens in shared memory: of the chunk that is computed, and of three more
constexpr int GDN_LANES         = 8;  // of a column
constexpr int GDN_LANE_COLUMNS  = 2;  // that a lane has rows of

static __device__ __forceinline__ void gdn_load(float * to, const float * from) {
#ifdef CP_ASYNC_AVAILABLE
    const unsigned place = ggml_cuda_cvta_generic_to_shared(to);
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" : : "r"(place), "l"(from) : "memory");
#else
    *to = *from;
#endif // CP_ASYNC_AVAILABLE
}

static __device__ __forceinline__ void gdn_end_chunk() {
#ifdef CP_ASYNC_AVAILABLE
    asm volatile("cp.async.commit_group;" : : : "memory");
#endif // CP_ASYNC_AVAILABLE
}

// Waits for all chunks that this thread has loaded but the last.
static __device__ __forceinline__ void gdn_wait_for_chunk() {
#ifdef CP_ASYNC_AVAILABLE
    asm volatile("cp.async.wait_group 1;" : : : "memory");
#endif // CP_ASYNC_AVAILABLE
}

// Parameters, layouts and the order of each sum are those of gated_delta_net_cuda, so that its bits come out. There 32 lanes have
// a column: lane i the rows i, i + 32, i + 64 and i + 96, whose sums are added over lanes 16, 8, 4, 2 and 1 apart. Here `lanes`
// have it, and each does what 32/lanes of those do; of the five steps only those over less than `lanes` cross lanes.
template <int S_v, int lanes, int columns, bool keep_rs_t>
static __global__ void __launch_bounds__(GDN_BLOCK_COLUMNS*lanes/columns, 512*columns/(GDN_BLOCK_COLUMNS*lanes))
gated_delta_net_tokens(
        const float * q, const float * k, const float * v, const float * g, const float * beta, const float * curr_state,
        float * dst, float * state, int64_t H, int64_t n_tokens, int64_t n_seqs, int64_t sq1, int64_t sq2, int64_t sq3,
        int64_t sv1, int64_t sv2, int64_t sv3, int64_t sb1, int64_t sb2, int64_t sb3,
        const uint3 neqk1_magic, const uint3 rq3_magic, float scale, int64_t state_slot_stride, int K) {
    static_assert(columns == 1 || columns == 2, "of a thread");
    constexpr int n_threads = GDN_BLOCK_COLUMNS*lanes/columns;
    constexpr int rows      = S_v/lanes;       // of a thread in each of its columns
    constexpr int parts     = WARP_SIZE/lanes; // lanes of gated_delta_net_cuda that a thread stands for
    constexpr int stride    = rows + 4;        // of a lane's rows in shared memory, in other banks than its neighbours'
    static_assert(n_threads % S_v == 0 && GDN_CHUNK*S_v % n_threads == 0, "a thread loads the same row of each token");

    __shared__ __align__(16) float k_loaded[GDN_LOADED][lanes*stride];
    __shared__ __align__(16) float q_loaded[GDN_LOADED][lanes*stride];
    __shared__ __align__(16) float v_loaded[GDN_LOADED][GDN_BLOCK_COLUMNS];
    __shared__ __align__(16) float gb_loaded[GDN_LOADED][2];

    const uint32_t h_idx    = blockIdx.x;
    const uint32_t sequence = blockIdx.y;
    const int      thread   = threadIdx.x;
    const int      lane     = thread % lanes;
    const int      own_col  = thread/lanes*columns; // this thread's first column, in its block
    const int      col      = blockIdx.z*GDN_BLOCK_COLUMNS + own_col;

    const uint32_t iq1 = fastmodulo(h_idx, neqk1_magic);
    const uint32_t iq3 = fastdiv(sequence, rq3_magic);

    const int64_t state_offset = ((sequence*H + h_idx)*S_v + col)*S_v + lane;
    state      += state_offset;
    curr_state += state_offset;

    // where this thread loads from
    const int load_row = thread % S_v;
    const int load_to  = load_row % lanes*stride + load_row/lanes;
    const int64_t qk_offset = iq3*sq3 + iq1*sq1 + load_row;
    const int64_t gb_offset = sequence*sb3 + h_idx*sb1;
    q += qk_offset;
    k += qk_offset;
    v += sequence*sv3 + h_idx*sv1 + blockIdx.z*GDN_BLOCK_COLUMNS + thread % GDN_BLOCK_COLUMNS;
    g    += gb_offset;
    beta += gb_offset;

    const auto load_chunk = [&](const int first) {
#pragma unroll
        for (int i = 0; i < GDN_CHUNK; i += n_threads/S_v) {
            const int t = first + i + thread/S_v;
            if (t < n_tokens) {
                gdn_load(&k_loaded[t % GDN_LOADED][load_to], k + t*sq2);
                gdn_load(&q_loaded[t % GDN_LOADED][load_to], q + t*sq2);
            }
        }
        static_assert(GDN_CHUNK*GDN_BLOCK_COLUMNS <= n_threads, "one value for each thread");
        const int t_v = first + thread/GDN_BLOCK_COLUMNS;
        if (thread < GDN_CHUNK*GDN_BLOCK_COLUMNS && t_v < n_tokens) {
            gdn_load(&v_loaded[t_v % GDN_LOADED][thread % GDN_BLOCK_COLUMNS], v + t_v*sv2);
        }
        const int t_gb = first + thread/2;
        if (thread < 2*GDN_CHUNK && t_gb < n_tokens) {
            gdn_load(&gb_loaded[t_gb % GDN_LOADED][thread % 2], (thread % 2 == 0 ? g : beta) + t_gb*sb2);
        }
        gdn_end_chunk();
    };
    const auto read_rows = [&](float * to, const float * from) {
#pragma unroll
        for (int i = 0; i < rows; i += 4) {
            const float4 four = *(const float4 *) &from[lane*stride + i];
            to[i + 0] = four.x;
            to[i + 1] = four.y;
            to[i + 2] = four.z;
            to[i + 3] = four.w;
        }
    };

    float s[columns][rows];
    float k_reg[rows];
    float q_reg[rows]; // of the token before

    ggml_cuda_pdl_sync();
    load_chunk(0);
    load_chunk(GDN_CHUNK);
#pragma unroll
    for (int c = 0; c < columns; ++c) {
#pragma unroll
        for (int i = 0; i < rows; ++i) {
            s[c][i] = curr_state[c*S_v + i*lanes];
        }
    }
    const auto next_chunk = [&](const int first) {
        gdn_wait_for_chunk();
        __syncthreads();
        load_chunk(first + 2*GDN_CHUNK);
    };
    next_chunk(0);
    read_rows(k_reg, k_loaded[0]);
#pragma unroll
    for (int i = 0; i < rows; ++i) {
        q_reg[i] = 0.0f;
    }

    // What this thread has of a column's product with k or q.
    const auto partial_sum = [&](const float * column, const float * x) {
        float sums[parts];
#pragma unroll
        for (int p = 0; p < parts; ++p) {
            sums[p] = 0.0f;
#pragma unroll
            for (int r = 0; r < rows; r += parts) {
                sums[p] += column[r + p] * x[r + p];
            }
        }
#pragma unroll
        for (int apart = parts/2; apart > 0; apart /= 2) {
#pragma unroll
            for (int p = 0; p < apart; ++p) {
                sums[p] += sums[p + apart];
            }
        }
        return sums[0];
    };

    // Of two columns the lower half of the lanes adds up the first, the other half the second.
    constexpr int half_lanes = columns == 2 ? lanes/2 : lanes;
    const bool    is_upper   = (lane & (lanes/2)) != 0;
    dst += (sequence*n_tokens*H + h_idx)*S_v + col + (columns == 2 && is_upper);
    dst -= S_v*H; // of the token before
    const auto attn_start = [&]() {
        const float first = partial_sum(s[0], q_reg);
        if constexpr (columns == 1) {
            return first;
        } else {
            const float second = partial_sum(s[columns - 1], q_reg);
            const float other  = __shfl_xor_sync(0xFFFFFFFF, is_upper ? first : second, lanes/2);
            return (is_upper ? second : first) + other;
        }
    };
    const auto attn_step = [&](float & attn, const int apart) {
        attn += __shfl_xor_sync(0xFFFFFFFF, attn, apart);
    };
    const auto write_attn = [&](const bool is_token, const float attn) {
        if (is_token && lane % half_lanes == 0) {
            *dst = attn * scale;
        }
        dst += S_v*H;
    };

    // A token's state waits for the sum over its keys. Meanwhile there is the output of the one before.
    const auto compute = [&](const int t, const int slot, const int next_slot) {
        float k_next[rows];
        read_rows(k_next, k_loaded[next_slot]);
        const float g_val    = expf(gb_loaded[slot][0]);
        const float beta_val = gb_loaded[slot][1];
        float v_reg[columns];
#pragma unroll
        for (int c = 0; c < columns; ++c) {
            v_reg[c] = v_loaded[slot][own_col + c];
        }

        float kv_col[columns];
        const auto kv_step = [&](const int apart) {
            float others[columns];
#pragma unroll
            for (int c = 0; c < columns; ++c) {
                others[c] = __shfl_xor_sync(0xFFFFFFFF, kv_col[c], apart);
            }
#pragma unroll
            for (int c = 0; c < columns; ++c) {
                kv_col[c] += others[c];
            }
        };
#pragma unroll
        for (int c = 0; c < columns; ++c) {
            kv_col[c] = partial_sum(s[c], k_reg);
        }
        kv_step(lanes/2);
        float attn = attn_start();
        read_rows(q_reg, q_loaded[slot]);
#pragma unroll
        for (int apart = lanes/4; apart > 0; apart /= 2) {
            kv_step(apart);
            attn_step(attn, apart*half_lanes/(lanes/2));
        }

#pragma unroll
        for (int c = 0; c < columns; ++c) {
            const float delta_col = (v_reg[c] - g_val * kv_col[c]) * beta_val;
#pragma unroll
            for (int i = 0; i < rows; ++i) {
                s[c][i] = g_val * s[c][i] + k_reg[i] * delta_col;
            }
        }
#pragma unroll
        for (int i = 0; i < rows; ++i) {
            k_reg[i] = k_next[i];
        }
        if constexpr (columns == 1) {
            attn_step(attn, 1);
        }
        write_attn(t > 0, attn);

        // slot 0 is the last state, slot s that of s tokens before
        if constexpr (keep_rs_t) {
            const int kept = (int) n_tokens - 1 - t;
            if (kept < K) {
#pragma unroll
                for (int c = 0; c < columns; ++c) {
#pragma unroll
                    for (int i = 0; i < rows; ++i) {
                        state[kept*state_slot_stride + c*S_v + i*lanes] = s[c][i];
                    }
                }
            }
        }
    };

    int t = 0;
    for (; t + GDN_CHUNK <= n_tokens; t += GDN_CHUNK) {
        const int slot = t % GDN_LOADED;
#pragma unroll
        for (int i = 0; i < GDN_CHUNK; ++i) {
            if (i == GDN_CHUNK - 1) {
                next_chunk(t + GDN_CHUNK); // whose first keys the last token reads ahead
            }
            compute(t + i, slot + i, i == GDN_CHUNK - 1 ? (slot + GDN_CHUNK) % GDN_LOADED : slot + i + 1);
        }
    }
    for (; t < n_tokens; ++t) {
        compute(t, t % GDN_LOADED, (t + 1) % GDN_LOADED);
    }

    float attn = attn_start();
#pragma unroll
    for (int apart = half_lanes/2; apart > 0; apart /= 2) {
        attn_step(attn, apart);
    }
    write_attn(true, attn);

    if constexpr (!keep_rs_t) {
#pragma unroll
        for (int c = 0; c < columns; ++c) {
#pragma unroll
            for (int i = 0; i < rows; ++i) {
                state[c*S_v + i*lanes] = s[c][i];
            }
        }
    }

    GGML_UNUSED(n_seqs);
}

// Whether a step has tokens enough: there is a default, and GGML_CUDA_GDN_TOKENS is another number, or 0 for none.
static bool gdn_takes_tokens(const int64_t S_v, const int64_t n_tokens, const int warp_size) {
    static const int fewest = [] {
        const char * env = getenv("GGML_CUDA_GDN_TOKENS");
        return env == nullptr ? 2 : atoi(env);
    }();
    return fewest > 0 && n_tokens >= fewest && S_v == 128 && warp_size == WARP_SIZE;
}
