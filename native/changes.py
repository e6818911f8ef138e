"""What our builds change in llama.cpp's source, each for a measured reason. The pinned source is the only one it fits.

Engines give the same tokens with and without them: the tests of drafts pass on both libraries. Chains on a device are the
exception: without `kept_candidates` an engine does not use them.
"""

from __future__ import annotations

import hashlib
from pathlib import Path

from native.cell_window import CELL_WINDOW
from native.cells_together import CELLS_TOGETHER
from native.cpu_masks import CPU_MASKS
from native.delta_net_columns import DELTA_NET_COLUMNS
from native.delta_net_tokens import DELTA_NET_TOKENS
from native.errors import BuildFailed
from native.expert_groups import EXPERT_GROUPS
from native.grouped_experts import GROUPED_EXPERTS
from native.kept_candidates import KEPT_CANDIDATES
from native.nibble_tiles import NIBBLE_TILES
from native.quant_tiles import QUANT_TILES
from native.router_products import ROUTER_PRODUCTS
from native.row_blocks import ROW_BLOCKS
from native.row_candidates import ROW_CANDIDATES
from native.scattered_copies import SCATTERED_COPIES
from native.sequences_as_rows import SEQUENCES_AS_ROWS
from native.shared_expert import SHARED_EXPERT
from native.short_rows import SHORT_ROWS
from native.sorted_experts import SORTED_EXPERTS
from native.source_change import Change
from native.state_cells import STATE_CELLS
from native.state_copies import STATE_COPIES
from native.state_ranges import STATE_RANGES
from native.states_in_place import STATES_IN_PLACE
from native.tile_occupancy import TILE_OCCUPANCY
from native.written_states import WRITTEN_STATES

CHANGES = (
    # A context that can take back K tokens of a recurrent model copies K + 1 states of the convolution in every layer and step,
    # also in steps of one token, which leave the others as they were. The delta net's own states are written only as far as the
    # step has tokens, so older ones could not be used anyway. On an H200, four drafts, 35B-A3B: 0.1 ms of 3.8 for one stream.
    Change(
        "src/models/delta-net-base.cpp",
        "        for (int64_t t = 1; t <= K; ++t) {\n            const int64_t s_idx  = std::max<int64_t>(0,",
        "        const int64_t n_new = conv_input->ne[0] - conv_states->ne[0];\n\n"
        "        for (int64_t t = std::max<int64_t>(1, K - n_new + 1); t <= K; ++t) {\n"
        "            const int64_t s_idx  = std::max<int64_t>(0,",
    ),
    # Queued copies of state (flag 4): a call returns when the copies of the one before are done and its own are under way, so
    # that a card copies while the processor works on cells. They stand in the order of the device's computing, and
    # llama_synchronize waits for the last ones. The flag means nothing to a library without this.
    Change(
        "src/llama-context.cpp",
        "class llama_io_write_host : public llama_io_write_i {\npublic:\n    llama_io_write_host(\n"
        "            uint8_t * p, size_t len) : ptr(p), buf_size(len) {}\n",
        "static ggml_backend_t state_queue_of(ggml_backend_sched_t queue, const ggml_tensor * tensor) {\n"
        "    if (queue == nullptr) {\n        return nullptr;\n    }\n"
        "    const ggml_backend_buffer_t buffer = tensor->view_src ? tensor->view_src->buffer : tensor->buffer;\n"
        "    const ggml_backend_buffer_type_t buft = ggml_backend_buffer_get_type(buffer);\n"
        "    if (ggml_backend_buft_is_host(buft)) {\n        return nullptr;\n    }\n"
        "    for (int i = 0; i < ggml_backend_sched_get_n_backends(queue); ++i) {\n"
        "        ggml_backend_t backend = ggml_backend_sched_get_backend(queue, i);\n"
        "        if (ggml_backend_supports_buft(backend, buft)) {\n            return backend;\n        }\n    }\n"
        "    return nullptr;\n}\n\n"
        "class llama_io_write_host : public llama_io_write_i {\npublic:\n    llama_io_write_host(\n"
        "            uint8_t * p, size_t len, ggml_backend_sched_t queue = nullptr)"
        " : ptr(p), buf_size(len), queue(queue) {}\n",
    ),
    Change(
        "src/llama-context.cpp",
        "        for (const auto & winfo : winfos) {\n"
        "            ggml_backend_tensor_get(winfo.tensor, winfo.ptr, winfo.offset, winfo.size);\n        }\n",
        "        if (queue) {\n            ggml_backend_sched_synchronize(queue);\n        }\n"
        "        for (const auto & winfo : winfos) {\n"
        "            if (ggml_backend_t backend = state_queue_of(queue, winfo.tensor)) {\n"
        "                ggml_backend_tensor_get_async(backend, winfo.tensor, winfo.ptr, winfo.offset, winfo.size);\n"
        "            } else {\n"
        "                ggml_backend_tensor_get(winfo.tensor, winfo.ptr, winfo.offset, winfo.size);\n"
        "            }\n        }\n",
    ),
    Change(
        "src/llama-context.cpp",
        "    std::vector<write_info> winfos;\n};\n\nclass llama_io_read_host : public llama_io_read_i {\npublic:\n"
        "    llama_io_read_host(const uint8_t * p, size_t len) : ptr(p), buf_size(len) {}\n",
        "    std::vector<write_info> winfos;\n\n    ggml_backend_sched_t queue = nullptr;\n};\n\n"
        "class llama_io_read_host : public llama_io_read_i {\npublic:\n"
        "    llama_io_read_host(const uint8_t * p, size_t len, ggml_backend_sched_t queue = nullptr)"
        " : ptr(p), buf_size(len), queue(queue) {}\n",
    ),
    Change(
        "src/llama-context.cpp",
        "        for (const auto & rinfo : rinfos) {\n"
        "            ggml_backend_tensor_set(rinfo.tensor, rinfo.ptr, rinfo.offset, rinfo.size);\n        }\n",
        "        if (queue) {\n            ggml_backend_sched_synchronize(queue);\n        }\n"
        "        for (const auto & rinfo : rinfos) {\n"
        "            if (ggml_backend_t backend = state_queue_of(queue, rinfo.tensor)) {\n"
        "                ggml_backend_tensor_set_async(backend, rinfo.tensor, rinfo.ptr, rinfo.offset, rinfo.size);\n"
        "            } else {\n"
        "                ggml_backend_tensor_set(rinfo.tensor, rinfo.ptr, rinfo.offset, rinfo.size);\n"
        "            }\n        }\n",
    ),
    Change(
        "src/llama-context.cpp",
        "    std::vector<read_info> rinfos;\n};\n\nclass llama_io_write_file : public llama_io_write_i {\n",
        "    std::vector<read_info> rinfos;\n\n    ggml_backend_sched_t queue = nullptr;\n};\n\n"
        "class llama_io_write_file : public llama_io_write_i {\n",
    ),
    Change(
        "src/llama-context.cpp",
        "        io = std::make_unique<llama_io_write_host>(dst, size);\n    }\n",
        "        io = std::make_unique<llama_io_write_host>(dst, size, (flags & 4) ? sched.get() : nullptr);\n    }\n",
    ),
    Change(
        "src/llama-context.cpp",
        "    } else {\n        io = std::make_unique<llama_io_read_host>(src, size);\n    }\n",
        "    } else {\n"
        "        io = std::make_unique<llama_io_read_host>(src, size, (flags & 4) ? sched.get() : nullptr);\n    }\n",
    ),
    Change(
        "src/llama-context.cpp",
        "    ctx->synchronize();\n\n    return ctx->state_seq_get_data(seq_id, dst, size, flags);\n",
        "    if (!(flags & 4)) {\n        ctx->synchronize();\n    }\n\n"
        "    return ctx->state_seq_get_data(seq_id, dst, size, flags);\n",
    ),
    Change(
        "src/llama-context.cpp",
        "    ctx->synchronize();\n\n    return ctx->state_seq_set_data(seq_id, src, size, flags);\n}\n",
        "    if (!(flags & 4)) {\n        ctx->synchronize();\n    }\n\n"
        "    return ctx->state_seq_set_data(seq_id, src, size, flags);\n}\n\n"
        'extern "C" LLAMA_API bool llama_state_seq_queues(void);\n\n'
        "// whether flag 4 queues copies\n"
        "bool llama_state_seq_queues(void) {\n    return true;\n}\n",
    ),
    *WRITTEN_STATES,
    *STATES_IN_PLACE,
    *KEPT_CANDIDATES,
    *CELL_WINDOW,
    *ROW_BLOCKS,
    *STATE_CELLS,
    *CELLS_TOGETHER,
    *STATE_RANGES,
    *STATE_COPIES,
    *CPU_MASKS,
    *QUANT_TILES,
    *NIBBLE_TILES,
    *EXPERT_GROUPS,
    *GROUPED_EXPERTS,
    *SHORT_ROWS,
    *SCATTERED_COPIES,
    *DELTA_NET_COLUMNS,
    *DELTA_NET_TOKENS,
    *SHARED_EXPERT,
    *SORTED_EXPERTS,
    *ROW_CANDIDATES,
    *SEQUENCES_AS_ROWS,
    *ROUTER_PRODUCTS,
    *TILE_OCCUPANCY,
)


def digest() -> str:
    """Names the changes: another version of them is another tree of source."""
    return hashlib.sha256(repr(CHANGES).encode()).hexdigest()[:12]


def apply(tree: Path, changes: tuple[Change, ...] = CHANGES) -> None:
    """Changes the source under `tree`; what is changed already stays. Raises BuildFailed for a source that they do not fit."""
    for change in changes:
        path = tree / change.path
        text = path.read_text(encoding="utf-8") if path.is_file() else ""
        if change.new in text:
            continue
        if text.count(change.old) != 1:
            raise BuildFailed(f"{change.path} of this source is not the one that native/changes.py changes")
        path.write_text(text.replace(change.old, change.new), encoding="utf-8")
