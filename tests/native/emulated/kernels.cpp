// llama.cpp's own attention kernels over lists, on emulated threads: the tensor core kernel with its copies ahead of time and the
// one for cards without tensor cores, each against plain attention. The sources are the changed ones of a build; what of them
// speaks to the card in assembler is replaced (tests/native/test_row_blocks_kernels.py) by device.cuh.

#include "device.cuh"
#include "fibers.h"

#include "fattn-mma-f16.cuh"
#include "fattn-tile.cuh"

#include <random>

struct step {
    int rows, cells, kv_heads, gqa_ratio, cuda_blocks;
    bool sinks;
    double density; // of visible stretches
};

template <int D> struct values {
    std::vector<float> q, sinks;
    std::vector<half> k, v, mask;

    explicit values(const step & s) {
        std::mt19937 random(s.rows*1000 + s.cells + s.cuda_blocks);
        std::uniform_real_distribution<float> number(-1.0f, 1.0f);
        q.resize(size_t(s.kv_heads)*s.gqa_ratio*s.rows*D);
        k.resize(size_t(s.kv_heads)*s.cells*D);
        v.resize(k.size());
        sinks.resize(s.kv_heads*s.gqa_ratio);
        mask.assign(size_t(s.rows)*s.cells, half(-INFINITY));
        for (auto & value : q) { value = number(random); }
        for (auto & value : k) { value = number(random); }
        for (auto & value : v) { value = number(random); }
        for (auto & value : sinks) { value = number(random); }
        for (int row = 0; row < s.rows; ++row) {
            half * seen = mask.data() + size_t(row)*s.cells;
            seen[row*37 % s.cells] = half(0.0f);
            for (int first = 0; first < s.cells; first += 16) {
                const bool stretch = number(random) < 2.0*s.density - 1.0;
                for (int i = 0; i < 16; ++i) {
                    if (stretch && number(random) > -0.5f) { seen[first + i] = half(0.0f); }
                }
            }
        }
    }

    std::vector<double> attention(const step & s, int row, int head) const {
        const size_t from = size_t(head/s.gqa_ratio)*s.cells*D;
        std::vector<double> result(D);
        double sum = s.sinks ? exp(double(sinks[head])) : 0.0;
        for (int cell = 0; cell < s.cells; ++cell) {
            if (float(mask[size_t(row)*s.cells + cell]) != 0.0f) { continue; }
            double score = 0.0;
            for (int i = 0; i < D; ++i) { score += q[(size_t(head)*s.rows + row)*D + i]*double(k[from + size_t(cell)*D + i]); }
            const double weight = exp(score/sqrt(D));
            sum += weight;
            for (int i = 0; i < D; ++i) { result[i] += weight*v[from + size_t(cell)*D + i]; }
        }
        for (auto & value : result) { value /= sum; }
        return result;
    }
};

template <int D> static ggml_cuda_kernel_launch_params launch(
        void (*kernel)(const char *, const char *, const char *, const char *, const char *, const int *, float *, float2 *, float,
            float, float, float, uint32_t, float, int32_t, uint3, int32_t, int32_t, int32_t, int32_t, int32_t, int32_t, int32_t,
            int32_t, int32_t, int32_t, int32_t, int64_t, int32_t, int32_t, int64_t, int32_t, int32_t, int32_t, int32_t, int32_t,
            int64_t),
        dim3 grid, int threads, const step & s, values<D> & in, const int * visible, float * out, float2 * meta) {
    const int heads = s.kv_heads*s.gqa_ratio, row = 2*D, head = row*s.cells;
    const ggml_cuda_kernel_launch_params params(grid, dim3(WARP_SIZE, threads/WARP_SIZE), 0, 0);
    ggml_cuda_kernel_launch(kernel, params,
        (const char *) in.q.data(), (const char *) in.k.data(), (const char *) in.v.data(), (const char *) in.mask.data(),
        (const char *) (s.sinks ? in.sinks.data() : nullptr), visible, out, meta,
        1.0f/sqrtf(D), 0.0f, 1.0f, 1.0f, 1u, 0.0f,
        D, uint3{0, 0, unsigned(s.rows)}, heads, 1, 4*D, 4*D*s.rows, 4*D*s.rows*heads,
        D, s.cells, s.kv_heads, 1, row, head, int64_t(head)*s.kv_heads, row, head, int64_t(head)*s.kv_heads,
        s.rows, 1, 1, 2*s.cells, 0, int64_t(2)*s.cells*s.rows);
    return params;
}

template <int D> static bool is_right(
        const char * name, int ncols1, int ncols2, const step & s, const values<D> & in, const std::vector<float> & out, double bound) {
    const int heads = s.kv_heads*s.gqa_ratio;
    double worst = 0.0;
    for (int row = 0; row < s.rows; ++row) {
        for (int head = 0; head < heads; ++head) {
            const auto wanted = in.attention(s, row, head);
            for (int i = 0; i < D; ++i) {
                const double difference = fabs(wanted[i] - out[(size_t(row)*heads + head)*D + i]);
                worst = difference <= worst ? worst : difference; // not a number is the worst
            }
        }
    }
    printf("%s, head %d, tile %d x %d, %d rows, %d cells, %d CUDA blocks, sinks %d: %.1e\n", name, D, ncols1, ncols2, s.rows,
        s.cells, s.cuda_blocks, s.sinks, worst);
    return worst < bound;
}

template <int D> static ggml_tensor tensor_of(const step & s, int n, void * data) {
    return {{D, n, s.kv_heads, 1}, {}, data, {}, {}};
}

template <int D, int ncols1, int ncols2> static bool tensor_cores(const step & s) {
    constexpr int ncols = ncols1*ncols2;
    values<D> in(s);
    ggml_tensor Q = tensor_of<D>(s, s.rows, nullptr), K = tensor_of<D>(s, s.cells, nullptr);
    ggml_tensor mask{{s.cells, s.rows, 1, 1}, {2, 2*size_t(s.cells), 0, 2*size_t(s.rows)*s.cells}, in.mask.data(), {}, {}};
    ggml_tensor dst{{}, {}, nullptr, {}, {&Q, &K, nullptr, &mask, nullptr}};
    ggml_backend_cuda_context ctx;
    ggml_cuda_pool_alloc<int> visible(ctx.pool());
    ggml_cuda_fattn_find_visible<ncols1>(ctx, &dst, visible, ggml_cuda_fattn_mma_get_nbatch_fa(D, D, ncols));

    const int heads = s.kv_heads*s.gqa_ratio;
    std::vector<float> out(size_t(s.rows)*heads*D, NAN);
    std::vector<float2> meta(size_t(s.cuda_blocks)*ncols*(2 + D/2), float2{NAN, NAN});
    launch<D>(flash_attn_ext_f16_visible<D, D, ncols1, ncols2>, dim3(s.cuda_blocks),
        ggml_cuda_fattn_mma_get_nthreads(D, D, ncols), s, in, visible.ptr, out.data(), meta.data());
    ggml_cuda_kernel_launch(flash_attn_visible_fixup<D, ncols1, ncols2>,
        ggml_cuda_kernel_launch_params(dim3(s.cuda_blocks, ncols1, ncols2), dim3(D), 0, 0),
        out.data(), (const float2 *) meta.data(), (const int *) visible.ptr, s.rows, heads, s.kv_heads, 1, s.gqa_ratio);
    return is_right<D>("tensor cores", ncols1, ncols2, s, in, out, 1e-3);
}

template <int D, int ncols1, int ncols2> static bool without_tensor_cores(const step & s) {
    constexpr int ncols = ncols1*ncols2;
    values<D> in(s);
    ggml_tensor Q = tensor_of<D>(s, s.rows, nullptr), K = tensor_of<D>(s, s.cells, nullptr);
    ggml_tensor mask{{s.cells, s.rows, 1, 1}, {2, 2*size_t(s.cells), 0, 2*size_t(s.rows)*s.cells}, in.mask.data(), {}, {}};
    ggml_tensor dst{{}, {}, nullptr, {}, {&Q, &K, nullptr, &mask, nullptr}};
    ggml_backend_cuda_context ctx;
    ggml_cuda_pool_alloc<int> visible(ctx.pool());
    ggml_cuda_fattn_find_visible<ncols1>(ctx, &dst, visible, ggml_cuda_fattn_tile_get_nbatch_fa(D, D, ncols));

    // Here a number of parallel blocks for each tile, whose parts are combined as flash_attn_combine_results does.
    const int heads = s.kv_heads*s.gqa_ratio, n = s.cuda_blocks;
    std::vector<float> parts(size_t(s.rows)*heads*n*D, NAN), out(size_t(s.rows)*heads*D);
    std::vector<float2> meta(size_t(s.rows)*heads*n, float2{NAN, NAN});
    launch<D>(flash_attn_tile<D, D, ncols1, ncols2, false, true>,
        dim3((s.rows + ncols1 - 1)/ncols1, n, s.kv_heads*s.gqa_ratio/ncols2),
        ggml_cuda_fattn_tile_get_nthreads(D, D, ncols), s, in, visible.ptr, parts.data(), meta.data());
    for (size_t column = 0; column < size_t(s.rows)*heads; ++column) {
        float max = -FLT_MAX, sum = 0.0f;
        for (int part = 0; part < n; ++part) { max = fmaxf(max, meta[column*n + part].x); }
        for (int part = 0; part < n; ++part) {
            const float scale = n == 1 ? 1.0f : expf(meta[column*n + part].x - max);
            sum += n == 1 ? 1.0f : scale*meta[column*n + part].y;
            for (int i = 0; i < D; ++i) { out[column*D + i] += scale*parts[(column*n + part)*D + i]; }
        }
        for (int i = 0; i < D; ++i) { out[column*D + i] /= sum; }
    }
    return is_right<D>("without", ncols1, ncols2, s, in, out, 1e-4);
}

int main() {
    setvbuf(stdout, nullptr, _IOLBF, 0);
    bool right = true;
    right &= tensor_cores<256, 1, 8>({5, 512, 2, 8, 9, true, 0.1});
    right &= tensor_cores<256, 1, 8>({3, 512, 1, 6, 4, false, 0.2});
    right &= tensor_cores<256, 1, 8>({2, 512, 1, 8, 30, false, 0.3});
    right &= tensor_cores<256, 2, 8>({5, 512, 1, 8, 5, false, 0.1});
    right &= tensor_cores<256, 4, 8>({6, 512, 1, 8, 3, true, 0.05});
    right &= tensor_cores<256, 8, 8>({11, 512, 1, 8, 5, false, 0.03});
    right &= tensor_cores<128, 1, 8>({5, 1024, 2, 8, 7, false, 0.1});
    right &= tensor_cores<128, 2, 4>({5, 512, 2, 4, 6, true, 0.1});
    right &= tensor_cores<128, 16, 4>({19, 512, 1, 4, 3, false, 0.03});
    right &= without_tensor_cores<256, 1, 8>({4, 512, 1, 8, 3, false, 0.1});
    right &= without_tensor_cores<256, 4, 8>({6, 512, 1, 8, 2, true, 0.1});
    right &= without_tensor_cores<128, 1, 8>({2, 512, 1, 8, 1, true, 0.2});
    right &= without_tensor_cores<128, 2, 4>({5, 512, 2, 4, 3, false, 0.1});
    right &= without_tensor_cores<128, 8, 4>({11, 768, 2, 4, 7, false, 0.03});
    return right ? 0 : 1;
}
