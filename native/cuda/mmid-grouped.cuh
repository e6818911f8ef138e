// MUL_MAT_ID of few tokens for each expert: an expert's weights are read once for all tokens that chose it.

#pragma once

#include "common.cuh"

// Whether the product takes this way. `dst` is the product's node or one that is fused into it: of the same tokens and slots.
// What depends on it (the product, its fusions, whether it needs the host) asks here.
bool ggml_cuda_should_use_mmid_grouped(const ggml_tensor * src0, const ggml_tensor * src1, const ggml_tensor * dst, int cc);

void ggml_cuda_mul_mat_id_grouped(
    ggml_backend_cuda_context & ctx, const ggml_tensor * src0, const ggml_tensor * src1, const ggml_tensor * ids, ggml_tensor * dst,
    const ggml_cuda_mm_fusion_args_host * fusion = nullptr);

// The same for the one expert of all tokens: MUL_MAT of 9 to 32 columns with a gate of the same shape, where `dst` is the GLU's node.
bool ggml_cuda_should_use_shared_expert(const ggml_tensor * src0, const ggml_tensor * src1, const ggml_tensor * dst, int cc);

void ggml_cuda_mul_mat_shared_expert(
    ggml_backend_cuda_context & ctx, const ggml_tensor * src0, const ggml_tensor * src1, ggml_tensor * dst,
    const ggml_cuda_mm_fusion_args_host * fusion);
