"""Where a transfer's work is done: proofs by threads of their own, or by the core's thread where no core is to spare."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Generator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from engines.errors import StateInvalid
from engines.runtime.llama import Batch
from engines.runtime.prefix import PrefixCache
from engines.runtime.state_desk import StateDesk
from engines.runtime.state_dock import Dock
from engines.runtime.state_forms import checksum_of, digest_of
from engines.runtime.state_layout import Bytes
from engines.runtime.state_snapshot import Manifest, StatePiece
from engines.runtime.state_transfer import Delivery
from tests.engines.runtime.held_moves import until
from tests.engines.runtime.test_core import prompt_of, run
from tests.engines.runtime.test_state_desk import desk_of
from tests.synthetic_gguf import SyntheticModel


class Laid:
    """Pieces that lie in memory already, as another process of the host lays them out."""

    def __init__(self, found: list[tuple[Bytes, bytes]]) -> None:
        self._found = iter(found)
        self.freed = self.given = 0

    async def deliver(self, piece: StatePiece) -> Delivery:
        self.given += 1
        return Delivery(piece, *self._next(), checksum_of)

    def _next(self) -> tuple[Bytes, Callable[[], None], bytes]:
        data, proof = next(self._found)
        return data, self._free, proof

    def _free(self) -> None:
        self.freed += 1


async def laid_out(desk: StateDesk) -> tuple[Manifest, list[tuple[Bytes, bytes]]]:
    found = []
    async with await desk.export(0) as state:
        async for exported in state.pieces(checksum_of):
            with exported.buffer:
                found.append((exported.data.copy(), exported.proof))
        return state.manifest, found


@pytest.mark.parametrize("proves_apart", [True, False])
@pytest.mark.parametrize("architecture", ["llama", "qwen35"])
async def test_pieces_with_checksums_come_in_as_they_left_and_a_bad_one_leaves_nothing(
    tiny_model: Callable[..., SyntheticModel], architecture: str, *, proves_apart: bool
) -> None:
    model = tiny_model(architecture)
    async with desk_of(model) as (core, desk):
        desk._proves_apart = proves_apart
        await run(core, prompt_of(model, 400), 5)
        manifest, found = await laid_out(desk)
        assert all(proof == checksum_of(data.data) for data, proof in found)
        for bad in (0, len(found) // 2, len(found) - 1):
            damaged = [(data.copy(), proof) for data, proof in found]
            damaged[bad][0][-1] ^= 1
            source = Laid(damaged)
            with pytest.raises(StateInvalid, match="damaged"):
                await desk.enter(1, manifest, source)
            assert source.freed == source.given
            assert (await desk.meta(1)).n_past == 0
        source = Laid(found)
        assert (await desk.enter(1, manifest, source)).n_past == len(manifest.tokens)
        assert source.freed == source.given == len(found)
        # The sequence ids inside say where it lay, and are forgotten on both ways out.
        async with await desk.export(1) as state:
            again = [digest_of(exported.data.data) async for exported in freed(state.pieces(checksum_of))]
        shared = [piece.kind in ("block", "part") for piece in manifest.pieces]
        assert again[: sum(shared)] == [
            digest_of(data.data) for (data, _), ours in zip(found, shared, strict=True) if ours
        ]


async def freed(pieces: Any) -> Any:
    async for exported in pieces:
        yield exported
        exported.buffer.free()


@pytest.mark.parametrize(("proves_apart", "quick"), [(True, True), (False, False), (False, True)])
async def test_what_a_job_needs_is_done_in_order_and_a_failure_takes_along_what_follows(
    tiny_model: Callable[..., SyntheticModel], *, proves_apart: bool, quick: bool
) -> None:
    model = tiny_model("llama")
    async with desk_of(model) as (core, desk):
        desk._proves_apart = proves_apart
        dock: Dock = (await desk.terms()).dock
        cores_thread = await core.perform(_thread_name)
        lane, seen = dock.lane(), list[tuple[str, int, str]]()

        def noted(what: str, number: int, value: Any = None) -> Any:
            seen.append((what, number, threading.current_thread().name))
            return value

        def submitted(number: int) -> asyncio.Future[Any]:
            return lane.submit(
                lambda cache: noted("work", number, number),
                first=lambda: noted("first", number),
                then=lambda result: noted("then", number, 10 * result),
                quick=quick,
            )

        assert await asyncio.gather(*(submitted(number) for number in range(20))) == [10 * n for n in range(20)]
        assert [number for what, number, _ in seen if what == "work"] == list(range(20))
        beside = {name for what, _, name in seen if what != "work"}
        assert (beside == {cores_thread}) == (quick and not proves_apart)
        assert {name for what, _, name in seen if what == "work"} == {cores_thread}

        good = submitted(20)
        bad = lane.submit(lambda cache: noted("work", 21), first=lambda: 1 // 0, quick=quick)
        behind = submitted(22)
        results = await asyncio.gather(good, bad, behind, return_exceptions=True)
        assert results[0] == 200
        assert isinstance(results[1], ZeroDivisionError)
        assert results[2] is results[1]
        assert not [number for what, number, _ in seen if what == "work" and number > 20]


def _thread_name(_cache: object) -> Any:
    yield from ()
    return threading.current_thread().name


@pytest.mark.parametrize("quick", [True, False])
async def test_a_proof_that_fails_behind_a_job_is_raised_to_whoever_waits_for_it(
    tiny_model: Callable[..., SyntheticModel], *, quick: bool
) -> None:
    async with desk_of(tiny_model("llama")) as (_, desk):
        desk._proves_apart = False
        lane = (await desk.terms()).dock.lane()
        with pytest.raises(ZeroDivisionError):
            await lane.submit(lambda cache: 0, then=lambda result: 1 // result, quick=quick)
        assert np.array_equal(await lane.submit(lambda cache: np.arange(3), quick=quick), [0, 1, 2])


@pytest.mark.parametrize("architecture", ["llama", "qwen35"])
async def test_a_piece_that_left_before_it_was_asked_for_is_the_one_that_is_given(
    tiny_model: Callable[..., SyntheticModel], architecture: str
) -> None:
    model = tiny_model(architecture)
    async with desk_of(model) as (core, desk):
        desk._proves_apart = False
        await run(core, prompt_of(model, 150), 8)
        manifest, found = await laid_out(desk)
        assert len(found) > 2
        arena = (await desk.terms()).dock.arena
        for prove, paired, left_early in (
            (checksum_of, True, True),
            (checksum_of, False, False),
            (digest_of, True, False),
        ):
            async with await desk.export(0) as state:
                state.begin()
                begun = state._under_way[0]
                given = []
                async for exported in state.pieces(prove, paired=paired):
                    assert not given or exported.buffer is not begun.buffer
                    assert bool(given) or (exported.buffer is begun.buffer) == left_early
                    assert exported.proof == prove(memoryview(exported.data.data))
                    given.append((exported.piece, exported.data.tobytes()))
                    exported.buffer.free()
            assert given == list(zip(manifest.pieces, (data.tobytes() for data, _ in found), strict=True))
        async with await desk.export(0) as state:
            state.begin()
        assert arena.free_bytes == arena.size_bytes


class LateProof(Delivery):
    """A piece whose proof takes until somebody lets it end."""

    may_end = threading.Event()

    def check(self) -> None:
        assert self.may_end.wait(30)
        super().check()


class LaidLate(Laid):
    """The last of `count` pieces is proved late."""

    def __init__(self, found: list[tuple[Bytes, bytes]]) -> None:
        super().__init__(found)
        self._count = len(found)

    async def deliver(self, piece: StatePiece) -> Delivery:
        delivery = await super().deliver(piece)
        late = self.given == self._count
        return LateProof(piece, delivery.data, delivery.free, delivery.proof, checksum_of) if late else delivery


@pytest.mark.parametrize("damaged", [False, True])
@pytest.mark.parametrize("architecture", ["llama", "qwen35"])
async def test_the_last_piece_enters_while_it_is_proved_and_nobody_finds_the_tokens_before(
    tiny_model: Callable[..., SyntheticModel], architecture: str, *, damaged: bool
) -> None:
    model = tiny_model(architecture)
    async with desk_of(model) as (core, desk):
        desk._proves_apart = True
        await run(core, prompt_of(model, 150), 5)
        manifest, found = await laid_out(desk)
        own = [piece.kind in ("block", "part") for piece in manifest.pieces]
        manifest, found = replace(manifest, pieces=manifest.pieces[: sum(own)]), found[: sum(own)]
        if damaged:
            found[-1][0][-1] ^= 1

        def seen(cache: PrefixCache) -> Generator[None, None, tuple[int, str, int]]:
            yield from ()
            slot = cache.slots[1]
            return len(slot.sequence), slot.transfer, slot.sequence.llama.last_position(slot.sequence.index)

        LateProof.may_end.clear()
        calls = core.codec.calls if core.codec else 0
        entering = asyncio.ensure_future(desk.enter(1, manifest, LaidLate(found)))
        wipes = core.codec is not None and (core.codec.wipes or not core.codec.layout.has_part)
        try:
            await until(lambda: core.codec is not None and core.codec.calls >= calls + len(found) - (not wipes))
            assert await core.perform(seen) == (0, "restore", len(manifest.tokens) - 1 if wipes else -1)
            assert not entering.done()
        finally:
            LateProof.may_end.set()
        if damaged:
            with pytest.raises(StateInvalid, match="damaged"):
                await entering
            assert await core.perform(seen) == (0, "", -1)
        else:
            assert (await entering).n_past == len(manifest.tokens)
            assert await core.perform(seen) == (len(manifest.tokens), "", len(manifest.tokens) - 1)


@pytest.mark.parametrize("architecture", ["llama", "qwen35"])
async def test_a_damaged_piece_leaves_nothing_that_a_next_prompt_reads(
    tiny_model: Callable[..., SyntheticModel], architecture: str
) -> None:
    """Rows that are no numbers, which zero times anything are not either."""
    model = tiny_model(architecture)
    async with desk_of(model) as (core, desk):
        desk._proves_apart = True
        await run(core, prompt_of(model, 150), 5)
        manifest, found = await laid_out(desk)
        own = [piece.kind in ("block", "part") for piece in manifest.pieces]
        manifest, found = replace(manifest, pieces=manifest.pieces[: sum(own)]), found[: sum(own)]

        def logits(cache: PrefixCache) -> Generator[None, None, Bytes]:
            yield from ()
            assert core.llama is not None
            index, batch = cache.slots[1].sequence.index, Batch(16)
            batch.add(index, 0, list(range(3, 19)), outputs=1)
            assert core.llama.decode(batch) == 0
            told = core.llama.logits(15).copy()
            core.llama.clear(index)
            return told.view(np.uint8)

        before = await core.perform(logits)
        for bad in range(len(found)):
            damaged = [(data.copy(), proof) for data, proof in found]
            damaged[bad][0][-200:-50] = 0xFF
            with pytest.raises(StateInvalid, match="damaged"):
                await desk.enter(1, manifest, Laid(damaged))
            assert np.array_equal(await core.perform(logits), before)


async def test_what_goes_on_beside_a_job_is_waited_for_by_its_future_and_by_a_closing_job(
    tiny_model: Callable[..., SyntheticModel],
) -> None:
    async with desk_of(tiny_model("llama")) as (core, desk):
        desk._proves_apart = True
        lane, seen, may_end = (await desk.terms()).dock.lane(), list[str](), threading.Event()
        cores_thread = await core.perform(_thread_name)

        def proof() -> None:
            assert may_end.wait(30)
            seen.append("proof")

        def noted(what: str) -> Callable[[object], str]:
            return lambda _cache: seen.append(what) or threading.current_thread().name

        early = lane.submit(noted("early"), first=lambda: seen.append("checked"), beside=proof, quick=True)
        later = lane.submit(noted("later"))
        closing = lane.submit(noted("closing"), beside=lambda: seen.append("own proof"), quick=True, closing=True)
        assert await later == cores_thread
        assert not early.done()
        assert not closing.done()
        assert seen == ["checked", "early", "later"]
        may_end.set()
        assert await asyncio.gather(early, closing) == [cores_thread] * 2
        assert seen[3:] == ["proof", "own proof", "closing"]


@pytest.mark.parametrize("quick", [True, False])
@pytest.mark.parametrize("proves_apart", [True, False])
async def test_behind_a_proof_that_fails_nothing_closes(
    tiny_model: Callable[..., SyntheticModel], *, proves_apart: bool, quick: bool
) -> None:
    """Also where it fails only once its job is done, which holds for quick proofs that a thread makes."""
    async with desk_of(tiny_model("llama")) as (_, desk):
        desk._proves_apart = proves_apart
        lane, done, may_end = (await desk.terms()).dock.lane(), list[str](), threading.Event()

        def fails() -> None:
            if proves_apart and quick:
                assert may_end.wait(30)
            raise StateInvalid("it was damaged")

        bad = lane.submit(lambda _cache: done.append("bad"), beside=fails, quick=quick)
        if proves_apart and quick:
            assert await lane.submit(lambda _cache: done.append("behind")) is None
            assert done == ["bad", "behind"]
            may_end.set()
        closing = lane.submit(lambda _cache: done.append("closing"), closing=True)
        after = lane.submit(lambda _cache: done.append("after"))
        results = await asyncio.gather(bad, closing, after, return_exceptions=True)
        assert [type(result) for result in results] == [StateInvalid] * 3
        assert not {"closing", "after"} & set(done)
