"""States that nobody computed: attention rows of finite random numbers, so that a gigabyte takes no prefill."""

from __future__ import annotations

import struct
from collections.abc import Generator

import numpy as np

from bench.errors import BenchError
from engines.runtime.core import EngineCore
from engines.runtime.llama import Batch, Llama
from engines.runtime.prefix import PrefixCache
from engines.runtime.slots import Slot
from engines.runtime.state_codec import StateCodec
from engines.runtime.state_layout import HEADER_BYTES, MAGIC, TENSOR_HEAD_BYTES, Bytes, StateLayout
from engines.runtime.state_transfer import arrive

FORGED_BLOCK_TOKENS = 256
SEED_TOKENS = 8
POOL_BLOCKS = 1 << 15
_F16, _Q8_0 = 1, 8  # ggml types


async def forge(core: EngineCore, tokens: int) -> None:
    """Fills slot 0 with `tokens` rows. A recurrent state is a real one, of a few tokens, that says it stands at the end."""
    codec, llama = core.codec, core.llama
    assert codec is not None and llama is not None
    if codec.layout.window:
        raise BenchError("a state cannot be made up for models with sliding windows")
    ids = np.random.default_rng(0).integers(0, llama.vocabulary.size, tokens).tolist()
    blocks = BlockForge(codec.layout)

    def work(cache: PrefixCache) -> Generator[None, None, None]:
        part = _part(codec, llama, cache.slots[1], tokens) if codec.layout.recurrent else None
        arrival = yield from arrive(cache, 0, ids, erase_existing=True)
        sequence = arrival.slot.sequence
        for start in range(0, tokens, FORGED_BLOCK_TOKENS):
            inside = ids[start : start + FORGED_BLOCK_TOKENS]
            codec.import_block(sequence, start, inside, blocks.block(start, inside))
            yield
        if part is not None:
            codec.import_part(sequence, tokens, part)
        codec.complete(sequence, ids)
        yield from arrival.finish()

    await core.perform(work)


def _part(codec: StateCodec, llama: Llama, slot: Slot, tokens: int) -> Bytes:
    """The recurrent state of a few tokens, moved to the position of the last of `tokens`."""
    sequence, seed = slot.sequence, list(range(5, 5 + SEED_TOKENS))
    sequence.clear()
    batch = Batch(SEED_TOKENS)
    batch.add(sequence.index, 0, seed, outputs=1)
    if llama.decode(batch) != 0:
        raise BenchError("llama.cpp refused a few tokens")
    sequence.append(seed)
    part = codec.export_part(sequence, np.empty(codec.part_bytes(sequence), dtype=np.uint8))
    sequence.clear()
    struct.pack_into("<i", part.data, HEADER_BYTES + 4, tokens - 1)
    return part


class BlockForge:
    """Blocks whose rows are taken from a pool, over and over; each is valid until the next one is made."""

    def __init__(self, layout: StateLayout) -> None:
        self._layout = layout
        rng = np.random.default_rng(0)
        self._pools = {_F16: rng.standard_normal(POOL_BLOCKS * 16).astype(np.float16).view(np.uint8)}
        quants = rng.integers(0, 256, (POOL_BLOCKS, 34), dtype=np.uint8)  # a scale and 32 signed bytes each
        quants[:, :2] = np.frombuffer(np.float16(0.02).tobytes(), np.uint8)
        self._pools[_Q8_0] = quants.ravel()
        self._block = np.empty(0, dtype=np.uint8)
        self._count = 0

    def block(self, start: int, tokens: list[int]) -> Bytes:
        if len(tokens) != self._count:
            self._block, self._count = self._forged(len(tokens)), len(tokens)
        cells = self._layout.attention.cells(self._block[HEADER_BYTES:], self._count)
        cells["pos"], cells["n_seq"] = np.arange(start, start + self._count), 1
        if self._layout.attention.wide_cells:
            cells["token"] = tokens
        return self._block

    def _forged(self, count: int) -> Bytes:
        layout, attention = self._layout, self._layout.attention
        block = np.zeros(layout.block_bytes(count), dtype=np.uint8)
        struct.pack_into("<IiII", block.data, 0, MAGIC, 0, 1, count)
        behind = HEADER_BYTES + 8 + count * attention.cell_dtype.itemsize
        struct.pack_into("<II", block.data, behind, 0, attention.layers)
        for tensor, offset in zip(attention.tensors, attention.head_offsets(count), strict=True):
            if tensor.kind not in self._pools:
                raise BenchError(f"rows of ggml type {tensor.kind} cannot be made up")
            at = HEADER_BYTES + int(offset) + TENSOR_HEAD_BYTES
            block[at - TENSOR_HEAD_BYTES : at] = np.frombuffer(tensor.head, np.uint8)
            block[at : at + count * tensor.row_bytes] = np.resize(self._pools[tensor.kind], count * tensor.row_bytes)
        end = HEADER_BYTES + attention.section_bytes(count)
        block[end:] = np.frombuffer(layout.block_tail, np.uint8)
        return block
