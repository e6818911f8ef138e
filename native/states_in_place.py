"""A delta net's states are computed where they lie.

A state of 35B-A3B has 2 MB for each sequence and layer. llama.cpp gathers the states of a step's sequences into rows of their
own, computes new ones from these into others, and copies them back, though between two steps of the same streams each state
comes from where it goes to. With these changes a step whose states all lie in their places reads them there (the cells of its
sequences are neighbours already, llama.cpp sees to that), and on a processor the operation writes where the copy that follows
would have put its result, as llama.cpp has it on a card: of six passes over the states two are left on a processor, of four two
on a card, and in each of these layers there are two launches fewer.

A graph is built for one or the other and serves no step of the other kind. Steps of several tokens in contexts that can take
tokens back stay with gathered states: after each draft that was not taken whole they come from another place, and the graph
would be built anew each time. Numbers are the same bit by bit.
"""

from __future__ import annotations

from native.source_change import Change

_GRAPH = "src/llama-graph.cpp"
_GRAPH_HEADER = "src/llama-graph.h"
_MEMORY = "src/llama-memory-recurrent.cpp"
_MEMORY_HEADER = "src/llama-memory-recurrent.h"
_CPU = "ggml/src/ggml-cpu/ggml-cpu.c"
_OPS = "ggml/src/ggml-cpu/ops.cpp"
_OPS_HEADER = "ggml/src/ggml-cpu/ops.h"

_READ = (
    Change(
        _MEMORY_HEADER,
        "    int32_t s_copy(int i) const;\n\nprivate:\n",
        "    int32_t s_copy(int i) const;\n\n"
        "    // whether the first n_seqs states of the current ubatch come from where they go to\n"
        "    bool is_in_place(uint32_t n_seqs) const;\n\nprivate:\n",
    ),
    Change(
        _MEMORY,
        "int32_t llama_memory_recurrent_context::s_copy(int i) const {\n",
        """bool llama_memory_recurrent_context::is_in_place(uint32_t n_seqs) const {
    // graphs that are reserved are the larger ones
    if (is_full || n_seqs > mem->n) {
        return false;
    }

    for (uint32_t i = mem->head; i < mem->head + n_seqs; ++i) {
        const auto & cell = mem->cells[i];
        if (cell.src0 != (int32_t) i || cell.seq_id.empty()) {
            return false;
        }
        // unlike s_copy() this forgets nothing
        const llama_seq_id seq = *cell.seq_id.begin();
        if (mem->n_rs_seq > 0 && seq >= 0 && (size_t) seq < mem->rs_idx.size() && mem->rs_idx[seq] != 0) {
            return false;
        }
    }

    return true;
}

int32_t llama_memory_recurrent_context::s_copy(int i) const {
""",
    ),
    Change(
        _GRAPH_HEADER,
        "    // used in view offsets, need to match for valid graph reuse\n    uint32_t head;\n    int32_t rs_z;\n};\n\n"
        "class llm_graph_input_cross_embd",
        "    // used in view offsets, need to match for valid graph reuse\n    uint32_t head;\n    int32_t rs_z;\n\n"
        "    // whether states are read where they lie\n    bool in_place = false;\n};\n\n"
        "class llm_graph_input_cross_embd",
    ),
    Change(
        _GRAPH,
        "void llm_graph_input_rs::set_input(const llama_ubatch * ubatch) {\n",
        """// Whether the states of a step can be read where they lie: in architectures whose one operation reads them, before it
// writes new ones.
static bool rs_in_place(
                        llm_arch arch,
             const llama_cparams & cparams,
              const llama_ubatch & ubatch,
    const llama_memory_recurrent_context * mctx) {
    switch (arch) {
        case LLM_ARCH_QWEN3NEXT:
        case LLM_ARCH_QWEN35:
        case LLM_ARCH_QWEN35MOE:
            break;
        default:
            return false;
    }

    if (ubatch.n_seq_tokens > 1 && cparams.n_rs_seq > 0) {
        return false;
    }

    if (!(ubatch.n_seq_tokens > 1 ? cparams.fused_gdn_ch : cparams.fused_gdn_ar)) {
        return false;
    }

    return mctx->is_in_place(ubatch.n_seqs);
}

void llm_graph_input_rs::set_input(const llama_ubatch * ubatch) {
""",
    ),
    Change(
        _GRAPH,
        """    res &= head == mctx->get_head();
    res &= rs_z == mctx->get_rs_z();

    return res;
}

void llm_graph_input_cross_embd""",
        """    res &= head == mctx->get_head();
    res &= rs_z == mctx->get_rs_z();

    res &= in_place == rs_in_place(params.arch, params.cparams, params.ubatch, mctx);

    return res;
}

void llm_graph_input_cross_embd""",
    ),
    Change(
        _GRAPH,
        "    const llama_memory_recurrent_context * mctx_cur) {\n\n"
        "    auto inp = std::make_unique<llm_graph_input_rs>(mctx_cur);\n",
        "    const llama_memory_recurrent_context * mctx_cur,\n                 llm_arch arch,\n"
        "     const llama_cparams & cparams) {\n\n    auto inp = std::make_unique<llm_graph_input_rs>(mctx_cur);\n",
    ),
    Change(
        _GRAPH,
        "    inp->head = mctx_cur->get_head();\n    inp->rs_z = mctx_cur->get_rs_z();\n",
        "    inp->head = mctx_cur->get_head();\n    inp->rs_z = mctx_cur->get_rs_z();\n\n"
        "    inp->in_place = rs_in_place(arch, cparams, ubatch, mctx_cur);\n",
    ),
    Change(
        _GRAPH,
        """    const auto * kv_state = inp->mctx;

    return build_rs(s, inp->s_copy_main,""",
        """    const auto * kv_state = inp->mctx;

    if (inp->in_place) {
        // {state_size, rs_size} -> {state_size, n_seqs}, as many nodes as gathering them takes
        const llm_graph_get_rows_fn & get_rows_in_place = [inp, n_seqs](ggml_context * ctx, ggml_tensor * states, ggml_tensor *) {
            return ggml_view_2d(ctx, states, states->ne[0], n_seqs, states->nb[1], inp->head*states->nb[1]);
        };

        return build_rs(s, inp->s_copy_main, inp->s_copy_extra, state_size, n_seqs,
                        kv_state->get_n_rs(), kv_state->get_head(), kv_state->get_size(), kv_state->get_rs_z(),
                        get_rows_in_place);
    }

    return build_rs(s, inp->s_copy_main,""",
    ),
)

# The four kinds of inputs with such states; three check the states' part of a graph by themselves.
_SAME = "    res &= inp_rs->rs_z == mctx->get_recr()->get_rs_z();\n"
_SAME_NOW = (
    _SAME
    + "\n    res &= inp_rs->in_place == rs_in_place(params.arch, params.cparams, params.ubatch, mctx->get_recr());\n"
)
_ENDS = (
    "// TODO: Hybrid input classes are a bit redundant.\n",
    "void llm_graph_input_mem_hybrid_iswa::set_input(",
    "void llm_graph_input_sampling::set_input(",
)
_INPUTS = (
    *(
        Change(_GRAPH, f"{_SAME}\n    return res;\n}}\n\n{end}", f"{_SAME_NOW}\n    return res;\n}}\n\n{end}")
        for end in _ENDS
    ),
    Change(
        _GRAPH,
        "    auto inp = build_rs_inp_impl(ctx0, ubatch, mctx_cur);\n",
        "    auto inp = build_rs_inp_impl(ctx0, ubatch, mctx_cur, arch, cparams);\n",
    ),
    Change(
        _GRAPH,
        "    auto inp_rs   = build_rs_inp_impl     (ctx0, ubatch, mctx_cur->get_recr());\n"
        "    auto inp_attn = build_attn_inp_kv_impl(",
        "    auto inp_rs   = build_rs_inp_impl     (ctx0, ubatch, mctx_cur->get_recr(), arch, cparams);\n"
        "    auto inp_attn = build_attn_inp_kv_impl(",
    ),
    Change(
        _GRAPH,
        "    auto inp_rs   = build_rs_inp_impl     (ctx0, ubatch, mctx_cur->get_recr());\n"
        "    auto inp_attn = build_attn_inp_k_impl(",
        "    auto inp_rs   = build_rs_inp_impl     (ctx0, ubatch, mctx_cur->get_recr(), arch, cparams);\n"
        "    auto inp_attn = build_attn_inp_k_impl(",
    ),
    Change(
        _GRAPH,
        "    auto inp_rs = build_rs_inp_impl(ctx0, ubatch, mctx_cur->get_recr());\n",
        "    auto inp_rs = build_rs_inp_impl(ctx0, ubatch, mctx_cur->get_recr(), arch, cparams);\n",
    ),
)

_WRITE = (
    Change(
        _OPS_HEADER,
        "void ggml_compute_forward_gated_delta_net(const struct ggml_compute_params * params, struct ggml_tensor * dst);\n",
        "void ggml_compute_forward_gated_delta_net(const struct ggml_compute_params * params, struct ggml_tensor * dst);\n"
        "void ggml_compute_forward_gated_delta_net_into(const struct ggml_compute_params * params, struct ggml_tensor * dst, "
        "struct ggml_tensor * states);\n",
    ),
    Change(
        _OPS,
        """static void ggml_compute_forward_gated_delta_net_one_chunk(
    const ggml_compute_params * params,
    ggml_tensor * dst,
    int64_t ir0,
""",
        """// states: where new ones are written, [D, n_seqs, K]; NULL: behind the attention scores
static void ggml_compute_forward_gated_delta_net_one_chunk(
    const ggml_compute_params * params,
    ggml_tensor * dst,
    ggml_tensor * states,
    int64_t ir0,
""",
    ),
    Change(
        _OPS,
        """    const int64_t state_size_per_snap = S_v * S_v * H * n_seqs;
    float * attn_out_base  = (float *)dst->data;
    float * state_out_base = (float *)dst->data + attn_score_elems;
""",
        """    const int64_t state_size_per_snap = states ? (int64_t) (states->nb[2] / sizeof(float)) : S_v * S_v * H * n_seqs;
    float * attn_out_base  = (float *)dst->data;
    float * state_out_base = states ? (float *)states->data : (float *)dst->data + attn_score_elems;
""",
    ),
    Change(
        _OPS,
        "        memcpy(s_out, s_in, S_v * S_v * sizeof(float));\n\n        // attn output pointer for first token",
        "        if (s_out != s_in) {\n            memcpy(s_out, s_in, S_v * S_v * sizeof(float));\n        }\n\n"
        "        // attn output pointer for first token",
    ),
    Change(
        _OPS,
        """static void ggml_compute_forward_gated_delta_net_f32(
        const ggml_compute_params * params,
        ggml_tensor * dst) {
""",
        """static void ggml_compute_forward_gated_delta_net_f32(
        const ggml_compute_params * params,
        ggml_tensor * dst,
        ggml_tensor * states) {
""",
    ),
    Change(
        _OPS,
        "        ggml_compute_forward_gated_delta_net_one_chunk(params, dst, ir0, ir1);\n",
        "        ggml_compute_forward_gated_delta_net_one_chunk(params, dst, states, ir0, ir1);\n",
    ),
    Change(
        _OPS,
        """void ggml_compute_forward_gated_delta_net(
        const ggml_compute_params * params,
        ggml_tensor * dst) {
    const ggml_tensor * src0 = dst->src[0];

    switch (src0->type) {
        case GGML_TYPE_F32:
            {
                ggml_compute_forward_gated_delta_net_f32(params, dst);
""",
        """void ggml_compute_forward_gated_delta_net(
        const ggml_compute_params * params,
        ggml_tensor * dst) {
    ggml_compute_forward_gated_delta_net_into(params, dst, nullptr);
}

void ggml_compute_forward_gated_delta_net_into(
        const ggml_compute_params * params,
        ggml_tensor * dst,
        ggml_tensor * states) {
    const ggml_tensor * src0 = dst->src[0];

    switch (src0->type) {
        case GGML_TYPE_F32:
            {
                ggml_compute_forward_gated_delta_net_f32(params, dst, states);
""",
    ),
    Change(
        _CPU,
        """static int ggml_cpu_try_fuse_ops(
        const struct ggml_cgraph * cgraph,
""",
        """// A delta net and the copy of its new states that follows it. *n_skipped: nodes up to the copy. NULL: there is none.
static struct ggml_tensor * ggml_cpu_states_of(const struct ggml_cgraph * cgraph, int node_n, int * n_skipped) {
    const struct ggml_tensor * gdn = cgraph->nodes[node_n];

    if (gdn->type != GGML_TYPE_F32 || (gdn->flags & GGML_TENSOR_FLAG_OUTPUT)) {
        return NULL;
    }

    const struct ggml_tensor * cpy = NULL;
    for (int j = node_n + 1; j < cgraph->n_nodes && cpy == NULL; ++j) {
        if (!ggml_op_is_empty(cgraph->nodes[j]->op)) {
            cpy = cgraph->nodes[j];
            *n_skipped = j - node_n;
        }
    }
    if (cpy == NULL || cpy->op != GGML_OP_CPY || (cpy->flags & GGML_TENSOR_FLAG_OUTPUT) ||
        !(cpy->flags & GGML_TENSOR_FLAG_COMPUTE)) {
        return NULL;
    }

    const struct ggml_tensor * v = gdn->src[2];

    const int64_t n_states = v->ne[0]*v->ne[0]*v->ne[1];
    const int64_t n_scores = v->ne[0]*v->ne[1]*v->ne[2]*v->ne[3];
    const int64_t n_kept   = MIN(v->ne[2], (int64_t) ggml_get_op_params_i32(gdn, 0));

    // all that it writes behind its scores, and nothing else
    const struct ggml_tensor * src = cpy->src[0];
    if (src->op != GGML_OP_VIEW || src->view_src != gdn || src->view_offs != n_scores*sizeof(float) ||
        !ggml_is_contiguous(src) || ggml_nelements(src) != n_states*v->ne[3]*n_kept) {
        return NULL;
    }

    struct ggml_tensor * dst = cpy->src[1];
    if (dst->op != GGML_OP_VIEW || dst->type != GGML_TYPE_F32 || dst->ne[0] != n_states || dst->ne[1] != v->ne[3] ||
        dst->ne[2] != n_kept || dst->ne[3] != 1 || dst->nb[0] != sizeof(float) || dst->nb[1] != n_states*sizeof(float)) {
        return NULL;
    }

    return dst;
}

static int ggml_cpu_try_fuse_ops(
        const struct ggml_cgraph * cgraph,
""",
    ),
    Change(
        _CPU,
        """                ggml_compute_forward_rms_norm_mul_fused(params, node, mul_node);
                return 1;
            }
        }
    }

    return 0;
""",
        """                ggml_compute_forward_rms_norm_mul_fused(params, node, mul_node);
                return 1;
            }
        }
    }

    if (node->op == GGML_OP_GATED_DELTA_NET) {
        int n_skipped = 0;
        struct ggml_tensor * states = ggml_cpu_states_of(cgraph, node_n, &n_skipped);
        if (states != NULL) {
            ggml_compute_forward_gated_delta_net_into(params, node, states);
            return n_skipped;
        }
    }

    return 0;
""",
    ),
)

STATES_IN_PLACE = (*_READ, *_INPUTS, *_WRITE)
