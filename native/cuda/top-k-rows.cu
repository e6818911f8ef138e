#include "top-k-rows.cuh"

#if !defined(GGML_USE_HIP) && !defined(GGML_USE_MUSA)

#include "top-k-rows-kernels.cuh"

#include <algorithm>
#include <cstdlib>
#include <utility>
#include <vector>

bool ggml_cuda_should_use_top_k_rows(const ggml_tensor * dst) {
    static const bool is_on = [] {
        const char * env = getenv("GGML_CUDA_TOP_K_ROWS");
        return env == nullptr || atoi(env) != 0;
    }();
    const ggml_tensor * src0 = dst->src[0];
    // a row of up to 1024 numbers is sorted in one kernel by llama.cpp
    return is_on && src0->type == GGML_TYPE_F32 && dst->type == GGML_TYPE_I32 && src0->ne[0] > 1024 && src0->ne[0] <= INT_MAX &&
        dst->ne[0] > 0 && dst->ne[0] <= TOP_K_MOST && ggml_is_contiguous(src0) && ggml_is_contiguous(dst);
}

// The first `n_rows` rows of the places.
static void top_k_launch(ggml_backend_cuda_context & ctx, top_k_places & places, const int64_t n_rows) {
    const int64_t most_words = (places.columns + 3 + 3)/4; // of a row that does not begin with a word
    const int     chunks     = (int) ((most_words + TOP_K_CHUNK - 1)/TOP_K_CHUNK);
    const int     room       = top_k_room_of_chunk(places.k);
    places.words = (int) ((most_words + chunks - 1)/chunks);

    ggml_cuda_pool_alloc<int>      counts(ctx.pool(), n_rows*chunks);
    ggml_cuda_pool_alloc<uint64_t> candidates(ctx.pool(), n_rows*chunks*room);

    const dim3 blocks(chunks, n_rows, 1);
    const ggml_cuda_kernel_launch_params of_chunks =
        ggml_cuda_kernel_launch_params(blocks, dim3(TOP_K_THREADS, 1, 1), 0, ctx.stream());
    ggml_cuda_kernel_launch(top_k_chunks, of_chunks, places, counts.get(), candidates.get());
    const ggml_cuda_kernel_launch_params of_rows =
        ggml_cuda_kernel_launch_params(dim3(n_rows, 1, 1), dim3(TOP_K_THREADS, 1, 1), 0, ctx.stream());
    ggml_cuda_kernel_launch(top_k_ends, of_rows, places, chunks, (const int *) counts.get(), (const uint64_t *) candidates.get());
}

static top_k_places top_k_places_of(const ggml_tensor * dst) {
    top_k_places places = {};
    places.of[0]   = {(const float *) dst->src[0]->data, (int *) dst->data, nullptr};
    places.columns = dst->src[0]->ne[0];
    places.k       = (int) dst->ne[0];
    return places;
}

void ggml_cuda_op_top_k_rows(ggml_backend_cuda_context & ctx, ggml_tensor * dst) {
    const int64_t n_rows = ggml_nrows(dst);
    top_k_places  places = top_k_places_of(dst);

    // so many rows at once that their candidates take up to about 64 MB
    const int64_t row_bytes = (places.columns/(4*TOP_K_CHUNK) + 1)*top_k_room_of_chunk(places.k)*(int64_t) sizeof(uint64_t);
    const int64_t at_once   = std::min<int64_t>(std::max<int64_t>((64 << 20)/row_bytes, 1), 65535);
    for (int64_t first = 0; first < n_rows; first += at_once) {
        places.rows_each = (uint32_t) std::min(at_once, n_rows - first);
        top_k_launch(ctx, places, places.rows_each);
        places.of[0].row += at_once*places.columns;
        places.of[0].ids += at_once*places.k;
    }
}

// What a run reads and writes. All is read first and written last, which is not the order of its nodes.
struct top_k_ranges {
    std::vector<std::pair<const char *, const char *>> read, written;

    static std::pair<const char *, const char *> of(const ggml_tensor * tensor) {
        return {(const char *) tensor->data, (const char *) tensor->data + ggml_nbytes(tensor)};
    }
    static bool is_apart(
            const std::pair<const char *, const char *> & one, const std::vector<std::pair<const char *, const char *>> & others) {
        return std::all_of(others.begin(), others.end(), [&](const std::pair<const char *, const char *> & other) {
            return one.second <= other.first || other.second <= one.first;
        });
    }
    bool may_read(const ggml_tensor * tensor) const { return is_apart(of(tensor), written); }
    bool may_write(const ggml_tensor * tensor) const { return is_apart(of(tensor), written) && is_apart(of(tensor), read); }
};

static bool top_k_is_nothing(const ggml_tensor * node) {
    return node->op == GGML_OP_NONE || node->op == GGML_OP_RESHAPE || node->op == GGML_OP_VIEW || node->op == GGML_OP_PERMUTE ||
        node->op == GGML_OP_TRANSPOSE || (node->flags & GGML_TENSOR_FLAG_COMPUTE) == 0;
}

// Whether the node takes the row's numbers by the indices of `ids`.
static bool top_k_are_values(const ggml_tensor * node, const ggml_tensor * ids) {
    const ggml_tensor * from = node->src[0];
    return node->src[1] == ids && from->type == GGML_TYPE_F32 && node->type == GGML_TYPE_F32 && from->ne[0] == 1 &&
        from->data == ids->src[0]->data && from->ne[1] == ids->src[0]->ne[0] && ggml_nrows(from) == from->ne[1] &&
        ggml_is_contiguous(from) && ggml_is_contiguous(node) && ggml_nrows(node) == ids->ne[0];
}

int ggml_cuda_top_k_run(ggml_backend_cuda_context & ctx, const ggml_cgraph * cgraph, const int first) {
    const auto is_taken = [](const ggml_tensor * node) {
        return node->op == GGML_OP_TOP_K && ggml_cuda_should_use_top_k_rows(node) && ggml_nrows(node) == 1;
    };
    if (!is_taken(cgraph->nodes[first])) {
        return 0;
    }
    top_k_places places = top_k_places_of(cgraph->nodes[first]);
    places.rows_each = 1;

    std::vector<const ggml_tensor *> ids;
    top_k_ranges ranges;
    int last = first;
    for (int i = first; i < cgraph->n_nodes; ++i) {
        const ggml_tensor * node = cgraph->nodes[i];
        if (top_k_is_nothing(node)) {
            continue;
        }
        if (is_taken(node) && node->ne[0] == places.k && node->src[0]->ne[0] == places.columns && ids.size() < TOP_K_PLACES &&
                ranges.may_read(node->src[0])) {
            ranges.read.push_back(top_k_ranges::of(node->src[0]));
            if (!ranges.may_write(node)) {
                break;
            }
            places.of[ids.size()] = top_k_places_of(node).of[0];
            ids.push_back(node);
        } else if (node->op == GGML_OP_GET_ROWS && !ids.empty() && top_k_are_values(node, ids.back()) && ranges.may_write(node) &&
                places.of[ids.size() - 1].values == nullptr) {
            places.of[ids.size() - 1].values = (float *) node->data;
        } else {
            break;
        }
        ranges.written.push_back(top_k_ranges::of(node));
        last = i;
    }
    if (last > first) {
        top_k_launch(ctx, places, ids.size());
    }
    return last - first;
}

#else

bool ggml_cuda_should_use_top_k_rows(const ggml_tensor *) {
    return false;
}

void ggml_cuda_op_top_k_rows(ggml_backend_cuda_context &, ggml_tensor *) {
    GGML_ABORT("there are no such kernels here");
}

int ggml_cuda_top_k_run(ggml_backend_cuda_context &, const ggml_cgraph *, int) {
    return 0;
}

#endif // !defined(GGML_USE_HIP) && !defined(GGML_USE_MUSA)
