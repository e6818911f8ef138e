#include "mmid-grouped.cuh"

#if !defined(GGML_USE_HIP) && !defined(GGML_USE_MUSA)

#include "mmid-grouped-kernels.cuh"

#include <cstdio>
#include <cstdlib>

constexpr int EXPERTS_MAX_PAIRS   = 4096; // of tokens and slots
constexpr int EXPERTS_MAX_EXPERTS = 4096;
static_assert((EXPERTS_READ_COST + EXPERTS_TOKEN_COST)*EXPERTS_MAX_PAIRS <= INT16_MAX, "a plan counts costs and items in 16 bits");

// GGML_CUDA_MMID_GROUPED=TOKENS or TOKENS,FEWEST: up to how many tokens for each expert on average (0: never), and for how many of a
// step at least. Unset it is for cards that copy into shared memory on their own (sm_80 and newer).
struct experts_limits {
    double mean   = 8.0;
    int    fewest = 9;
    bool   is_set = false;
};

static experts_limits experts_limits_of_environment() {
    experts_limits limits;
    if (const char * text = getenv("GGML_CUDA_MMID_GROUPED")) {
        limits.is_set = sscanf(text, "%lf,%d", &limits.mean, &limits.fewest) >= 1;
        if (!limits.is_set) {
            GGML_LOG_WARN("%s: GGML_CUDA_MMID_GROUPED is no number: '%s'\n", __func__, text);
        }
    }
    return limits;
}

#define EXPERTS_TYPES(CASE) \
    CASE(GGML_TYPE_Q4_0)  CASE(GGML_TYPE_Q4_1)    CASE(GGML_TYPE_Q5_0)   CASE(GGML_TYPE_Q5_1)  CASE(GGML_TYPE_Q8_0)    CASE(GGML_TYPE_MXFP4) \
    CASE(GGML_TYPE_Q2_K)  CASE(GGML_TYPE_Q3_K)    CASE(GGML_TYPE_Q4_K)   CASE(GGML_TYPE_Q5_K)  CASE(GGML_TYPE_Q6_K) \
    CASE(GGML_TYPE_IQ1_S) CASE(GGML_TYPE_IQ1_M)   CASE(GGML_TYPE_IQ2_XXS) CASE(GGML_TYPE_IQ2_XS) CASE(GGML_TYPE_IQ2_S) \
    CASE(GGML_TYPE_IQ3_XXS) CASE(GGML_TYPE_IQ3_S) CASE(GGML_TYPE_IQ4_NL) CASE(GGML_TYPE_IQ4_XS)

static bool experts_know(const ggml_type type) {
#define EXPERTS_CASE(known) case known:
    switch (type) {
        EXPERTS_TYPES(EXPERTS_CASE)
            return true;
        default:
            return false;
    }
#undef EXPERTS_CASE
}

// Whether the type's weights are multiplied from registers. The others are slower than tiles where rows are short: on an H200 the 512
// columns of 35B-A3B's down in Q6_K take 0.8 of their speed, the 2,048 of gate and up 1.4.
static bool experts_multiply_from_registers(const ggml_type type) {
#define EXPERTS_CASE(known) case known: return experts_in_registers<known>();
    switch (type) {
        EXPERTS_TYPES(EXPERTS_CASE)
        default:
            return false;
    }
#undef EXPERTS_CASE
}
constexpr int64_t EXPERTS_LONG_ROW  = 1024;
constexpr double  EXPERTS_FEW_MEAN  = 2.0;

// Whether the kernels can do it at all.
static bool experts_can(const ggml_tensor * src0, const ggml_tensor * src1, const ggml_tensor * dst) {
    if (!experts_know(src0->type) || src1->type != GGML_TYPE_F32 || dst->type != GGML_TYPE_F32) {
        return false;
    }
    if (src0->ne[0] % EXPERTS_LANE != 0 || src0->ne[3] != 1 || src1->ne[3] != 1 || src0->nb[2] > INT32_MAX) {
        return false;
    }
    if (src0->nb[0] != ggml_type_size(src0->type) || src0->nb[1] != ggml_row_size(src0->type, src0->ne[0]) ||
            src0->nb[2] != src0->ne[1]*src0->nb[1] || src1->nb[0] != sizeof(float) || !ggml_is_contiguous(dst)) {
        return false;
    }
    // Products of experts are with a model's weights. What a step computes itself may have padding that others clear.
    return ggml_backend_buffer_get_usage(src0->buffer) != GGML_BACKEND_BUFFER_USAGE_COMPUTE;
}

bool ggml_cuda_should_use_mmid_grouped(const ggml_tensor * src0, const ggml_tensor * src1, const ggml_tensor * dst, const int cc) {
    static const experts_limits limits = experts_limits_of_environment();

    const int64_t n_experts = src0->ne[2];
    const int64_t n_tokens  = dst->ne[2];
    const int64_t n_pairs   = dst->ne[1]*n_tokens;

    if (!GGML_CUDA_CC_IS_NVIDIA(cc) || (!limits.is_set && cc < GGML_CUDA_CC_AMPERE)) {
        return false;
    }
    if (!limits.is_set && !experts_multiply_from_registers(src0->type) &&
            (src0->ne[0] < EXPERTS_LONG_ROW || n_pairs > EXPERTS_FEW_MEAN*n_experts)) {
        return false;
    }
    if (n_tokens < limits.fewest || n_pairs > limits.mean*n_experts || n_pairs > EXPERTS_MAX_PAIRS || n_experts > EXPERTS_MAX_EXPERTS) {
        return false;
    }
    return experts_can(src0, src1, dst);
}

// With more columns each reading of the weights is for three of them too often; larger matrices fill the card with tiles.
constexpr int64_t SHARED_FEWEST      = 9;
constexpr int64_t SHARED_MOST        = 32;
constexpr int64_t SHARED_MAX_WEIGHTS = 1024*1024;

bool ggml_cuda_should_use_shared_expert(const ggml_tensor * src0, const ggml_tensor * src1, const ggml_tensor * dst, const int cc) {
    static const bool is_on = [] {
        const char * text = getenv("GGML_CUDA_SHARED_EXPERT");
        return text == nullptr || atoi(text) != 0;
    }();

    if (!is_on || !GGML_CUDA_CC_IS_NVIDIA(cc) || cc < GGML_CUDA_CC_AMPERE) {
        return false;
    }
    if (dst->ne[1] < SHARED_FEWEST || dst->ne[1] > SHARED_MOST || src0->ne[0]*src0->ne[1] > SHARED_MAX_WEIGHTS) {
        return false;
    }
    if (src0->ne[2] != 1 || src1->ne[2] != 1 || dst->ne[2] != 1 || dst->ne[3] != 1) {
        return false;
    }
    return experts_can(src0, src1, dst);
}

// The operands, and the memory that the two kernels of a product share.
struct experts_operands {
    const char    * x;
    const float   * y; // activations, with their strides in floats
    int64_t         s11, s12;
    const int32_t * ids;
    int             ids_stride, n_experts, n_values;
    float         * dst;
    ggml_cuda_mm_fusion_args_device fusion;
};

template <ggml_type type, bool has_gate>
static void launch_experts(ggml_backend_cuda_context & ctx, const experts_operands & of, experts_shape s) {
    constexpr int steps = experts_steps<type>();
    experts_lay_out<type, steps, has_gate>(s);

    ggml_cuda_pool_alloc<int>  plan(ctx.pool(), experts_plan_size(s.n_pairs));
    ggml_cuda_pool_alloc<char> y(ctx.pool(), (size_t) of.n_values/s.ncols*s.y_row_bytes);

    const dim3 n_prepare(1 + (of.n_values + EXPERTS_PREPARE - 1)/EXPERTS_PREPARE, 1, 1);
    const ggml_cuda_kernel_launch_params prepare(n_prepare, dim3(EXPERTS_PREPARE, 1, 1), 2*of.n_experts*sizeof(int), ctx.stream());
    ggml_cuda_kernel_launch(experts_prepare, prepare,
        of.ids, plan.get(), of.n_experts, s.n_pairs, s.n_used, of.ids_stride, experts_item_columns(s), of.ids && s.n_sections == 1,
        of.y, y.get(), s.ncols, s.n_channels_y, of.n_values, of.s11, of.s12, s.y_row_bytes, experts_in_registers<type>() ? s.lanes : 0);

    const int shared_bytes = EXPERTS_WARPS*2*steps*s.slot_bytes;

    const int id = ctx.device;
    static int blocks_per_sm[GGML_CUDA_MAX_DEVICES] = {0};
    static int known_bytes[GGML_CUDA_MAX_DEVICES]   = {0};
    if (known_bytes[id] != shared_bytes) {
        GGML_ASSERT(shared_bytes <= 48*1024);
        CUDA_CHECK(cudaOccupancyMaxActiveBlocksPerMultiprocessor(
            &blocks_per_sm[id], mul_mat_experts<type, has_gate>, EXPERTS_WARPS*WARP_SIZE, shared_bytes));
        known_bytes[id] = shared_bytes;
    }
    const dim3 n_blocks(ggml_cuda_info().devices[id].nsm*std::max(blocks_per_sm[id], 1), 1, 1);
    const dim3 n_threads(WARP_SIZE, EXPERTS_WARPS, 1);
    const ggml_cuda_kernel_launch_params params(n_blocks, n_threads, shared_bytes, ctx.stream());
    ggml_cuda_kernel_launch(mul_mat_experts<type, has_gate>, params,
        of.x, (const char *) y.get(), (const int *) plan.get(), of.fusion, of.dst, s);
}

template <bool has_gate>
static void launch_experts_of(
        const ggml_type type, ggml_backend_cuda_context & ctx, const experts_operands & of, const experts_shape & s) {
#define EXPERTS_CASE(known) case known: launch_experts<known, has_gate>(ctx, of, s); break;
    switch (type) {
        EXPERTS_TYPES(EXPERTS_CASE)
        default:
            GGML_ABORT("fatal error");
    }
#undef EXPERTS_CASE
}

void ggml_cuda_mul_mat_id_grouped(
        ggml_backend_cuda_context & ctx, const ggml_tensor * src0, const ggml_tensor * src1, const ggml_tensor * ids, ggml_tensor * dst,
        const ggml_cuda_mm_fusion_args_host * fusion) {
    if (ids) {
        GGML_ASSERT(ids->type == GGML_TYPE_I32 && ids->nb[0] == sizeof(int32_t));
        GGML_ASSERT(ids->ne[0] == dst->ne[1] && ids->ne[1] == dst->ne[2]);
    } else {
        GGML_ASSERT(src0->ne[2] == 1);
    }
    GGML_ASSERT(src1->ne[0] == src0->ne[0] && src1->ne[2] == dst->ne[2] && dst->ne[0] == src0->ne[1]);

    experts_operands of{};
    if (fusion) {
        GGML_ASSERT(!fusion->x_scale && !fusion->gate_scale);
        for (const ggml_tensor * bias : {fusion->x_bias, fusion->gate_bias}) {
            GGML_ASSERT(!bias || (bias->type == GGML_TYPE_F32 && ggml_is_contiguous(bias)));
            GGML_ASSERT(!bias || (bias->ne[0] == src0->ne[1] && bias->ne[1] == src0->ne[2]));
        }
        GGML_ASSERT(!fusion->gate || (fusion->gate->type == src0->type && ggml_are_same_stride(fusion->gate, src0)));
        of.fusion.x_bias    = fusion->x_bias    ? fusion->x_bias->data    : nullptr;
        of.fusion.gate_bias = fusion->gate_bias ? fusion->gate_bias->data : nullptr;
        of.fusion.gate      = fusion->gate      ? fusion->gate->data      : nullptr;
        of.fusion.glu_op    = fusion->glu_op;
        of.fusion.glu_limit = fusion->glu_limit;
    }

    experts_shape s{};
    s.ncols        = (int) src0->ne[0];
    s.nrows        = (int) src0->ne[1];
    s.n_used       = (int) dst->ne[1];
    s.n_channels_y = (int) src1->ne[1];
    s.row_bytes    = (int) src0->nb[1];
    s.expert_bytes = (int64_t) src0->nb[2];
    s.stride_dst   = (int) dst->ne[0];
    s.n_pairs      = (int) (dst->ne[1]*dst->ne[2]);

    of.x          = (const char *) src0->data;
    of.y          = (const float *) src1->data;
    of.s11        = (int64_t) (src1->nb[1]/sizeof(float));
    of.s12        = (int64_t) (src1->nb[2]/sizeof(float));
    of.ids        = ids ? (const int32_t *) ids->data : nullptr;
    of.ids_stride = ids ? (int) (ids->nb[1]/sizeof(int32_t)) : 0;
    of.n_experts  = (int) src0->ne[2];
    of.n_values   = (int) (src1->ne[0]*src1->ne[1]*src1->ne[2]);
    of.dst        = (float *) dst->data;

    if (of.fusion.gate) {
        launch_experts_of<true>(src0->type, ctx, of, s);
    } else {
        launch_experts_of<false>(src0->type, ctx, of, s);
    }
}

// Columns as tokens of one slot.
static ggml_tensor tokens_of_one_slot(const ggml_tensor * matrix) {
    ggml_tensor tokens = *matrix;
    tokens.ne[1] = 1;
    tokens.ne[2] = matrix->ne[1];
    tokens.nb[2] = matrix->nb[1];
    tokens.nb[3] = matrix->nb[1]*matrix->ne[1];
    return tokens;
}

void ggml_cuda_mul_mat_shared_expert(
        ggml_backend_cuda_context & ctx, const ggml_tensor * src0, const ggml_tensor * src1, ggml_tensor * dst,
        const ggml_cuda_mm_fusion_args_host * fusion) {
    const ggml_tensor y = tokens_of_one_slot(src1);
    ggml_tensor out = tokens_of_one_slot(dst);
    ggml_cuda_mul_mat_id_grouped(ctx, src0, &y, nullptr, &out, fusion);
}

#else

bool ggml_cuda_should_use_mmid_grouped(const ggml_tensor * src0, const ggml_tensor * src1, const ggml_tensor * dst, const int cc) {
    GGML_UNUSED_VARS(src0, src1, dst, cc);
    return false;
}

void ggml_cuda_mul_mat_id_grouped(
        ggml_backend_cuda_context & ctx, const ggml_tensor * src0, const ggml_tensor * src1, const ggml_tensor * ids, ggml_tensor * dst,
        const ggml_cuda_mm_fusion_args_host * fusion) {
    GGML_UNUSED_VARS(ctx, src0, src1, ids, dst, fusion);
    GGML_ABORT("not built");
}

bool ggml_cuda_should_use_shared_expert(const ggml_tensor * src0, const ggml_tensor * src1, const ggml_tensor * dst, const int cc) {
    GGML_UNUSED_VARS(src0, src1, dst, cc);
    return false;
}

void ggml_cuda_mul_mat_shared_expert(
        ggml_backend_cuda_context & ctx, const ggml_tensor * src0, const ggml_tensor * src1, ggml_tensor * dst,
        const ggml_cuda_mm_fusion_args_host * fusion) {
    GGML_UNUSED_VARS(ctx, src0, src1, dst, fusion);
    GGML_ABORT("not built");
}

#endif // !defined(GGML_USE_HIP) && !defined(GGML_USE_MUSA)
