"""A step's mask is written over that of the step before, by what has changed.

llama.cpp writes a mask anew for every step: of 32 rows over 262,656 cells 16.8 MB on one thread, then copies all of it to the
card. Between two steps of the same streams each row sees one cell more. With these changes the cells of a cache keep a journal
of which of them came, went or changed (native/masks/llama-kv-journal.h), a mask remembers whose rows it holds, where they stand
and up to which place of the journal (llama-kv-mask.h), and while the graph serves another step only cells noted behind that
place, and those between a row's old position and its new one, are looked at. What they changed are a few pieces of neighbouring
cells. A card gets the whole mask, as before. With GGML_SCHED_PIECES in the engine's environment it gets these pieces alone, for
all rows at once; that has run with a second processor in the card's place, and on no card yet.

What a mask holds can be trusted only where nobody else writes: ggml hands an input's memory to later tensors of the same graph
once its last reader is done, and the memory of its copy on a device to earlier ones as well, unless a tensor is input and
output. With these changes a mask and its copy are. A graph that is built or placed anew has tensors without a record, one whose
computing failed serves no other step, and rows of other sequences, a reset or more changes than the journal holds mean that the
mask is written as a whole, as before. So are masks with a window or alibi, of caches that are not shared, and of architectures
outside native/cell_window.py's list.

Why not a mask that the card makes from positions and sequences: it would need an operation of its own on each backend, and every
layer's search and kernel read the mask as it is; the bytes of a few cells cost less than its launch.
"""

from __future__ import annotations

from pathlib import Path

from native.source_change import Change

_SOURCES = Path(__file__).resolve().parent / "masks"
_CELLS = "src/llama-kv-cells.h"
_CACHE = "src/llama-kv-cache.cpp"
_CACHE_HEADER = "src/llama-kv-cache.h"
_CONTEXT = "src/llama-context.cpp"
_SCHEDULER = "ggml/src/ggml-backend.cpp"

_FILES = tuple(
    Change(f"src/{name}", "", (_SOURCES / name).read_text(encoding="utf-8"))
    for name in ("llama-kv-journal.h", "llama-kv-mask.h")
)

# All that changes what a cell is passes one of these.
_JOURNAL = (
    Change(_CELLS, '#include "llama.h"\n', '#include "llama.h"\n#include "llama-kv-journal.h"\n'),
    Change(
        _CELLS,
        "    using seq_set_t = std::bitset<LLAMA_MAX_SEQ>;\n",
        "    using seq_set_t = std::bitset<LLAMA_MAX_SEQ>;\n\n"
        "    // for those who remember what they made of the cells\n    llama_kv_journal journal;\n",
    ),
    Change(
        _CELLS,
        "        has_shift = false;\n\n        used.clear();\n",
        "        has_shift = false;\n\n        journal.note_all();\n\n        used.clear();\n",
    ),
    Change(
        _CELLS,
        "        assert(i < ext.size());\n        ext[i] = p;\n",
        "        assert(i < ext.size());\n        ext[i] = p;\n        journal.note(i);\n",
    ),
    Change(
        _CELLS,
        "    void seq_pos_dec(llama_seq_id s, uint32_t i) {\n",
        "    void seq_pos_dec(llama_seq_id s, uint32_t i) {\n        journal.note(i);\n",
    ),
    Change(
        _CELLS,
        "    void seq_pos_inc(llama_seq_id s, uint32_t i) {\n",
        "    void seq_pos_inc(llama_seq_id s, uint32_t i) {\n        journal.note(i);\n",
    ),
)

# Which masks keep their memory, native/cell_window.py says. Their op params: [0] the first cell, [1] the number of the record,
# [2] 0 if all was written, else how many pieces were, plus one, [3...] first cell and count of each, within the mask.
_MASK = (
    Change(
        _CACHE_HEADER,
        '#include "llama-kv-cells.h"\n',
        '#include "llama-kv-cells.h"\n#include "llama-kv-mask.h"\n',
    ),
    Change(
        _CACHE_HEADER,
        """    void set_input_kq_mask   (ggml_tensor * dst, const llama_ubatch * ubatch, bool causal_attn) const;
    void set_input_pos_bucket(ggml_tensor * dst, const llama_ubatch * ubatch) const;

    void set_input_k_rot(ggml_tensor * dst) const;
    void set_input_v_rot(ggml_tensor * dst) const;

    // true if""",
        """    void set_input_kq_mask   (ggml_tensor * dst, const llama_ubatch * ubatch, bool causal_attn) const;
    void set_input_pos_bucket(ggml_tensor * dst, const llama_ubatch * ubatch) const;

    // whether masks of this cache may be written over the ones before
    bool follows_kq_mask() const;

    void set_input_k_rot(ggml_tensor * dst) const;
    void set_input_v_rot(ggml_tensor * dst) const;

    // true if""",
    ),
    Change(
        _CACHE_HEADER,
        """    llama_kv_cells_vec & v_cells;

""",
        """    llama_kv_cells_vec & v_cells;

    // what the masks of the last graph hold; a mask's tensor names its record, and one that is new names none
    struct mask_record {
        int32_t id = 0;

        llama_kv_mask mask;
    };

    mutable mask_record                    last_mask;
    mutable std::vector<llama_kv_mask_row> mask_rows;

    // false: the mask has to be written as a whole, and is taken to be
    bool follow_kq_mask(ggml_tensor * dst, const llama_ubatch * ubatch, bool causal_attn) const;

""",
    ),
    Change(
        _CACHE,
        """void llama_kv_cache::set_input_kq_mask(ggml_tensor * dst, const llama_ubatch * ubatch, bool causal_attn) const {
""",
        """bool llama_kv_cache::follows_kq_mask() const {
    return reads_plain_mask(model.arch) && n_stream == 1 && swa_type == LLAMA_SWA_TYPE_NONE && !hparams.use_alibi;
}

bool llama_kv_cache::follow_kq_mask(ggml_tensor * dst, const llama_ubatch * ubatch, bool causal_attn) const {
    // else its memory is given to others while the graph is computed
    if (!(dst->flags & GGML_TENSOR_FLAG_OUTPUT) || !follows_kq_mask()) {
        return false;
    }

    auto & mask = last_mask.mask;

    const bool is_2d = ubatch->is_pos_2d();

    mask_rows.resize(ubatch->n_tokens);
    for (uint32_t i = 0; i < ubatch->n_tokens; ++i) {
        mask_rows[i] = {
            ubatch->seq_id[i][0],
            ubatch->pos[i],
            is_2d ? ubatch->pos[i + ubatch->n_tokens*2] : 0,
            is_2d ? ubatch->pos[i + ubatch->n_tokens]   : 0,
        };
    }

    bool res = dst->op_params[1] != 0 && dst->op_params[1] == last_mask.id &&
        mask.first_kv == (uint32_t) dst->op_params[0] && mask.n_kv == (uint32_t) dst->ne[0] &&
        mask.causal == causal_attn && mask.is_2d == is_2d;

    if (res && dst->type == GGML_TYPE_F16) {
        res = mask.follow(v_cells[0], mask_rows,
            llama_cast<ggml_fp16_t>(0.0f), llama_cast<ggml_fp16_t>(-INFINITY), (ggml_fp16_t *) dst->data);
    } else if (res) {
        res = mask.follow(v_cells[0], mask_rows, 0.0f, -INFINITY, (float *) dst->data);
    }

    if (res) {
        const auto & pieces = mask.get_pieces();
        static_assert(3 + 2*llama_kv_mask::MAX_PIECES <= GGML_MAX_OP_PARAMS/sizeof(int32_t));

        dst->op_params[2] = 1 + (int32_t) pieces.size();
        for (size_t k = 0; k < pieces.size(); ++k) {
            dst->op_params[3 + 2*k] = pieces[k].first;
            dst->op_params[4 + 2*k] = pieces[k].count;
        }

        return true;
    }

    mask.first_kv = dst->op_params[0];
    mask.n_kv     = dst->ne[0];
    mask.causal   = causal_attn;
    mask.is_2d    = is_2d;
    mask.written(v_cells[0], mask_rows);

    last_mask.id = last_mask.id == std::numeric_limits<int32_t>::max() ? 1 : last_mask.id + 1;

    dst->op_params[1] = last_mask.id;
    dst->op_params[2] = 0;

    return false;
}

void llama_kv_cache::set_input_kq_mask(ggml_tensor * dst, const llama_ubatch * ubatch, bool causal_attn) const {
""",
    ),
    Change(
        _CACHE,
        """    //const int64_t t_start = ggml_time_us();

    const args_set_input_kq_mask args = {
""",
        """    if (follow_kq_mask(dst, ubatch, causal_attn)) {
        return;
    }

    //const int64_t t_start = ggml_time_us();

    const args_set_input_kq_mask args = {
""",
    ),
)

# What a failed graph's inputs hold on a device, nobody knows.
_FAILED = (
    Change(
        _CONTEXT,
        """        LLAMA_LOG_ERROR("%s: failed to compute graph, compute status: %d\\n", __func__, status);
        ret = status;
""",
        """        LLAMA_LOG_ERROR("%s: failed to compute graph, compute status: %d\\n", __func__, status);
        gf_res_prev_active = nullptr;
        ret = status;
""",
    ),
)

_COPIES = (
    Change(
        _SCHEDULER,
        "struct ggml_backend_sched_split {\n",
        """// whether a copy on a device gets the pieces of its input that have changed, and nothing else
static bool ggml_backend_sched_keeps_copies(void) {
    static const bool res = getenv("GGML_SCHED_PIECES") != NULL;
    return res;
}

struct ggml_backend_sched_split {
""",
    ),
    Change(
        _SCHEDULER,
        """static enum ggml_status ggml_backend_sched_compute_splits(ggml_backend_sched_t sched) {
""",
        """// Copies what was written of an input that is kept from one run of the graph to the next: its op_params[2] is
// 1 + the number of pieces, pairs of first element and count in each row follow. A copy that waits costs as much
// as 64 KB and more: all is copied where pieces are no cheaper.
static bool ggml_backend_sched_copy_pieces(const struct ggml_tensor * input, struct ggml_tensor * input_cpy) {
    if (!ggml_backend_sched_keeps_copies()) {
        return false;
    }
    const int32_t n_pieces = input->op_params[2] - 1;
    if (input->op != GGML_OP_NONE || !(input->flags & GGML_TENSOR_FLAG_OUTPUT) || n_pieces < 0) {
        return false;
    }
    if (!ggml_backend_buffer_is_host(input->buffer) || input_cpy->buffer->iface.set_tensor_2d == NULL ||
        ggml_nbytes(input) < (size_t) n_pieces*64*1024) {
        return false;
    }
    for (int32_t k = 0; k < n_pieces; k++) {
        const size_t offset = input->op_params[3 + 2*k]*input->nb[0];
        ggml_backend_tensor_set_2d(input_cpy, (const char *) input->data + offset, offset, input->op_params[4 + 2*k]*input->nb[0],
            input->ne[1], input_cpy->nb[1], input->nb[1]);
    }
    return true;
}

static enum ggml_status ggml_backend_sched_compute_splits(ggml_backend_sched_t sched) {
""",
    ),
    Change(
        _SCHEDULER,
        """                ggml_backend_tensor_copy(input, input_cpy);
            } else {
                // wait for the split backend to finish using the input before overwriting it
""",
        """                if (!ggml_backend_sched_copy_pieces(input, input_cpy)) {
                    ggml_backend_tensor_copy(input, input_cpy);
                }
            } else {
                // wait for the split backend to finish using the input before overwriting it
""",
    ),
    Change(
        _SCHEDULER,
        """                            if (sched->n_copies > 1) {
                                ggml_set_input(tensor_copy);
""",
        """                            // what is kept of an input is kept of its copy: no split before or behind has its memory
                            const bool is_kept = ggml_backend_sched_keeps_copies() &&
                                (src->flags & GGML_TENSOR_FLAG_INPUT) && (src->flags & GGML_TENSOR_FLAG_OUTPUT);
                            if (sched->n_copies > 1 || is_kept) {
                                ggml_set_input(tensor_copy);
""",
    ),
)

FOLLOWED_MASKS = (*_FILES, *_JOURNAL, *_MASK, *_FAILED, *_COPIES)
