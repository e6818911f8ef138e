#pragma once

#include "llama-kv-cells.h"

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <vector>

// Whose mask a row of a step is, and where the row stands.
struct llama_kv_mask_row {
    llama_seq_id seq_id;
    llama_pos    pos;
    llama_pos    x; // M-RoPE, else 0
    llama_pos    y;

    bool stands_at(const llama_kv_mask_row & o) const { return pos == o.pos && x == o.x && y == o.y; }
};

// Neighbouring cells whose values changed in some row, relative to the mask's first one.
struct llama_kv_mask_piece {
    int32_t first;
    int32_t count;
};

// What a mask holds, so that the next step's is written over it by what has changed: causal or not, without window and without
// alibi, of one cache that all sequences share.
class llama_kv_mask {
public:
    // A piece costs a copy to a device about 10 us, in which 500 KB pass; what lies between two is copied with them.
    static constexpr int32_t NEAR       = 1024;
    static constexpr size_t  MAX_PIECES = 6;

    uint32_t first_kv = 0;
    uint32_t n_kv     = 0;
    bool     causal   = false;
    bool     is_2d    = false;

    // the mask is written as a whole now
    void written(const llama_kv_cells & cells, const std::vector<llama_kv_mask_row> & rows_new) {
        place = cells.journal.place();
        rows  = rows_new;
    }

    // Makes of what `data` holds (n_kv values for each row) the mask of these rows. false: it has to be written as a whole.
    template <typename T>
    bool follow(
            const llama_kv_cells & cells, const std::vector<llama_kv_mask_row> & rows_new, T keep, T drop, T * data) {
        if (!find_touched(cells, rows_new)) {
            return false;
        }

        pieces.clear();
        for (const uint32_t j : touched) {
            bool changed = false;
            for (size_t r = 0; r < rows_new.size(); ++r) {
                T & value = data[r*n_kv + j];

                const T value_new = sees(cells, rows_new[r], first_kv + j) ? keep : drop;
                if (value != value_new) {
                    value   = value_new;
                    changed = true;
                }
            }
            if (changed) {
                add_piece(j);
            }
        }

        written(cells, rows_new);

        return true;
    }

    // what the last follow() changed, in ascending order
    const std::vector<llama_kv_mask_piece> & get_pieces() const { return pieces; }

private:
    uint64_t place = 0; // in the journal of cells

    std::vector<llama_kv_mask_row>   rows;
    std::vector<uint32_t>            touched;
    std::vector<llama_kv_mask_piece> pieces;

    bool sees(const llama_kv_cells & cells, const llama_kv_mask_row & row, uint32_t cell) const {
        if (cells.is_empty(cell) || !cells.seq_has(cell, row.seq_id)) {
            return false;
        }
        if (!causal) {
            return true;
        }
        const llama_pos pos = cells.pos_get(cell);
        return pos < row.pos || (pos == row.pos && !(is_2d && cells.ext_get(cell).is_2d_gt(row.x, row.y)));
    }

    // The cells that some row may see otherwise than before. false: rows of other sequences, or so many that to write all is cheaper.
    bool find_touched(const llama_kv_cells & cells, const std::vector<llama_kv_mask_row> & rows_new) {
        const llama_kv_journal & journal = cells.journal;

        const size_t n_max = 64 + n_kv/8;

        touched.clear();
        if (rows.size() != rows_new.size() || !journal.reaches(place)) {
            return false;
        }

        for (uint64_t k = place; k < journal.place(); ++k) {
            touch(journal.at(k));
        }

        for (size_t r = 0; r < rows_new.size(); ++r) {
            const llama_kv_mask_row & a = rows[r];
            const llama_kv_mask_row & b = rows_new[r];
            if (a.seq_id != b.seq_id) {
                return false;
            }
            if (!causal || a.stands_at(b)) {
                continue;
            }

            // at the lower of the two positions only an image's cells can be another thing
            const llama_pos lo = std::min(a.pos, b.pos) + (is_2d ? 0 : 1);
            const llama_pos hi = std::max(a.pos, b.pos);

            const auto & own = cells.seq_pos_get(b.seq_id);
            for (auto it = own.lower_bound({ lo, 0 }); it != own.end() && it->first <= hi; ++it) {
                touch(it->second);
                if (touched.size() > n_max + llama_kv_journal::CAPACITY) {
                    return false;
                }
            }
        }

        std::sort(touched.begin(), touched.end());
        touched.erase(std::unique(touched.begin(), touched.end()), touched.end());

        return touched.size() <= n_max;
    }

    void touch(uint32_t cell) {
        if (cell >= first_kv && cell - first_kv < n_kv) {
            touched.push_back(cell - first_kv);
        }
    }

    void add_piece(int32_t j) {
        if (!pieces.empty()) {
            auto & last = pieces.back();
            if (j - (last.first + last.count) < NEAR || pieces.size() == MAX_PIECES) {
                last.count = j + 1 - last.first;
                return;
            }
        }
        pieces.push_back({ j, 1 });
    }
};
