"""Copies of state that a card makes beside the processor's work: no piece counts as there, out or in, before its copy is."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Generator
from contextlib import ExitStack
from typing import Any

import pytest

from engines.errors import StateInvalid
from engines.runtime.arena import ALIGNMENT_BYTES
from engines.runtime.core import EngineCore
from engines.runtime.prefix import PrefixCache
from engines.runtime.state_adopt import adopting
from engines.runtime.state_desk import StateDesk
from engines.runtime.state_follow import Leaving
from engines.runtime.state_forms import checksum_of
from engines.runtime.state_layout import Bytes
from engines.runtime.state_snapshot import Manifest, StatePiece
from engines.runtime.state_together import commit_together, stop_together
from engines.runtime.state_transfer import Delivery
from tests.engines.runtime.late_copies import LateCopies
from tests.engines.runtime.test_core import finished, prompt_of, run
from tests.engines.runtime.test_state_desk import desk_of, exported, opened, refused, restored
from tests.engines.runtime.test_state_follow import (
    FENCE,
    SETTINGS,
    begun,
    delivery_of,
    endless,
    gone_on,
    left_alone,
    text_until,
)
from tests.paced_engine import slow_steps
from tests.synthetic_gguf import SyntheticModel

DRAFTING: dict[str, Any] = {"slots": 2, "speculation": "mtp", "draft_tokens": 3}
Tiny = Callable[..., SyntheticModel]


def model_of(tiny_model: Tiny, architecture: str, *, drafts: bool) -> tuple[SyntheticModel, dict[str, Any]]:
    """With a draft head, what it holds follows the last part, by calls that wait for none of the target's copies."""
    return (tiny_model(architecture, nextn=True), DRAFTING) if drafts else (tiny_model(architecture), {"slots": 2})


async def conversation(core: EngineCore, model: SyntheticModel) -> None:
    """In slot 0, with a checkpoint where the state is recurrent."""
    await run(core, prompt_of(model, 270), 10, cuts=[150], draft_min=3)


def settled(core: EngineCore) -> Callable[[PrefixCache], Generator[None, None, None]]:
    def work(_cache: PrefixCache) -> Generator[None, None, None]:
        yield from ()
        assert core.codec is not None
        core.codec.settle()

    return work


class Passing:
    """Pieces whose memory another's bytes fill as soon as it is free."""

    def __init__(self, found: list[tuple[StatePiece, Bytes, bytes]]) -> None:
        self._found = iter(found)
        self.given = self.freed = 0

    async def deliver(self, piece: StatePiece) -> Delivery:
        known, found, proof = next(self._found)
        assert known == piece
        data = found.copy()

        def free() -> None:
            self.freed += 1
            data[:] = ~data

        self.given += 1
        return Delivery(piece, data, free, proof, checksum_of)


async def laid_out(desk: StateDesk, slot: int = 0) -> tuple[Manifest, list[tuple[StatePiece, Bytes, bytes]]]:
    """As they are when they are told to be there."""
    found = []
    async with await desk.export(slot) as state:
        async for piece in state.pieces(checksum_of):
            found.append((piece.piece, piece.data.copy(), piece.proof))
            piece.buffer.free()
        return state.manifest, found


def same(left: list[tuple[StatePiece, Bytes, bytes]], right: list[tuple[StatePiece, Bytes, bytes]]) -> bool:
    return [(p, d.tobytes(), proof) for p, d, proof in left] == [(p, d.tobytes(), proof) for p, d, proof in right]


@pytest.mark.parametrize(
    ("architecture", "drafts", "proves_apart"),
    [("llama", False, True), ("qwen35", False, False), ("qwen35", True, True), ("qwen35", True, False)],
)
async def test_pieces_that_are_queued_leave_as_they_are_and_are_proved_as_they_leave(
    tiny_model: Tiny, monkeypatch: pytest.MonkeyPatch, architecture: str, *, drafts: bool, proves_apart: bool
) -> None:
    model, settings = model_of(tiny_model, architecture, drafts=drafts)
    async with desk_of(model, **settings) as (core, desk):
        desk._proves_apart = proves_apart
        await conversation(core, model)
        manifest, plain = await laid_out(desk)
        kinds = [piece.kind for piece in manifest.pieces]
        assert kinds.count("block") > 2
        assert ("checkpoint" in kinds, kinds[-2:] == ["draft", "hidden"]) == (architecture == "qwen35", drafts)
        stream = await exported(desk)
        late = LateCopies(monkeypatch, core)
        assert same((await laid_out(desk))[1], plain)
        assert await exported(desk) == stream
        assert late.landed == 2 * sum(kind in ("block", "part", "checkpoint") for kind in kinds)


@pytest.mark.parametrize(
    ("architecture", "drafts", "checkpoints", "proves_apart"),
    [("llama", False, 4, False), ("qwen35", False, 0, False), ("qwen35", True, 4, False), ("qwen35", True, 0, True)],
)
async def test_the_memory_of_a_piece_that_enters_is_free_once_its_copy_is_done(
    tiny_model: Tiny,
    monkeypatch: pytest.MonkeyPatch,
    architecture: str,
    checkpoints: int,
    *,
    drafts: bool,
    proves_apart: bool,
) -> None:
    """Also where a checkpoint finds no place, so that its job calls nothing."""
    model, settings = model_of(tiny_model, architecture, drafts=drafts)
    there = settings | {"checkpoints": checkpoints}
    async with desk_of(model, **settings) as (home, desk), desk_of(model, **there) as (away, other):
        other._proves_apart = proves_apart
        await conversation(home, model)
        manifest, found = await laid_out(desk)
        late = LateCopies(monkeypatch, away)
        source = Passing(found)
        await other.enter(1, manifest, source)
        assert (source.given, source.freed) == (len(found), len(found))
        assert (late.torn, late.under_way) == (0, 0)
        assert late.landed >= sum(piece.kind in ("block", "part") for piece in manifest.pieces)
        # The conversation that is found there, and what it holds, are those of home.
        again = [one for one in (await laid_out(other, 1))[1] if one[0].kind != "checkpoint"]
        assert same(again, [one for one in found if one[0].kind != "checkpoint"])


@pytest.mark.parametrize(("architecture", "drafts"), [("llama", False), ("qwen35", True)])
async def test_a_state_that_is_adopted_is_finished_behind_its_last_copy(
    tiny_model: Tiny, monkeypatch: pytest.MonkeyPatch, architecture: str, *, drafts: bool
) -> None:
    model, settings = model_of(tiny_model, architecture, drafts=drafts)
    async with desk_of(model, **settings) as (home, desk), desk_of(model, **settings) as (away, other):
        other._proves_apart = False
        await conversation(home, model)
        manifest, found = await laid_out(desk)
        late = LateCopies(monkeypatch, away)
        source, terms = Passing(found), await other.terms()
        async with await adopting(terms, away, 1, len(manifest.tokens)) as arriving:
            for piece in await arriving.complete(manifest):
                await arriving.begin(await source.deliver(piece))
            await arriving.finish()
        assert (source.freed, late.torn, late.under_way) == (len(found), 0, 0)
        assert away.cache.slots[1].sequence.tokens == list(manifest.tokens)


async def test_what_moves_while_it_runs_by_queued_copies_writes_what_it_would_have_written(
    tiny_model: Tiny, monkeypatch: pytest.MonkeyPatch, slow: ExitStack
) -> None:
    model = tiny_model("qwen35moe", nextn=True, tie_free=True)
    settings, fields = SETTINGS | DRAFTING, {"draft_min": 3}
    async with desk_of(model, **settings) as (home, desk), desk_of(model, **settings) as (away, other):
        desk._proves_apart = other._proves_apart = False
        alone, _ = await left_alone(home, model, **fields)
        late = LateCopies(monkeypatch, home, away)
        work, terms, theirs = endless(home, model, **fields), await desk.terms(), await other.terms()
        slow.enter_context(slow_steps())
        await begun(home, work, 110)
        async with Leaving(home, terms, work, FENCE) as leaving, await adopting(theirs, away, 1, 800) as arriving:
            async for block in leaving.finished_blocks():
                await arriving.begin(delivery_of(block), work.tokens[block.piece.start : block.piece.end])
            await text_until(work, 135)
            for early in await leaving.unsent_cuts():
                cut = await leaving.cut(early)
                assert cut is not None
                await arriving.begin_cut(delivery_of(cut))
            manifest = (await stop_together([leaving]))[leaving]
            slow.close()
            assert [piece.kind for piece in manifest.pieces][-1] == "hidden"
            await arriving.complete(manifest)
            left = [(piece, piece.data.copy()) async for piece in leaving.rest()]
            await home.perform(settled(home))
            for piece, told in left:
                assert (piece.proof, piece.data.tobytes()) == (checksum_of(told.data), told.tobytes())
                await arriving.begin(delivery_of(piece))
            moved = await gone_on(arriving, manifest, away)
            await commit_together([leaving], FENCE)
        await finished(moved)
        assert moved.tokens == alone.tokens
        assert late.landed > 0
        assert (late.torn, late.under_way) == (0, 0)


async def test_what_a_job_queued_before_it_failed_is_waited_for(
    tiny_model: Tiny, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny_model("llama")
    async with desk_of(model) as (core, desk):
        await conversation(core, model)
        late, dock = LateCopies(monkeypatch, core), (await desk.terms()).dock
        with await dock.arena.take(dock.codec.capacity_bytes(64)) as buffer:

            def fails(cache: PrefixCache) -> None:
                dock.codec.take_block(cache.slots[0].sequence, 0, 64, buffer.data, queued=True)
                raise ConnectionError

            with pytest.raises(ConnectionError):
                await dock.lane().submit(fails)
            assert (late.landed, late.under_way) == (1, 0)


@pytest.mark.parametrize("architecture", ["llama", "qwen35"])
async def test_a_bad_piece_among_queued_ones_leaves_nothing(
    tiny_model: Tiny, monkeypatch: pytest.MonkeyPatch, architecture: str
) -> None:
    model = tiny_model(architecture)
    async with desk_of(model) as (core, desk):
        await run(core, prompt_of(model, 300), 10)
        plain = await exported(desk)
        late = LateCopies(monkeypatch, core)
        pieces = opened(plain)[1]
        for at in (40, len(pieces) // 2, len(pieces) - 40):
            damaged = bytearray(pieces)
            damaged[at] ^= 4
            await refused(desk, plain[: -len(pieces)] + bytes(damaged), StateInvalid, "damaged")
        await refused(desk, plain[:-700], StateInvalid, "ends")
        assert await restored(desk, plain) == "exact"
        assert opened(await exported(desk, 1))[0].tokens == opened(plain)[0].tokens
        blocks = sum(32 + piece.size_bytes for piece in opened(plain)[0].pieces if piece.kind in ("block", "part"))
        assert opened(await exported(desk, 1))[1][:blocks] == pieces[:blocks]
        await asyncio.gather(exported(desk), exported(desk, 1), run(core, prompt_of(model, 30), 5))
        assert (late.torn, late.under_way) == (0, 0)


@pytest.mark.parametrize("drafts", [False, True])
async def test_a_last_part_that_is_taken_early_gives_way_where_there_is_no_other_room(
    tiny_model: Tiny, monkeypatch: pytest.MonkeyPatch, *, drafts: bool
) -> None:
    model, settings = model_of(tiny_model, "qwen35", drafts=drafts)
    async with desk_of(model, **settings) as (core, desk):
        await run(core, prompt_of(model, 300), 10)
        plain = await exported(desk)
        late = LateCopies(monkeypatch, core)
        async with await desk.export(0) as state:
            largest = max(piece.size_bytes for piece in state.manifest.pieces)
            others = await state.arena.take(state.arena.free_bytes - -(-largest // ALIGNMENT_BYTES) * ALIGNMENT_BYTES)
            with others:
                raw = b"".join([bytes(buffer) async for buffer in state])
        assert raw == plain
        # Whoever leaves before the end gives everything back.
        async with await desk.export(0) as state:
            free_bytes = state.arena.free_bytes
            async for exported_piece in state.pieces():
                exported_piece.buffer.free()
                break
        assert state.arena.free_bytes == free_bytes
        assert late.under_way == 0
