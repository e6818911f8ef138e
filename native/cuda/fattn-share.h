// Who computes what of an attention whose rows see few of the K blocks: arithmetic only, the same on the card and on the host.
//
// A tile is a few rows of the step (for one K/V head). Its list names the K blocks that at least one of its rows may see, never
// none: a tile whose rows see nothing lists block 0, and masks make of it what they make of all blocks. `prefix[t]` is how many
// blocks the lists before tile t have in all, prefix[n_tiles] how many all have. The same tiles exist once for each head.
//
// A unit is one listed block of one tile of one head. Units are numbered: head, then tile, then place in the list. CUDA blocks
// get equal runs of units, so that work is shared by what rows see and not by how long the cache is; where a run begins or
// ends within a tile, partial results are combined afterwards.

#pragma once

#include <cstdint>

#ifdef __CUDACC__
#define FATTN_SHARE_MEMBER __host__ __device__ __forceinline__
#else
#define FATTN_SHARE_MEMBER inline
#endif
#define FATTN_SHARE_FN static FATTN_SHARE_MEMBER

// Memory for n_tiles lists over n_blocks K blocks, in ints: prefix, count of each list, counter of finished lists, lists.
FATTN_SHARE_FN int fattn_share_counts(const int n_tiles) {
    return n_tiles + 1;
}

FATTN_SHARE_FN int fattn_share_finished(const int n_tiles) {
    return 2*n_tiles + 1;
}

FATTN_SHARE_FN int fattn_share_list(const int n_tiles, const int n_blocks, const int tile) {
    return 2*n_tiles + 2 + tile*n_blocks;
}

struct fattn_share_run {
    int first; // the units [first, stop)
    int stop;
};

// The run of one of n_runs CUDA blocks. Every unit is in one run; while there are more CUDA blocks than units the last have none.
FATTN_SHARE_FN fattn_share_run fattn_share_run_of(const int run, const int n_runs, const int n_units) {
    const int n_used = n_runs < n_units ? n_runs : n_units;
    if (run >= n_used) {
        return {n_units, n_units};
    }
    return {int(int64_t(run)*n_units/n_used), int(int64_t(run + 1)*n_units/n_used)};
}

// The CUDA block whose run holds the unit.
FATTN_SHARE_FN int fattn_share_owner(const int unit, const int n_runs, const int n_units) {
    const int n_used = n_runs < n_units ? n_runs : n_units;
    return int((int64_t(unit + 1)*n_used - 1)/n_units);
}

struct fattn_share_tile {
    int head;
    int tile;  // among those of the head
    int first; // its units are [first, first + n)
    int n;
};

// The tile that a unit belongs to.
FATTN_SHARE_FN fattn_share_tile fattn_share_tile_of(const int * prefix, const int n_tiles, const int unit) {
    const int n_units_head = prefix[n_tiles];
    const int head = unit/n_units_head;
    const int rest = unit - head*n_units_head;

    int low  = 0;           // prefix[low] <= rest
    int high = n_tiles;     // prefix[high] > rest
    while (high - low > 1) {
        const int middle = (low + high)/2;
        if (prefix[middle] <= rest) {
            low = middle;
        } else {
            high = middle;
        }
    }
    return {head, low, head*n_units_head + prefix[low], prefix[low + 1] - prefix[low]};
}

struct fattn_share_part {
    fattn_share_tile tile;
    int first; // places [first, stop) of the tile's list
    int stop;

    // A part that holds the end of the list writes the tile's result, others write to the CUDA block's own place. The writer
    // leaves maximum and sum too if the list began before it.
    FATTN_SHARE_MEMBER bool ends()   const { return stop == tile.n; }
    FATTN_SHARE_MEMBER bool begins() const { return first == 0; }
};

// What a CUDA block computes next: the part of its run from `unit` on that lies in one tile.
FATTN_SHARE_FN fattn_share_part fattn_share_part_of(
        const int * prefix, const int n_tiles, const int unit, const int run_stop) {
    const fattn_share_tile tile = fattn_share_tile_of(prefix, n_tiles, unit);
    const int stop = run_stop - tile.first;
    return {tile, unit - tile.first, stop < tile.n ? stop : tile.n};
}

struct fattn_share_seam {
    fattn_share_tile tile;
    int first_run; // the CUDA blocks [first_run, run) left parts of the tile that `run` wrote the end of; none: nothing to do
};

// Whose partial results belong to the tile that the CUDA block `run` finished without having begun it.
FATTN_SHARE_FN fattn_share_seam fattn_share_seam_of(
        const int * prefix, const int n_tiles, const int n_heads, const int run, const int n_runs) {
    const int n_units = n_heads*prefix[n_tiles];
    const fattn_share_run own = fattn_share_run_of(run, n_runs, n_units);
    if (own.first >= own.stop) {
        return {{0, 0, 0, 0}, run};
    }
    const fattn_share_part part = fattn_share_part_of(prefix, n_tiles, own.first, own.stop);
    if (part.begins() || !part.ends()) {
        return {part.tile, run};
    }
    return {part.tile, fattn_share_owner(part.tile.first, n_runs, n_units)};
}
