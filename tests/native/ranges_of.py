"""Ranges of states by both of our library's ways, as a process that uses it: `python -m … MODEL WAY OUT [transposed] [windowed]`.

WAY is `ranges` or `scratch`; whatever else happens in the cache is the same, so that all that is written to OUT must be too. A
process of the first way also compares every range that leaves with what leaves through a scratch sequence.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import sys
from pathlib import Path
from typing import Any

import llama_cpp
import numpy as np

from engines.config import EngineConfig
from engines.runtime import llama as llama_module
from engines.runtime import state_ranges
from engines.runtime.context_params import ContextParams
from engines.runtime.llama import Batch
from engines.runtime.state_layout import Bytes
from tests.native.small_engine import BATCH_TOKENS, SEQUENCES, small_llama

EMPTY, SCRATCH, TARGET = 5, 6, 7
STEP = 200
CUTS = (0, 1, 8, 71, 135, 391)


class Transposed(ContextParams):
    """A context without flash attention, whose values are transposed; the engine makes none."""

    def __init__(self, config: EngineConfig, threads: int) -> None:
        super().__init__(config, threads)
        self.native.flash_attn_type = llama_cpp.LLAMA_FLASH_ATTN_TYPE_DISABLED


class Cache:
    """A context in which sequences come, go and share cells."""

    def __init__(self, model: Path, *, windowed: bool) -> None:
        self.llama = small_llama(model, full_window=not windowed)
        self._random = np.random.default_rng(7)
        self.held = dict.fromkeys(range(SEQUENCES), 0)

    def feed(self, *parts: tuple[int, int]) -> np.ndarray:
        """Logits of the last row, after `count` more tokens of each sequence."""
        batch = Batch(BATCH_TOKENS)
        for seq, count in parts:
            tokens = self._random.integers(1, self.llama.vocabulary.size - 1, count)
            batch.add(seq, self.held[seq], [int(token) for token in tokens], outputs=1)
            self.held[seq] += count
        assert self.llama.decode(batch) == 0
        self.llama.synchronize()
        return self.llama.logits(batch.count - 1).copy()

    def clear(self, *seqs: int) -> None:
        for seq in seqs:
            self.llama.clear(seq)
            self.held[seq] = 0

    def share(self, source: int, target: int) -> None:
        self.llama.share(source, target, self.held[source])
        self.held[target] = self.held[source]

    def fill(self) -> None:
        """Cells of five sequences, some of them shared, in pieces between one another."""
        for _ in range(2):
            for seq in range(4):
                self.feed((seq, STEP))
        for _ in range(20):
            self.feed(*((seq, 1) for seq in range(4)))
        self.share(0, 4)
        self.feed((0, 5), (4, 7))
        self.clear(1)
        for _ in range(8):
            self.feed((2, 30))
            self.feed((3, 20), (1, 25))
        self.clear(2)
        self.feed((1, STEP))

    # --- both ways ------------------------------------------------------------------------------

    def _room(self, count: int) -> Bytes:
        return np.zeros(self.llama.state_bytes(0) * 2 + 1000 * count, dtype=np.uint8)

    def by_scratch(self, seq: int, start: int, end: int) -> Bytes:
        self.llama.share_range(seq, SCRATCH, start, end)
        if self.llama.has_recurrent_state:
            self.llama.share_range(EMPTY, SCRATCH, 0, 0)
        buffer = self._room(end - start)
        written = self.llama.export_into(SCRATCH, buffer, partial=False)
        also = self._room(end - start)
        if state_ranges.HAS_RANGES:
            assert self.llama.export_range(SCRATCH, start, end, also) == written
            assert np.array_equal(also, buffer)
        self.llama.clear(SCRATCH)
        return buffer[:written]

    def by_range(self, seq: int, start: int, end: int) -> Bytes:
        buffer = self._room(end - start)
        found = buffer[: self.llama.export_range(seq, start, end, buffer)]
        other = self.by_scratch(seq, start, end)
        assert found.shape == other.shape, (seq, start, end)
        # Nothing else may differ than the sequence's number: in the head, and for each cell of each section.
        cells = int(found[12:16].view(np.uint32)[0])
        apart = np.flatnonzero(found != other)
        assert (found[apart] == seq).all() and (other[apart] == SCRATCH).all()
        assert 1 + cells <= apart.size <= 1 + 2 * cells
        return found

    def enter(self, way: str, block: Bytes, start: int, end: int) -> bool:
        if way == "ranges":
            return self.llama.append_from(TARGET, block)
        done = self.llama.import_from(SCRATCH, block, partial=False)
        if done:
            self.llama.share_range(SCRATCH, TARGET, start, end)
        self.llama.clear(SCRATCH)
        return done


def refused(cache: Cache, seq: int, blocks: list[tuple[int, int, Bytes]], whole: Bytes) -> None:
    """Whatever does not belong behind the sequence is refused, and the others keep what they have."""
    others = [cache.llama.export_state(other) for other in range(5)]
    start, end, block = blocks[2]
    wrong = {
        "again": block,
        "cut": block[:-1],
        "cut in its cells": block[:40],
        "magic": block.copy(),
        "type": block.copy(),
    }
    wrong["magic"][0] ^= 1
    # The first tensor's type stands behind the cells and two counts.
    cells = int(block[12:16].view(np.uint32)[0])
    wide = 24 if block[20:24].view(np.uint32)[0] == 1 and cache.llama.has_recurrent_state else 12
    wrong["type"][16 + cells * wide + 8] ^= 1
    if cache.llama.has_recurrent_state:
        wrong["recurrent"] = whole
    for name, piece in wrong.items():
        for _, _, earlier in blocks[: 3 if name == "again" else 2]:
            if name != "recurrent":
                assert cache.llama.append_from(TARGET, earlier), name
        assert not cache.llama.append_from(TARGET, piece), name
        cache.llama.clear(TARGET)
        assert cache.llama.last_position(TARGET) == -1, name
    assert all(np.array_equal(was, cache.llama.export_state(other)) for other, was in enumerate(others))
    buffer = cache._room(1)
    assert cache.llama.export_range(seq, start, end, buffer[: block.nbytes - 1]) == 0
    assert cache.llama.export_range(100, start, end, buffer) == 0
    assert cache.llama.export_range(seq, end, start, buffer) == 0


def wiped(cache: Cache) -> None:
    """A state that is no numbers leaves none behind, and sequences that share cells with what is wiped keep what they have."""
    llama, fed = cache.llama, list(range(1, STEP, 7))

    def of_new_tokens() -> np.ndarray:
        batch = Batch(BATCH_TOKENS)
        batch.add(TARGET, 0, fed, outputs=1)
        assert llama.decode(batch) == 0
        llama.synchronize()
        logits = llama.logits(batch.count - 1).copy()
        llama.clear(TARGET)
        return logits

    wanted = of_new_tokens()
    others = [llama.export_state(other) for other in range(5)]
    for damaged in (llama.export_state(3), others[0]):
        damaged = damaged.copy()
        damaged[-STEP:] = 0xFF
        assert llama.import_from(TARGET, damaged, partial=False)
        assert state_ranges.wipe(llama.context, TARGET)
        assert (llama.first_position(TARGET), llama.last_position(TARGET)) == (-1, -1)
    cache.share(1, TARGET)
    assert state_ranges.wipe(llama.context, TARGET)
    assert not state_ranges.wipe(llama.context, 100)
    assert all(np.array_equal(was, llama.export_state(other)) for other, was in enumerate(others))
    found = of_new_tokens()
    assert np.isfinite(found).all()
    assert np.abs(found - wanted).max() < 1e-3 * wanted.std()


def moved(cache: Cache, way: str) -> list[str]:
    """Digests of all that leaves, of what it is when it came in, and of how it goes on."""
    cache.fill()
    out: list[Any] = []
    for seq in (0, 1, 3, 4):
        edges = [cut for cut in CUTS if cut < cache.held[seq]] + [cache.held[seq]]
        blocks = []
        for start, end in itertools.pairwise(edges):
            taken = cache.by_range(seq, start, end) if way == "ranges" else cache.by_scratch(seq, start, end)
            blocks.append((start, end, taken))
        part = np.zeros(cache.llama.part_bytes(seq), dtype=np.uint8)
        part = part[: cache.llama.export_into(seq, part, partial=True)]
        if way == "ranges":
            refused(cache, seq, blocks, cache.llama.export_state(seq))
        for start, end, block in blocks:
            assert cache.enter(way, block, start, end)
        if cache.llama.needs_checkpoints:
            assert cache.llama.import_from(TARGET, part, partial=True)
        cache.held[TARGET] = cache.held[seq]
        out += [cache.llama.export_state(TARGET), cache.llama.first_position(TARGET), cache.llama.last_position(TARGET)]
        out += [cache.feed((TARGET, 40), (seq, 1)), cache.llama.export_state(TARGET), cache.feed((TARGET, 1))]
        cache.clear(TARGET)
    if way == "ranges":
        wiped(cache)
    cache.llama.close()
    return [hashlib.sha256(x.tobytes()).hexdigest() if isinstance(x, np.ndarray) else str(x) for x in out]


if __name__ == "__main__":
    model, way, out, *options = sys.argv[1:]
    if "transposed" in options:
        llama_module.ContextParams = Transposed  # type: ignore[attr-defined]
    Path(out).write_text(json.dumps(moved(Cache(Path(model), windowed="windowed" in options), way)))
