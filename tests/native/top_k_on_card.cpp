// The largest numbers of rows as a card finds them, against a sort, and how long it takes both ways.
//
//   top_k_on_card [check] [time]
//
// Built against the folder of a library: c++ -std=c++17 -O2 -I LLAMA_CPP/ggml/include top_k_on_card.cpp -L LIB -lggml -lggml-base.
// `check` compares columns and values (exit code 1 if a case is off). `time` starts itself with GGML_CUDA_TOP_K_ROWS=0 and without and
// prints microseconds of a graph with one row for each of some sequences, as the chains of an engine's slots have them.

#include "ggml-backend.h"
#include "ggml.h"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <numeric>
#include <random>
#include <string>
#include <vector>

enum kind { NORMAL, STEPS, EQUAL, ASCENDING, ENDLESS, KINDS };

struct rows_of {
    int kind, rows, columns, k;
};

static std::vector<float> numbers(const rows_of & of) {
    std::mt19937 random(of.kind*7 + of.rows);
    std::normal_distribution<float> normal(0, 3);
    std::vector<float> all(size_t(of.columns)*of.rows);
    for (size_t i = 0; i < all.size(); ++i) {
        const float value = normal(random);
        switch (of.kind) {
            case NORMAL:    all[i] = value; break;
            case STEPS:     all[i] = std::round(2*value)/2; break; // many equal ones
            case EQUAL:     all[i] = 1.0f; break;
            case ASCENDING: all[i] = 1e-3f*float(i % of.columns); break;
            default:        all[i] = random() % 1000 == 0 ? -INFINITY : 1.0f + 1e-6f*float(random() % 1000); break;
        }
    }
    return all;
}

// How many columns or values are not those of a sort, larger numbers first and of equal ones the first column first; `us` of the graph.
static int wrong_of(ggml_backend_t card, const rows_of & of, double * us) {
    ggml_init_params params = {ggml_tensor_overhead()*512 + ggml_graph_overhead(), nullptr, true};
    ggml_context * ctx = ggml_init(params);
    ggml_tensor * x = ggml_new_tensor_2d(ctx, GGML_TYPE_F32, of.columns, of.rows);
    ggml_cgraph * graph = ggml_new_graph(ctx);
    std::vector<ggml_tensor *> columns, values;
    for (int i = 0; i < of.rows; ++i) {
        ggml_tensor * row = ggml_view_1d(ctx, x, of.columns, i*x->nb[1]);
        columns.push_back(ggml_top_k(ctx, row, of.k));
        values.push_back(ggml_get_rows(ctx, ggml_reshape_2d(ctx, row, 1, of.columns), columns.back()));
        ggml_set_output(columns.back());
        ggml_set_output(values.back());
        ggml_build_forward_expand(graph, values.back());
    }
    ggml_backend_buffer_t buffer = ggml_backend_alloc_ctx_tensors(ctx, card);
    if (buffer == nullptr) { exit(3); }
    const auto all = numbers(of);
    ggml_backend_tensor_set(x, all.data(), 0, ggml_nbytes(x));
    for (int i = 0; i < 3; ++i) { ggml_backend_graph_compute(card, graph); }

    int wrong = 0;
    for (int i = 0; i < of.rows; ++i) {
        std::vector<int32_t> found(of.k), sorted(of.columns);
        std::vector<float> value(of.k);
        ggml_backend_tensor_get(columns[i], found.data(), 0, of.k*sizeof(int32_t));
        ggml_backend_tensor_get(values[i], value.data(), 0, of.k*sizeof(float));
        const float * row = all.data() + size_t(of.columns)*i;
        std::iota(sorted.begin(), sorted.end(), 0);
        std::partial_sort(sorted.begin(), sorted.begin() + of.k, sorted.end(),
            [row](int a, int b) { return row[a] > row[b] || (row[a] == row[b] && a < b); });
        for (int j = 0; j < of.k; ++j) { wrong += found[j] != sorted[j] || value[j] != row[sorted[j]]; }
    }
    if (us != nullptr) {
        const int repeats = 20;
        const auto start = std::chrono::steady_clock::now();
        for (int i = 0; i < repeats; ++i) { ggml_backend_graph_compute_async(card, graph); }
        ggml_backend_synchronize(card);
        *us = std::chrono::duration<double, std::micro>(std::chrono::steady_clock::now() - start).count()/repeats;
    }
    ggml_backend_buffer_free(buffer);
    ggml_free(ctx);
    return wrong;
}

static std::vector<rows_of> all_timed() {
    std::vector<rows_of> all;
    for (const int kind : {NORMAL, EQUAL}) {
        for (const int rows : {1, 8, 32}) { all.push_back({kind, rows, 248320, 128}); }
    }
    return all;
}

static std::vector<double> times_with(const std::string & self, const char * is_on) {
    setenv("GGML_CUDA_TOP_K_ROWS", is_on, 1);
    std::vector<double> all;
    if (FILE * child = popen(("'" + self + "' numbers 2>/dev/null").c_str(), "r")) {
        char line[256];
        double us = 0.0;
        while (fgets(line, sizeof(line), child)) {
            if (sscanf(line, "us %lf", &us) == 1) { all.push_back(us); }
        }
        pclose(child);
    }
    unsetenv("GGML_CUDA_TOP_K_ROWS");
    all.resize(all_timed().size(), NAN);
    return all;
}

int main(int argc, char ** argv) {
    const std::vector<std::string> wanted(argv + 1, argv + argc);
    const auto is_wanted = [&](const char * name) { return std::find(wanted.begin(), wanted.end(), name) != wanted.end(); };
    if (is_wanted("time")) {
        const auto before = times_with(argv[0], "0"), now = times_with(argv[0], "1");
        printf("%-7s %5s %10s %10s %6s\n", "numbers", "rows", "us before", "us now", "times");
        const auto all = all_timed();
        for (size_t i = 0; i < all.size(); ++i) {
            printf("%-7s %5d %10.1f %10.1f %6.1f\n", all[i].kind == NORMAL ? "normal" : "equal", all[i].rows, before[i], now[i], before[i]/now[i]);
        }
        fflush(stdout);
    }
    if (!is_wanted("check") && !is_wanted("numbers")) {
        return 0;
    }
    ggml_backend_load_all();
    ggml_backend_t card = ggml_backend_init_by_type(GGML_BACKEND_DEVICE_TYPE_GPU, nullptr);
    if (card == nullptr) {
        fprintf(stderr, "no card\n");
        return 2;
    }
    for (const auto & each : is_wanted("numbers") ? all_timed() : std::vector<rows_of>{}) {
        double us = 0.0;
        wrong_of(card, each, &us);
        printf("us %.3f\n", us);
    }
    int bad = 0;
    for (int kind = NORMAL; is_wanted("check") && kind < KINDS; ++kind) {
        for (const int rows : {1, 8, 32}) {
            for (const int columns : {248320, 151936, 32000}) {
                for (const int k : {128, 40}) {
                    const int wrong = wrong_of(card, {kind, rows, columns, k}, nullptr);
                    printf("%s kind %d, %d rows of %d, k %d: %d wrong\n", wrong ? "BAD" : "ok ", kind, rows, columns, k, wrong);
                    bad += wrong != 0;
                }
            }
        }
    }
    if (is_wanted("check")) { printf("%d bad\n", bad); }
    ggml_backend_free(card);
    return bad != 0;
}
