#pragma once

#include "common.cuh"

// Whether an operation of the k largest numbers takes the kernels of top-k-rows-kernels.cuh.
bool ggml_cuda_should_use_top_k_rows(const ggml_tensor * dst);

// Indices of the k largest numbers of each row, the largest first, of equal ones the first column first. -0 equals 0, and a NaN is
// larger than infinity.
void ggml_cuda_op_top_k_rows(ggml_backend_cuda_context & ctx, ggml_tensor * dst);

// Computes the node and what follows it, as long as that is the same of other rows or numbers taken by such indices, together.
// Returns how many nodes behind the first are done; 0: nothing is.
int ggml_cuda_top_k_run(ggml_backend_cuda_context & ctx, const ggml_cgraph * cgraph, int first);
