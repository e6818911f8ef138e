"""Gate, up and GLU of an expert that every token has are one product on a card, in steps of 9 to 32 tokens.

Beside its chosen experts a layer of 35B-A3B has one for all tokens, 2048 by 512. With more than 8 tokens llama.cpp quantizes
the activations, multiplies gate and up in tiles of 128 rows (four for each, on 132 SMs), adds up their parts and takes the GLU:
six kernels a layer, each longer to start than to work. The kernels of native/grouped_experts.py take all tokens as those of one
expert, three for each reading of a row out of the card's cache, and have all SMs at work: two kernels.

It is for matrices of up to 1,048,576 weights and the types that those kernels know, on cards from sm_80 on.
GGML_CUDA_SHARED_EXPERT=0 in the engine's environment turns it off. A token's results differ from the tiles' in low bits.

On an H200 that takes 11 to 12 us instead of 27 with 32 tokens in Q4_0, and a step of 32 streams 17.9 ms instead of 18.6. Q6_K
gains nothing.
"""

from __future__ import annotations

from native.source_change import Change

SHARED_EXPERT = (
    Change(
        "ggml/src/ggml-cuda/ggml-cuda.cu",
        """            const ggml_tensor * ids  = up->src[2];

            if (ggml_cuda_should_fuse_mul_mat_vec_f(up)) {
""",
        """            const ggml_tensor * ids  = up->src[2];

            if (op == GGML_OP_MUL_MAT &&
                    ggml_cuda_should_use_shared_expert(src0, src1, glu, ggml_cuda_info().devices[cuda_ctx->device].cc)) {
                ggml_cuda_mm_fusion_args_host fusion_data{};
                fusion_data.gate      = gate->src[0];
                fusion_data.glu_op    = ggml_get_glu_op(glu);
                fusion_data.glu_limit = ggml_get_op_params_f32(glu, 3);

                ggml_cuda_mul_mat_shared_expert(*cuda_ctx, src0, src1, glu, &fusion_data);
                fused_mul_mat_vec = true;
                fused_node_count  = 3;
                break;
            }

            if (ggml_cuda_should_fuse_mul_mat_vec_f(up)) {
""",
    ),
)
