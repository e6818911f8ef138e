// A delta net's step on emulated threads, out of a build's gated_delta_net.cu (tests/native/test_delta_net_columns.py prepares it):
// several columns in a warp, and several rows of lanes in each, give the bits of one column in a warp.

#include "device.cuh"
#include "fibers.h"

static uint3 init_fastdiv_values(uint64_t divisor) { return {0, 0, (unsigned) divisor}; }
static unsigned fastdiv(unsigned n, uint3 divisor) { return n/divisor.z; }

struct float4 { float x, y, z, w; };

// Each thread's copies into shared memory, in groups: they arrive as late as they may.
struct late_copy { float * to; const float * from; };
static std::vector<std::vector<late_copy>> late[1024];
static std::vector<late_copy> & open_group() {
    auto & own = late[thread_number()];
    if (own.empty()) { own.emplace_back(); }
    return own.back();
}
static void emulated_load(float * to, const float * from) {
    *to = NAN;
    open_group().push_back({to, from});
}
static void emulated_end_chunk() {
    open_group();
    late[thread_number()].emplace_back();
}
static void emulated_wait(size_t n_groups) {
    auto & own = late[thread_number()];
    while (own.size() > n_groups + 1) { // behind the last one is the open one
        for (const auto & each : own.front()) { *each.to = *each.from; }
        own.erase(own.begin());
    }
}

#include "gated_delta_net.cu"

constexpr int S = 128;

static std::vector<float> numbers(size_t n, float scale, unsigned seed) {
    std::vector<float> values(n);
    for (auto & value : values) {
        seed = seed*1664525u + 1013904223u;
        value = scale*((int) (seed >> 8) - (1 << 23))/(1 << 23);
    }
    return values;
}

template <bool keep> static bool is_same(int heads, int key_heads, int tokens, int seqs, int key_seqs, int K, bool in_place) {
    const int64_t D = (int64_t) S*S*heads, row = S + 4; // rows of q, k and v have room behind them
    const auto q = numbers(row*key_heads*tokens*key_seqs, 0.2f, 1), k = numbers(q.size(), 0.2f, 2);
    const auto v = numbers(row*heads*tokens*seqs, 1.0f, 3);
    const auto g = numbers(heads*tokens*seqs, 1.0f, 4), beta = numbers(g.size(), 1.0f, 5);
    const auto before = numbers(D*seqs, 1.0f, 6);
    const int64_t stride = D*seqs + 64;

    const auto run = [&](bool launched) {
        auto read = before;
        std::vector<float> out(S*heads*tokens*seqs, NAN), states(stride*K, -7.0f);
        float * written = in_place ? read.data() : states.data();
        const int64_t q1 = row, q2 = row*key_heads, q3 = q2*tokens, v1 = row, v2 = row*heads, v3 = v2*tokens;
        if (launched) {
            launch_gated_delta_net<false, keep>(
                q.data(), k.data(), v.data(), g.data(), beta.data(), read.data(), out.data(), written, S, heads, tokens, seqs,
                q1, q2, q3, v1, v2, v3, 1, heads, heads*tokens, key_heads, seqs/key_seqs, 0.125f, stride, K, 0);
        } else {
            run_kernel(dim3(heads, seqs, S/4), dim3(WARP_SIZE, 4), [&] {
                gated_delta_net_cuda<S, false, keep>(
                    q.data(), k.data(), v.data(), g.data(), beta.data(), read.data(), out.data(), written, heads, tokens, seqs,
                    q1, q2, q3, v1, v2, v3, 1, heads, heads*tokens, init_fastdiv_values(key_heads),
                    init_fastdiv_values(seqs/key_seqs), 0.125f, stride, K);
            });
        }
        printf("%s in %u parts\n", launched ? "launched" : "plain", gridDim.z);
        const unsigned parts = gridDim.z;
        out.insert(out.end(), states.begin(), states.end());
        out.insert(out.end(), read.begin(), read.end());
        return std::make_pair(out, parts);
    };
    const auto expected = run(false), got = run(true);
    const char * env = getenv("GGML_CUDA_GDN_COLUMNS");
    const bool two = env == nullptr || atoi(env) != 0; // on three SMs always
    const bool many = gdn_takes_tokens(S, tokens, WARP_SIZE);
    return got.second == (many ? S/GDN_BLOCK_COLUMNS : two ? S/8 : S/4) && got.first.size() == expected.first.size() &&
           memcmp(got.first.data(), expected.first.data(), 4*got.first.size()) == 0;
}

int main() {
    bool right = true;
    const auto expect = [&](const char * what, bool ok) {
        printf("%s %s\n", ok ? "ok " : "BAD", what);
        right = right && ok;
    };
    expect("one token", is_same<false>(4, 2, 1, 3, 3, 1, false));
    expect("one token in place", is_same<false>(4, 2, 1, 3, 3, 1, true));
    expect("one head", is_same<false>(1, 1, 2, 1, 1, 1, false));
    expect("tokens", is_same<false>(2, 2, 5, 2, 2, 1, false));
    expect("keys of several sequences", is_same<false>(2, 1, 2, 4, 2, 1, false));
    expect("kept states", is_same<true>(2, 2, 3, 2, 2, 5, false));
    expect("fewer kept states than tokens", is_same<true>(2, 2, 5, 2, 2, 3, false));
    for (const int tokens : {3, 4, 8, 9, 21}) {
        expect("many tokens", is_same<false>(2, 1, tokens, 1, 1, 1, false));
        expect("many tokens in place", is_same<false>(1, 1, tokens, 2, 1, 1, true));
        expect("many tokens with kept states", is_same<true>(2, 2, tokens, 1, 1, 4, false));
    }
    const char * env = getenv("GGML_CUDA_GDN_COLUMNS");
    const bool on = env == nullptr || atoi(env) != 0;
    expect("many columns", gdn_takes_columns(128, 32, 2, 32, 132) == on);
    expect("few columns", !gdn_takes_columns(128, 32, 1, 32, 132));
    expect("other states", !gdn_takes_columns(64, 32, 32, 32, 132));
    return right ? 0 : 1;
}
