// What a sequence's cells stand in and what counts the cells in use, against ordered sets: the same questions have the same
// answers after every kind of change. Built and run by test_state_cells.py; says what was another one.

#include "llama-kv-rows.h"

#include <cstdio>
#include <cstdlib>
#include <random>
#include <set>

using pair_t = llama_kv_row::value_type;

static std::mt19937 rng(7);

static uint32_t below(uint32_t n) { return rng() % n; }

static void require(bool same, const char * what, int round) {
    if (!same) {
        printf("%s is another one in round %d\n", what, round);
        exit(1);
    }
}

// the row's cells, each at its position
struct both {
    llama_kv_row row;
    std::set<pair_t> set;

    void insert(pair_t v) {
        if (set.insert(v).second) {
            row.insert(v);
        }
    }

    void erase(pair_t v) {
        if (set.erase(v)) {
            row.erase(v);
        }
    }

    void compare(int round) {
        require(row.size() == set.size() && row.empty() == set.empty(), "the number of pairs", round);
        if (set.empty()) {
            require(row.begin() == row.end(), "an empty row", round);
            return;
        }
        require(row.front() == *set.begin() && row.back() == *set.rbegin(), "an end", round);
        require(std::equal(row.begin(), row.end(), set.begin(), set.end()), "the order", round);
        for (int i = 0; i < 20; ++i) {
            const pair_t v = { (int) below(9000) - 100, below(2) ? below(9000) : UINT32_MAX };
            const auto low = set.lower_bound(v), up = set.upper_bound(v);
            require((row.lower_bound(v) == row.end()) == (low == set.end()), "a lower bound's end", round);
            require(low == set.end() || *row.lower_bound(v) == *low, "a lower bound", round);
            require((row.upper_bound(v) == row.end()) == (up == set.end()), "an upper bound's end", round);
            require(up == set.end() || *row.upper_bound(v) == *up, "an upper bound", round);
        }
    }
};

static void change(both & b, int kind) {
    const int last = b.set.empty() ? -1 : b.set.rbegin()->first;
    const int count = below(3) ? below(8) : below(4000);
    switch (kind) {
        case 0: // tokens that are computed, or a block that enters
            for (int i = 1; i <= count; ++i) {
                b.insert({ last + i, below(8192) });
            }
            break;
        case 1: // an end that is dropped, in the order of its cells or from behind
        case 2: {
            std::vector<pair_t> gone(b.set.lower_bound({ last - count, 0 }), b.set.end());
            if (kind == 2) {
                std::reverse(gone.begin(), gone.end());
            }
            for (const auto & v : gone) {
                b.erase(v);
            }
            break;
        }
        case 3: // a beginning that a window forgets
            for (int i = 0; i < count && !b.set.empty(); ++i) {
                b.erase(*b.set.begin());
            }
            break;
        case 4: // what lies scattered, coming and going
            for (int i = 0; i < count; ++i) {
                const pair_t v = { (int) below(8192), below(8192) };
                b.insert(v);
                if (below(2)) {
                    b.erase(v);
                }
                if (!b.set.empty() && below(3) == 0) {
                    const auto it = b.set.lower_bound({ (int) below(8192), 0 });
                    if (it != b.set.end()) {
                        const pair_t w = *it;
                        b.erase(w);
                        if (below(2)) {
                            b.insert(w);
                        }
                    }
                }
            }
            break;
        case 5: // a beginning of cells that stand behind those of the end
            for (int i = 0; i < count; ++i) {
                b.insert({ i, 8192 + (uint32_t) i });
            }
            break;
        case 6:
            b.row.clear();
            b.set.clear();
            break;
        default: // all of it, in the order of its cells
            std::vector<pair_t> gone(b.set.begin(), b.set.end());
            std::sort(gone.begin(), gone.end(), [](const pair_t & x, const pair_t & y) { return x.second < y.second; });
            for (const auto & v : gone) {
                b.erase(v);
            }
    }
}

static void compare_rows() {
    both b;
    for (int round = 0; round < 1000; ++round) {
        const uint32_t kind = below(60);
        change(b, kind < 54 ? kind % 6 : kind < 56 ? 6 : 7);
        if (below(3)) {
            b.compare(round);
        }
        if (below(50) == 0) {
            both other = b; // a copy has what is noted in it too
            other.compare(round);
            std::swap(b, other);
        }
    }
    b.compare(1000);
}

static void compare_used() {
    for (uint32_t size : { 1u, 63u, 64u, 65u, 1000u, 8192u }) {
        llama_kv_used used;
        used.resize(size);
        std::set<uint32_t> set;
        for (int round = 0; round < 10000; ++round) {
            const uint32_t i = below(4) ? below(size) : std::min(size - 1, below(70));
            if (round % 4096 == 4095) {
                used.clear();
                set.clear();
            } else if (round / 2048 % 2 ? below(4) : !below(4)) {
                used.erase(i);
                set.erase(i);
            } else {
                used.insert(i);
                set.insert(i);
            }
            require(used.size() == set.size() && used.empty() == set.empty(), "the number of cells in use", round);
            if (!set.empty() && below(2)) {
                require(used.min() == *set.begin(), "the first cell in use", round);
                require(used.max() == *set.rbegin(), "the last cell in use", round);
            }
            const uint32_t from = below(size + 1), limit = from + below(size - from + 1);
            const auto next = set.lower_bound(from);
            require(used.next_used(from, limit) == std::min(limit, next == set.end() ? limit : *next), "the next cell in use", round);
            uint32_t empty = from;
            while (empty < limit && set.count(empty)) {
                ++empty;
            }
            require(used.next_empty(from, limit) == empty, "the next empty cell", round);
        }
    }
}

int main() {
    compare_rows();
    compare_used();
    return 0;
}
