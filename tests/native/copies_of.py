"""States large enough to be written past caches, as a process that uses our library: `python -m … MODEL`. It fails at the first
byte that is another one."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np

from engines.config import EngineConfig
from engines.runtime.llama import Batch, Llama
from engines.runtime.state_layout import HEADER_BYTES, TENSOR_HEAD_BYTES, Bytes, StateLayout

# On both sides of what is written past caches, in (1 MiB) and out (6 MiB), where a token has 8 KiB.
LENGTHS = (100, 140, 700, 900)
STEP = 200
OFFSETS = (0, 1, 12, 63)
OURS, THEIRS = 0, 1


def context_of(model: Path) -> Llama:
    config = EngineConfig(
        model_path=str(model), model_name="m", slots=3, context_tokens=2048, threads=1, batch_tokens=256,
        micro_batch_tokens=256, sampling="host", speculation="none",
    )  # fmt: skip
    return Llama(config, 1, lambda share: None)


def feed(llama: Llama, start: int, end: int) -> None:
    batch = Batch(STEP)
    for at in range(start, end, STEP):
        batch.clear()
        batch.add(OURS, at, [place % 500 + 1 for place in range(at, min(at + STEP, end))], outputs=1)
        assert llama.decode(batch) == 0


def nameless(layout: StateLayout, state: Bytes) -> Bytes:
    layout.forget_sequence(state, partial=False)
    return state


def made_up(layout: StateLayout, like: Bytes, length: int) -> Bytes:
    """A state of as many tokens whose rows are random bytes."""
    state, section = like.copy(), layout.attention
    random = np.random.default_rng(length)
    for tensor, at in zip(section.tensors, section.head_offsets(length), strict=True):
        begin, size = HEADER_BYTES + int(at) + TENSOR_HEAD_BYTES, tensor.row_bytes * length
        state[begin : begin + size] = random.integers(0, 256, size, dtype=np.uint8)
    return state


def memory_at(offset: int, size: int) -> Bytes:
    """So many bytes, the first `offset` behind a border of cache lines, with others before and behind them."""
    memory = np.full(size + 256, 0xA5, dtype=np.uint8)
    begin = -memory.ctypes.data % 64 + 64 + offset
    return memory[begin - 64 : begin + size + 64]


def moved(llama: Llama, layout: StateLayout, like: Bytes, length: int, offset: int) -> None:
    state = made_up(layout, like, length)
    source = memory_at(offset, state.nbytes)
    source[64:-64] = state
    assert llama.import_from(THEIRS, source[64:-64], partial=False)
    target = memory_at(offset, state.nbytes)
    assert llama.export_into(THEIRS, target[64:-64], partial=False) == state.nbytes
    llama.clear(THEIRS)
    assert np.array_equal(nameless(layout, target[64:-64]), nameless(layout, state)), (length, offset)
    assert (target[:64] == 0xA5).all()
    assert (target[-64:] == 0xA5).all()


def main(model: Path) -> None:
    llama, held = context_of(model), 0
    for length in LENGTHS:
        feed(llama, held, length)
        held = length
        like = llama.export_state(OURS)
        layout = StateLayout.learn(like, like, length)
        for offset in OFFSETS:
            moved(llama, layout, like, length, offset)
            assert np.array_equal(llama.export_state(OURS), like), (length, offset)
    llama.close()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
