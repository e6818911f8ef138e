"""States of real contexts, piece by piece: what went out comes in the same, and what is damaged changes nothing."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Generator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from engines.errors import NoCellsFree, StateError, StateIncompatible, StateInvalid
from engines.runtime import state_codec, state_ranges
from engines.runtime.cells import Sequence
from engines.runtime.core import EngineCore
from engines.runtime.prefix import PrefixCache
from engines.runtime.state_codec import StateCodec, probe
from engines.runtime.state_layout import HEADER_BYTES, Bytes, StateLayout
from tests.engines.runtime.test_core import finished, generation, prompt_of, run, running
from tests.paced_engine import slow_steps
from tests.synthetic_gguf import SyntheticModel

ARCHITECTURES = ("llama", "gemma3", "qwen35", "qwen35moe")
BLOCK = 64


@dataclass
class Pieces:
    """A state as it left: its tokens, its blocks by start, and its part."""

    tokens: list[int]
    blocks: list[tuple[int, Bytes]]
    part: Bytes | None


async def done(core: EngineCore, action: Callable[[PrefixCache, StateCodec], Any]) -> Any:
    """`action` on the core's thread, in one slice."""

    def work(cache: PrefixCache) -> Generator[None, None, Any]:
        yield from ()
        assert core.codec is not None
        return action(cache, core.codec)

    return await core.perform(work)


def exported_block(codec: StateCodec, sequence: Sequence, start: int, end: int) -> Bytes:
    buffer = np.empty(codec.capacity_bytes(end - start), dtype=np.uint8)
    return codec.export_block(sequence, start, end, buffer).copy()


def exported(codec: StateCodec, sequence: Sequence, block_tokens: int = BLOCK) -> Pieces:
    count = len(sequence)
    cuts = [(start, min(start + block_tokens, count)) for start in range(0, count, block_tokens)]
    blocks = [(start, exported_block(codec, sequence, start, end)) for start, end in cuts]
    part_bytes = codec.part_bytes(sequence)
    part = codec.export_part(sequence, np.empty(part_bytes, dtype=np.uint8)).copy() if part_bytes else None
    return Pieces(list(sequence.tokens), blocks, part)


def import_all(codec: StateCodec, sequence: Sequence, pieces: Pieces) -> None:
    for start, block in pieces.blocks:
        codec.import_block(sequence, start, pieces.tokens[start : start + BLOCK], block)
    if pieces.part is not None:
        codec.import_part(sequence, len(pieces.tokens), pieces.part)
    codec.complete(sequence, pieces.tokens)


def same(a: Pieces, b: Pieces) -> bool:
    if a.tokens != b.tokens or (a.part is None) != (b.part is None):
        return False
    blocks = all(np.array_equal(x, y) for (_, x), (_, y) in zip(a.blocks, b.blocks, strict=True))
    return blocks and (a.part is None or np.array_equal(a.part, b.part))


@asynccontextmanager
async def two(model: SyntheticModel, **settings: Any) -> AsyncIterator[tuple[EngineCore, EngineCore]]:
    async with running(model, **settings) as first, running(model, **settings) as second:
        yield first, second


@pytest.mark.parametrize("kv_type", ["f16", "q8_0"])
@pytest.mark.parametrize("architecture", [*ARCHITECTURES, "windowed"])
async def test_an_imported_state_goes_on_as_the_original(
    tiny_model: Callable[..., SyntheticModel], architecture: str, kv_type: str
) -> None:
    """Bit for bit: both continue alone, from cells in the same order, in batches of the same shape."""
    model = tiny_model("gemma3" if architecture == "windowed" else architecture)
    settings = {"kv_type_k": kv_type, "kv_type_v": kv_type, "full_window": architecture != "windowed"}
    async with two(model, **settings) as (a, b):
        await run(a, prompt_of(model, 150), 20)
        pieces = await done(a, lambda cache, codec: exported(codec, cache.slots[0].sequence))
        await done(b, lambda cache, codec: import_all(codec, cache.slots[2].sequence, pieces))
        again = await done(b, lambda cache, codec: exported(codec, cache.slots[2].sequence))
        assert same(pieces, again)
        prompt = [*pieces.tokens, 5, 6, 7]
        theirs, ours = await run(a, prompt, 64), await run(b, prompt, 64)
        assert ours.cached_tokens == theirs.cached_tokens == len(pieces.tokens) == 169
        assert ours.tokens == theirs.tokens
        last_a = await done(a, lambda cache, codec: exported(codec, cache.slots[0].sequence))
        last_b = await done(b, lambda cache, codec: exported(codec, cache.slots[2].sequence))
        assert same(last_a, last_b)


@pytest.mark.parametrize("architecture", ["llama", "qwen35", "qwen35moe"])
async def test_blocks_that_leave_while_the_engine_decodes_are_those_of_a_still_one(
    tiny_model: Callable[..., SyntheticModel], architecture: str
) -> None:
    model = tiny_model(architecture)
    async with two(model) as (a, b):
        neighbour = generation(prompt_of(model, 40, start=3), 300)
        mover = generation(prompt_of(model, 130), 500)
        a.submit(mover, neighbour)
        live: list[tuple[int, Bytes]] = []
        with slow_steps(0.003):
            while len(live) < 4:  # 256 of its 629 tokens, each block as soon as it is there
                await mover.mailbox.take(10)
                begin = BLOCK * len(live)

                def next_block(cache: PrefixCache, codec: StateCodec, begin: int = begin) -> Bytes | None:
                    sequence = next(slot.sequence for slot in cache.slots if slot.generation is mover)
                    is_full = len(sequence) >= begin + BLOCK
                    return exported_block(codec, sequence, begin, begin + BLOCK) if is_full else None

                block = await done(a, next_block)
                live += [] if block is None else [(begin, block)]
        assert (await finished(mover)).error is None
        assert (await finished(neighbour)).error is None
        still = await done(a, lambda cache, codec: exported(codec, _holder(cache, mover.tokens[:-1])))
        assert all(np.array_equal(x, y) for (_, x), (_, y) in zip(live, still.blocks, strict=False))
        await done(b, lambda cache, codec: import_all(codec, cache.slots[1].sequence, still))
        assert same(still, await done(b, lambda cache, codec: exported(codec, cache.slots[1].sequence)))
        assert (await run(b, [*still.tokens, 5], 20)).cached_tokens == len(still.tokens)


def _holder(cache: PrefixCache, tokens: list[int]) -> Sequence:
    return next(slot.sequence for slot in cache.slots if slot.sequence.tokens == tokens)


DAMAGE: dict[str, Callable[[Bytes], Bytes]] = {
    "cut": lambda block: block[:-1],
    "cut in its cells": lambda block: block[:40],
    "empty": lambda block: block[:0],
    "too long": lambda block: np.append(block, np.zeros(8, np.uint8)),
    "magic": lambda block: _flipped(block, 0),
    "streams": lambda block: _flipped(block, HEADER_BYTES),
    "cell count": lambda block: _flipped(block, HEADER_BYTES + 4),
    "huge cell count": lambda block: _flipped(block, HEADER_BYTES + 7),
    "position": lambda block: _flipped(block, HEADER_BYTES + 8),
    "negative position": lambda block: _flipped(block, HEADER_BYTES + 11, 0x80),
    "sequences": lambda block: _flipped(block, HEADER_BYTES + 12),
}


def _flipped(block: Bytes, at: int, bit: int = 1) -> Bytes:
    changed = block.copy()
    changed[at] ^= bit
    return changed


def _damaged(layout: StateLayout, block: Bytes) -> dict[str, Bytes]:
    """Every way to damage a block: those above, and each tensor's type and row size."""
    cells = BLOCK * layout.attention.cell_dtype.itemsize
    found = {name: change(block) for name, change in DAMAGE.items()}
    found["transposed"] = _flipped(block, HEADER_BYTES + 8 + cells)
    found["layers"] = _flipped(block, HEADER_BYTES + 12 + cells)
    for index, at in enumerate(layout.attention.head_offsets(BLOCK)):
        found[f"type {index}"] = _flipped(block, HEADER_BYTES + int(at))
        found[f"row size {index}"] = _flipped(block, HEADER_BYTES + int(at) + 4)
        found[f"huge row size {index}"] = _flipped(block, HEADER_BYTES + int(at) + 11, 0x80)
    for at in range(block.shape[0] - len(layout.block_tail), block.shape[0]):
        found[f"tail {at}"] = _flipped(block, at)
    return found


def _damaged_parts(part: Bytes | None) -> dict[str, Bytes]:
    """A part begins with counts and the position in both of its forms."""
    if part is None:
        return {}
    flipped = {f"byte {at}": _flipped(part, at) for at in (0, 8, 12, 16, 20)}
    return {
        **flipped,
        "cut": part[:-1],
        "cut to its head": part[:9],
        "empty": part[:0],
        "too long": np.append(part, part[:4]),
    }


@pytest.mark.parametrize("architecture", ARCHITECTURES)
async def test_a_damaged_piece_is_refused_and_changes_nothing(
    tiny_model: Callable[..., SyntheticModel], architecture: str
) -> None:
    model = tiny_model(architecture)
    async with running(model) as core:
        await run(core, prompt_of(model, 150), 20)
        await run(core, prompt_of(model, 90, start=5), 20)
        pieces = await done(core, lambda cache, codec: exported(codec, cache.slots[0].sequence))
        neighbour = await done(core, lambda cache, codec: exported(codec, cache.slots[1].sequence))

        def refused(cache: PrefixCache, codec: StateCodec, kind: str, piece: Bytes) -> type[StateError] | None:
            """What refused it; everything must be as empty as before."""
            target, free = cache.slots[3].sequence, cache.ledger.free
            why: type[StateError] | None = None
            try:
                if kind == "block":
                    codec.import_block(target, 0, pieces.tokens[:BLOCK], piece)
                else:
                    import_all(codec, target, Pieces(pieces.tokens, pieces.blocks, piece))
            except (StateInvalid, StateIncompatible) as error:
                why = type(error)
            codec.abandon(target)
            assert all(codec.is_empty(sequence) for sequence in (target, *cache.scratch))
            assert cache.ledger.free == free
            return why

        layout = (await done(core, lambda cache, codec: codec)).layout
        for name, block in _damaged(layout, pieces.blocks[0][1]).items():
            why = await done(core, lambda cache, codec, block=block: refused(cache, codec, "block", block))
            assert why is not None, name
            assert why is StateIncompatible or "type" not in name
        for name, part in _damaged_parts(pieces.part).items():
            assert await done(core, lambda cache, codec, part=part: refused(cache, codec, "part", part)), name
        assert same(neighbour, await done(core, lambda cache, codec: exported(codec, cache.slots[1].sequence)))
        await done(core, lambda cache, codec: import_all(codec, cache.slots[3].sequence, pieces))
        assert same(pieces, await done(core, lambda cache, codec: exported(codec, cache.slots[3].sequence)))
        assert (await run(core, prompt_of(model, 30, start=8), 10)).new_tokens == 10


@pytest.mark.parametrize("architecture", ["llama", "gemma3", "qwen35"])
async def test_what_llama_cpp_itself_refuses_leaves_nothing_behind(
    tiny_model: Callable[..., SyntheticModel], architecture: str
) -> None:
    """As if the checks before had a hole: another model's block, of which nothing was checked."""
    model, other = tiny_model(architecture), tiny_model(architecture, layers=12 if architecture == "gemma3" else 4)
    async with running(other) as core:
        await run(core, prompt_of(other, 100), 5)
        foreign = await done(core, lambda cache, codec: exported(codec, cache.slots[0].sequence))
    async with running(model) as core:
        await run(core, prompt_of(model, 150), 20)
        pieces = await done(core, lambda cache, codec: exported(codec, cache.slots[0].sequence))

        def force(cache: PrefixCache, codec: StateCodec) -> None:
            target, free = cache.slots[3].sequence, cache.ledger.free
            import_all(codec, target, pieces)
            assert not target.llama.import_from(target.index, foreign.blocks[0][1], partial=False)
            codec.abandon(target)
            assert all(codec.is_empty(sequence) for sequence in (target, *cache.scratch))
            assert cache.ledger.free == free

        await done(core, force)
        assert (await run(core, [*pieces.tokens, 5], 10)).cached_tokens == len(pieces.tokens)


async def test_a_state_that_finds_no_cells_is_refused_and_the_rest_stays(
    tiny_model: Callable[..., SyntheticModel],
) -> None:
    model = tiny_model("llama")
    async with running(model, slots=2, context_tokens=300, cache_tokens=300) as core:
        await run(core, prompt_of(model, 120), 5)
        pieces = await done(core, lambda cache, codec: exported(codec, cache.slots[0].sequence))
        busy = generation(prompt_of(model, 200, start=4), 60)

        def import_it(cache: PrefixCache, codec: StateCodec) -> None:
            target = next(slot.sequence for slot in cache.slots if slot.idle)
            target.clear()
            try:
                import_all(codec, target, pieces)
            finally:
                codec.abandon(target)

        with slow_steps(0.05):
            core.submit(busy)
            await busy.mailbox.take(10)
            with pytest.raises(NoCellsFree):
                await done(core, import_it)
        assert (await finished(busy)).finish_reason == "length"


async def test_an_engine_with_an_unknown_layout_shares_nothing_and_still_answers(
    tiny_model: Callable[..., SyntheticModel], caplog: pytest.LogCaptureFixture
) -> None:
    """The probe meets a context whose states its parser does not know: here, one whose sequence already holds something."""
    model = tiny_model("llama", tie_free=True)
    async with running(model) as core:
        await run(core, prompt_of(model, 20), 5)
        codec, reason = await done(core, lambda cache, codec: probe(cache, codec._llama))
        assert codec is None
        assert "layouts fit" in reason or "computed" in reason
        assert "will not share state" in caplog.text
        assert (await run(core, [1, 2, 10], 5)).tokens[3:] == model.follow(10, 5)


def _zeros(_context: object, _seq: int, _start: int, _end: int, buffer: Bytes, _flags: int = 0) -> int:
    buffer[:] = 0
    return buffer.nbytes


RANGE_FAULTS: dict[str, tuple[str, Callable[..., int]]] = {
    "gives nothing": ("export_range", lambda *_: 0),
    "gives other bytes": ("export_range", _zeros),
    "takes nothing": ("append_from", lambda *_: False),
}


@pytest.mark.parametrize("fault", [None, *RANGE_FAULTS])
async def test_ranges_are_used_where_the_library_has_them_and_they_are_right(
    tiny_model: Callable[..., SyntheticModel],
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
    fault: str | None,
) -> None:
    """With the wheel's library all of them fail at the first call; with ours what is not at fault works."""
    model = tiny_model("qwen35", nextn=True)
    if fault:
        monkeypatch.setattr(state_ranges, *RANGE_FAULTS[fault])
        monkeypatch.setattr(state_ranges, "HAS_RANGES", True)
        monkeypatch.setattr(state_codec, "HAS_RANGES", True)
        if not hasattr(state_ranges.llama_cpp.llama_cpp._lib, "llama_state_seq_append"):
            monkeypatch.setattr(state_ranges, "append_from", lambda *_: False)
            monkeypatch.setattr(state_ranges, "export_range", RANGE_FAULTS[fault][1])
    async with running(model, speculation="mtp", draft_tokens=3) as core:
        assert core.codec is not None
        assert core.codec.drafts is not None
        assert core.codec.ranges == core.codec.drafts.ranges == (fault is None and state_ranges.HAS_RANGES)
        assert ("through a scratch sequence" in caplog.text) == (fault is not None)
        await run(core, prompt_of(model, 100), 10)
        pieces = await done(core, lambda cache, codec: exported(codec, cache.slots[0].sequence))
        await done(core, lambda cache, codec: import_all(codec, cache.slots[2].sequence, pieces))
        assert same(pieces, await done(core, lambda cache, codec: exported(codec, cache.slots[2].sequence)))
