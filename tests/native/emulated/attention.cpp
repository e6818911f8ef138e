// Runs the attention over lists of visible blocks on a processor, out of the files that a card's build compiles: search of the
// mask, lists, sharing, combining. Only what computes one part of a tile (process_tile) is written anew, with its real
// arguments and its real places for results.
//
//   attention < CASE > RESULT
//
// CASE, little-endian: int32 rows, cells, kv_heads, gqa_ratio, streams, cuda_blocks, columns, sinks; floats Q [streams][heads]
// [rows][D], K and V [streams][kv_heads][cells][D], mask [streams][rows][cells], sinks [heads]. RESULT: int32 tiles, blocks;
// the lists (count, blocks) of each tile; the number of parts; (cuda block, head, tile, first, stop, ends) of each part; then
// (cuda block, first) of each seam, the number before; floats [streams][rows][heads][D].

#include "common.cuh"
#include "fibers.h"

#include "fattn-visible.cuh"

constexpr int D = 8;      // head size
constexpr int BLOCK = 8;  // cells of a K block
constexpr int NCOLS2 = 4;

constexpr int ggml_cuda_get_physical_warp_size() { return WARP_SIZE; }
constexpr int ggml_cuda_fattn_mma_get_nbatch_fa(int, int, int) { return BLOCK; }
constexpr int ggml_cuda_fattn_mma_get_nthreads(int, int, int) { return WARP_SIZE; }
constexpr int ggml_cuda_fattn_mma_get_occupancy(int, int, int) { return 1; }

template <int DKQ, int DV, int ncols1, int ncols2, int nwarps, bool use_logit_softcap, bool V_is_K_view, bool use_sparse, bool needs_fixup, bool is_fixup, bool use_list>
static void flash_attn_ext_f16_process_tile(
        const float2 * Q_f2, const half2 * K_h2, const half2 * V_h2, const half * mask_h, const int32_t * indices,
        const float * sinks_f, float2 * dstk, float2 * dstk_fixup, float scale, float slope, float, uint3 ne01, int ne02,
        int gqa_ratio, int, int stride_Q1, int stride_Q2, int stride_K, int stride_V, int stride_mask, int jt, int zt_gqa,
        int kb0_start, int kb0_stop) {
    static_assert(use_list && !(needs_fixup && is_fixup));
    if (threadIdx.x != 0) {
        return;
    }
    assert(kb0_start < kb0_stop);
    constexpr int ncols = ncols1*ncols2;
    for (int jc = 0; jc < ncols; ++jc) {
        const int j = jc/ncols2;
        const int c = jc%ncols2;
        const int row = jt*ncols1 + j;
        const bool exists = row < int(ne01.z) && zt_gqa*ncols2 + c < gqa_ratio;
        float max = -FLT_MAX/2.0f, sum = 0.0f, values[DV] = {};
        for (int place = kb0_start; place < kb0_stop && exists; ++place) {
            for (int cell = indices[place]*BLOCK; cell < (indices[place] + 1)*BLOCK; ++cell) {
                const float * q = (const float *) (Q_f2 + row*stride_Q1 + c*stride_Q2);
                const half  * k = (const half *) (K_h2 + int64_t(cell)*stride_K);
                const half  * v = (const half *) (V_h2 + int64_t(cell)*stride_V);
                float score = slope*mask_h[int64_t(row)*stride_mask + cell];
                for (int i = 0; i < DKQ; ++i) { score += scale*q[i]*k[i]; }
                const float max_new = fmaxf(max, score + FATTN_KQ_MAX_OFFSET);
                const float old = expf(max - max_new), weight = expf(score - max_new);
                sum = sum*old + weight;
                for (int i = 0; i < DV; ++i) { values[i] = values[i]*old + weight*v[i]; }
                max = max_new;
            }
        }
        if (!is_fixup && sinks_f && exists) {
            const float max_new = fmaxf(max, sinks_f[c]), old = expf(max - max_new);
            sum = sum*old + expf(sinks_f[c] - max_new);
            for (int i = 0; i < DV; ++i) { values[i] *= old; }
            max = max_new;
        }
        if (needs_fixup) { dstk_fixup[blockIdx.x*ncols + jc] = make_float2(max, sum); }
        if (is_fixup) { dstk_fixup[(gridDim.x + blockIdx.x)*ncols + jc] = make_float2(max, sum); }
        float * own = (float *) (dstk_fixup + gridDim.x*(2*ncols) + blockIdx.x*(ncols*(DV/2))) + jc*DV;
        float * out = (float *) (dstk + (int64_t(row)*ne02 + c)*(DV/2));
        for (int i = 0; i < DV; ++i) {
            if (is_fixup) { own[i] = values[i]; }
            else if (exists) { out[i] = needs_fixup ? values[i] : values[i]/sum; }
        }
    }
}

#include "fattn-mma-visible.cuh"

template <typename T> static std::vector<T> read(size_t n) {
    std::vector<T> all(n);
    if (fread(all.data(), sizeof(T), n, stdin) != n) { abort(); }
    return all;
}

static std::vector<half> read_halves(size_t n) {
    const auto all = read<float>(n);
    return {all.begin(), all.end()};
}

static void write(const std::vector<int> & all) { fwrite(all.data(), sizeof(int), all.size(), stdout); }

template <int ncols1> static void run(const std::vector<int> & shape) {
    const int rows = shape[0], cells = shape[1], kv_heads = shape[2], gqa = shape[3], streams = shape[4], n_runs = shape[5];
    const int heads = kv_heads*gqa;
    auto q = read<float>(size_t(streams)*heads*rows*D);
    auto k = read_halves(size_t(streams)*kv_heads*cells*D), v = read_halves(k.size());
    auto mask = read_halves(size_t(streams)*rows*cells);
    auto sinks = read<float>(heads);
    std::vector<float> out(size_t(streams)*rows*heads*D, 12345.0f);

    ggml_tensor Q{{D, rows, heads, streams}, {}, q.data(), {}, {}}, K{{D, cells, kv_heads, streams}, {}, k.data(), {}, {}};
    ggml_tensor M{{cells, rows, 1, streams}, {sizeof(half), cells*sizeof(half), 0, size_t(rows)*cells*sizeof(half)}, mask.data(), {}, {}};
    ggml_tensor dst{{}, {}, out.data(), {}, {&Q, &K, nullptr, &M, nullptr}};

    ggml_backend_cuda_context ctx;
    ggml_cuda_pool_alloc<int> visible(ctx.pool());
    ggml_cuda_fattn_find_visible<ncols1>(ctx, &dst, visible, BLOCK);

    const int iter_j = (rows + ncols1 - 1)/ncols1, n_tiles = iter_j*streams, n_blocks = cells/BLOCK;
    const int n_heads = (gqa + NCOLS2 - 1)/NCOLS2*kv_heads, n_units = n_heads*visible.ptr[n_tiles];
    write({n_tiles, n_blocks});
    for (int tile = 0; tile < n_tiles; ++tile) {
        const int n = visible.ptr[fattn_share_counts(n_tiles) + tile];
        const int * list = visible.ptr + fattn_share_list(n_tiles, n_blocks, tile);
        assert(n == visible.ptr[tile + 1] - visible.ptr[tile]);
        write({n});
        write({list, list + n});
    }
    std::vector<int> parts, seams;
    for (int run = 0; run < n_runs; ++run) {
        const auto own = fattn_share_run_of(run, n_runs, n_units);
        for (int unit = own.first; unit < own.stop;) {
            const auto part = fattn_share_part_of(visible.ptr, n_tiles, unit, own.stop);
            parts.insert(parts.end(), {run, part.tile.head, part.tile.tile, part.first, part.stop, part.ends()});
            unit = part.tile.first + part.stop;
        }
        const auto seam = fattn_share_seam_of(visible.ptr, n_tiles, n_heads, run, n_runs);
        if (seam.first_run < run) { seams.insert(seams.end(), {run, seam.first_run}); }
    }
    write({int(parts.size()/6)}), write(parts), write({int(seams.size()/2)}), write(seams);

    constexpr int ncols = ncols1*NCOLS2;
    ggml_cuda_pool_alloc<float2> meta(ctx.pool(), size_t(n_runs)*ncols*(2 + D/2));
    const int element = sizeof(half);
    const uint3 ne01{0, 0, unsigned(rows)};
    ggml_cuda_kernel_launch(flash_attn_ext_f16_visible<D, D, ncols1, NCOLS2>,
        ggml_cuda_kernel_launch_params(dim3(n_runs), dim3(WARP_SIZE), 0, 0),
        (const char *) q.data(), (const char *) k.data(), (const char *) v.data(), (const char *) mask.data(),
        (const char *) (shape[7] ? sinks.data() : nullptr), visible.ptr, out.data(), meta.ptr,
        1.0f/sqrtf(D), 0.0f, 1.0f, 1.0f, 1u, 0.0f,
        D, ne01, heads, streams, 4*D, 4*D*rows, 4*D*rows*heads,
        D, cells, kv_heads, streams, element*D, element*D*cells, int64_t(element)*D*cells*kv_heads,
        element*D, element*D*cells, int64_t(element)*D*cells*kv_heads,
        rows, 1, streams, element*cells, 0, int64_t(element)*cells*rows);
    ggml_cuda_kernel_launch(flash_attn_visible_fixup<D, ncols1, NCOLS2>,
        ggml_cuda_kernel_launch_params(dim3(n_runs, ncols1, NCOLS2), dim3(D), 0, 0),
        out.data(), (const float2 *) meta.ptr, (const int *) visible.ptr, rows, heads, kv_heads, streams, gqa);
    fwrite(out.data(), sizeof(float), out.size(), stdout);
}

// Which steps get lists, and how wide their tiles are.
static void check_rules() {
    const auto shall = [](int rows, int cells, int streams = 1, float softcap = 0.0f, int card = 900) {
        ggml_tensor Q{{256, rows, 16, streams}, {}, nullptr, {}, {}}, K{{256, cells, 2, streams}, {}, nullptr, {}, {}};
        ggml_tensor mask{{cells, rows, 1, streams}, {}, nullptr, {}, {}}, dst{{}, {}, nullptr, {}, {&Q, &K, nullptr, &mask, nullptr}};
        memcpy(dst.op_params + 2, &softcap, sizeof(softcap));
        return ggml_cuda_fattn_shall_use_visible(card, &dst);
    };
    assert(shall(2, 65536) && shall(256, 262144));
    assert(!shall(1, 65536) && !shall(257, 65536) && !shall(8, 65280) && !shall(8, 65544));
    assert(!shall(8, 65536, 2) && !shall(8, 65536, 1, 30.0f) && !shall(8, 65536, 1, 0.0f, -1));
    const auto width = [](int rows, int most) {
        ggml_tensor dst{};
        dst.op_params[FATTN_VISIBLE_ROWS_PARAM] = rows;
        return ggml_cuda_fattn_visible_ncols1(&dst, most);
    };
    assert(width(1, 8) == 1 && width(2, 8) == 2 && width(3, 8) == 4 && width(5, 8) == 8 && width(100, 8) == 8);
    assert(width(0, 8) == 8 && width(0, 2) == 2); // nothing is known
}

int main() {
    check_rules();
    for (int c; (c = getchar()) != EOF;) {
        ungetc(c, stdin);
        const auto shape = read<int>(8);
        switch (shape[6]) {
            case 1: run<1>(shape); break;
            case 2: run<2>(shape); break;
            case 8: run<8>(shape); break;
            default: abort();
        }
    }
}
