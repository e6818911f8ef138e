// The k largest numbers of rows on emulated threads, host's side and kernels out of native/cuda, against a stable sort.
//
//   row_candidates [all]
//
// Without `all` it runs what takes seconds. With GGML_CUDA_TOP_K_ROWS=0 it says whether nothing takes this way.

#include "device.cuh"
#include "fibers.h"

#include <algorithm>
#include <numeric>
#include <string>

#define __noinline__

struct alignas(16) float4 { float x, y, z, w; };
static float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }
static uint32_t __float_as_uint(float value) { return bits_of(value); }
static float __uint_as_float(uint32_t bits) { return value_of(bits); }
template <typename T> static T min(T a, T b) { return std::min(a, b); }
template <typename T> static T max(T a, T b) { return std::max(a, b); }
static int __shfl_sync(unsigned, int value, unsigned from) {
    return warp_together(value, [=](const int * all, unsigned) { return all[from]; });
}

enum { GGML_TYPE_F32, GGML_TYPE_I32, GGML_TYPE_F16 };
enum { GGML_OP_NONE, GGML_OP_RESHAPE, GGML_OP_VIEW, GGML_OP_PERMUTE, GGML_OP_TRANSPOSE, GGML_OP_TOP_K, GGML_OP_GET_ROWS, GGML_OP_ADD };
constexpr int GGML_TENSOR_FLAG_COMPUTE = 16;
struct ggml_cgraph { int n_nodes; ggml_tensor ** nodes; };
static int64_t ggml_nrows(const ggml_tensor * tensor) { return tensor->ne[1]*tensor->ne[2]*tensor->ne[3]; }
static size_t ggml_nbytes(const ggml_tensor * tensor) { return 4*tensor->ne[0]*ggml_nrows(tensor); }
static bool ggml_is_contiguous(const ggml_tensor * tensor) {
    return tensor->nb[0] == 4 && (ggml_nrows(tensor) == 1 || tensor->nb[1] == 4*size_t(tensor->ne[0]));
}

#include "top-k-rows.cu"

using numbers = std::vector<float>;

static uint32_t seed = 1;
static uint32_t next() { return (seed = seed*1664525u + 1013904223u) >> 8; }
static float normal() {
    float sum = -6.0f;
    for (int i = 0; i < 12; ++i) { sum += float(next())/(1 << 24); }
    return sum;
}

// --- the reference: equal numbers in the order of their columns, -0 is 0, a NaN is above all ---------------

static std::vector<int> largest(const float * row, int columns, int k) {
    std::vector<int> ids(columns);
    std::iota(ids.begin(), ids.end(), 0);
    const auto is_before = [=](int a, int b) { return std::isnan(row[a]) ? !std::isnan(row[b]) : row[a] > row[b]; };
    std::stable_sort(ids.begin(), ids.end(), is_before);
    ids.resize(k);
    return ids;
}

static ggml_tensor tensor_of(int op, int type, int64_t columns, int64_t rows, void * data) {
    ggml_tensor tensor{};
    const int64_t ne[] = {columns, rows, 1, 1};
    for (int i = 0; i < 4; ++i) {
        tensor.ne[i] = ne[i];
        tensor.nb[i] = i == 0 ? 4 : tensor.nb[i - 1]*ne[i - 1];
    }
    tensor.op    = op;
    tensor.type  = type;
    tensor.data  = data;
    tensor.flags = GGML_TENSOR_FLAG_COMPUTE;
    return tensor;
}

// Rows as they lie on a card, `skip` numbers behind a word, with NaN around them.
struct rows {
    std::vector<float4> words;
    float * first;
    rows(const numbers & values, int skip) : words(values.size()/4 + 3, make_float4(NAN, NAN, NAN, NAN)) {
        first = (float *) words.data() + 4 + skip;
        std::copy(values.begin(), values.end(), first);
    }
};

static bool is_right(const numbers & values, int n_rows, int k, int skip = 0) {
    const int columns = values.size()/n_rows;
    const rows given(values, skip);
    std::vector<int> ids(n_rows*k + 1, -7);
    ggml_tensor row = tensor_of(GGML_OP_NONE, GGML_TYPE_F32, columns, n_rows, given.first);
    ggml_tensor top = tensor_of(GGML_OP_TOP_K, GGML_TYPE_I32, k, n_rows, ids.data());
    top.src[0] = &row;
    if (!ggml_cuda_should_use_top_k_rows(&top)) { return false; }
    ggml_backend_cuda_context ctx;
    ggml_cuda_op_top_k_rows(ctx, &top);
    for (int i = 0; i < n_rows; ++i) {
        const auto expected = largest(&values[i*columns], columns, k);
        if (!std::equal(expected.begin(), expected.end(), &ids[i*k])) { return false; }
    }
    return ids.back() == -7;
}

static numbers filled(int n, float (*number)(int)) {
    numbers values(n);
    for (int i = 0; i < n; ++i) { values[i] = number(i); }
    return values;
}
static numbers random_of(int n) { return filled(n, [](int) { return normal(); }); }

// --- chains of several sequences in a graph -------------------------------------------------------------

struct chains {
    static constexpr int columns = 5000, k = 40;
    int n;
    numbers logits;
    std::vector<float4> place;
    std::vector<int> ids;
    numbers values;
    std::vector<ggml_tensor> all;
    std::vector<ggml_tensor *> nodes;

    // Five nodes for each sequence: a view, its reshapes, indices, values.
    explicit chains(int n) : n(n), logits(random_of(n*columns)), place(n*columns/4), ids(n*k, -7), values(n*k, -7.0f), all(5*n) {
        memcpy((void *) place.data(), logits.data(), 4*logits.size());
        for (int i = 0; i < n; ++i) {
            ggml_tensor * own = &all[5*i];
            float * row = (float *) place.data() + i*columns;
            own[0] = tensor_of(GGML_OP_VIEW, GGML_TYPE_F32, columns, 1, row);
            own[1] = tensor_of(GGML_OP_RESHAPE, GGML_TYPE_F32, columns, 1, row);
            own[2] = tensor_of(GGML_OP_RESHAPE, GGML_TYPE_F32, 1, columns, row);
            own[3] = tensor_of(GGML_OP_TOP_K, GGML_TYPE_I32, k, 1, &ids[i*k]);
            own[4] = tensor_of(GGML_OP_GET_ROWS, GGML_TYPE_F32, 1, k, &values[i*k]);
            own[3].src[0] = &own[1];
            own[4].src[0] = &own[2];
            own[4].src[1] = &own[3];
            for (int j = 0; j < 5; ++j) { nodes.push_back(&own[j]); }
        }
    }
    int run(int first) {
        ggml_cgraph graph = {int(nodes.size()), nodes.data()};
        ggml_backend_cuda_context ctx;
        return ggml_cuda_top_k_run(ctx, &graph, first);
    }
    bool is_done(int i, bool with_values = true) const {
        const auto expected = largest(&logits[i*columns], columns, k);
        for (int j = 0; j < k; ++j) {
            if (ids[i*k + j] != expected[j]) { return false; }
            if (values[i*k + j] != (with_values ? logits[i*columns + expected[j]] : -7.0f)) { return false; }
        }
        return true;
    }
    bool is_untouched(int i) const { return ids[i*k] == -7 && values[i*k] == -7.0f; }
};

static bool right = true;
static void expect(const std::string & what, bool ok) {
    printf("%s %s\n", ok ? "ok " : "BAD", what.c_str());
    fflush(stdout);
    right = right && ok;
}

static void expect_runs() {
    chains three(3);
    expect("three rows and their values together", three.run(3) == 11 && three.is_done(0) && three.is_done(1) && three.is_done(2));
    expect("in one launch", gridDim.x == 3);

    chains resting(3);
    resting.all[5 + 3].flags = resting.all[5 + 4].flags = 0;
    expect("a row that rests", resting.run(3) == 11 && resting.is_done(0) && resting.is_untouched(1) && resting.is_done(2));

    chains other(3);
    other.all[5 + 4].op = GGML_OP_ADD;
    expect("up to something else", other.run(3) == 5 && other.is_done(0) && other.is_done(1, false) && other.is_untouched(2));

    chains elsewhere(2);
    elsewhere.all[4].src[0] = &elsewhere.all[5 + 2];
    expect("values of another row", elsewhere.run(3) == 0 && elsewhere.is_untouched(0));

    chains shorter(2);
    shorter.all[5 + 3].ne[0] = shorter.all[5 + 4].ne[1] = 39;
    expect("another k", shorter.run(3) == 1 && shorter.is_done(0) && shorter.is_untouched(1));

    chains again(2); // the second sequence's results lie where the first one's were
    again.all[5 + 3].data = &again.ids[1];
    expect("results in the same place", again.run(3) == 1 && again.is_done(0));

    chains early(2); // what the second one reads is written by the first
    early.all[5 + 1].data = early.all[5 + 2].data = early.all[4].data;
    expect("a row that the run writes", early.run(3) == 1 && early.is_done(0) && early.is_untouched(1));

    chains over(2); // the second one's indices come to lie where the first row is
    over.all[5 + 3].data = over.all[0].data;
    expect("a row that is written over", over.run(3) == 1 && over.is_done(0) && over.is_untouched(1));

    chains alone(1);
    alone.nodes.pop_back();
    expect("a row alone is left", alone.run(3) == 0 && alone.is_untouched(0));

    chains many(65);
    expect("as many as there are places for", many.run(3) == 5*63 + 1 && many.is_done(63) && many.is_untouched(64));
}

int main(int argc, char ** argv) {
    ggml_tensor row = tensor_of(GGML_OP_NONE, GGML_TYPE_F32, 4000, 1, nullptr), top = tensor_of(GGML_OP_TOP_K, GGML_TYPE_I32, 8, 1, nullptr);
    top.src[0] = &row;
    if (!ggml_cuda_should_use_top_k_rows(&top)) {
        chains two(2);
        expect("turned off", two.run(3) == 0 && two.is_untouched(0));
        return right ? 0 : 1;
    }
    top.ne[0] = 1025;
    expect("a k that is too large", !ggml_cuda_should_use_top_k_rows(&top));
    top.ne[0] = 8;
    row.ne[0] = 1024;
    expect("a short row", !ggml_cuda_should_use_top_k_rows(&top));

    expect("random", is_right(random_of(40000), 1, 128));
    expect("rows that do not begin with a word", is_right(random_of(3*16385), 3, 128, 1));
    expect("all equal", is_right(numbers(20000, 3.0f), 1, 128));
    expect("k columns", is_right(random_of(1025), 1, 1024));
    expect("few columns, some infinite, some not numbers", is_right(filled(2001, [](int i) {
        return i % 97 == 5 ? INFINITY : i % 3 == 0 ? -INFINITY : i % 89 == 7 ? (i % 2 ? NAN : -NAN) : normal();
    }), 1, 128, 3));
    expect("one bin", is_right(filled(20000, [](int) { return value_of(0x41200000 | next() % 50000); }), 1, 128));
    expect("-0 is 0", is_right(filled(3000, [](int i) { return i % 700 == 9 ? 1.0f : i % 2 ? -0.0f : 0.0f; }), 1, 200));
    if (argc > 1 && std::string(argv[1]) == "all") {
        expect_runs();
        expect("a vocabulary's logits", is_right(random_of(248320), 1, 128));
        for (const int k : {1, 2, 31, 33, 255, 256, 257, 500, 1023, 1024}) {
            expect("k = " + std::to_string(k), is_right(random_of(2*9001), 2, k, 2));
        }
        for (const int columns : {1025, 1027, 2047, 4097, 16383, 16384, 16385, 16388, 32769}) {
            expect(std::to_string(columns) + " columns", is_right(random_of(columns), 1, 64, columns % 4));
        }
        expect("all equal, k = 1024", is_right(numbers(40000, -2.0f), 1, 1024));
        expect("all zeros of both signs", is_right(filled(20000, [](int i) { return i % 3 ? -0.0f : 0.0f; }), 1, 1024));
        expect("rising", is_right(filled(40000, [](int i) { return float(i); }), 1, 128));
        expect("falling", is_right(filled(40000, [](int i) { return -float(i); }), 1, 128));
        expect("all -infinity", is_right(numbers(20000, -INFINITY), 1, 128));
        expect("all infinity", is_right(numbers(20000, INFINITY), 1, 600));
        expect("no number at all", is_right(numbers(20000, NAN), 1, 128));
        expect("a number among none", is_right(filled(20000, [](int i) { return i == 777 ? 5.0f : NAN; }), 1, 128));
        expect("fewer numbers than k", is_right(filled(20000, [](int i) { return i % 400 ? -INFINITY : float(i); }), 1, 128));
        expect("tiny numbers", is_right(filled(20000, [](int) { return value_of(next() % 3000 | (next() % 2 ? 1u << 31 : 0)); }), 1, 128));
        expect("a few values", is_right(filled(40000, [](int) { return float(next() % 7); }), 1, 128));
        expect("one bin, k = 300", is_right(filled(40000, [](int) { return value_of(0xC1200000 | next() % 900000); }), 1, 300));
        expect("bits", is_right(filled(40000, [](int) { return value_of(next() << 8 ^ next()); }), 1, 400));
        expect("one chunk has all", is_right(filled(50000, [](int i) { return i < 900 ? 100.0f + normal() : normal(); }), 1, 700));
        expect("a threshold near zero", is_right(filled(30000, [](int i) { return i % 300 ? -fabsf(normal()) : normal(); }), 1, 128));
        numbers rows_apart = random_of(5*4000);
        std::fill(rows_apart.begin() + 4000, rows_apart.begin() + 8000, 0.0f);
        expect("rows of different kinds", is_right(rows_apart, 5, 128));
    }
    return right ? 0 : 1;
}
