// mmid.cu's arrays by CUDA blocks of many warps, each of which has a share of the tokens.

#pragma once

#include "common.cuh"

#include <cstdlib>

constexpr int MM_IDS_WARPS = 16; // of a CUDA block, which has one expert

// Parameters and results are those of mm_ids_helper. n_used: n_expert_used as fastdiv takes it.
__launch_bounds__(WARP_SIZE*MM_IDS_WARPS)
static __global__ void mm_ids_sorted(
        const int32_t * ids, int32_t * ids_src1, int32_t * ids_dst, int32_t * expert_bounds,
        const int n_slots, const uint3 n_used, const int nchannels_y, const int si1, const int sis1, const bool write_inverse) {
    __shared__ int n_lower_of[MM_IDS_WARPS]; // slots of experts with a lower index
    __shared__ int n_own_of[MM_IDS_WARPS];   // slots of this one

    const int expert = blockIdx.x;
    const int lane   = threadIdx.x;
    const int warp   = threadIdx.y;

    const int n_share = (n_slots + WARP_SIZE*MM_IDS_WARPS - 1)/(WARP_SIZE*MM_IDS_WARPS)*WARP_SIZE;
    const int first   = warp*n_share;
    const int end     = min(first + n_share, n_slots);

    int n_lower = 0;
    int n_own   = 0;
    ggml_cuda_pdl_sync();
#pragma unroll 8
    for (int slot = first + lane; slot < end; slot += WARP_SIZE) {
        const uint2 at   = fast_div_modulo(slot, n_used);
        const int   used = ids[(int) at.x*si1 + (int) at.y];
        n_lower += used <  expert;
        n_own   += used == expert;
    }
    n_lower = warp_reduce_sum<WARP_SIZE>(n_lower);
    n_own   = warp_reduce_sum<WARP_SIZE>(n_own);
    if (lane == 0) {
        n_lower_of[warp] = n_lower;
        n_own_of[warp]   = n_own;
    }
    __syncthreads();

    int bound  = 0; // where this expert begins
    int before = 0; // its slots in the shares before
    int n_all  = 0;
#pragma unroll
    for (int w = 0; w < MM_IDS_WARPS; ++w) {
        bound  += n_lower_of[w];
        before += w < warp ? n_own_of[w] : 0;
        n_all  += n_own_of[w];
    }

    if (warp == 0 && lane == 0) {
        expert_bounds[expert] = bound;
        if (expert == (int) gridDim.x - 1) {
            expert_bounds[gridDim.x] = bound + n_all;
        }
    }

    int row = bound + before;
    for (int slot0 = first; slot0 < end && n_own > 0; slot0 += WARP_SIZE) {
        const int   slot = slot0 + lane;
        const uint2 at   = fast_div_modulo(slot, n_used);
        const int   it   = at.x;
        const int   iex  = at.y;
        const bool  is_own = slot < end && ids[it*si1 + iex] == expert;

        const uint32_t own = __ballot_sync(0xFFFFFFFF, is_own);
        if (is_own) {
            const int to = row + __popc(own & ((1u << lane) - 1));
            ids_dst[to] = slot;
            // ids_src1 holds the forward map, or the inverse map (token slot -> compact row) for quant dedup
            if (write_inverse) {
                ids_src1[slot] = to;
            } else {
                ids_src1[to] = it*sis1 + iex % nchannels_y;
            }
        }
        row += __popc(own);
    }
}

static bool mm_ids_takes_sorted(const int warp_size) {
    static const bool is_on = [] {
        const char * env = getenv("GGML_CUDA_SORTED_IDS");
        return env == nullptr || atoi(env) != 0;
    }();
    return is_on && warp_size == WARP_SIZE;
}
