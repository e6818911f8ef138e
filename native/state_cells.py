"""What a cell costs the processor when it joins or leaves a sequence: rows and bits instead of a tree's node for each.

llama.cpp keeps the cells in use, and those of each sequence by their positions, in ordered trees: a state that enters makes two
nodes for every token, wherever they lie in memory, one that is dropped gives them back, and one that leaves is read node by node.
A card copies the rows of a token in 0.2 us (10,880 bytes of q8_0), so that the processor is what it waits for. Here the cells in
use have a bit each, and the cells of a sequence stand in a row: nearly all come at its end and go at one of its ends. One that
stands near the end moves those behind it; the others are noted and put in their places together, when the row is next read, since
what comes or goes in the middle comes or goes by thousands (a beginning that is shared, an end that is dropped).

65,536 tokens of a model with next to no rows, in 16 blocks, on a core of an EPYC: in 2.8 ms instead of 6, out 1.4 instead of 5.4.
32,768 tokens: shared in 0.28 ms instead of 0.65, dropped in 0.32 instead of 1.7, half of them in 0.2 instead of 1.2; three tokens
behind them are taken back as before. What a sequence holds, and in which order, is the same (tests/native/test_state_cells.py).
"""

from __future__ import annotations

from native.source_change import Change

_CELLS = "src/llama-kv-cells.h"
_ROWS_HEADER = "src/llama-kv-rows.h"
_CACHE = "src/llama-kv-cache.cpp"

_CONTAINERS = (
    Change(
        _ROWS_HEADER,
        "",
        """#pragma once

#include "llama.h"

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

// which cells are in use, a bit each
class llama_kv_used {
public:
    void resize(uint32_t n) {
        words.assign((n + 63)/64, 0);
        clear();
    }

    void clear() {
        std::fill(words.begin(), words.end(), 0);
        count = 0;
        first = 0;
        end   = 0;
    }

    bool     empty() const { return count == 0; }
    uint32_t size()  const { return count; }

    void insert(uint32_t i) {
        uint64_t & word = words[i/64];
        const uint64_t bit = (uint64_t) 1 << i%64;
        if (word & bit) {
            return;
        }
        first = count == 0 ? i     : std::min(first, i);
        end   = count == 0 ? i + 1 : std::max(end,   i + 1);
        word |= bit;
        ++count;
    }

    void erase(uint32_t i) {
        uint64_t & word = words[i/64];
        const uint64_t bit = (uint64_t) 1 << i%64;
        count -= (word & bit) ? 1 : 0;
        word &= ~bit;
    }

    // the first cell in use from i on, or limit
    uint32_t next_used(uint32_t i, uint32_t limit) const { return next(i, limit, 0); }

    // the first cell not in use from i on, or limit
    uint32_t next_empty(uint32_t i, uint32_t limit) const { return next(i, limit, ~(uint64_t) 0); }

    // note: call only if there are any
    uint32_t min() const {
        while (!has(first)) {
            first = words[first/64] >> first%64 ? first + 1 : (first/64 + 1)*64;
        }
        return first;
    }

    // note: call only if there are any
    uint32_t max() const {
        while (!has(end - 1)) {
            end = words[(end - 1)/64] << (63 - (end - 1)%64) ? end - 1 : (end - 1)/64*64;
        }
        return end - 1;
    }

private:
    std::vector<uint64_t> words;

    uint32_t count = 0;

    // none is before the one or behind the other; they follow when somebody asks
    mutable uint32_t first = 0;
    mutable uint32_t end   = 0;

    bool has(uint32_t i) const { return (words[i/64] >> i%64) & 1; }

    // the first cell from i on whose bit is another one than that of `flip`, or limit
    uint32_t next(uint32_t i, uint32_t limit, uint64_t flip) const {
        while (i < limit) {
            uint64_t word = (words[i/64] ^ flip) >> i%64;
            if (word == 0) {
                i = (i/64 + 1)*64;
                continue;
            }
            for (; (word & 1) == 0; word >>= 1) {
                ++i;
            }
            break;
        }
        return std::min(i, limit);
    }
};

// an ordered set of (pos, cell) pairs as a row
class llama_kv_row {
public:
    using value_type     = std::pair<llama_pos, uint32_t>;
    using const_iterator = std::vector<value_type>::const_iterator;

    // so many pairs behind its place are moved for one at once
    static constexpr ptrdiff_t NEAR_END = 1024;

    bool   empty() const { return size() == 0; }
    size_t size()  const { return row.size() - first + more.size() - less.size(); }

    const_iterator begin() const { settle(); return row.begin() + first; }
    const_iterator end()   const { settle(); return row.end(); }

    const value_type & front() const { settle(); return row[first]; }
    const value_type & back()  const { settle(); return row.back(); }

    const_iterator lower_bound(const value_type & v) const { return std::lower_bound(begin(), end(), v); }
    const_iterator upper_bound(const value_type & v) const { return std::upper_bound(begin(), end(), v); }

    void clear() {
        row.clear();
        more.clear();
        less.clear();
        first = 0;
    }

    // note: call only if v is not there
    void insert(value_type v) {
        if (is_settled()) {
            if (row.size() == first || row.back() < v) {
                row.push_back(v);
                return;
            }
            const auto it = std::lower_bound(row.begin() + first, row.end(), v);
            if (row.end() - it <= NEAR_END) {
                row.insert(it, v);
                return;
            }
        }
        more.push_back(v);
    }

    // note: call only if v is there
    void erase(value_type v) {
        if (!is_settled()) {
            less.push_back(v);
        } else if (row[first] == v) {
            drop_first();
        } else if (row.back() == v) {
            row.pop_back();
        } else {
            const auto it = std::lower_bound(row.begin() + first, row.end(), v);
            if (row.end() - it <= NEAR_END) {
                row.erase(it);
            } else {
                less.push_back(v);
            }
        }
        if (empty()) {
            clear();
        }
    }

private:
    // in their order from first on; what more and less name is still to come and to go
    mutable std::vector<value_type> row;
    mutable std::vector<value_type> more;
    mutable std::vector<value_type> less;

    mutable size_t first = 0;

    bool is_settled() const { return more.empty() && less.empty(); }

    void drop_first() {
        ++first;
        if (first >= (size_t) NEAR_END && 2*first >= row.size()) {
            row.erase(row.begin(), row.begin() + first);
            first = 0;
        }
    }

    void settle() const {
        if (is_settled()) {
            return;
        }
        std::sort(more.begin(), more.end());
        std::sort(less.begin(), less.end());

        std::vector<value_type> all;
        all.reserve(size());

        auto a = row.begin() + first;
        auto b = more.begin();
        auto c = less.begin();
        while (a != row.end() || b != more.end()) {
            const value_type v = b == more.end() || (a != row.end() && *a < *b) ? *a : *b;

            // it may have come and gone several times
            int n = 0;
            for (; a != row.end()  && *a == v; ++a) { ++n; }
            for (; b != more.end() && *b == v; ++b) { ++n; }
            for (; c != less.end() && *c == v; ++c) { --n; }
            if (n > 0) {
                all.push_back(v);
            }
        }

        row.swap(all);
        more.clear();
        less.clear();
        first = 0;
    }
};
""",
    ),
    Change(_CELLS, '#include "llama-cparams.h"\n', '#include "llama-cparams.h"\n#include "llama-kv-rows.h"\n'),
)

_USED = (
    Change(_CELLS, "        seq.resize(n);\n", "        seq.resize(n);\n        used.resize(n);\n"),
    Change(
        _CELLS,
        "        return used.empty() ? 0 : *used.begin();\n",
        "        return used.empty() ? 0 : used.min();\n",
    ),
    Change(
        _CELLS,
        "        return used.empty() ? 0 : *used.rbegin() + 1;\n",
        "        return used.empty() ? 0 : used.max() + 1;\n",
    ),
    Change(
        _CELLS,
        "    // set of indices of used cells (i.e. pos[i] != -1, allowed to not have any seq_id)\n"
        "    std::set<uint32_t> used;\n",
        "    // the used cells (i.e. pos[i] != -1, allowed to not have any seq_id)\n    llama_kv_used used;\n",
    ),
)

# The row itself is declared beside the bounds (native/cell_window.py).
_ROWS = (
    Change(
        _CELLS,
        "    const std::set<std::pair<llama_pos, uint32_t>> & seq_pos_get(llama_seq_id seq_id) const {\n",
        "    const llama_kv_row & seq_pos_get(llama_seq_id seq_id) const {\n",
    ),
    Change(
        _CELLS, "        return seq_pos[seq_id].begin()->first;\n", "        return seq_pos[seq_id].front().first;\n"
    ),
    Change(
        _CELLS, "        return seq_pos[seq_id].rbegin()->first;\n", "        return seq_pos[seq_id].back().first;\n"
    ),
    Change(
        _CELLS,
        """        assert(!seq[i].test(seq_id));

        seq[i].set(seq_id);
        seq_pos_inc(seq_id, i);
""",
        """        assert(!seq[i].test(seq_id));

        if (seq[i].test(seq_id)) {
            return;
        }

        seq[i].set(seq_id);
        seq_pos_inc(seq_id, i);
""",
    ),
    Change(
        _CELLS,
        """        const auto n = seq_pos[s].erase({ pos[i], i });
        assert(n == 1);
        GGML_UNUSED(n);
""",
        """        seq_pos[s].erase({ pos[i], i });
        if (seq_pos[s].empty()) {
            seq_bounds[s] = {};
        }
""",
    ),
    Change(
        _CELLS,
        "        seq_pos[s].insert({ pos[i], i });\n",
        """        seq_pos[s].insert({ pos[i], i });
        seq_bounds[s].first = std::min(seq_bounds[s].first, i);
        seq_bounds[s].end = std::max(seq_bounds[s].end, i + 1);
""",
    ),
)

# The records of a sequence's cells, of which each is read in several pieces, in one.
_RECORDS = (
    Change(
        _CACHE,
        """        for (uint32_t i = 0; i < cell_count; ++i) {
            llama_pos pos;
            uint32_t n_seq_id;

            io.read(&pos,      sizeof(pos));
            io.read(&n_seq_id, sizeof(n_seq_id));
""",
        """        // pos, n_seq_id (which must be 1), ext, seq_id
        const uint32_t record_size = 3 + (has_cell_ext() ? sizeof(llama_kv_cell_ext)/sizeof(int32_t) : 0);

        std::vector<int32_t> records((size_t) cell_count*record_size);
        io.read(records.data(), records.size()*sizeof(int32_t));

        for (uint32_t i = 0; i < cell_count; ++i) {
            const int32_t * record = records.data() + (size_t) i*record_size;

            const llama_pos pos      = record[0];
            const uint32_t  n_seq_id = record[1];
""",
    ),
    Change(
        _CACHE,
        """                llama_kv_cell_ext ext;
                io.read(&ext, sizeof(ext));

                if (hparams.n_pos_per_embd() > 1) {
""",
        """                llama_kv_cell_ext ext;
                memcpy(&ext, record + 2, sizeof(ext));

                if (hparams.n_pos_per_embd() > 1) {
""",
    ),
    Change(
        _CACHE,
        """            // read the sequence id, but directly discard it - we will use dest_seq_id instead
            {
                llama_seq_id seq_id;
                io.read(&seq_id, sizeof(seq_id));
            }

""",
        """            // its last number, a sequence id, is not asked for: dest_seq_id takes its place

""",
    ),
    # Each state that enters is told of, to a callback that in a process with an interpreter waits for its lock first.
    Change(
        _CACHE,
        """        LLAMA_LOG_DEBUG("%s: cell_count = %d, dest_seq_id = %d\\n", __func__, cell_count, dest_seq_id);

        // DEBUG CHECK: verify that all cells were allocated and have correct seq_id and pos values
""",
        """        // DEBUG CHECK: verify that all cells were allocated and that they have the right seq_id and pos
""",
    ),
)

STATE_CELLS = (*_CONTAINERS, *_USED, *_ROWS, *_RECORDS)
