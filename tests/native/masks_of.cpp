// A mask that is written over the one before, and a copy of it that gets only the pieces, against one that is written anew: the
// same values after every kind of change that a cache makes. Built and run by test_followed_masks.py; says what was another one.

#include "llama-kv-mask.h"

#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <random>

static constexpr uint32_t CELLS     = 6144;
static constexpr int      SEQUENCES = 12;
static constexpr int      ROUNDS    = 1500;

static std::mt19937 rng(7);

static uint32_t below(uint32_t n) { return rng() % n; }

static void require(bool same, const char * what, int round) {
    if (!same) {
        printf("%s in round %d\n", what, round);
        exit(1);
    }
}

struct cache {
    llama_kv_cells cells;

    llama_pos next[SEQUENCES] = {};

    cache() { cells.resize(CELLS); }

    void add(uint32_t i, llama_seq_id seq, llama_pos pos, bool is_2d) {
        cells.pos_set(i, pos);
        if (is_2d) {
            llama_kv_cell_ext ext;
            ext.x = below(3);
            ext.y = below(3);
            cells.ext_set(i, ext);
        }
        cells.seq_add(i, seq);
    }

    uint32_t empty_near(uint32_t i) {
        for (uint32_t k = 0; k < CELLS; ++k) {
            if (cells.is_empty((i + k) % CELLS)) {
                return (i + k) % CELLS;
            }
        }
        return CELLS;
    }

    // tokens of a sequence, one behind the other; some of an image share a position
    void append(llama_seq_id seq, uint32_t n, bool is_2d) {
        uint32_t at = below(8) == 0 ? below(CELLS) : 0;
        while (n-- > 0 && cells.get_used() < CELLS - 1) {
            at = empty_near(at);
            add(at, seq, next[seq], is_2d);
            next[seq] += is_2d && below(4) == 0 ? 0 : 1;
        }
    }

    // as llama_kv_cache::prepare tries a step and takes it back
    void try_out(bool is_2d) {
        std::vector<uint32_t> idxs;
        for (uint32_t i = 0; i < CELLS && idxs.size() < 20; ++i) {
            if (cells.is_empty(i)) {
                idxs.push_back(i);
            }
        }
        const auto before = cells.cp(idxs);
        for (const uint32_t i : idxs) {
            add(i, below(SEQUENCES), below(3000), is_2d);
        }
        cells.set(idxs, before);
    }

    template <typename F>
    void for_cells_of(llama_seq_id seq, F f) {
        for (uint32_t i = 0; i < CELLS; ++i) {
            if (!cells.is_empty(i) && cells.seq_has(i, seq)) {
                f(i);
            }
        }
    }

    void follow_ends() {
        for (int s = 0; s < SEQUENCES; ++s) {
            next[s] = cells.seq_pos_max(s) + 1;
        }
    }

    void change(bool is_2d) {
        const llama_seq_id seq   = below(SEQUENCES);
        const llama_seq_id other = below(SEQUENCES);
        const llama_pos    end   = next[seq];
        const llama_pos    p0    = end > 0 ? end - 1 - (llama_pos) below(std::min<uint32_t>(end, below(6) == 0 ? end : 8)) : 0;

        switch (below(24)) {
            case 0: // the end is taken back
                for_cells_of(seq, [&](uint32_t i) { if (cells.pos_get(i) >= p0) { cells.seq_rm(i, seq); } });
                break;
            case 1: // a beginning is shared
                for_cells_of(seq, [&](uint32_t i) { if (cells.pos_get(i) < p0 && !cells.seq_has(i, other)) { cells.seq_add(i, other); } });
                break;
            case 2:
                if (below(8) == 0) {
                    for (uint32_t i = 0; i < CELLS; ++i) { cells.seq_keep(i, seq); }
                }
                break;
            case 3: // positions are moved
                for_cells_of(seq, [&](uint32_t i) { if (cells.pos_get(i) >= p0) { cells.pos_add(i, below(2) ? 3 : -3); } });
                cells.reset_shift();
                break;
            case 4:
                if (below(8) == 0) {
                    for_cells_of(seq, [&](uint32_t i) { cells.pos_div(i, 2); });
                    cells.reset_shift();
                }
                break;
            case 5: // cells are taken from whoever has them
                for (uint32_t k = 0, i = below(CELLS); k < 5; ++k, i = (i + 1) % CELLS) {
                    if (!cells.is_empty(i)) { cells.rm(i); }
                }
                break;
            case 6:
                if (below(100) == 0) { cells.reset(); }
                break;
            case 7: // a state comes in
                append(seq, below(500), is_2d);
                break;
            default:
                append(seq, 1 + below(3), is_2d);
        }
        follow_ends();
        if (cells.get_used() > CELLS - 600) {
            for_cells_of(seq, [&](uint32_t i) { cells.seq_rm(i, seq); });
            follow_ends();
        }
    }
};

static bool is_seen(const llama_kv_cells & cells, const llama_kv_mask_row & row, uint32_t i, bool causal, bool is_2d) {
    if (cells.is_empty(i) || !cells.seq_has(i, row.seq_id)) {
        return false;
    }
    const auto & ext = cells.ext_get(i);
    const bool is_behind = is_2d && cells.pos_get(i) == row.pos && (ext.y > row.y || (ext.y == row.y && ext.x > row.x));
    return !causal || (cells.pos_get(i) <= row.pos && !is_behind);
}

template <typename T>
static void run(bool causal, bool is_2d, T keep, T drop) {
    cache kv;
    for (int s = 0; s < SEQUENCES; ++s) {
        kv.append(s, 100 + below(200), is_2d);
    }

    llama_kv_mask mask;
    std::vector<llama_kv_mask_row> rows;
    std::vector<T> host, device, anew;

    bool is_new   = true;
    int  followed = 0, several = 0;

    for (int round = 0; round < ROUNDS; ++round) {
        for (uint32_t n = below(4); n > 0; --n) {
            kv.change(is_2d);
        }
        kv.try_out(is_2d);

        if (rows.empty() || below(40) == 0) { // other rows: another graph, or the same for other sequences
            rows.assign(1 + below(24), {});
            for (auto & row : rows) {
                row.seq_id = below(SEQUENCES);
            }
            is_new = is_new || below(2) == 0;
        }
        for (auto & row : rows) {
            row.pos = std::max<llama_pos>(0, kv.next[row.seq_id] - (below(8) == 0 ? below(200) : 1 + below(3)));
            row.x   = is_2d ? below(3) : 0;
            row.y   = is_2d ? below(3) : 0;
        }
        if (below(60) == 0) {
            is_new = true;
        }
        if (is_new) { // a tensor whose memory holds something
            mask.first_kv = 256*below(4);
            mask.n_kv     = CELLS - mask.first_kv - 256*below(4);
            mask.causal   = causal;
            mask.is_2d    = is_2d;
        }

        const size_t n_all = rows.size()*mask.n_kv;
        anew.assign(n_all, drop);
        for (size_t r = 0; r < rows.size(); ++r) {
            for (uint32_t j = 0; j < mask.n_kv; ++j) {
                if (is_seen(kv.cells, rows[r], mask.first_kv + j, causal, is_2d)) {
                    anew[r*mask.n_kv + j] = keep;
                }
            }
        }

        if (is_new || host.size() != n_all || !mask.follow(kv.cells, rows, keep, drop, host.data())) {
            host = device = anew;
            mask.written(kv.cells, rows);
            is_new = false;
            continue;
        }

        ++followed;
        const auto & pieces = mask.get_pieces();
        several += pieces.size() > 1;
        require(pieces.size() <= llama_kv_mask::MAX_PIECES, "there are more pieces than there may be", round);
        int32_t end = 0;
        for (const auto & piece : pieces) {
            require(piece.first >= end && piece.count > 0, "pieces overlap", round);
            end = piece.first + piece.count;
            require(end <= (int32_t) mask.n_kv, "a piece ends behind the mask", round);
            for (size_t r = 0; r < rows.size(); ++r) {
                const size_t first = r*mask.n_kv + piece.first;
                std::copy(host.begin() + first, host.begin() + first + piece.count, device.begin() + first);
            }
        }
        require(host   == anew, "the mask is another one",         round);
        require(device == anew, "the device's mask is another one", round);
    }

    printf("%d of %d followed, %d with several pieces\n", followed, ROUNDS, several);
    require(followed > ROUNDS/2 && followed < ROUNDS && several > ROUNDS/100, "too few or too many masks were followed", ROUNDS);
}

int main() {
    for (const bool causal : { true, false }) {
        for (const bool is_2d : { false, true }) {
            run<float>   (causal, is_2d, 0.0f, -INFINITY);
            run<uint16_t>(causal, is_2d, 0, 0xFC00);
        }
    }
    return 0;
}
