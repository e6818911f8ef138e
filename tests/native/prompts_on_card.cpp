// What a prompt's tokens take of a card besides products: delta nets and lists of experts, with and without our kernels.
//
//   prompts_on_card [check] [time]
//
// Built against the folder of a library: c++ -std=c++17 -O2 -I LLAMA_CPP/ggml/include prompts_on_card.cpp -L LIB -lggml
// -lggml-base -lggml-cpu. Both start this program with GGML_CUDA_GDN_TOKENS and GGML_CUDA_SORTED_IDS off and with them on.
// `check` compares the bits of both (exit code 1 if a case is off), `time` prints the microseconds of an operation.

#include "ggml-backend.h"
#include "ggml.h"

#include <chrono>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <vector>

struct shape {
    int tokens, seqs; // of a delta net
    int kept;         // states
    int experts;      // 0: a delta net
    int columns, rows, channels;
};

static std::vector<shape> all_shapes() {
    std::vector<shape> all;
    for (const auto & [tokens, seqs] : std::vector<std::pair<int, int>>{{512, 1}, {2048, 1}, {512, 4}, {2, 1}, {5, 1}, {5, 8}, {5, 32},
                                                                         {16, 1}, {37, 2}}) {
        all.push_back({tokens, seqs, 1, 0, 0, 0, 0});
    }
    all.push_back({512, 1, 4, 0, 0, 0, 0});
    all.push_back({5, 32, 5, 0, 0, 0, 0});
    for (const int tokens : {512, 2048}) {
        all.push_back({tokens, 1, 1, 256, 2048, 512, 1});
        all.push_back({tokens, 1, 1, 256, 512, 2048, 8});
    }
    all.push_back({4096, 1, 1, 256, 256, 32, 1}); // almost nothing but the lists
    return all;
}

static std::vector<float> numbers(size_t n, float low, float high, uint32_t state) {
    std::vector<float> values(n);
    for (auto & value : values) {
        state = state*1664525u + 1013904223u;
        value = low + (high - low)*float(state >> 8)/(1 << 24);
    }
    return values;
}

static void set(ggml_tensor * tensor, float low, float high, uint32_t seed) {
    const auto values = numbers(ggml_nelements(tensor), low, high, seed);
    if (tensor->type == GGML_TYPE_F32) {
        ggml_backend_tensor_set(tensor, values.data(), 0, ggml_nbytes(tensor));
        return;
    }
    std::vector<char> packed(ggml_nbytes(tensor));
    ggml_quantize_chunk(tensor->type, values.data(), packed.data(), 0, ggml_nrows(tensor), tensor->ne[0], nullptr);
    ggml_backend_tensor_set(tensor, packed.data(), 0, packed.size());
}

// Prints the microseconds of an operation and a number for its result's bits.
static void run(ggml_backend_t card, const shape & s) {
    constexpr int size = 128, heads = 32, key_heads = 16, used = 8, repeats = 20;
    ggml_context * ctx = ggml_init({ggml_tensor_overhead()*16 + ggml_graph_overhead(), nullptr, true});
    std::vector<ggml_tensor *> in;
    ggml_tensor * out, * ids = nullptr;
    if (s.experts == 0) {
        in.push_back(ggml_new_tensor_4d(ctx, GGML_TYPE_F32, size, key_heads, s.tokens, s.seqs));
        in.push_back(ggml_new_tensor_4d(ctx, GGML_TYPE_F32, size, key_heads, s.tokens, s.seqs));
        in.push_back(ggml_new_tensor_4d(ctx, GGML_TYPE_F32, size, heads, s.tokens, s.seqs));
        in.push_back(ggml_new_tensor_4d(ctx, GGML_TYPE_F32, 1, heads, s.tokens, s.seqs));
        in.push_back(ggml_new_tensor_4d(ctx, GGML_TYPE_F32, 1, heads, s.tokens, s.seqs));
        in.push_back(ggml_new_tensor_4d(ctx, GGML_TYPE_F32, size, size, heads, s.seqs));
        out = ggml_gated_delta_net(ctx, in[0], in[1], in[2], in[3], in[4], in[5], s.kept);
    } else {
        in.push_back(ggml_new_tensor_3d(ctx, GGML_TYPE_Q4_0, s.columns, s.rows, s.experts));
        in.push_back(ggml_new_tensor_3d(ctx, GGML_TYPE_F32, s.columns, s.channels, s.tokens));
        ids = ggml_new_tensor_2d(ctx, GGML_TYPE_I32, used, s.tokens);
        out = ggml_mul_mat_id(ctx, in[0], in[1], ids);
    }
    ggml_cgraph * graph = ggml_new_graph(ctx);
    ggml_build_forward_expand(graph, out);
    ggml_backend_buffer_t buffer = ggml_backend_alloc_ctx_tensors(ctx, card);
    if (buffer == nullptr) { exit(3); }
    ggml_backend_buffer_clear(buffer, 0);
    for (size_t i = 0; i < in.size(); ++i) {
        const bool is_gate = s.experts == 0 && i == 3, is_beta = s.experts == 0 && i == 4;
        const float most = s.experts == 0 && i < 2 ? 0.15f : 1.0f; // keys and queries of length 1
        set(in[i], is_beta ? 0.0f : -most, is_gate ? 0.0f : most, 7 + i);
    }
    if (ids != nullptr) {
        std::vector<int32_t> chosen;
        uint32_t state = 5;
        for (int token = 0; token < s.tokens; ++token) {
            for (int i = 0; i < used; ++i) { // one of each eighth of the experts
                state = state*1664525u + 1013904223u;
                chosen.push_back((i + token)%used*(s.experts/used) + (state >> 16)%(s.experts/used));
            }
        }
        ggml_backend_tensor_set(ids, chosen.data(), 0, ggml_nbytes(ids));
    }
    for (int i = 0; i < 5; ++i) { ggml_backend_graph_compute(card, graph); }
    const auto start = std::chrono::steady_clock::now();
    for (int i = 0; i < repeats; ++i) { ggml_backend_graph_compute_async(card, graph); }
    ggml_backend_synchronize(card);
    const double us = std::chrono::duration<double, std::micro>(std::chrono::steady_clock::now() - start).count()/repeats;
    std::vector<uint32_t> bits(ggml_nelements(out));
    ggml_backend_tensor_get(out, bits.data(), 0, ggml_nbytes(out));
    uint64_t digest = 1469598103934665603u;
    double sum = 0.0;
    for (const uint32_t each : bits) {
        float value;
        memcpy(&value, &each, sizeof(value));
        sum += std::fabs(value);
        digest = (digest ^ each)*1099511628211u;
    }
    printf("us %.3f %016llx %.6e\n", us, (unsigned long long) digest, sum/double(bits.size()));
    fflush(stdout);
    ggml_backend_buffer_free(buffer);
    ggml_free(ctx);
}

struct result { double us = NAN, size = NAN; unsigned long long digest = 0; };

// The results of a process whose library has our kernels on or off.
static std::vector<result> results_with(const char * self, bool on) {
    setenv("GGML_CUDA_GDN_TOKENS", on ? "2" : "0", 1);
    setenv("GGML_CUDA_SORTED_IDS", on ? "1" : "0", 1);
    std::vector<result> all;
    if (FILE * child = popen((std::string("'") + self + "' numbers 2>/dev/null").c_str(), "r")) {
        char line[256];
        result each;
        while (fgets(line, sizeof(line), child)) {
            if (sscanf(line, "us %lf %llx %lf", &each.us, &each.digest, &each.size) == 3) { all.push_back(each); }
        }
        pclose(child);
    }
    all.resize(all_shapes().size());
    return all;
}

int main(int argc, char ** argv) {
    bool checks = false, times = false;
    for (int i = 1; i < argc; ++i) {
        checks = checks || std::string(argv[i]) == "check";
        times  = times  || std::string(argv[i]) == "time";
    }
    if (argc == 2 && std::string(argv[1]) == "numbers") {
        ggml_backend_load_all();
        ggml_backend_t backend = ggml_backend_init_by_type(GGML_BACKEND_DEVICE_TYPE_GPU, nullptr);
        if (backend == nullptr) { backend = ggml_backend_init_by_type(GGML_BACKEND_DEVICE_TYPE_CPU, nullptr); }
        if (backend == nullptr) { return 2; }
        for (const auto & each : all_shapes()) { run(backend, each); }
        ggml_backend_free(backend);
        return 0;
    }
    if (!checks && !times) { return 0; }
    const auto before = results_with(argv[0], false), now = results_with(argv[0], true);
    const auto all = all_shapes();
    int wrong = 0;
    printf("%-10s %6s %6s %6s %11s %11s %6s  %s\n", "operation", "tokens", "seqs", "kept", "us before", "us now", "times", "bits");
    for (size_t i = 0; i < all.size(); ++i) {
        const bool same = before[i].digest != 0 && before[i].digest == now[i].digest && std::isfinite(now[i].size);
        wrong += !same;
        printf("%-10s %6d %6d %6d %11.1f %11.1f %6.2f  %s (mean size %.2e)\n", all[i].experts == 0 ? "delta net" : all[i].channels == 1 ? "gate or up" : "down",
            all[i].tokens, all[i].seqs, all[i].kept, before[i].us, now[i].us, before[i].us/now[i].us, same ? "same" : "OTHER", now[i].size);
    }
    return checks && wrong != 0;
}
