"""The k largest numbers of a row are found on a card in two short kernels, those of all sequences together.

A chain on the device has one row of logits for each sequence, of which it keeps the k largest. Without a newer CUDA's own
search llama.cpp sorts the whole row for it: of 248,320 logits a histogram, four passes and copies, about 60 us on an H200. 32
streams do it 32 times a step: 2.0 ms of 17.9. Here (native/cuda/top-k-rows-kernels.cuh)

* a CUDA block reads up to 16,384 numbers once and keeps them in registers. Its threads' largest numbers vote for a bound that k
  of them reach: few other numbers do, and all that do are written as candidates (some 150 to 250 of k = 128). If too many do,
  digits of whole keys follow (number, then column), so that at most k + 512 are left whatever the row is.
* another block has the row's candidates. A digit or two leave a few more than k, and the place of each is how many are larger.

What comes out is exact and has one order: larger numbers first, of equal ones the first column first; -0 equals 0, and a NaN is
larger than infinity, so that whoever reads the candidates sees it. It does not depend on other rows. Nothing goes to the host,
no memory has to be cleared before, and graphs of the card record it.

Where a graph has such operations one behind the other with nothing between them but views and the rows' own values being taken
(GET_ROWS), as llama.cpp builds the chains of its sequences, up to 64 rows and their values are computed by one launch of each
kernel. What they write must not lie where another of them reads or writes.

It is for rows of more than 1024 numbers and k up to 1024. GGML_CUDA_TOP_K_ROWS=0 in the engine's environment turns it off.

On an H200 a row of 248,320 and its values take 12 us instead of 68, 32 of them 29 instead of 2,132; a step of 32 streams takes
11.8 ms instead of 13.8, one of 8 6.6 instead of 7.2, one of a single stream 0.06 less. Rows of equal numbers, the worst ones:
121 us for 32. tests/native/top_k_on_card.cpp compares and times both ways.
"""

from __future__ import annotations

from pathlib import Path

from native.source_change import Change

_SOURCES = Path(__file__).resolve().parent / "cuda"
_CUDA = "ggml/src/ggml-cuda"
_BACKEND = f"{_CUDA}/ggml-cuda.cu"
_TOP_K = f"{_CUDA}/top-k.cu"

_FILES = tuple(
    Change(f"{_CUDA}/{name}", "", (_SOURCES / name).read_text(encoding="utf-8"))
    for name in ("top-k-rows.cuh", "top-k-rows-kernels.cuh", "top-k-rows.cu")
)

ROW_CANDIDATES = (
    *_FILES,
    Change(
        _TOP_K,
        """#include "top-k.cuh"
""",
        """#include "top-k.cuh"
#include "top-k-rows.cuh"
""",
    ),
    Change(
        _TOP_K,
        """void ggml_cuda_op_top_k(ggml_backend_cuda_context & ctx, ggml_tensor * dst) {
""",
        """void ggml_cuda_op_top_k(ggml_backend_cuda_context & ctx, ggml_tensor * dst) {
    if (ggml_cuda_should_use_top_k_rows(dst)) {
        ggml_cuda_op_top_k_rows(ctx, dst);
        return;
    }

""",
    ),
    Change(
        _BACKEND,
        """#include "ggml-cuda/top-k.cuh"
""",
        """#include "ggml-cuda/top-k-rows.cuh"
#include "ggml-cuda/top-k.cuh"
""",
    ),
    # Nodes of concurrent streams do not stand in the order of their computing.
    Change(
        _BACKEND,
        """    ggml_tensor * node = cgraph->nodes[i];

    if (node->op == GGML_OP_MUL) {
        ggml_cuda_moe_weighted_reduction_match match;
""",
        """    ggml_tensor * node = cgraph->nodes[i];

    if (node->op == GGML_OP_TOP_K && cuda_ctx->stream_context().concurrent_events.empty()) {
        const int n_behind = ggml_cuda_top_k_run(*cuda_ctx, cgraph, i);
        if (n_behind > 0) {
            return n_behind;
        }
    }

    if (node->op == GGML_OP_MUL) {
        ggml_cuda_moe_weighted_reduction_match match;
""",
    ),
)
