"""A range of a sequence's positions leaves without a scratch sequence, and one is appended to what a sequence holds already.

llama.cpp writes whole sequences and reads them in place of what the sequence held. Ranges therefore pass through a scratch
sequence that is made to share the cells and then emptied: for each cell two changes of ordered trees on the way out and four on
the way in, and three walks over all cells of the cache for each block. With these changes a range is looked up among the cells
of its sequence, which stay as they are, and appended ones join them once. The bytes are those of the scratch way but for the
sequence's number, and cells are chosen as before.

Three functions are added, whose names tell a library that has them: llama_state_seq_get_range, llama_state_seq_append, and
llama_state_seq_wipe, which empties a sequence whose state turned out to be damaged once it was in: rows that no sequence holds
are read all the same, behind a mask or as the state before a first token, and what is no number stays none times zero. What is
asked of a memory travels with the reader or writer of the state (llama-io.h), so that every kind of memory passes it on. The
first two have no part in recurrent state: as with a scratch sequence that shares none, a range is written without, and what is
appended must hold none.
"""

from __future__ import annotations

from native.source_change import Change

_IO = "src/llama-io.h"
_CACHE = "src/llama-kv-cache.cpp"
_RECURRENT = "src/llama-memory-recurrent.cpp"
_CONTEXT = "src/llama-context.cpp"
_CONTEXT_HEADER = "src/llama-context.h"

_ASKED = (
    Change(
        _IO,
        """class llama_io_write_i {
public:
""",
        """// of a sequence only the positions [p0, p1), and no recurrent state
struct llama_io_range {
    bool on = false;

    int32_t p0 = 0;
    int32_t p1 = 0;
};

class llama_io_write_i {
public:
    llama_io_range range;

""",
    ),
    Change(
        _IO,
        """class llama_io_read_i {
public:
""",
        """class llama_io_read_i {
public:
    // behind what the sequence holds, not in its place; recurrent state stays
    bool append = false;

    // nothing is read: what no other sequence holds becomes zeros, and the sequence empty
    bool wipe = false;

""",
    ),
)

_OUT = (
    Change(
        _CACHE,
        """void llama_kv_cache::state_write(llama_io_write_i & io, llama_seq_id seq_id, llama_state_seq_flags flags) const {
""",
        """// the cells of a range of a sequence's positions, as ranges of cells in their order; returns how many cells these are
static uint32_t state_range_cells(
        const llama_kv_cells & cells, llama_seq_id seq_id, const llama_io_range & range,
        uint32_t n_swa, llama_swa_type swa_type, std::vector<std::pair<uint32_t, uint32_t>> & found) {
    const auto & held = cells.seq_pos_get(seq_id);

    const auto begin = held.lower_bound({ range.p0, 0 });
    const auto end   = held.lower_bound({ range.p1, 0 });
    if (begin == end) {
        return 0;
    }

    // as in a sequence that ends with the range
    const llama_pos pos_max = std::prev(end)->first;

    std::vector<uint32_t> idxs;
    idxs.reserve(end - begin);
    for (auto it = begin; it != end; ++it) {
        if (!llama_hparams::is_masked_swa(n_swa, swa_type, it->first, pos_max)) {
            idxs.push_back(it->second);
        }
    }
    if (!std::is_sorted(idxs.begin(), idxs.end())) {
        std::sort(idxs.begin(), idxs.end());
    }

    for (const uint32_t idx : idxs) {
        if (found.empty() || found.back().second != idx) {
            found.emplace_back(idx, idx);
        }
        found.back().second = idx + 1;
    }

    return idxs.size();
}

void llama_kv_cache::state_write(llama_io_write_i & io, llama_seq_id seq_id, llama_state_seq_flags flags) const {
""",
    ),
    Change(
        _CACHE,
        """        uint32_t cell_range_begin = cells.size();

        for (uint32_t i = 0; i < cells.size(); ++i) {
            bool add_cell = true;
""",
        """        uint32_t cell_range_begin = cells.size();

        if (io.range.on) {
            cell_count = state_range_cells(cells, seq_id, io.range, n_swa, swa_type, cr.data);
        }

        for (uint32_t i = io.range.on ? cells.size() : 0; i < cells.size(); ++i) {
            bool add_cell = true;
""",
    ),
    Change(
        _CACHE,
        """    const auto & cells = v_cells[cr.strm];

    for (const auto & range : cr.data) {
        for (uint32_t i = range.first; i < range.second; ++i) {
            std::vector<llama_seq_id> seq_ids;
""",
        """    const auto & cells = v_cells[cr.strm];

    if (io.range.on) {
        // the same records of one sequence's cells, in one piece
        static_assert(sizeof(llama_kv_cell_ext) == 3*sizeof(int32_t), "what follows writes three numbers");

        size_t n_cells = 0;
        for (const auto & range : cr.data) {
            n_cells += range.second - range.first;
        }

        std::vector<int32_t> records(n_cells*(has_cell_ext() ? 6 : 3));
        int32_t * record = records.data();

        for (const auto & range : cr.data) {
            for (uint32_t i = range.first; i < range.second; ++i) {
                *record++ = cells.pos_get(i);
                *record++ = 1;
                if (has_cell_ext()) {
                    memcpy(record, &cells.ext_get(i), sizeof(llama_kv_cell_ext));
                    record += 3;
                }
                *record++ = seq_id;
            }
        }
        io.write(records.data(), records.size()*sizeof(int32_t));

        return;
    }

    for (const auto & range : cr.data) {
        for (uint32_t i = range.first; i < range.second; ++i) {
            std::vector<llama_seq_id> seq_ids;
""",
    ),
    Change(
        _RECURRENT,
        """        if ((seq_id == -1 && !cell.is_empty()) || cell.has_seq_id(seq_id)) {
            ++cell_count;
            uint32_t rs_idx_cur = 0;
""",
        """        if (!io.range.on && ((seq_id == -1 && !cell.is_empty()) || cell.has_seq_id(seq_id))) {
            ++cell_count;
            uint32_t rs_idx_cur = 0;
""",
    ),
)

_WIPED = (
    Change(
        _CACHE,
        """    if (sinfos_out) {
        sinfos_out->assign(n_stream, slot_info{});
    }
""",
        """    if (io.wipe) {
        state_clear(seq_id);
        return;
    }

    if (sinfos_out) {
        sinfos_out->assign(n_stream, slot_info{});
    }
""",
    ),
    Change(
        _RECURRENT,
        """    GGML_UNUSED(flags);

    uint32_t cell_count;
    io.read(&cell_count, sizeof(cell_count));
""",
        """    GGML_UNUSED(flags);

    if (io.wipe) {
        const int32_t tail = cells[seq_id].tail;
        const bool    own  = tail >= 0 && cells[tail].seq_id.size() == 1;
        state_clear(seq_id, own ? tail : 0, own ? 1 : 0);
        return;
    }

    uint32_t cell_count;
    io.read(&cell_count, sizeof(cell_count));
""",
    ),
)

_IN = (
    Change(
        _CACHE,
        """        seq_rm(dest_seq_id, -1, -1);

        llama_batch_allocr balloc(hparams.n_pos_per_embd());
""",
        """        if (!io.append) {
            seq_rm(dest_seq_id, -1, -1);
        }

        const llama_pos pos_held = cells.seq_pos_max(dest_seq_id);

        // kept: it has room for any batch of all sequences, some hundreds of lists, and only a ubatch is asked of it
        static thread_local std::map<uint32_t, llama_batch_allocr> ballocs;
        llama_batch_allocr & balloc =
            ballocs.try_emplace(hparams.n_pos_per_embd(), hparams.n_pos_per_embd()).first->second;
""",
    ),
    Change(
        _CACHE,
        """            if (n_seq_id != 1) {
                LLAMA_LOG_ERROR("%s: invalid seq_id-agnostic kv cell\\n", __func__);
                return false;
            }

            if (has_cell_ext()) {
""",
        """            if (n_seq_id != 1) {
                LLAMA_LOG_ERROR("%s: invalid seq_id-agnostic kv cell\\n", __func__);
                return false;
            }

            if (io.append && pos <= pos_held) {
                LLAMA_LOG_ERROR("%s: position %d does not follow %d\\n", __func__, pos, pos_held);
                return false;
            }

            if (has_cell_ext()) {
""",
    ),
    Change(
        _RECURRENT,
        """    bool res = true;

    // save the head of the restored cells - could be needed to clear the state
""",
        """    if (io.append) {
        if (cell_count != 0 || !state_read_data(io, 0)) {
            throw std::runtime_error("what is appended has no recurrent state of this kind");
        }
        return;
    }

    bool res = true;

    // save the head of the restored cells - could be needed to clear the state
""",
    ),
)

_CALLS = (
    Change(
        _CONTEXT_HEADER,
        """    size_t state_seq_set_data(llama_seq_id seq_id, const uint8_t * src, size_t size, llama_state_seq_flags flags);
""",
        """    size_t state_seq_set_data(llama_seq_id seq_id, const uint8_t * src, size_t size, llama_state_seq_flags flags);

    size_t state_seq_get_range(
            llama_seq_id seq_id, llama_pos p0, llama_pos p1, uint8_t * dst, size_t size, llama_state_seq_flags flags);
    size_t state_seq_append(llama_seq_id seq_id, const uint8_t * src, size_t size, llama_state_seq_flags flags);
    bool   state_seq_wipe(llama_seq_id seq_id);
""",
    ),
    Change(
        _CONTEXT,
        "bool llama_context::state_load_file(",
        """size_t llama_context::state_seq_get_range(
        llama_seq_id seq_id, llama_pos p0, llama_pos p1, uint8_t * dst, size_t size, llama_state_seq_flags flags) {
    if (seq_id < 0 || (uint32_t) seq_id >= cparams.n_seq_max || p0 < 0 || p1 <= p0) {
        LLAMA_LOG_ERROR("%s: no such range of a sequence\\n", __func__);
        return 0;
    }

    llama_io_write_host io(dst, size, (flags & 4) ? sched.get() : nullptr);
    io.range = { true, p0, p1 };

    try {
        io.write(&io_magic, sizeof(io_magic));
        io.write(&seq_id, sizeof(seq_id));

        return state_seq_write_data(io, seq_id, 0);
    } catch (const std::exception & err) {
        LLAMA_LOG_ERROR("%s: error saving state: %s\\n", __func__, err.what());
        return 0;
    }
}

size_t llama_context::state_seq_append(
        llama_seq_id seq_id, const uint8_t * src, size_t size, llama_state_seq_flags flags) {
    if (seq_id < 0 || (uint32_t) seq_id >= cparams.n_seq_max) {
        LLAMA_LOG_ERROR("%s: no such sequence\\n", __func__);
        return 0;
    }

    llama_io_read_host io(src, size, (flags & 4) ? sched.get() : nullptr);
    io.append = true;

    try {
        uint32_t magic_read;
        io.read(&magic_read, sizeof(magic_read));
        if (io_magic != magic_read) {
            throw std::runtime_error("wrong sequence state magic");
        }

        llama_seq_id seq_id_read;
        io.read(&seq_id_read, sizeof(seq_id_read));

        return state_seq_read_data(io, seq_id, 0);
    } catch (const std::exception & err) {
        LLAMA_LOG_ERROR("%s: error loading state: %s\\n", __func__, err.what());
        io.discard();
        return 0;
    }
}

bool llama_context::state_seq_wipe(llama_seq_id seq_id) {
    if (seq_id < 0 || (uint32_t) seq_id >= cparams.n_seq_max) {
        LLAMA_LOG_ERROR("%s: no such sequence\\n", __func__);
        return false;
    }

    llama_io_read_host io(nullptr, 0);
    io.wipe = true;

    try {
        state_seq_read_data(io, seq_id, 0);
        return true;
    } catch (const std::exception & err) {
        LLAMA_LOG_ERROR("%s: error wiping state: %s\\n", __func__, err.what());
        return false;
    }
}

bool llama_context::state_load_file(""",
    ),
    Change(
        _CONTEXT,
        "size_t llama_state_seq_save_file(",
        """extern "C" LLAMA_API size_t llama_state_seq_get_range(
        llama_context * ctx, uint8_t * dst, size_t size, llama_seq_id seq_id,
        llama_pos p0, llama_pos p1, llama_state_seq_flags flags);

// llama_state_seq_get_data_ext of the positions [p0, p1) alone, without recurrent state; of the flags only 4 counts
size_t llama_state_seq_get_range(
        llama_context * ctx, uint8_t * dst, size_t size, llama_seq_id seq_id,
        llama_pos p0, llama_pos p1, llama_state_seq_flags flags) {
    if (!(flags & 4)) {
        ctx->synchronize();
    }

    return ctx->state_seq_get_range(seq_id, p0, p1, dst, size, flags);
}

extern "C" LLAMA_API size_t llama_state_seq_append(
        llama_context * ctx, const uint8_t * src, size_t size, llama_seq_id seq_id, llama_state_seq_flags flags);

// llama_state_seq_set_data_ext behind what the sequence holds; where it returns another number than size, clear the sequence
size_t llama_state_seq_append(
        llama_context * ctx, const uint8_t * src, size_t size, llama_seq_id seq_id, llama_state_seq_flags flags) {
    if (!(flags & 4)) {
        ctx->synchronize();
    }

    return ctx->state_seq_append(seq_id, src, size, flags);
}

extern "C" LLAMA_API bool llama_state_seq_wipe(llama_context * ctx, llama_seq_id seq_id);

// empties the sequence; what no other one holds of it is zeros then, so that nothing can read it where it lay
bool llama_state_seq_wipe(llama_context * ctx, llama_seq_id seq_id) {
    ctx->synchronize();

    return ctx->state_seq_wipe(seq_id);
}

size_t llama_state_seq_save_file(""",
    ),
)

STATE_RANGES = _ASKED + _OUT + _WIPED + _IN + _CALLS
