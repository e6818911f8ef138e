# ruff: noqa: E501 (the lines are those of llama.cpp)
"""A prompt's cells lie side by side in a cache that all sequences share.

llama.cpp takes the next empty cells from where it took the last ones, or from the beginning again once enough of them are
empty. In a cache that conversations have come to and left, a prompt's parts then lie far from each other, and its attention
(native/cell_window.py) looks at all that lies between: a part of 2,048 rows at up to the whole cache. On an H200 with 32
prompts of 8,192 tokens a token waited up to 1.16 s (p99) for parts of 4,096 that take 0.4 s alone.

So a step's tokens go where they fit in one piece with a little room behind: shortly behind the last cell of their (first)
sequence; else where that sequence's span grows least; of a sequence without cells into the longest empty stretch, so that what
follows has room behind it. If nothing is long enough it is llama.cpp's way again, from the first empty cell on, found by words
of bits.

That holds for single tokens too. Streams that were written together leave cells that are empty one by one, and a stream that
fills them moves its span's end with every token: a graph serves again as long as that stays within 256 cells, so every eighth
token behind 32 streams built one anew.

What attention sums stays, but in another order, so numbers differ in low bits from llama.cpp's way, as they do whenever other
conversations came before. LLAMA_KV_CELLS_TOGETHER=0 in the engine's environment turns it off.
"""

from __future__ import annotations

from native.source_change import Change

_CELLS = "src/llama-kv-cells.h"
_CACHE = "src/llama-kv-cache.cpp"

CELLS_TOGETHER = (
    Change(
        _CELLS,
        """    // the index of the first cell that is used
""",
        """    // Where n tokens of a sequence find empty cells side by side, or size() if nowhere: shortly behind its last cell,
    // else where its bounds grow least; without cells of its own the longest stretch. Stretches that would soon be full
    // come last: where a sequence's span ends matters to graphs that serve again.
    uint32_t find_together(uint32_t n, llama_seq_id seq_id) const {
        constexpr uint32_t NEAR  = 1024;
        constexpr uint32_t SPARE = 64;

        const auto & own = seq_bounds[seq_id];
        const bool has_own = own.end > own.first;

        if (has_own) {
            const uint32_t limit = std::min(size(), own.end + NEAR);
            for (uint32_t first = used.next_empty(own.end, limit); first < limit;) {
                const uint32_t end = used.next_used(first, size());
                if (end - first >= n + SPARE || (first == own.end && end - first >= n)) {
                    return first;
                }
                first = used.next_empty(end, std::max(end, limit));
            }
        }

        for (const uint32_t spare : { SPARE, 0u }) {
            uint32_t res  = size();
            uint32_t best = 0;

            for (uint32_t first = used.next_empty(0, size()); first < size();) {
                const uint32_t end = used.next_used(first, size());
                if (end - first >= n + spare) {
                    // of a stretch that lies before the sequence, the last cells are the nearest
                    const uint32_t at = !has_own || first >= own.first ? first : std::min(end, std::max(own.first, first + n)) - n;
                    const uint32_t cost = has_own ? std::max(own.end, at + n) - std::min(own.first, at) : size() - (end - first);
                    if (res == size() || cost < best) {
                        res  = at;
                        best = cost;
                    }
                }
                first = used.next_empty(end, size());
            }
            if (res < size()) {
                return res;
            }
        }

        return size();
    }

    // the first empty cell from i on, or size()
    uint32_t next_empty(uint32_t i) const { return used.next_empty(i, size()); }

    // the index of the first cell that is used
""",
    ),
    Change(
        _CACHE,
        """        if (n_tokens > cells.size()) {
            LLAMA_LOG_ERROR("%s: n_tokens = %d > size = %u\\n", __func__, n_tokens, cells.size());
            return { };
        }
""",
        """        if (n_tokens > cells.size()) {
            LLAMA_LOG_ERROR("%s: n_tokens = %d > size = %u\\n", __func__, n_tokens, cells.size());
            return { };
        }

        // what a window leaves behind is used again cell by cell
        static const bool keeps_together = [] {
            const char * env = getenv("LLAMA_KV_CELLS_TOGETHER");
            return env == nullptr || atoi(env) != 0;
        }();
        if (keeps_together && !cont && n_stream == 1 && swa_type == LLAMA_SWA_TYPE_NONE) {
            uint32_t head_new = cells.find_together(n_tokens, seq_id);
            if (head_new == cells.size()) {
                head_new = cells.next_empty(head_cur);
            }
            if (head_new < cells.size()) {
                head_cur = head_new;
            }
        }
""",
    ),
)
