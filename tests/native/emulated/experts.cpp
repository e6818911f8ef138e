// The product of experts that the host's side of a build starts, with its kernels on emulated threads. The sources are those of
// native/cuda; tests/native/test_grouped_experts.py takes out of llama.cpp's what they stand on.
//
//   experts < CASES > RESULTS
//   experts shares WARPS GROUPS < IDS: what each warp has of the work, by the plan and the shares that the kernels make
//
// IDS, little-endian: int32 experts, tokens, slots, then the ids [tokens][slots]. The answer, a line for each warp: groups,
// and how often it multiplies one of them with a token.
//
// A case, little-endian: int32 type, columns, rows, experts, tokens, slots, rows of activations of a token, with a gate, with
// biases, bytes of a row; the experts' weights and the gate's, as they lie in a file; biases and the gate's (floats); the ids
// [tokens][slots] (int32); activations [tokens][rows of them][columns] (floats). Its result: whether the product takes this way
// (int32), then floats [tokens][slots][rows].

#include "quants.cuh"
#include "fibers.h"

#include "types.h"

#include "mmid-grouped.cu"

template <typename T> static std::vector<T> read(size_t n) {
    std::vector<T> all(n);
    if (fread(all.data(), sizeof(T), n, stdin) != n) { abort(); }
    return all;
}

// Weights as a card has them: from a multiple of 256 bytes on. Behind them there is nothing but the rest of 16 bytes.
struct weights {
    void * place;
    explicit weights(size_t bytes) : place(aligned_alloc(256, (bytes + 255)/256*256)) {
        memset(place, 0xFF, (bytes + 255)/256*256);
        if (fread(place, 1, bytes, stdin) != bytes) { abort(); }
    }
    ~weights() { free(place); }
};

// A warp's groups are those between the places where it and the next one begin.
static int print_shares(const int n_warps, const int n_groups) {
    const auto sizes = read<int>(3);
    const int n_experts = sizes[0], n_pairs = sizes[1]*sizes[2];
    const auto ids = read<int>(n_pairs);
    std::vector<int> plan(experts_plan_size(n_pairs), -1), shared(2*n_experts);
    run_kernel({1, 1, 1}, {EXPERTS_PREPARE, 1, 1}, [&] {
        experts_make_plan(ids.data(), plan.data(), shared.data(), n_experts, n_pairs, sizes[2], sizes[2], 2*EXPERTS_COLUMNS, true);
    });
    experts_shape s{};
    s.n_pairs = n_pairs, s.n_groups = n_groups, s.n_sections = 1;
    const auto * items = (const experts_item *) (plan.data() + 4);
    for (int warp = 0; warp < n_warps; ++warp) {
        experts_place place, stop;
        experts_share(plan.data(), s, warp, n_warps, place, stop);
        int groups = 0, products = 0;
        for (; !place.is(stop); place.advance(s)) {
            ++groups;
            products += items[place.item].count;
        }
        printf("%d %d\n", groups, products);
    }
    return 0;
}

int main(int argc, char ** argv) {
    if (argc == 4 && strcmp(argv[1], "shares") == 0) {
        return print_shares(atoi(argv[2]), atoi(argv[3]));
    }
    for (int c; (c = getchar()) != EOF;) {
        ungetc(c, stdin);
        const auto shape = read<int>(10);
        const int ncols = shape[1], nrows = shape[2], experts = shape[3], tokens = shape[4], slots = shape[5], channels = shape[6];
        const size_t row_bytes = shape[9], bytes = row_bytes*nrows*experts;
        weights x(bytes), gate(shape[7] ? bytes : 0);
        auto x_bias = read<float>(shape[8] ? nrows*experts : 0), gate_bias = read<float>(x_bias.size());
        auto ids = read<int>(tokens*slots);
        auto y = read<float>(size_t(tokens)*channels*ncols);
        std::vector<float> out(size_t(tokens)*slots*nrows, NAN);

        const size_t type_size = row_bytes/(ncols/type_elements((ggml_type) shape[0]));
        ggml_tensor X{{ncols, nrows, experts, 1}, {type_size, row_bytes, row_bytes*nrows, 0}, x.place}, G = X, B{{nrows, experts}}, C = B;
        ggml_tensor Y{{ncols, channels, tokens, 1}, {4, 4ul*ncols, 4ul*ncols*channels, 0}, y.data()};
        ggml_tensor I{{slots, tokens, 1, 1}, {4, 4ul*slots, 0, 0}, ids.data()}, D{{nrows, slots, tokens, 1}, {}, out.data()};
        X.type = G.type = shape[0];
        Y.type = D.type = B.type = C.type = GGML_TYPE_F32;
        I.type = GGML_TYPE_I32;
        G.data = gate.place, B.data = x_bias.data(), C.data = gate_bias.data();

        ggml_cuda_mm_fusion_args_host fusion{};
        fusion.glu_op = GGML_GLU_OP_SWIGLU;
        if (shape[7]) { fusion.gate = &G; }
        if (shape[8]) { fusion.x_bias = &B; }
        if (shape[7] && shape[8]) { fusion.gate_bias = &C; }

        memset(dynamic_shared, 0xFF, sizeof(dynamic_shared)); // not numbers
        int takes;
        if (experts == 1 && slots == 1 && shape[7]) { // every token's expert: a product of matrices
            ggml_tensor Z{{ncols, tokens, 1, 1}, {4, 4ul*ncols, 4ul*ncols*tokens, 4ul*ncols*tokens}, y.data()}, E{{nrows, tokens, 1, 1}, {}, out.data()};
            Z.type = E.type = GGML_TYPE_F32;
            takes = ggml_cuda_should_use_shared_expert(&X, &Z, &E, 900);
            if (takes) {
                ggml_backend_cuda_context ctx;
                ggml_cuda_mul_mat_shared_expert(ctx, &X, &Z, &E, &fusion);
            }
        } else if ((takes = ggml_cuda_should_use_mmid_grouped(&X, &Y, &D, 900))) {
            ggml_backend_cuda_context ctx;
            ggml_cuda_mul_mat_id_grouped(ctx, &X, &Y, &I, &D, shape[7] || shape[8] ? &fusion : nullptr);
        }
        fwrite(&takes, sizeof(takes), 1, stdout);
        fwrite(out.data(), sizeof(float), out.size(), stdout);
    }
}
