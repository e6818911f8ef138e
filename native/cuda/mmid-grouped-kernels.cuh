// The kernel of mmid-grouped.cu that multiplies.
//
// It has as many warps as the card holds at a time, and they share the experts' rows evenly, whatever was chosen. A warp copies its
// rows into shared memory a stage ahead, 16 bytes a lane, and waits for nobody else. Of a row each lane multiplies 64 weights in a
// row, so the activations of up to three tokens stay in registers for all rows of an expert.

#pragma once

#include "cp-async.cuh"
#include "mmid-grouped-weights.cuh"
#include "unary.cuh"

// --- copies that arrive a stage later --------------------------------------------------------------------

static __device__ __forceinline__ void experts_copies_end() {
#ifdef CP_ASYNC_AVAILABLE
    asm volatile("cp.async.commit_group;");
#endif // CP_ASYNC_AVAILABLE
}

// Waits for all stages but the last, of the whole warp.
static __device__ __forceinline__ void experts_copies_wait() {
#ifdef CP_ASYNC_AVAILABLE
    asm volatile("cp.async.wait_group 1;" : : : "memory");
#endif // CP_ASYNC_AVAILABLE
    __syncwarp();
}

struct experts_place {
    int item, group, section;

    __device__ __forceinline__ bool is(const experts_place & other) const {
        return item == other.item && group == other.group && section == other.section;
    }

    __device__ __forceinline__ void advance(const experts_shape & s) {
        if (++section == s.n_sections) {
            section = 0;
            if (++group == s.n_groups) {
                group = 0;
                ++item;
            }
        }
    }
};

// The first group that begins at a position of all items' costs or behind it.
static __device__ __forceinline__ experts_place experts_at(
        const experts_item * items, const short * item_of, const int n_items, const int n_costs, const experts_shape & s, const int position) {
    const int i = position/s.n_groups;
    if (i >= n_costs) {
        return {n_items, 0, 0};
    }
    const int item = item_of[i];
    const experts_item own = items[item];
    const int group = (position - own.before*s.n_groups + own.cost - 1)/own.cost;
    return group < s.n_groups ? experts_place{item, group, 0} : experts_place{item + 1, 0, 0};
}

// A warp's share of what all groups cost: from `place` on, up to `stop`.
static __device__ __forceinline__ void experts_share(
        const int * plan, const experts_shape & s, const int warp, const int n_warps, experts_place & place, experts_place & stop) {
    const int n_items = plan[0];
    const int n_costs = plan[1];
    const experts_item * items = (const experts_item *) (plan + 4);
    const short * item_of = (const short *) ((const int *) (items + s.n_pairs) + s.n_pairs);
    const int64_t n_all = (int64_t) n_costs*s.n_groups;
    place = experts_at(items, item_of, n_items, n_costs, s, (int) (n_all*warp/n_warps));
    stop  = experts_at(items, item_of, n_items, n_costs, s, (int) (n_all*(warp + 1)/n_warps));
}

// Where the step's rows begin, from the first expert's first weight on.
template <int steps, bool has_gate>
static __device__ __forceinline__ int experts_first_row(const experts_shape & s, const int group, const int step) {
    constexpr int n = has_gate ? steps/2 : steps; // of one matrix
    return (group*n + step % n)*s.step_rows;
}

template <ggml_type type, int steps, bool has_gate>
static __device__ __forceinline__ void experts_copy(
        const char * x, const char * gate, const int expert, const experts_shape & s, const experts_place & place, char * to) {
    constexpr int section_bytes = EXPERTS_SECTION/ggml_cuda_type_traits<type>::qk*ggml_cuda_type_traits<type>::bs;
    const int in_row = place.section*section_bytes;
#pragma unroll
    for (int step = 0; step < steps; ++step) {
        const int row  = experts_first_row<steps, has_gate>(s, place.group, step);
        const int rows = s.nrows - row < s.step_rows ? s.nrows - row : s.step_rows;
        if (rows <= 0) {
            continue;
        }
        const char * from = (has_gate && step >= steps/2 ? gate : x) + expert*s.expert_bytes + (int64_t) row*s.row_bytes + in_row;
        // Whole 16 bytes from both ends: memory is given out in such.
        const int before = (int) ((uintptr_t) from % 16);
        int bytes = s.n_sections == 1 ? rows*s.row_bytes : s.row_bytes - in_row;
        bytes = (bytes < section_bytes || s.n_sections == 1 ? bytes : section_bytes) + before;
        from -= before;
        for (int i = 16*threadIdx.x; i < bytes; i += 16*WARP_SIZE) {
#ifdef CP_ASYNC_AVAILABLE
            cp_async_cg_16<128>(ggml_cuda_cvta_generic_to_shared(to + step*s.slot_bytes + i), from + i);
#else
            *(int4 *) (to + step*s.slot_bytes + i) = *(const int4 *) (from + i);
#endif // CP_ASYNC_AVAILABLE
        }
    }
    experts_copies_end();
}

// --- products -------------------------------------------------------------------------------------------

// Sums `steps` values over the lanes of a row at once. Where a lane's sum belongs is said by its upper bits within the row.
template <int steps>
static __device__ __forceinline__ float experts_sum(const float (&v)[steps], const int lanes, int & step) {
    int offset = lanes/2;
    const bool upper = threadIdx.x & offset;
    float sum;
    if constexpr (steps == 4) {
        float a = upper ? v[2] : v[0];
        float b = upper ? v[3] : v[1];
        a += __shfl_xor_sync(0xFFFFFFFF, upper ? v[0] : v[2], offset, WARP_SIZE);
        b += __shfl_xor_sync(0xFFFFFFFF, upper ? v[1] : v[3], offset, WARP_SIZE);
        offset /= 2;
        const bool odd = threadIdx.x & offset;
        sum  = odd ? b : a;
        sum += __shfl_xor_sync(0xFFFFFFFF, odd ? a : b, offset, WARP_SIZE);
        step = 2*upper + odd;
    } else {
        static_assert(steps == 2, "bad number of steps");
        sum  = upper ? v[1] : v[0];
        sum += __shfl_xor_sync(0xFFFFFFFF, upper ? v[0] : v[1], offset, WARP_SIZE);
        step = upper;
    }
    for (offset /= 2; offset > 0; offset /= 2) {
        sum += __shfl_xor_sync(0xFFFFFFFF, sum, offset, WARP_SIZE);
    }
    return sum;
}

static __device__ __forceinline__ float experts_glu(const ggml_cuda_mm_fusion_args_device & fusion, const float gate, const float up) {
    switch (fusion.glu_op) {
        case GGML_GLU_OP_SWIGLU:       return up*ggml_cuda_op_silu_single(gate);
        case GGML_GLU_OP_GEGLU:        return up*ggml_cuda_op_gelu_single(gate);
        case GGML_GLU_OP_SWIGLU_OAI:   return ggml_cuda_op_swiglu_oai_single(gate, up);
        case GGML_GLU_OP_SWIGLU_CLAMP: return ggml_cuda_op_swiglu_clamp_single(gate, up, fusion.glu_limit);
        default:                       return up*gate;
    }
}

// What a warp knows of its tokens.
template <int steps> struct experts_columns {
    int y[EXPERTS_COLUMNS][EXPERTS_Y];    // where the type's weights are multiplied from registers
    const block_q8_1 * from[EXPERTS_COLUMNS]; // else
    float sum[EXPERTS_COLUMNS][steps];
};

template <ggml_type type, int steps, bool has_gate, int ncols>
static __device__ __forceinline__ void experts_multiply(
        const char * stage, const char * x, const char * gate, const experts_shape & s, const experts_place & place, const int expert,
        const int * pairs, const ggml_cuda_mm_fusion_args_device & fusion, float * dst, experts_columns<steps> & columns) {
    constexpr int qk = ggml_cuda_type_traits<type>::qk;
    constexpr int section_bytes = EXPERTS_SECTION/qk*ggml_cuda_type_traits<type>::bs;
    const int lane = threadIdx.x % s.lanes;
    const int in_section = s.ncols - place.section*EXPERTS_SECTION; // weights from here to the row's end
    auto & sum = columns.sum;

    if (place.section == 0) {
#pragma unroll
        for (int j = 0; j < ncols; ++j) {
#pragma unroll
            for (int step = 0; step < steps; ++step) {
                sum[j][step] = 0.0f;
            }
        }
    }

    const char * rows[steps];
#pragma unroll
    for (int step = 0; step < steps; ++step) {
        const int row = experts_first_row<steps, has_gate>(s, place.group, step);
        const uint32_t from = (uint32_t) (uintptr_t) (has_gate && step >= steps/2 ? gate : x) + (uint32_t) expert*(uint32_t) s.expert_bytes +
            (uint32_t) row*s.row_bytes + place.section*section_bytes;
        rows[step] = stage + step*s.slot_bytes + from % 16;
    }

    if constexpr (experts_in_registers<type>()) {
        const bool has_weights = EXPERTS_LANE*lane < in_section;
        const int in_slot = s.step_rows > 1 ? (int) (threadIdx.x/s.lanes)*s.row_bytes : 0;
#pragma unroll
        for (int step = 0; step < steps; ++step) {
            experts_weights<type> weights;
            weights.load(rows[step] + in_slot, has_weights ? lane : 0);
#pragma unroll
            for (int j = 0; j < ncols; ++j) {
                const float with = weights.dot(columns.y[j], sum[j][step]);
                sum[j][step] = has_weights ? with : sum[j][step];
            }
        }
    } else {
        constexpr int vdr = experts_vec_dot<type>::vdr;
        constexpr int per_block = ggml_cuda_type_traits<type>::qi/vdr;
        const int n_blocks = (in_section < EXPERTS_SECTION ? in_section : EXPERTS_SECTION)/qk;
        const int64_t y0 = (int64_t) place.section*(EXPERTS_SECTION/QK8_1);
        const int kqs = vdr*(threadIdx.x % per_block);
        for (int kbx = threadIdx.x/per_block; kbx < n_blocks; kbx += WARP_SIZE/per_block) {
#pragma unroll
            for (int j = 0; j < ncols; ++j) {
#pragma unroll
                for (int step = 0; step < steps; ++step) {
                    sum[j][step] += experts_vec_dot<type>::dot(rows[step], columns.from[j] + y0 + kbx*(qk/QK8_1), kbx, kqs);
                }
            }
        }
    }

    if (place.section + 1 < s.n_sections) {
        return;
    }
#pragma unroll
    for (int j = 0; j < ncols; ++j) {
        int step;
        float result = experts_sum<steps>(sum[j], s.lanes, step);
        const int row = experts_first_row<steps, has_gate>(s, place.group, step) + threadIdx.x/s.lanes;
        bool is_mine = (lane & (s.lanes/steps - 1)) == 0 && row < s.nrows;
        if constexpr (has_gate) {
            float other = __shfl_xor_sync(0xFFFFFFFF, result, s.lanes/2, WARP_SIZE);
            is_mine = is_mine && step < steps/2;
            if (is_mine) {
                result += fusion.x_bias    ? ((const float *) fusion.x_bias)[(int64_t) expert*s.nrows + row]    : 0.0f;
                other  += fusion.gate_bias ? ((const float *) fusion.gate_bias)[(int64_t) expert*s.nrows + row] : 0.0f;
                result = experts_glu(fusion, other, result);
            }
        } else if (is_mine && fusion.x_bias) {
            result += ((const float *) fusion.x_bias)[(int64_t) expert*s.nrows + row];
        }
        if (is_mine) {
            dst[(int64_t) pairs[j]*s.stride_dst + row] = result;
        }
    }
}

// Takes the activations of `ncols` pairs.
template <ggml_type type, int steps>
static __device__ __forceinline__ void experts_take(
        const char * y, const experts_shape & s, const int section, const int * pairs, const int ncols, experts_columns<steps> & columns) {
    const int lane = threadIdx.x % s.lanes;
#pragma unroll
    for (int j = 0; j < EXPERTS_COLUMNS; ++j) {
        if (j >= ncols) {
            break;
        }
        const int pair  = pairs[j];
        const int token = pair/s.n_used;
        const int row   = s.n_channels_y == 1 ? token : token*s.n_channels_y + (pair - token*s.n_used) % s.n_channels_y;
        const char * from = y + (int64_t) row*s.y_row_bytes;
        if constexpr (experts_in_registers<type>()) {
            // A lane without weights takes what stands there.
            const int2 * words = (const int2 *) from + section*(EXPERTS_Y/2*WARP_SIZE) + lane;
#pragma unroll
            for (int i = 0; i < EXPERTS_Y/2; ++i) {
                const int2 two = words[i*s.lanes];
                columns.y[j][2*i + 0] = two.x;
                columns.y[j][2*i + 1] = two.y;
            }
        } else {
            columns.from[j] = (const block_q8_1 *) from;
        }
    }
}

template <ggml_type type, bool has_gate>
__launch_bounds__(EXPERTS_WARPS*WARP_SIZE, 4)
static __global__ void mul_mat_experts(
        const char * x_ptr, const char * y_ptr, const int * plan_ptr, const ggml_cuda_mm_fusion_args_device fusion, float * dst_ptr,
        const experts_shape s) {
    constexpr int steps = experts_steps<type>();
    extern __shared__ int4 experts_stages[];

    const char * GGML_CUDA_RESTRICT x    = x_ptr;
    const char * GGML_CUDA_RESTRICT gate = (const char *) fusion.gate;
    const char * GGML_CUDA_RESTRICT y    = y_ptr;
    float      * GGML_CUDA_RESTRICT dst  = dst_ptr;

    ggml_cuda_pdl_sync();
    const experts_item * items = (const experts_item *) (plan_ptr + 4);
    const int * pairs = (const int *) (items + s.n_pairs);

    experts_place place, stop;
    experts_share(plan_ptr, s, blockIdx.x*EXPERTS_WARPS + threadIdx.y, gridDim.x*EXPERTS_WARPS, place, stop);
    if (place.is(stop)) {
        return;
    }
    const int stage_bytes = steps*s.slot_bytes;
    char * stages = (char *) experts_stages + threadIdx.y*2*stage_bytes;

    experts_place copied = place;
    experts_columns<steps> columns;
    experts_item item = items[place.item];
    bool is_new = true;

    experts_copy<type, steps, has_gate>(x, gate, item.expert, s, copied, stages);

    for (int i = 0; !place.is(stop); ++i) {
        copied.advance(s);
        if (!copied.is(stop)) {
            experts_copy<type, steps, has_gate>(x, gate, items[copied.item].expert, s, copied, stages + (i + 1) % 2*stage_bytes);
        } else {
            experts_copies_end(); // of nothing: the one before is what is waited for
        }
        experts_copies_wait();

        const char * stage = stages + i % 2*stage_bytes;
        for (int c = 0; c < item.count; c += EXPERTS_COLUMNS) {
            const int n = item.count - c < EXPERTS_COLUMNS ? item.count - c : EXPERTS_COLUMNS;
            const int * own = pairs + item.first + c;
            if (is_new || item.count > EXPERTS_COLUMNS || (experts_in_registers<type>() && s.n_sections > 1)) {
                experts_take<type, steps>(y, s, place.section, own, n, columns);
            }
            switch (n) {
                case 1:
                    experts_multiply<type, steps, has_gate, 1>(stage, x, gate, s, place, item.expert, own, fusion, dst, columns);
                    break;
                case 2:
                    experts_multiply<type, steps, has_gate, 2>(stage, x, gate, s, place, item.expert, own, fusion, dst, columns);
                    break;
                default:
                    experts_multiply<type, steps, has_gate, 3>(stage, x, gate, s, place, item.expert, own, fusion, dst, columns);
                    break;
            }
        }
        __syncwarp(); // before the stage is written anew

        const int before = place.item;
        place.advance(s);
        is_new = place.item != before;
        if (is_new && !place.is(stop)) {
            item = items[place.item];
        }
    }
    ggml_cuda_pdl_lc();
}
