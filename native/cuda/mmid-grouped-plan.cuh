// What the two kernels of mmid-grouped.cu know of a product, and the first: it sorts the (token, slot) pairs by expert and quantizes
// the activations.

#pragma once

#include "common.cuh"

constexpr int EXPERTS_WARPS   = 4;    // of a CUDA block; they share nothing
constexpr int EXPERTS_COLUMNS = 3;    // tokens that a warp multiplies at a time: more do not fit into its registers
constexpr int EXPERTS_SECTION = 2048; // weights of a row that a warp multiplies at a time
constexpr int EXPERTS_LANE    = 64;   // of which a lane takes so many
constexpr int EXPERTS_PREPARE = 256;  // threads of the first kernel's CUDA blocks

// What a group of an item's rows costs, in parts of about a hundred instructions: reading the weights, and multiplying each token.
constexpr int EXPERTS_READ_COST  = 3;
constexpr int EXPERTS_TOKEN_COST = 4;

// Tokens of one expert. A plan: the number of items, what a group of each of them costs together, two ints of nothing, the items, the
// pairs sorted by expert, and for each part of the cost its item.
struct experts_item {
    int expert;
    int first; // pair
    int count;
    short before; // what the items before it cost
    short cost;
};

// In ints, for all pairs with experts of their own.
static constexpr __host__ __device__ int experts_plan_size(const int n_pairs) {
    constexpr int item_size = sizeof(experts_item)/sizeof(int);
    return 4 + (item_size + 1)*n_pairs + ((EXPERTS_READ_COST + EXPERTS_TOKEN_COST)*n_pairs + 1)/2;
}

struct experts_shape {
    int ncols;  // weights of a row
    int nrows;  // of an expert
    int n_used; // slots of a token
    int n_channels_y; // rows of activations of a token: one for all slots, or one for each
    int row_bytes;
    int64_t expert_bytes;
    int n_sections;
    int lanes;     // of a row, a power of two
    int step_rows; // rows that a warp multiplies at a time
    int n_groups;  // of an expert's rows; a group is what a stage holds (a section of it)
    int slot_bytes; // of shared memory for a step
    int y_row_bytes;
    int stride_dst;
    int n_pairs;
};

// Without ids all tokens are the first expert's.
static __device__ __forceinline__ void experts_make_plan(
        const int32_t * ids, int * plan, int * shared, const int n_experts, const int n_pairs, const int n_used, const int ids_stride,
        const int columns, const bool is_whole) {
    const int tid  = threadIdx.x;
    const int lane = tid % WARP_SIZE;
    const int warp = tid / WARP_SIZE;
    __shared__ int sums[EXPERTS_PREPARE/WARP_SIZE];

    experts_item * items = (experts_item *) (plan + 4);
    int * pairs = (int *) (items + n_pairs);
    short * item_of = (short *) (pairs + n_pairs);
    int * count = shared;
    int * first = shared + n_experts;

    for (int e = tid; e < n_experts; e += EXPERTS_PREPARE) {
        count[e] = 0;
    }
    __syncthreads();
    for (int p = tid; p < n_pairs; p += EXPERTS_PREPARE) {
        const int e = ids ? ids[(p/n_used)*ids_stride + p % n_used] : 0;
        if (e >= 0 && e < n_experts) {
            atomicAdd(count + e, 1);
        }
    }
    __syncthreads();

    // What lies before an expert: pairs in the lower 16 bits, items in the upper.
    int base = 0;
    for (int e0 = 0; e0 < n_experts; e0 += EXPERTS_PREPARE) {
        const int e   = e0 + tid;
        const int n   = e < n_experts ? count[e] : 0;
        const int most = is_whole && n > 0 ? n : columns; // of an item
        const int own = n | ((n + most - 1)/most) << 16;
        int sum = own;
#pragma unroll
        for (int offset = 1; offset < WARP_SIZE; offset *= 2) {
            const int lower = __shfl_up_sync(0xFFFFFFFF, sum, offset);
            sum += lane >= offset ? lower : 0;
        }
        if (lane == WARP_SIZE - 1) {
            sums[warp] = sum;
        }
        __syncthreads();
        int before = base + sum - own;
        for (int w = 0; w < EXPERTS_PREPARE/WARP_SIZE; ++w) {
            before += w < warp ? sums[w] : 0;
            base   += sums[w];
        }
        if (e < n_experts) {
            first[e] = before & 0xFFFF;
            count[e] = 0;
            int item = before >> 16;
            for (int c = 0; c < n; c += most, ++item) {
                const int pair = (before & 0xFFFF) + c;
                const int n_own = n - c < most ? n - c : most;
                const int from = EXPERTS_READ_COST*item + EXPERTS_TOKEN_COST*pair;
                const int cost = EXPERTS_READ_COST + EXPERTS_TOKEN_COST*n_own;
                items[item] = {e, pair, n_own, (short) from, (short) cost};
                for (int i = 0; i < cost; ++i) {
                    item_of[from + i] = (short) item;
                }
            }
        }
        __syncthreads();
    }
    if (tid == 0) {
        plan[0] = base >> 16;
        plan[1] = EXPERTS_READ_COST*(base >> 16) + EXPERTS_TOKEN_COST*(base & 0xFFFF);
    }
    // The order of an expert's pairs is nobody's business: a token's results do not depend on its neighbours.
    for (int p = tid; p < n_pairs; p += EXPERTS_PREPARE) {
        const int e = ids ? ids[(p/n_used)*ids_stride + p % n_used] : 0;
        if (e >= 0 && e < n_experts) {
            pairs[first[e] + atomicAdd(count + e, 1)] = p;
        }
    }
}

// The activations for a lane's weights: two blocks of q8_1, each a word of scale and sum and eight of values.
constexpr int EXPERTS_Y = 2*(int) sizeof(block_q8_1)/4;

// Where a word of a block lies in its row, in words. A warp loads two words of all its lanes at a time.
static __device__ __forceinline__ int experts_word(const int block, const int word, const int lanes) {
    constexpr int per_section = EXPERTS_SECTION/QK8_1;
    const int of_lane = block % 2*(EXPERTS_Y/2) + word;
    return block/per_section*(EXPERTS_Y*WARP_SIZE) + 2*(of_lane/2*lanes + block % per_section/2) + of_lane % 2;
}

// CUDA block 0 makes the plan, the others quantize: in the order of experts_word, or with 0 lanes as blocks in a row.
__launch_bounds__(EXPERTS_PREPARE, 1)
static __global__ void experts_prepare(
        const int32_t * ids, int * plan, const int n_experts, const int n_pairs, const int n_used, const int ids_stride, const int columns,
        const bool is_whole, const float * x, char * y, const int ncols, const int n_channels, const int n_values, const int64_t s11, const int64_t s12,
        const int y_row_bytes, const int lanes) {
    extern __shared__ int experts_shared[];

    ggml_cuda_pdl_lc();
    ggml_cuda_pdl_sync();
    if (blockIdx.x == 0) {
        experts_make_plan(ids, plan, experts_shared, n_experts, n_pairs, n_used, ids_stride, columns, is_whole);
        return;
    }
    const int i = (blockIdx.x - 1)*EXPERTS_PREPARE + threadIdx.x;
    if (i >= n_values) { // a whole warp
        return;
    }
    const int row = i/ncols;
    const int col = i - row*ncols;
    const float xi = x[(row/n_channels)*s12 + (row % n_channels)*s11 + col];
    float amax = fabsf(xi);
    float sum  = xi;
    amax = warp_reduce_max<QK8_1>(amax);
    sum  = warp_reduce_sum<QK8_1>(sum);

    const float d = amax/127.0f;
    const int8_t q = amax == 0.0f ? 0 : roundf(xi/d);

    const int block = col/QK8_1;
    const int word  = 1 + col % QK8_1/4;
    constexpr int words = sizeof(block_q8_1)/4;
    y += (int64_t) row*y_row_bytes;
    y[4*(lanes ? experts_word(block, word, lanes) : block*words + word) + col % 4] = q;
    if (col % QK8_1 == 0) {
        ((half2 *) y)[lanes ? experts_word(block, 0, lanes) : block*words] = make_half2(d, sum);
    }
}
