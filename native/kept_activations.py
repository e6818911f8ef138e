"""A card quantizes a step's activations once for all weights that they are multiplied with.

Where weights are quantized llama.cpp quantizes the activations for each product anew: of 35B-A3B's attention the same row for
queries, keys and values, of its delta nets for the projection, the gate, alpha and beta, of its experts for those that were
chosen and the shared one. With few streams a step is made of some two thousand kernels of one to two microseconds each, and
these are 150 of them. With these changes what was quantized last stays in a buffer of its own, and a product with the same tensor
takes it from there.

What a tensor holds does not change between its users in one run of a graph, so the tensor names what was kept; at the beginning
of a run nothing is. While parts of a graph run side by side (GGML_CUDA_GRAPH_OPT), nothing is kept. GGML_CUDA_KEPT_ROWS=0 in the
engine's environment turns it off. Numbers are the same bit by bit.

No card has run this yet.
"""

from __future__ import annotations

from pathlib import Path

from native.source_change import Change

_HEADER = Path(__file__).resolve().parent / "cuda" / "kept-rows.cuh"
_CUDA = "ggml/src/ggml-cuda"
_BACKEND = f"{_CUDA}/ggml-cuda.cu"
_MMVQ = f"{_CUDA}/mmvq.cu"
_MMQ = f"{_CUDA}/mmq.cu"

_BUFFER = (
    Change(f"{_CUDA}/kept-rows.cuh", "", _HEADER.read_text(encoding="utf-8")),
    Change(
        _BACKEND,
        """ggml_backend_cuda_context::~ggml_backend_cuda_context() {
""",
        """// Beside the contexts, whose header all kernels are compiled with.
static std::mutex kept_rows_mutex;
static std::unordered_map<const ggml_backend_cuda_context *, ggml_cuda_kept_rows> kept_rows_by_context;

ggml_cuda_kept_rows & ggml_cuda_kept_rows_of(ggml_backend_cuda_context & ctx) {
    std::lock_guard<std::mutex> lock(kept_rows_mutex);
    return kept_rows_by_context[&ctx];
}

static void ggml_cuda_kept_rows_free(const ggml_backend_cuda_context & ctx) {
    std::lock_guard<std::mutex> lock(kept_rows_mutex);
    auto it = kept_rows_by_context.find(&ctx);
    if (it == kept_rows_by_context.end()) {
        return;
    }
    if (it->second.buffer != nullptr) {
        CUDA_CHECK(cudaFree(it->second.buffer));
    }
    kept_rows_by_context.erase(it);
}

ggml_backend_cuda_context::~ggml_backend_cuda_context() {
""",
    ),
    Change(
        _BACKEND,
        """    if (copy_event != nullptr) {
        CUDA_CHECK(cudaEventDestroy(copy_event));
    }
""",
        """    ggml_cuda_kept_rows_free(*this);
    if (copy_event != nullptr) {
        CUDA_CHECK(cudaEventDestroy(copy_event));
    }
""",
    ),
    *(
        Change(path, f'#include "{include}"\n', f'#include "{include}"\n#include "{kept}"\n')
        for path, include, kept in (
            (_BACKEND, "ggml-cuda/common.cuh", "ggml-cuda/kept-rows.cuh"),
            (_MMVQ, "vecdotq.cuh", "kept-rows.cuh"),
            (_MMQ, "mmq.cuh", "kept-rows.cuh"),
        )
    ),
    # Before a graph is recorded, for memory cannot be had while it is.
    Change(
        _BACKEND,
        """    bool use_cuda_graph             = false;
    bool cuda_graph_update_required = false;
    const void * graph_key = nullptr;

#ifdef USE_CUDA_GRAPH
    graph_key = ggml_cuda_graph_get_key(cgraph);
""",
        """    static const bool keeps_rows = [] {
        const char * env = getenv("GGML_CUDA_KEPT_ROWS");
        return env == nullptr || atoi(env) != 0;
    }();
    auto & kept_rows = ggml_cuda_kept_rows_of(*cuda_ctx);
    if (keeps_rows && kept_rows.buffer == nullptr) {
        void * buffer = nullptr;
        constexpr size_t size = ggml_cuda_kept_rows::MAX_BYTES + ggml_cuda_kept_rows::PAD_BYTES;
        if (ggml_cuda_device_malloc(&buffer, size, cuda_ctx->device) == cudaSuccess) {
            kept_rows.buffer = (char *) buffer;
        } else {
            (void) cudaGetLastError(); // a card that is full keeps nothing
        }
    }
    kept_rows.begin(cuda_ctx->stream_context().concurrent_events.empty());

    bool use_cuda_graph             = false;
    bool cuda_graph_update_required = false;
    const void * graph_key = nullptr;

#ifdef USE_CUDA_GRAPH
    graph_key = ggml_cuda_graph_get_key(cgraph);
""",
    ),
)

_PRODUCTS = (
    Change(
        _MMVQ,
        """    ggml_cuda_pool_alloc<char> src1_q8_1(ctx.pool(), ne13*ne12 * ne11*ne10_padded * sizeof(block_q8_1)/QK8_1);
    {
""",
        """    const size_t src1_q8_1_size = ne13*ne12 * ne11*ne10_padded * sizeof(block_q8_1)/QK8_1;

    ggml_cuda_pool_alloc<char> src1_q8_1(ctx.pool());

    ggml_cuda_kept_rows & kept_rows = ggml_cuda_kept_rows_of(ctx);

    const char * src1_rows = kept_rows.find(src1, ggml_cuda_kept_rows::ROWS);
    if (src1_rows == nullptr) {
        char * rows = kept_rows.make_room(src1, ggml_cuda_kept_rows::ROWS, src1_q8_1_size);
        if (rows == nullptr) {
            rows = src1_q8_1.alloc(src1_q8_1_size);
        }
        src1_rows = rows;

""",
    ),
    Change(
        _MMVQ,
        "        quantize_row_q8_1_cuda(src1_d, nullptr, src1_q8_1.get(), src0->type, ne10, s11, s12, s13, ne10_padded,"
        " ne11, ne12, ne13, stream);\n",
        "        quantize_row_q8_1_cuda(src1_d, nullptr, rows, src0->type, ne10, s11, s12, s13, ne10_padded,"
        " ne11, ne12, ne13, stream);\n",
    ),
    Change(
        _MMVQ,
        "        src0->data, src0->type, src1_q8_1.get(), ids_d, fusion_local, dst_d, ne00,\n",
        "        src0->data, src0->type, src1_rows, ids_d, fusion_local, dst_d, ne00,\n",
    ),
    Change(
        _MMQ,
        """        ggml_cuda_pool_alloc<char> src1_q8_1(ctx.pool(), nbytes_src1_q8_1);
        ggml_cuda_pool_alloc<float> src1_scale(ctx.pool());
        if (src0->type == GGML_TYPE_NVFP4 && use_native_fp4) {
            src1_scale.alloc(ne13*ne12*ne11);
        }

        {
""",
        """        ggml_cuda_pool_alloc<char> src1_q8_1(ctx.pool());
        ggml_cuda_pool_alloc<float> src1_scale(ctx.pool());

        const int form = mmq_get_q8_1_ds_layout(src0->type);

        ggml_cuda_kept_rows & kept_rows = ggml_cuda_kept_rows_of(ctx);

        const char * src1_rows = use_native_fp4 ? nullptr : kept_rows.find(src1, form);
        if (src1_rows == nullptr) {
            char * rows = use_native_fp4 ? nullptr : kept_rows.make_room(src1, form, nbytes_src1_q8_1);
            if (rows == nullptr) {
                rows = src1_q8_1.alloc(nbytes_src1_q8_1);
            }
            src1_rows = rows;
            if (src0->type == GGML_TYPE_NVFP4 && use_native_fp4) {
                src1_scale.alloc(ne13*ne12*ne11);
            }

""",
    ),
    Change(
        _MMQ,
        "                quantize_mmq_fp4_cuda(src1_d, nullptr, src1_q8_1.get(), src1_scale.ptr, src0->type, use_aligned_float8,"
        " ne10, s11, s12, s13, ne10_padded,\n",
        "                quantize_mmq_fp4_cuda(src1_d, nullptr, rows, src1_scale.ptr, src0->type, use_aligned_float8,"
        " ne10, s11, s12, s13, ne10_padded,\n",
    ),
    Change(
        _MMQ,
        "                quantize_mmq_q8_1_cuda(src1_d, nullptr, src1_q8_1.get(), src0->type, ne10, s11, s12, s13, ne10_padded,\n"
        "                                       ne11, ne12, ne13, stream);\n",
        "                quantize_mmq_q8_1_cuda(src1_d, nullptr, rows, src0->type, ne10, s11, s12, s13, ne10_padded,\n"
        "                                       ne11, ne12, ne13, stream);\n",
    ),
    Change(
        _MMQ,
        "            src0_d, src0->type, (const int *) src1_q8_1.ptr, nullptr, nullptr, dst_d,\n",
        "            src0_d, src0->type, (const int *) src1_rows, nullptr, nullptr, dst_d,\n",
    ),
)

KEPT_ACTIVATIONS = _BUFFER + _PRODUCTS
