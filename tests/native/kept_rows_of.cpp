// What a card finds of the activations it quantized last.

#include "ggml.h"
#include "kept-rows.cuh"

#include <cstdio>

#define CHECK(what) do { if (!(what)) { std::printf("line %d: %s\n", __LINE__, #what); return 1; } } while (0)

int main() {
    ggml_context * ctx = ggml_init({ 1 << 20, nullptr, false });

    ggml_tensor * rows   = ggml_new_tensor_2d(ctx, GGML_TYPE_F32, 64, 8);
    ggml_tensor * others = ggml_new_tensor_2d(ctx, GGML_TYPE_F32, 64, 8);
    ggml_tensor * alike  = ggml_reshape_3d(ctx, rows, 64, 1, 8);
    ggml_tensor * behind = ggml_view_2d(ctx, rows, 64, 4, rows->nb[1], 4*rows->nb[1]);
    ggml_tensor * halves = ggml_view_2d(ctx, rows, 32, 8, rows->nb[1], 0);

    constexpr int ROWS = ggml_cuda_kept_rows::ROWS, TILES = 1;
    char buffer[1];
    ggml_cuda_kept_rows kept;

    // Without a buffer, or where parts of a graph run side by side, nothing is kept.
    kept.begin(true);
    CHECK(kept.make_room(rows, ROWS, 1) == nullptr && kept.find(rows, ROWS) == nullptr);
    kept.buffer = buffer;
    kept.begin(false);
    CHECK(kept.make_room(rows, ROWS, 1) == nullptr && kept.find(rows, ROWS) == nullptr);

    kept.begin(true);
    CHECK(kept.find(rows, ROWS) == nullptr);
    CHECK(kept.make_room(rows, ROWS, 1) == buffer);
    CHECK(kept.find(rows, ROWS) == buffer);
    CHECK(kept.find(alike, ROWS) == buffer);
    CHECK(kept.find(rows, TILES) == nullptr);
    CHECK(kept.find(behind, ROWS) == nullptr);
    CHECK(kept.find(halves, ROWS) == nullptr);
    CHECK(kept.find(others, ROWS) == nullptr);

    // The memory of a tensor that nobody needs any more is another's: not what lies there is kept, but what the tensor holds.
    others->data = rows->data;
    CHECK(kept.find(others, ROWS) == nullptr);

    // What cannot be kept leaves what is.
    CHECK(kept.make_room(others, ROWS, ggml_cuda_kept_rows::MAX_BYTES + 1) == nullptr);
    CHECK(kept.make_room(halves, ROWS, 1) == nullptr);
    CHECK(kept.find(rows, ROWS) == buffer);

    // Tiles of one matrix of eight rows are not those of eight matrices of one row.
    CHECK(kept.make_room(rows, TILES, 1) == buffer);
    CHECK(kept.find(rows, ROWS) == nullptr);
    CHECK(kept.find(rows, TILES) == buffer);
    CHECK(kept.find(alike, TILES) == nullptr);

    // The next run of the graph has computed its tensors anew.
    kept.begin(true);
    CHECK(kept.find(rows, TILES) == nullptr);

    ggml_free(ctx);
    return 0;
}
