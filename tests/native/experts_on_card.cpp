// Products of experts with few tokens each, on a card: against the processor's, and how long they take both ways.
//
//   experts_on_card [check] [time]
//
// Built against the folder of a library: c++ -std=c++17 -O2 -I LLAMA_CPP/ggml/include experts_on_card.cpp -L LIB -lggml
// -lggml-base -lggml-cpu. `check` compares (exit code 1 if a case is off), with GGML_CUDA_MMID_GROUPED=1000,1 unless that is set:
// every case takes the grouped kernels. `time` starts itself with 0 and with 1000,1 and prints one table, in the shapes of Qwen 3.6
// 35B-A3B: 256 experts, 8 for each token. Without a card both are the processor.

#include "ggml-backend.h"
#include "ggml-cpu.h"
#include "ggml.h"

#include <algorithm>
#include <array>
#include <chrono>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <map>
#include <set>
#include <string>
#include <thread>
#include <vector>

struct shape {
    ggml_type type;
    int columns, rows, experts, tokens, slots;
    int channels; // rows of activations of a token: 1 or one for each slot
    bool gate, bias;
    double crowd;   // the share of tokens that choose expert 0
    int layers = 1; // products in a row with weights of their own
};

struct sequence {
    uint32_t state = 7;
    uint32_t next() { return (state = state*1664525u + 1013904223u) >> 8; }
    float number() { return float(next())/(1 << 23) - 1.0f; }
};

static std::vector<int32_t> ids_of(const shape & s) {
    sequence random;
    std::vector<int32_t> ids;
    for (int token = 0; token < s.tokens; ++token) {
        std::vector<int32_t> own;
        if (random.number() < 2.0*s.crowd - 1.0) { own.push_back(0); }
        while (int(own.size()) < s.slots) {
            const int32_t id = random.next() % s.experts;
            if (std::find(own.begin(), own.end(), id) == own.end()) { own.push_back(id); }
        }
        ids.insert(ids.end(), own.begin(), own.end());
    }
    return ids;
}

// Packed once for a few rows, which all experts repeat from another place on.
static void set_weights(ggml_tensor * tensor, int salt) {
    const int64_t columns = tensor->ne[0], rows = ggml_nrows(tensor), own = std::min<int64_t>(rows, 1009);
    static std::map<std::array<int64_t, 4>, std::vector<char>> known; // packing takes longer than all else
    auto & packed = known[{tensor->type, columns, own, salt}];
    if (packed.empty()) {
        sequence random{uint32_t(salt)};
        std::vector<float> values(columns*own);
        for (auto & value : values) { value = random.number(); }
        packed.resize(ggml_row_size(tensor->type, columns)*own);
        ggml_quantize_chunk(tensor->type, values.data(), packed.data(), 0, own, columns, nullptr);
    }
    for (int64_t row = 0; row < rows; row += own) {
        ggml_backend_tensor_set(tensor, packed.data(), row*tensor->nb[1], std::min(own, rows - row)*tensor->nb[1]);
    }
}

// `only`: a token that is computed alone, or -1. `ms`: of one layer.
static std::vector<float> product(ggml_backend_t backend, const shape & s, int only, double * ms) {
    const int tokens = only < 0 ? s.tokens : 1;
    ggml_init_params params = {ggml_tensor_overhead()*(16*s.layers + 8) + ggml_graph_overhead(), nullptr, true};
    ggml_context * ctx = ggml_init(params);
    ggml_tensor * y = ggml_new_tensor_3d(ctx, GGML_TYPE_F32, s.columns, s.channels, tokens);
    ggml_tensor * matrix = s.channels == 1 ? ggml_reshape_2d(ctx, y, s.columns, tokens) : nullptr;
    ggml_tensor * ids = ggml_new_tensor_2d(ctx, GGML_TYPE_I32, s.slots, tokens);
    ggml_cgraph * graph = ggml_new_graph(ctx);
    std::vector<ggml_tensor *> weights, biases;
    ggml_tensor * out = nullptr;
    const auto multiply = [&]() {
        if (s.experts == 1) { // every token's: a product of matrices
            weights.push_back(ggml_new_tensor_2d(ctx, s.type, s.columns, s.rows));
            return ggml_mul_mat(ctx, weights.back(), matrix);
        }
        weights.push_back(ggml_new_tensor_3d(ctx, s.type, s.columns, s.rows, s.experts));
        ggml_tensor * result = ggml_mul_mat_id(ctx, weights.back(), y, ids);
        if (s.bias) {
            biases.push_back(ggml_new_tensor_2d(ctx, GGML_TYPE_F32, s.rows, s.experts));
            result = ggml_add_id(ctx, result, biases.back(), ids);
        }
        return result;
    };
    for (int layer = 0; layer < s.layers; ++layer) {
        out = multiply();
        if (s.gate) { out = ggml_swiglu_split(ctx, multiply(), out); }
        ggml_build_forward_expand(graph, out);
    }
    ggml_backend_buffer_t buffer = ggml_backend_alloc_ctx_tensors(ctx, backend);
    if (buffer == nullptr) { exit(3); }

    const auto all_ids = ids_of(s);
    sequence random;
    std::vector<float> all_y(size_t(s.tokens)*s.channels*s.columns);
    for (auto & value : all_y) { value = random.number(); }
    const size_t first = std::max(only, 0);
    ggml_backend_tensor_set(ids, all_ids.data() + first*s.slots, 0, ggml_nbytes(ids));
    ggml_backend_tensor_set(y, all_y.data() + first*s.channels*s.columns, 0, ggml_nbytes(y));
    for (size_t i = 0; i < weights.size(); ++i) { set_weights(weights[i], int(i)); }
    for (auto * bias : biases) {
        std::vector<float> values(ggml_nelements(bias));
        for (auto & value : values) { value = random.number(); }
        ggml_backend_tensor_set(bias, values.data(), 0, ggml_nbytes(bias));
    }
    ggml_backend_graph_compute(backend, graph);
    if (ms != nullptr) {
        const int repeats = 20;
        for (int i = 0; i < 5; ++i) { ggml_backend_graph_compute(backend, graph); }
        const auto start = std::chrono::steady_clock::now();
        for (int i = 0; i < repeats; ++i) { ggml_backend_graph_compute_async(backend, graph); }
        ggml_backend_synchronize(backend);
        *ms = std::chrono::duration<double, std::milli>(std::chrono::steady_clock::now() - start).count()/repeats/s.layers;
    }
    std::vector<float> result(ggml_nelements(out));
    ggml_backend_tensor_get(out, result.data(), 0, ggml_nbytes(out));
    ggml_backend_buffer_free(buffer);
    ggml_free(ctx);
    return result;
}

static std::vector<shape> checked() {
    std::vector<shape> all;
    for (const ggml_type type : {GGML_TYPE_Q4_0, GGML_TYPE_Q8_0, GGML_TYPE_Q4_K, GGML_TYPE_Q6_K, GGML_TYPE_Q5_K, GGML_TYPE_Q4_1,
                                 GGML_TYPE_Q5_0, GGML_TYPE_IQ4_NL, GGML_TYPE_IQ4_XS, GGML_TYPE_Q3_K, GGML_TYPE_Q2_K}) {
        all.push_back({type, 2048, 512, 64, 32, 8, 1, true, false, 0.0});
        all.push_back({type, 512, 2048, 64, 32, 8, 8, false, false, 0.0});
        all.push_back({type, 2048, 37, 16, 9, 2, 1, false, true, 0.9});
        all.push_back({type, 768, 65, 12, 17, 3, 3, true, false, 0.5});
        all.push_back({type, 4096, 66, 8, 64, 1, 1, true, true, 0.7});
        all.push_back({type, 2304, 50, 300, 64, 7, 7, false, false, 0.0});
        all.push_back({type, 256, 33, 8, 5, 4, 1, true, false, 0.0});
        all.push_back({type, 2048, 512, 1, 32, 1, 1, true, false, 0.0});
        all.push_back({type, 2304, 50, 1, 9, 1, 1, true, false, 0.0});
    }
    for (const ggml_type type : {GGML_TYPE_Q4_0, GGML_TYPE_Q8_0}) {
        all.push_back({type, 64, 21, 5, 20, 2, 1, true, false, 0.0});
        all.push_back({type, 320, 40, 9, 33, 5, 5, false, false, 0.3});
        all.push_back({type, 2112, 30, 9, 12, 2, 1, true, false, 0.3});
    }
    return all;
}

static int check(ggml_backend_t card, ggml_backend_t processor) {
    int wrong = 0;
    double worst = 0.0;
    for (const auto & s : checked()) {
        const auto ours = product(card, s, -1, nullptr), theirs = product(processor, s, -1, nullptr);
        double difference = 0.0, size = 0.0;
        for (size_t i = 0; i < ours.size(); ++i) {
            difference += double(ours[i] - theirs[i])*(ours[i] - theirs[i]);
            size += double(theirs[i])*theirs[i];
        }
        const double error = difference/size; // a sum that is not a number is no small number either
        const int token = s.tokens/2;
        const auto alone = product(card, s, token, nullptr);
        const bool same_bits = std::equal(alone.begin(), alone.end(), ours.begin() + alone.size()*token);
        const bool is_right = error < 5e-4 && (same_bits || card == processor || s.experts == 1); // one token of it takes another way
        worst = std::max(worst, error < 5e-4 ? error : INFINITY);
        wrong += !is_right;
        printf("%s %s %d x %d, %d experts, %d tokens x %d%s%s: %.2e%s\n", is_right ? "ok " : "BAD", ggml_type_name(s.type), s.columns,
            s.rows, s.experts, s.tokens, s.slots, s.gate ? ", gate" : "", s.bias ? ", bias" : "", error, same_bits ? "" : ", other bits");
    }
    printf("%d wrong, worst squared error %.2e\n", wrong, worst);
    return wrong;
}

struct timed { const char * name; shape s; };

static std::vector<timed> all_timed() {
    std::vector<timed> all;
    for (const int tokens : {2, 4, 8, 9, 16, 32, 64, 128}) {
        all.push_back({"gate, up, GLU", {GGML_TYPE_Q4_0, 2048, 512, 256, tokens, 8, 1, true, false, 0.0, 3}});
        all.push_back({"down", {GGML_TYPE_Q4_0, 512, 2048, 256, tokens, 8, 8, false, false, 0.0, 3}});
    }
    for (const int tokens : {9, 16, 32}) {
        all.push_back({"shared expert", {GGML_TYPE_Q4_0, 2048, 512, 1, tokens, 1, 1, true, false, 0.0, 40}});
    }
    for (const ggml_type type : {GGML_TYPE_Q8_0, GGML_TYPE_Q4_K, GGML_TYPE_Q6_K}) {
        all.push_back({"shared expert", {type, 2048, 512, 1, 32, 1, 1, true, false, 0.0, 40}});
        all.push_back({"gate, up, GLU", {type, 2048, 512, 256, 32, 8, 1, true, false, 0.0, 3}});
        all.push_back({"down", {type, 512, 2048, 256, 32, 8, 8, false, false, 0.0, 3}});
    }
    return all;
}

// The times of a process whose library is told `limits`.
static std::vector<double> times_with(const char * self, const char * limits) {
    setenv("GGML_CUDA_MMID_GROUPED", limits, 1);
    setenv("GGML_CUDA_SHARED_EXPERT", limits, 1); // 0, or no 0
    std::vector<double> all;
    if (FILE * child = popen((std::string("'") + self + "' numbers 2>/dev/null").c_str(), "r")) {
        char line[256];
        double ms = 0.0;
        while (fgets(line, sizeof(line), child)) {
            if (sscanf(line, "ms %lf", &ms) == 1) { all.push_back(ms); }
        }
        pclose(child);
    }
    all.resize(all_timed().size(), NAN);
    return all;
}

static void print_times(const char * self) {
    const auto before = times_with(self, "0"), after = times_with(self, "1000,1");
    printf("%-5s %-14s %6s %7s %9s %9s %6s %9s\n", "type", "product", "tokens", "experts", "ms before", "ms now", "times", "GB/s now");
    const auto all = all_timed();
    for (size_t i = 0; i < all.size(); ++i) {
        const auto & s = all[i].s;
        const auto ids = ids_of(s);
        const size_t woken = std::set<int32_t>(ids.begin(), ids.end()).size();
        const double bytes = double(woken)*s.rows*ggml_row_size(s.type, s.columns)*(s.gate ? 2 : 1);
        printf("%-5s %-14s %6d %7zu %9.4f %9.4f %6.2f %9.0f\n", ggml_type_name(s.type), all[i].name, s.tokens, woken, before[i], after[i],
            before[i]/after[i], bytes/after[i]/1e6);
    }
}

int main(int argc, char ** argv) {
    const std::vector<std::string> wanted(argv + 1, argv + argc);
    const auto is_wanted = [&](const char * name) { return std::find(wanted.begin(), wanted.end(), name) != wanted.end(); };
    if (is_wanted("time")) {
        const char * chosen = getenv("GGML_CUDA_MMID_GROUPED");
        const std::string kept = chosen ? chosen : "1000,1";
        print_times(argv[0]);
        setenv("GGML_CUDA_MMID_GROUPED", kept.c_str(), 1);
        setenv("GGML_CUDA_SHARED_EXPERT", "1", 1);
        fflush(stdout);
    }
    setenv("GGML_CUDA_MMID_GROUPED", "1000,1", 0); // before the library asks for it
    if (!is_wanted("check") && !is_wanted("numbers")) {
        return 0;
    }
    ggml_backend_load_all();
    ggml_backend_t card = ggml_backend_init_by_type(GGML_BACKEND_DEVICE_TYPE_GPU, nullptr);
    ggml_backend_t processor = ggml_backend_init_by_type(GGML_BACKEND_DEVICE_TYPE_CPU, nullptr);
    if (processor == nullptr) {
        return 2;
    }
    ggml_backend_cpu_set_n_threads(processor, std::max(1u, std::thread::hardware_concurrency()));
    if (card == nullptr) {
        fprintf(stderr, "no card: the processor against itself\n");
        card = processor;
    }
    for (const auto & each : is_wanted("numbers") ? all_timed() : std::vector<timed>{}) {
        double ms = 0.0;
        product(card, each.s, -1, &ms);
        printf("ms %.6f\n", ms);
        fflush(stdout);
    }
    const int wrong = is_wanted("check") ? check(card, processor) : 0;
    ggml_backend_free(processor);
    if (card != processor) {
        ggml_backend_free(card);
    }
    return wrong != 0;
}
