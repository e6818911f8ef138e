// The attention of a card against the processor's, with steps as the engine makes them: rows of several sequences over one cache.
//
//   attention_on_card [check] [time]
//
// Built against the folder of a library: c++ -std=c++17 -O2 -I LLAMA_CPP/ggml/include attention_on_card.cpp -L LIB -lggml
// -lggml-base -lggml-cpu. `check` compares both (exit code 1 if a case is off), `time` prints the card's time for one call. With
// GGML_CUDA_FATTN_VISIBLE=0 a card runs llama.cpp's own kernels; `check` wants 8192, or few of its cases are of lists. Without a
// card both are the processor.

#include "ggml-backend.h"
#include "ggml-cpu.h"
#include "ggml.h"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <thread>
#include <vector>

struct step {
    const char * name;
    int sequences, rows_each, prompt, generated; // prompt and generated tokens of each sequence
    int head_size, kv_heads, gqa_ratio;
    bool unlike; // the first sequence's prompt is as long as all others' together
    bool hint;   // whether the step tells the rows of a sequence
    ggml_type type;
    int shared = 0; // tokens before the prompts that all sequences see
};

static std::vector<step> steps(bool large) {
    const ggml_type f16 = GGML_TYPE_F16, q8 = GGML_TYPE_Q8_0;
    if (large) {
        return {
            {" 8 x 8192, 35B-A3B", 8, 1, 8192, 16, 256, 2, 8, false, true, f16},
            {"32 x 8192, 35B-A3B", 32, 1, 8192, 16, 256, 2, 8, false, true, f16},
            {"32 x 8192, 256 generated", 32, 1, 8192, 256, 256, 2, 8, false, true, f16},
            {"32 x 8192, no hint", 32, 1, 8192, 16, 256, 2, 8, false, false, f16},
            {"32 x 8192, q8_0", 32, 1, 8192, 16, 256, 2, 8, false, true, q8},
            {" 8 x 8192, 4 drafts", 8, 5, 8192, 16, 256, 2, 8, false, true, f16},
            {" 8 of unlike lengths", 8, 1, 8192, 16, 256, 2, 8, true, true, f16},
            {" 2 x 8192", 2, 1, 8192, 16, 256, 2, 8, false, true, f16},
            {" 8 x 1024", 8, 1, 1024, 16, 256, 2, 8, false, true, f16},
            {" 8 x 8192, heads of 128", 8, 1, 8192, 16, 128, 8, 4, false, true, f16},
            {"32 x 8192, heads of 128", 32, 1, 8192, 16, 128, 8, 4, false, true, f16},
            {" 8 x 512 behind 8192 shared", 8, 1, 512, 16, 256, 2, 8, false, true, f16, 8192},
            {"32 x 512 behind 8192 shared", 32, 1, 512, 16, 256, 2, 8, false, true, f16, 8192},
            {" 1 x 65536 (as before)", 1, 1, 65536, 16, 256, 2, 8, false, false, f16},
        };
    }
    std::vector<step> all;
    for (const bool hint : {true, false}) {
        for (const int head_size : {256, 128}) {
            for (const int gqa : {8, 4, 6}) {
                all.push_back({"8 sequences", 8, 1, 1500, 9, head_size, 2, gqa, false, hint, f16});
                all.push_back({"31 sequences", 31, 1, 300, 11, head_size, 2, gqa, false, hint, f16});
                all.push_back({"drafts of 2", 5, 3, 2000, 7, head_size, 2, gqa, false, hint, f16});
                all.push_back({"drafts of 4, unlike lengths", 7, 5, 1200, 5, head_size, 2, gqa, true, hint, f16});
                all.push_back({"unlike lengths", 9, 1, 900, 20, head_size, 2, gqa, true, hint, f16});
                all.push_back({"q8_0", 8, 1, 1300, 9, head_size, 2, gqa, false, hint, q8});
                all.push_back({"a shared beginning", 6, 2, 1000, 5, head_size, 2, gqa, false, hint, f16, 3001});
                all.push_back({"two prompts", 2, 100, 5000, 0, head_size, 1, gqa, false, hint, f16});
            }
        }
    }
    return all;
}

struct inputs {
    int rows, cells;
    std::vector<float> q, k, v;
    std::vector<ggml_fp16_t> mask;
};

static inputs inputs_of(const step & s) {
    uint32_t state = 7;
    const auto number = [&]() {
        state = state*1664525u + 1013904223u;
        return float(state >> 8)/(1 << 23) - 1.0f;
    };
    std::vector<int> first(s.sequences + 1, s.shared);
    for (int i = 0; i < s.sequences; ++i) {
        first[i + 1] = first[i] + (s.unlike && i == 0 ? s.prompt*(s.sequences - 1) : s.prompt) - i % 3;
    }
    const int prompts = first.back();
    inputs in;
    in.rows = s.sequences*s.rows_each;
    in.cells = (prompts + s.sequences*s.generated + s.rows_each + 255)/256*256;
    in.q.resize(size_t(s.head_size)*in.rows*s.kv_heads*s.gqa_ratio);
    in.k.resize(size_t(s.head_size)*in.cells*s.kv_heads);
    in.v.resize(in.k.size());
    for (auto * all : {&in.q, &in.k, &in.v}) {
        for (auto & value : *all) { value = number(); }
    }
    in.mask.assign(size_t(in.rows)*in.cells, ggml_fp32_to_fp16(-INFINITY));
    const ggml_fp16_t zero = ggml_fp32_to_fp16(0.0f);
    for (int row = 0; row < in.rows; ++row) {
        const int seq = row/s.rows_each, hidden = s.rows_each - 1 - row % s.rows_each;
        ggml_fp16_t * seen = in.mask.data() + size_t(row)*in.cells;
        std::fill(seen, seen + s.shared, zero);
        // A row does not see the tokens of its own sequence that come after it.
        std::fill(seen + first[seq], seen + first[seq + 1] - (s.generated ? 0 : hidden), zero);
        for (int token = 0; token < s.generated - hidden; ++token) { seen[prompts + token*s.sequences + seq] = zero; }
    }
    return in;
}

static std::vector<float> attention(ggml_backend_t backend, const step & s, const inputs & in, int repeats, double * ms) {
    ggml_init_params params = {ggml_tensor_overhead()*16 + ggml_graph_overhead(), nullptr, true};
    ggml_context * ctx = ggml_init(params);
    ggml_tensor * q = ggml_new_tensor_4d(ctx, GGML_TYPE_F32, s.head_size, in.rows, s.kv_heads*s.gqa_ratio, 1);
    ggml_tensor * k = ggml_new_tensor_4d(ctx, s.type, s.head_size, in.cells, s.kv_heads, 1);
    ggml_tensor * v = ggml_new_tensor_4d(ctx, s.type, s.head_size, in.cells, s.kv_heads, 1);
    ggml_tensor * mask = ggml_new_tensor_4d(ctx, GGML_TYPE_F16, in.cells, in.rows, 1, 1);
    ggml_tensor * out = ggml_flash_attn_ext(ctx, q, k, v, mask, 1.0f/std::sqrt(float(s.head_size)), 0.0f, 0.0f);
    ggml_prec_set_acc(out, GGML_PREC_F32);
    out->op_params[8] = s.hint ? s.rows_each : 0; // FATTN_VISIBLE_ROWS_PARAM
    ggml_cgraph * graph = ggml_new_graph(ctx);
    ggml_build_forward_expand(graph, out);
    ggml_backend_buffer_t buffer = ggml_backend_alloc_ctx_tensors(ctx, backend);
    ggml_backend_tensor_set(q, in.q.data(), 0, ggml_nbytes(q));
    ggml_backend_tensor_set(mask, in.mask.data(), 0, ggml_nbytes(mask));
    for (auto [tensor, values] : {std::pair{k, &in.k}, std::pair{v, &in.v}}) {
        std::vector<char> packed(ggml_nbytes(tensor));
        ggml_quantize_chunk(s.type, values->data(), packed.data(), 0, ggml_nrows(tensor), s.head_size, nullptr);
        ggml_backend_tensor_set(tensor, packed.data(), 0, packed.size());
    }
    ggml_backend_graph_compute(backend, graph);
    if (ms != nullptr) {
        for (int i = 0; i < 5; ++i) { ggml_backend_graph_compute(backend, graph); }
        const auto start = std::chrono::steady_clock::now();
        for (int i = 0; i < repeats; ++i) { ggml_backend_graph_compute_async(backend, graph); }
        ggml_backend_synchronize(backend);
        *ms = std::chrono::duration<double, std::milli>(std::chrono::steady_clock::now() - start).count()/repeats;
    }
    std::vector<float> result(ggml_nelements(out));
    ggml_backend_tensor_get(out, result.data(), 0, ggml_nbytes(out));
    ggml_backend_buffer_free(buffer);
    ggml_free(ctx);
    return result;
}

int main(int argc, char ** argv) {
    const std::vector<std::string> wanted(argv + 1, argv + argc);
    const auto is_wanted = [&](const char * name) { return std::find(wanted.begin(), wanted.end(), name) != wanted.end(); };
    ggml_backend_load_all();
    ggml_backend_t card = ggml_backend_init_by_type(GGML_BACKEND_DEVICE_TYPE_GPU, nullptr);
    ggml_backend_t processor = ggml_backend_init_by_type(GGML_BACKEND_DEVICE_TYPE_CPU, nullptr);
    if (processor == nullptr) {
        return 2;
    }
    ggml_backend_cpu_set_n_threads(processor, std::max(1u, std::thread::hardware_concurrency()));
    if (card == nullptr) {
        printf("no card: the processor against itself\n");
        card = processor;
    }
    int wrong = 0;
    double worst = 0.0;
    for (const auto & s : is_wanted("check") ? steps(false) : std::vector<step>{}) {
        const inputs in = inputs_of(s);
        const auto ours = attention(card, s, in, 0, nullptr), theirs = attention(processor, s, in, 0, nullptr);
        double difference = 0.0, size = 0.0;
        for (size_t i = 0; i < ours.size(); ++i) {
            difference += double(ours[i] - theirs[i])*(ours[i] - theirs[i]);
            size += double(theirs[i])*theirs[i];
        }
        const double error = difference/size; // a sum that is not a number is no small number either
        const bool is_right = error < 5e-4;
        worst = std::max(worst, is_right ? error : INFINITY);
        wrong += !is_right;
        printf("%s %s, %d rows, %d cells, head %d x %d x %d, %s hint: %.2e\n", is_right ? "ok " : "BAD", s.name, in.rows, in.cells,
            s.head_size, s.kv_heads, s.gqa_ratio, s.hint ? "with" : "no", error);
    }
    if (is_wanted("check")) {
        printf("%d wrong, worst squared error %.2e\n", wrong, worst);
    }
    for (const auto & s : is_wanted("time") ? steps(true) : std::vector<step>{}) {
        double ms = 0.0;
        const inputs in = inputs_of(s);
        attention(card, s, in, 50, &ms);
        printf("%-28s %4d rows %7d cells: %8.4f ms\n", s.name, in.rows, in.cells, ms);
        fflush(stdout);
    }
    ggml_backend_free(processor);
    if (card != processor) {
        ggml_backend_free(card);
    }
    return wrong != 0;
}
