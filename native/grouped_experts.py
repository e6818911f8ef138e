"""Experts on a card in steps of few tokens: an expert's weights are read once for all tokens that chose it.

With more than 8 tokens llama.cpp multiplies a mixture of experts in tiles for tensor cores, as wide as the step has tokens.
Streams with different prompts wake different experts: of 32 tokens with 8 of 256 experts each, 163 experts get one to three.
The tiles are almost empty, and their loads do not fill the card's memory. Two kernels do it here instead
(native/cuda/mmid-grouped-kernels.cuh):

* One quantizes each token's activations once and sorts the (token, slot) pairs by expert; nothing goes to the host, so graphs
  of the card record it.
* The other's warps share the rows of all chosen experts evenly, by what reading them and multiplying their tokens costs. Each
  copies its rows into shared memory a stage ahead (4.6 KB of Q4_0, 16 warps on an SM: 74 KB under way, of which an H200 needs
  about 40) and multiplies them with up to three tokens' activations that stay in its registers, or with all tokens by threes:
  they share one reading (of rows of up to 2048 weights; of longer ones up to three do). Experts without tokens cost nothing.

Gate, up and the GLU between them become one, and biases are added, as in steps of up to 8 tokens. Q4_0, Q8_0 and Q4_K have
products of their own, with words of 16 bytes instead of the 2 that MMVQ loads at a time; the other types take MMVQ's. A token's
results have the same bits whatever else is in the step; they are not those of the other kernels, as between sizes of batches.

It is for steps of 9 tokens or more with up to 8 for each expert on average, on cards from sm_80 on; of types that take MMVQ's
products for rows of 1,024 weights and more, with up to 2. GGML_CUDA_MMID_GROUPED=MEAN or MEAN,FEWEST in the engine's
environment are other limits for all of them, on older cards too; 0 turns it off.

On an H200 all of tests/native/experts_on_card.cpp's cases agreed. A layer of Qwen 3.6 35B-A3B, Q4_0: 0.11 ms instead of 0.41 in
a step of 32 tokens (2.6 TB/s), 0.07 instead of 0.18 in one of 16, 0.32 instead of 1.09 in one of 128. A step of 32 streams took
17.9 ms instead of 25.9, 7.2 of them here, and 5.0 since a warp's share follows what an item costs: by items alone those with
three tokens kept their warps twice as long.
"""

from __future__ import annotations

from pathlib import Path

from native.source_change import Change

_SOURCES = Path(__file__).resolve().parent / "cuda"
_CUDA = "ggml/src/ggml-cuda"
_BACKEND = f"{_CUDA}/ggml-cuda.cu"
_MMVQ = f"{_CUDA}/mmvq.cu"

_FILES = tuple(
    Change(f"{_CUDA}/{name}", "", (_SOURCES / name).read_text(encoding="utf-8"))
    for name in (
        "mmid-grouped.cuh",
        "mmid-grouped-plan.cuh",
        "mmid-grouped-weights.cuh",
        "mmid-grouped-kernels.cuh",
        "mmid-grouped.cu",
    )
)

GROUPED_EXPERTS = (
    *_FILES,
    Change(
        _BACKEND,
        """#include "ggml-cuda/mmvq.cuh"
""",
        """#include "ggml-cuda/mmid-grouped.cuh"
#include "ggml-cuda/mmvq.cuh"
""",
    ),
    # What can be fused: with enough tokens also more than MMVQ takes.
    Change(
        _BACKEND,
        """    if (tensor->op == GGML_OP_MUL_MAT_ID && dst->ne[2] > get_mmvq_mmid_max_batch(src0->type, cc)) {
        return false;
    }
""",
        """    if (tensor->op == GGML_OP_MUL_MAT_ID && dst->ne[2] > get_mmvq_mmid_max_batch(src0->type, cc) &&
            !ggml_cuda_should_use_mmid_grouped(src0, src1, dst, cc)) {
        return false;
    }
""",
    ),
    Change(
        _BACKEND,
        """    if (src1->type != GGML_TYPE_F32 || dst->type != GGML_TYPE_F32) {
        return true;
    }

    if (dst->ne[2] <= MMVQ_MAX_BATCH_SIZE) {
""",
        """    if (src1->type != GGML_TYPE_F32 || dst->type != GGML_TYPE_F32) {
        return true;
    }

    if (ggml_cuda_should_use_mmid_grouped(src0, src1, dst, cc)) {
        return false;
    }

    if (dst->ne[2] <= MMVQ_MAX_BATCH_SIZE) {
""",
    ),
    Change(
        _BACKEND,
        """    // [TAG_MUL_MAT_ID_CUDA_GRAPHS]
    if (src1->type == GGML_TYPE_F32 && dst->type == GGML_TYPE_F32) {
        static_assert(MMVQ_MAX_BATCH_SIZE == MMVF_MAX_BATCH_SIZE);
""",
        """    // [TAG_MUL_MAT_ID_CUDA_GRAPHS]
    if (ggml_cuda_should_use_mmid_grouped(src0, src1, dst, cc)) {
        ggml_cuda_mul_mat_id_grouped(ctx, src0, src1, ids, dst);
        return;
    }

    if (src1->type == GGML_TYPE_F32 && dst->type == GGML_TYPE_F32) {
        static_assert(MMVQ_MAX_BATCH_SIZE == MMVF_MAX_BATCH_SIZE);
""",
    ),
    # All fused products come here.
    Change(
        _MMVQ,
        """#include "mmvq.cuh"
#include "quantize.cuh"
""",
        """#include "mmvq.cuh"
#include "mmid-grouped.cuh"
#include "quantize.cuh"
""",
    ),
    Change(
        _MMVQ,
        """        const ggml_cuda_mm_fusion_args_host * fusion) {
    GGML_ASSERT(        src1->type == GGML_TYPE_F32);
    GGML_ASSERT(        dst->type  == GGML_TYPE_F32);
    GGML_ASSERT(!ids || ids->type  == GGML_TYPE_I32); // Optional, used for batched GGML_MUL_MAT_ID.

    GGML_TENSOR_BINARY_OP_LOCALS;

    cudaStream_t stream = ctx.stream();

    const size_t ts_src0 = ggml_type_size(src0->type);
""",
        """        const ggml_cuda_mm_fusion_args_host * fusion) {
    GGML_ASSERT(        src1->type == GGML_TYPE_F32);
    GGML_ASSERT(        dst->type  == GGML_TYPE_F32);
    GGML_ASSERT(!ids || ids->type  == GGML_TYPE_I32); // Optional, used for batched GGML_MUL_MAT_ID.

    if (ids && ggml_cuda_should_use_mmid_grouped(src0, src1, dst, ggml_cuda_info().devices[ggml_cuda_get_device()].cc)) {
        ggml_cuda_mul_mat_id_grouped(ctx, src0, src1, ids, dst, fusion);
        return;
    }

    GGML_TENSOR_BINARY_OP_LOCALS;

    cudaStream_t stream = ctx.stream();

    const size_t ts_src0 = ggml_type_size(src0->type);
""",
    ),
)
