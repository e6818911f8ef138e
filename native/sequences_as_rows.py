"""Rows of several sequences are multiplied with a weight as one matrix.

A delta net's output comes as rows of each sequence (4,096 x 1 x 32 in a step of 32 streams of 35B-A3B), and llama.cpp
multiplies it with `ssm_out` in that shape: a product of one row for each sequence, which reads the weights as often as there
are sequences. On an H200 that took 64 us in each of 30 layers, 1.9 of a step's 17.9 ms. The same rows side by side are one
product of 32, which reads them once, and the step took 16.3 ms.
"""

from __future__ import annotations

from native.source_change import Change

_GRAPH = "src/llama-graph.cpp"

SEQUENCES_AS_ROWS = (
    Change(
        _GRAPH,
        """          ggml_tensor * w,
          ggml_tensor * cur,
          ggml_tensor * w_s) const {
    ggml_tensor * res = ggml_mul_mat(ctx0, w, cur);

    if (prec_policy) {
""",
        """          ggml_tensor * w,
          ggml_tensor * cur,
          ggml_tensor * w_s) const {
    const ggml_tensor * of_sequences = cur;
    const bool is_flat = ggml_is_matrix(cur) || !ggml_is_matrix(w) || !ggml_is_contiguous(cur);
    if (!is_flat) {
        cur = ggml_reshape_2d(ctx0, cur, cur->ne[0], ggml_nrows(cur));
    }
    ggml_tensor * res = ggml_mul_mat(ctx0, w, cur);

    if (prec_policy) {
""",
    ),
    Change(
        _GRAPH,
        """        ab_cur = ggml_scale(ctx0, ab_cur, scale);
        res = ggml_add(ctx0, res, ab_cur);
    }

    return res;
}

ggml_tensor * llm_graph_context::build_lora_mm_id(
""",
        """        ab_cur = ggml_scale(ctx0, ab_cur, scale);
        res = ggml_add(ctx0, res, ab_cur);
    }

    if (!is_flat) {
        res = ggml_reshape_4d(ctx0, res, res->ne[0], of_sequences->ne[1], of_sequences->ne[2], of_sequences->ne[3]);
    }
    return res;
}

ggml_tensor * llm_graph_context::build_lora_mm_id(
""",
    ),
)
