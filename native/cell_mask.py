"""The mask of a step's attention from one pass over the cells, instead of one for each of its sequences.

Neighbouring cells mostly belong to the same sequences, so which of the step's these are is asked once a stretch. Rows of a
prompt begin as copies of the row before, and only cells between the two rows' positions are looked at then: not all cells of
the micro-batch for each of its rows, which of 4,096 rows took a core of a Zen 4 45 ms more.
"""

from __future__ import annotations

from native.source_change import Change

_CACHE = "src/llama-kv-cache.cpp"

CELL_MASK = (
    Change(
        _CACHE,
        """    int64_t n_kv;
    int64_t n_stream;
    int64_t n_tps;
};
""",
        """    int64_t n_kv;
    int64_t n_stream;
    int64_t n_tps;

    uint32_t first_kv;
};

// the cells of each of the stream's sequences, relative to the mask's first one
static std::unordered_map<llama_seq_id, std::vector<uint32_t>> seq_cells_of(const args_set_input_kq_mask & args, uint32_t s) {
    std::unordered_map<llama_seq_id, std::vector<uint32_t>> res;

    const auto * ubatch = args.ubatch;

    llama_kv_cells::seq_set_t wanted;
    for (uint32_t ii = 0; ii < args.n_tps; ++ii) {
        const llama_seq_id seq_id = ubatch->seq_id[s*args.n_tps + ii][0];

        wanted.set(seq_id);
        res[seq_id];
    }

    const auto & cells = args.v_cells.at(args.seq_to_stream[ubatch->seq_id[s*args.n_tps][0]]);

    llama_kv_cells::seq_set_t last;
    std::vector<std::vector<uint32_t> *> holders;

    for (uint32_t j = 0; j < args.n_kv; ++j) {
        const uint32_t i = args.first_kv + j;
        if (cells.is_empty(i)) {
            continue;
        }

        const auto held = cells.seq_get_all(i) & wanted;
        if (held != last) {
            last = held;
            holders.clear();
            if (held.any()) {
                for (auto & [seq_id, own] : res) {
                    if (held.test(seq_id)) {
                        holders.push_back(&own);
                    }
                }
            }
        }

        for (auto * own : holders) {
            own->push_back(j);
        }
    }

    return res;
}
""",
    ),
    Change(
        _CACHE,
        """        std::unordered_map<llama_seq_id, std::vector<uint32_t>> seq_idxs;

        for (uint32_t ii = 0; ii < n_tps; ++ii) {
""",
        """        std::unordered_map<llama_seq_id, std::vector<uint32_t>> seq_idxs;

        const auto seq_cells = alibi ? decltype(seq_idxs){} : seq_cells_of(args, s);

        // cells that the step's rows may see otherwise than each other, by position
        std::unordered_map<llama_seq_id, std::vector<std::pair<llama_pos, uint32_t>>> seq_near;

        for (uint32_t ii = 0; ii < n_tps; ++ii) {
""",
    ),
    Change(
        _CACHE,
        """                    idxs.reserve(ubatch->n_tokens + n_swa + 32);

                    seq_srct[seq_id] = i;
                }
            }
""",
        """                    idxs.reserve(ubatch->n_tokens + n_swa + 32);

                    seq_srct[seq_id] = i;

                    std::fill(data + idst, data + idst + n_kv, mask_drop);
                }
            }
""",
    ),
    Change(
        _CACHE,
        """            for (uint32_t jj = 0; jj < n_kv; ++jj) {
                uint32_t j = jj;

                // we have an exiting mask for this sequence -> update just seq_idxs
                if (!alibi) {
                    if (prev) {
                        if (jj >= idxs.size()) {
                            break;
                        }

                        j = idxs[jj];
                    }
                }

                if (cells.is_empty(j)) {
                    goto skip;
                }

                // mask the token if not the same sequence
                if (!cells.seq_has(j, seq_id)) {
                    goto skip;
                }

                p0 = cells.pos_get(j);
""",
        """            if (prev && causal && !swa) {
                auto & near = seq_near[seq_id];
                if (near.empty()) {
                    for (const uint32_t j : idxs) {
                        near.emplace_back(cells.pos_get(args.first_kv + j), j);
                    }
                    std::sort(near.begin(), near.end());
                }

                const llama_pos p1_prev = ubatch->pos[seq_srct[seq_id]];
                seq_srct[seq_id] = i;

                const llama_pos lo = std::min(p1_prev, p1);
                const llama_pos hi = std::max(p1_prev, p1);

                auto it = std::lower_bound(near.begin(), near.end(), std::make_pair(lo, 0u));
                for (; it != near.end() && it->first <= hi; ++it) {
                    const bool is_later = it->first > p1 ||
                        (is_2d && it->first == p1 && cells.ext_get(args.first_kv + it->second).is_2d_gt(p1_x, p1_y));
                    data[idst + it->second] = is_later ? mask_drop : mask_keep;
                }

                continue;
            }

            for (uint32_t jj = 0; jj < n_kv; ++jj) {
                uint32_t j = jj;

                // the sequence's own cells, and of an existing mask just seq_idxs
                if (!alibi) {
                    const auto & own = prev ? idxs : seq_cells.at(seq_id);
                    if (jj >= own.size()) {
                        break;
                    }

                    j = own[jj];
                }

                const uint32_t cell = args.first_kv + j;

                if (cells.is_empty(cell)) {
                    goto skip;
                }

                // mask the token if not the same sequence
                if (!cells.seq_has(cell, seq_id)) {
                    goto skip;
                }

                p0 = cells.pos_get(cell);
""",
    ),
    Change(
        _CACHE,
        """                            const auto & p0_ext = cells.ext_get(j);
""",
        """                            const auto & p0_ext = cells.ext_get(cell);
""",
    ),
    Change(
        _CACHE,
        """        /*.n_tps            =*/ n_tps,
    };

    if (dst->type == GGML_TYPE_F16) {
""",
        """        /*.n_tps            =*/ n_tps,
        /*.first_kv         =*/ (uint32_t) dst->op_params[0],
    };

    if (dst->type == GGML_TYPE_F16) {
""",
    ),
)
