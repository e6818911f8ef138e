"""A step's attention looks at the span of its own sequences' cells: what our builds change of llama.cpp's unified cache.

There every row of attention reads the cells of all sequences, up to the last one in use, and a mask hides what is not the row's
own. Eight prompts of 8,192 tokens read 65,536 cells each, and a mask of 512 rows by 65,536 cells (64 MB) is written, sent to the
card and read again by every layer; a step of 32 streams looked at 8.4 million cells to write its mask. With these changes the
graph's view of keys and values starts at the first cell that the step's sequences hold and ends behind their last, and a mask is
written from one pass over those cells (native/cell_mask.py), or from what has changed (native/followed_masks.py). The span of a
sequence grows with its cells and is forgotten with its last one: a beginning that is shared from far away makes it wide, which
is slower and never wrong.
"""

from __future__ import annotations

from native.cell_mask import CELL_MASK
from native.followed_masks import FOLLOWED_MASKS
from native.source_change import Change

_CELLS = "src/llama-kv-cells.h"
_CACHE = "src/llama-kv-cache.cpp"
_CACHE_HEADER = "src/llama-kv-cache.h"
_GRAPH = "src/llama-graph.cpp"

# Where a sequence's cells lie. seq_pos_inc and seq_pos_dec keep it (native/state_cells.py, which changes them anyway).
_BOUNDS = (
    Change(_CELLS, "#include <bitset>\n", "#include <algorithm>\n#include <array>\n#include <bitset>\n"),
    Change(
        _CELLS,
        """            seq_pos[s].clear();
        }
    }

    void reset_shift() {
""",
        """            seq_pos[s].clear();
            seq_bounds[s] = {};
        }
    }

    void reset_shift() {
""",
    ),
    Change(
        _CELLS,
        """    // the full set of sequences this cell is visible to
""",
        """    // the cells of a sequence lie in [first, end); wider than they are, it may be, until it has none
    struct bounds {
        uint32_t first = std::numeric_limits<uint32_t>::max();
        uint32_t end   = 0;
    };

    const bounds & seq_bounds_get(llama_seq_id seq_id) const {
        assert(seq_id >= 0);
        assert(seq_id < LLAMA_MAX_SEQ);

        return seq_bounds[seq_id];
    }

    // the full set of sequences this cell is visible to
""",
    ),
    Change(
        _CELLS,
        """    std::set<std::pair<llama_pos, uint32_t>> seq_pos[LLAMA_MAX_SEQ];
""",
        """    llama_kv_row seq_pos[LLAMA_MAX_SEQ];

    std::array<bounds, LLAMA_MAX_SEQ> seq_bounds;
""",
    ),
)

# The view of a step. Only architectures take part whose graphs read cells through the plain mask and nothing else.
_VIEW = (
    Change(
        _CACHE_HEADER,
        """    uint32_t get_n_kv(const slot_info & sinfo) const;

    // get views of the current state of the cache
    ggml_tensor * get_k(ggml_context * ctx, int32_t il, uint32_t n_kv, const slot_info & sinfo) const;
    ggml_tensor * get_v(ggml_context * ctx, int32_t il, uint32_t n_kv, const slot_info & sinfo) const;
""",
        """    uint32_t get_n_kv(const slot_info & sinfo) const;

    // the first cell that the sequences of the ubatch need; shortens n_kv to what they need from there on
    uint32_t get_first_kv(const slot_info & sinfo, const llama_ubatch & ubatch, int32_t & n_kv) const;

    // get views of the current state of the cache
    ggml_tensor * get_k(ggml_context * ctx, int32_t il, uint32_t n_kv, const slot_info & sinfo, uint32_t first_kv = 0) const;
    ggml_tensor * get_v(ggml_context * ctx, int32_t il, uint32_t n_kv, const slot_info & sinfo, uint32_t first_kv = 0) const;
""",
    ),
    Change(
        _CACHE_HEADER,
        """    uint32_t get_n_kv() const;
""",
        """    uint32_t get_n_kv() const;
    uint32_t get_first_kv() const;

    // whether a mask may be written over the one before (native/followed_masks.py)
    bool follows_kq_mask() const;
""",
    ),
    Change(
        _CACHE_HEADER,
        """    int32_t n_kv;
};
""",
        """    int32_t n_kv;

    // the cell that those n_kv start at
    uint32_t first_kv = 0;
};
""",
    ),
    Change(
        _CACHE,
        """ggml_tensor * llama_kv_cache::get_k(ggml_context * ctx, int32_t il, uint32_t n_kv, const slot_info & sinfo) const {
""",
        """// whether graphs of the architecture read cells through the plain mask and nothing else
static bool reads_plain_mask(llm_arch arch) {
    switch (arch) {
        case LLM_ARCH_LLAMA:
        case LLM_ARCH_QWEN2:
        case LLM_ARCH_QWEN2MOE:
        case LLM_ARCH_QWEN3:
        case LLM_ARCH_QWEN3MOE:
        case LLM_ARCH_QWEN3NEXT:
        case LLM_ARCH_QWEN35:
        case LLM_ARCH_QWEN35MOE:
        case LLM_ARCH_GEMMA2:
        case LLM_ARCH_GEMMA3:
            return true;
        default:
            return false;
    }
}

uint32_t llama_kv_cache::get_first_kv(const slot_info & sinfo, const llama_ubatch & ubatch, int32_t & n_kv) const {
    if (!reads_plain_mask(model.arch) || n_stream != 1 || sinfo.n_stream() != 1) {
        return 0;
    }

    const auto & cells = v_cells[sinfo.strm[0]];

    uint32_t first = std::numeric_limits<uint32_t>::max();
    uint32_t end   = 0;
    for (uint32_t i = 0; i < ubatch.n_tokens; ++i) {
        const auto & bounds = cells.seq_bounds_get(ubatch.seq_id[i][0]);

        first = std::min(first, bounds.first);
        end   = std::max(end,   bounds.end);
    }
    if (first >= end) {
        return 0;
    }

    // padded as get_n_kv pads; wide ones by up to 1/32 of them: 32 streams fill 256 cells in 8 steps, and each time the graph is
    // built and the mask written as a whole
    uint32_t n_pad_cur = std::max(n_pad, 256u);
    while (n_pad_cur < 2048 && end - first >= 64*n_pad_cur) {
        n_pad_cur *= 2;
    }

    first -= first % n_pad_cur;
    end    = std::min<uint32_t>(cells.size(), GGML_PAD(end, n_pad_cur));
    n_kv   = end - first;

    return first;
}

ggml_tensor * llama_kv_cache::get_k(
        ggml_context * ctx, int32_t il, uint32_t n_kv, const slot_info & sinfo, uint32_t first_kv) const {
""",
    ),
    Change(
        _CACHE,
        """            ggml_row_size(k->type, n_embd_k_gqa*kv_size)*sinfo.s0);
}

ggml_tensor * llama_kv_cache::get_v(ggml_context * ctx, int32_t il, uint32_t n_kv, const slot_info & sinfo) const {
""",
        """            ggml_row_size(k->type, n_embd_k_gqa*kv_size)*sinfo.s0 + ggml_row_size(k->type, n_embd_k_gqa)*first_kv);
}

ggml_tensor * llama_kv_cache::get_v(
        ggml_context * ctx, int32_t il, uint32_t n_kv, const slot_info & sinfo, uint32_t first_kv) const {
""",
    ),
    Change(
        _CACHE,
        """                ggml_row_size(v->type, n_embd_v_gqa*kv_size)*sinfo.s0);
    }
""",
        """                ggml_row_size(v->type, n_embd_v_gqa*kv_size)*sinfo.s0 + ggml_row_size(v->type, n_embd_v_gqa)*first_kv);
    }
""",
    ),
    Change(
        _CACHE,
        """            ggml_row_size(v->type, kv_size*n_embd_v_gqa)*sinfo.s0);
}
""",
        """            ggml_row_size(v->type, kv_size*n_embd_v_gqa)*sinfo.s0 + ggml_row_size(v->type, first_kv));
}
""",
    ),
    Change(
        _CACHE,
        """    n_kv = kv->get_n_kv(sinfos[i_cur]);
""",
        """    n_kv     = kv->get_n_kv(sinfos[i_cur]);
    first_kv = kv->get_first_kv(sinfos[i_cur], ubatches[i_cur], n_kv);
""",
    ),
    Change(
        _CACHE,
        """uint32_t llama_kv_cache_context::get_n_kv() const {
    return n_kv;
}
""",
        """uint32_t llama_kv_cache_context::get_n_kv() const {
    return n_kv;
}

uint32_t llama_kv_cache_context::get_first_kv() const {
    return first_kv;
}

bool llama_kv_cache_context::follows_kq_mask() const {
    return kv->follows_kq_mask();
}
""",
    ),
    Change(
        _CACHE,
        """    return kv->get_k(ctx, il, n_kv, sinfos[i_cur]);
""",
        """    return kv->get_k(ctx, il, n_kv, sinfos[i_cur], first_kv);
""",
    ),
    Change(
        _CACHE,
        """    return kv->get_v(ctx, il, n_kv, sinfos[i_cur]);
""",
        """    return kv->get_v(ctx, il, n_kv, sinfos[i_cur], first_kv);
""",
    ),
    # The mask's tensor carries the cell that it starts at: whoever fills it reads it there, and a graph serves another step only
    # if both start alike.
    Change(
        _GRAPH,
        """    ggml_set_name(res, "attn_inp_kq_mask");

    return res;
}

static bool can_reuse_kq_mask(
        ggml_tensor * kq_mask,
        const llama_kv_cache_context * mctx,
        const llama_ubatch & ubatch,
        const llama_cparams & cparams) {
    const auto n_kv     = mctx->get_n_kv();
    const auto n_tokens = ubatch.n_tokens;
    const auto n_stream = cparams.kv_unified ? 1 : ubatch.n_seqs_unq;

    bool res = true;

""",
        """    ggml_set_name(res, "attn_inp_kq_mask");

    res->op_params[0] = (int32_t) mctx->get_first_kv();

    // An output keeps its memory, for masks that are written over the ones before. Of all graphs: where tensors lie is laid out
    // for the largest one, and holds for those that fit.
    if (mctx->follows_kq_mask()) {
        ggml_set_output(res);
    }

    return res;
}

static bool can_reuse_kq_mask(
        ggml_tensor * kq_mask,
        const llama_kv_cache_context * mctx,
        const llama_ubatch & ubatch,
        const llama_cparams & cparams) {
    const auto n_kv     = mctx->get_n_kv();
    const auto n_tokens = ubatch.n_tokens;
    const auto n_stream = cparams.kv_unified ? 1 : ubatch.n_seqs_unq;

    bool res = true;

    res &= (kq_mask->op_params[0] == (int32_t) mctx->get_first_kv());
""",
    ),
)

CELL_WINDOW = _BOUNDS + _VIEW + CELL_MASK + FOLLOWED_MASKS
