"""How a move ends where its target refuses, is of another version or says too little, and where its source stops meanwhile."""

from __future__ import annotations

import asyncio
import gc
import threading
import time
from collections.abc import AsyncIterable, Callable, Generator, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from engines.errors import EngineError, GenerationStays, ProtocolBroken, StateError, StateInvalid
from engines.rpc_handoff import HandoffClient
from engines.runtime.core import EngineCore
from engines.runtime.generation import Mailbox
from engines.runtime.handoff_choices import gone_on, making_of
from engines.runtime.handoff_entry import free_slot
from engines.runtime.handoff_in import ArrivingHandoffs
from engines.runtime.handoff_out import LeavingHandoffs
from engines.runtime.prefix import PrefixCache
from engines.runtime.prefix_marks import marks_of
from engines.runtime.preparation import Preparation
from engines.runtime.sampler import Sampler
from engines.runtime.state_adopt import Adopting, adopting
from engines.runtime.state_desk import StateDesk
from engines.runtime.state_follow import Leaving
from engines.runtime.state_snapshot import Manifest, resumed
from engines.runtime.state_together import begin_together
from engines.wire_handoff import (
    FORM,
    AdoptAnswer,
    AdoptBody,
    AdoptedAnswer,
    AskBody,
    BlockHead,
    HandoffBody,
    PrefixMark,
)
from tests.engine_process import EngineProcess
from tests.engines.runtime.handoff_pair import engine_of
from tests.engines.runtime.held_moves import HANDOFF, HeldAnswers, asked, held_move, reading, until
from tests.engines.runtime.test_core import finished, prompt_of, run
from tests.engines.runtime.test_state_desk import desk_of
from tests.engines.runtime.test_state_follow import FENCE, SETTINGS, begun, endless, idle, rest_of, stopped
from tests.engines.runtime.test_state_follow import followed as blocks_sent
from tests.paced_engine import slow_steps
from tests.synthetic_gguf import SyntheticModel

DRAFTS: dict[str, Any] = {"slots": 2, "context_tokens": 4096, "speculation": "mtp", "draft_tokens": 3}


@pytest.fixture
def slowly() -> Iterator[None]:
    """No answer ends before its test ends it."""
    with slow_steps():
        yield


@dataclass
class Target(HandoffClient):
    """Another version's engine, or one that fails in ways of which ours has none: takes all blocks, reads `reads` parts of the
    rest (None: all), and says `rest` of it (None: refuses it)."""

    on_shelf: bool = True
    form: int = FORM
    reads: int | None = None
    rest: str | None = None
    asked: str = "over"
    asks: list[AskBody] = field(default_factory=list)

    async def adopt(self, body: AdoptBody) -> AdoptAnswer:
        assert body.form == FORM
        return AdoptAnswer(0, self.on_shelf, 0, self.form)

    async def adopt_ask(self, body: AskBody) -> AdoptedAnswer:
        self.asks.append(body)
        return AdoptedAnswer(self.asked if body.drop else "open", 0, 99)

    async def adopt_block(self, handoff: str, head: BlockHead, data: Any = b"") -> AdoptedAnswer:
        return AdoptedAnswer("open", 0, 99)

    async def adopt_rest(
        self, handoff: str, payload: AsyncIterable[Any], total_bytes: int, patience_s: float
    ) -> AdoptedAnswer:
        count = 0
        async for _ in payload:
            count += 1
            if count == self.reads:
                break
        if self.rest is None:
            raise StateInvalid("It is not what it was said to be.")
        return AdoptedAnswer(self.rest, 0, 99)

    async def close(self) -> None:
        """There is no connection."""


def leaving_to(target: Target, core: EngineCore, desk: StateDesk) -> tuple[LeavingHandoffs, HandoffBody]:
    """The move whose connection is this one."""
    leaving = LeavingHandoffs(core, desk)
    leaving._clients["127.0.0.1", 1, ""] = (time.monotonic(), target)
    return leaving, HandoffBody(HANDOFF, 1, "s", "127.0.0.1", 1, "", 30.0)


@pytest.mark.parametrize(("on_shelf", "reads"), [(True, 2), (False, 3)])
async def test_a_refused_rest_leaves_the_arena_as_it_was(
    tiny_model: Callable[..., SyntheticModel], slowly: None, *, on_shelf: bool, reads: int
) -> None:
    """Also while the move is remembered, whose number may be asked for again."""
    model = tiny_model("qwen35", tie_free=True, nextn=True)
    async with desk_of(model, **DRAFTS) as (core, desk):
        work, reader = await reading(core, model)
        arena = (await desk.terms()).dock.arena
        gc.disable()
        try:
            leaving, body = leaving_to(Target(on_shelf=on_shelf, reads=reads), core, desk)
            for _ in range(2):
                with pytest.raises(StateInvalid, match="not what it was said"):
                    await leaving.move(body)
            assert arena.free_bytes == arena.size_bytes
        finally:
            gc.enable()
        assert reader.events == [f"moving {HANDOFF}"] * 2 + [f"stays {HANDOFF}"]
        stopped_tokens = work.new_tokens
        await until(lambda: work.new_tokens > stopped_tokens)
        core.cancel(work)
        reader.close()


async def test_a_target_of_another_version_is_told_from_the_start(
    tiny_model: Callable[..., SyntheticModel], slowly: None
) -> None:
    model = tiny_model("llama", tie_free=True)
    async with desk_of(model, slots=2, context_tokens=4096) as (core, desk):
        work, reader = await reading(core, model)
        target = Target(form=1)
        leaving, body = leaving_to(target, core, desk)
        with pytest.raises(GenerationStays, match="another version"):
            await leaving.move(body)
        assert reader.events == []
        assert [ask.drop for ask in target.asks] == [True]
        # And the other way round.
        arriving = ArrivingHandoffs(Preparation(core.config, core), desk)
        before = AdoptBody("h2", 1, "t", "", (await desk.terms()).fingerprint, 100, False, False, "r")
        with pytest.raises(GenerationStays, match="form 1"):
            await arriving.begin(before, asyncio.Event())
        assert all(slot.idle for slot in core.cache.slots if slot.generation is not work)
        core.cancel(work)
        reader.close()


async def test_what_arrives_takes_what_was_left_of_its_session_rather_than_anothers_slot(
    tiny_model: Callable[..., SyntheticModel],
) -> None:
    model = tiny_model("llama")
    async with desk_of(model, slots=3) as (core, _):
        for start, session in ((1, "other"), (2, "mine"), (3, "third")):
            await run(core, prompt_of(model, 40, start), 4, session=session)
        slots = {slot.sequence.origin.session: slot.index for slot in core.cache.slots}
        cache = core.cache

        def chosen(session: str, tenant: str = "", marks: tuple[PrefixMark, ...] = ()) -> int:
            return free_slot(cache, AdoptBody("h", 1, session, tenant, "", 100, True, False, marks=marks))

        oldest = slots["other"]
        assert (chosen("unknown"), chosen("mine", tenant="abc")) == (oldest, oldest)
        # What can be lent stays.
        assert chosen("mine", marks=marks_of(prompt_of(model, 40, 2), 16)) == oldest
        assert len(cache.slots[slots["mine"]].sequence) > 0
        assert chosen("mine") == slots["mine"]
        assert [slot.index for slot in cache.slots if not len(slot.sequence)] == [slots["mine"]]
        assert chosen("third") == slots["mine"]


@pytest.mark.parametrize("goes_on", [True, False])
async def test_a_target_that_took_all_and_does_not_go_on_is_asked(
    tiny_model: Callable[..., SyntheticModel], slowly: None, *, goes_on: bool
) -> None:
    model = tiny_model("llama", tie_free=True)
    async with desk_of(model, slots=2, context_tokens=4096) as (core, desk):
        work, reader = await reading(core, model)
        target = Target(rest="open", asked="going" if goes_on else "over")
        leaving, body = leaving_to(target, core, desk)
        if goes_on:
            assert (await leaving.move(body)).kind == "live"
            assert (await reader.end()).finish_reason == "moved"
            assert not any(ask.resumed for ask in target.asks)
        else:
            with pytest.raises(ProtocolBroken, match="does not go on"):
                await leaving.move(body)
        outcome = ("live", "ok") if goes_on else ("unknown", "protocol_broken")
        labels = dict(zip(("direction", "kind", "outcome"), ("out", *outcome), strict=True))
        assert core.metrics.registry.get_sample_value("hydra_engine_handoffs_total", labels) == 1
        if not goes_on:
            await until(lambda: reader.events[-1] == f"stays {HANDOFF}")
            core.cancel(work)
            reader.close()


async def test_a_source_that_stops_before_its_commit_leaves_the_answer_to_the_target(
    tiny_model: Callable[..., SyntheticModel], tmp_path: Path
) -> None:
    model = tiny_model("llama", tie_free=True)
    held = HeldAnswers()
    with engine_of(tmp_path, model) as target, target.slowed():
        async with held_move(model, target, held) as move:
            core, work, reader = move.core, move.work, move.reader
            with slow_steps():
                await goes_on_at(target)
            core.stop()
            await asyncio.to_thread(core.join, 10)
            held.released.set()
            last = await reader.end()
            assert (last.finish_reason, last.error, last.stats is not None) == ("moved", None, True)
            assert work.handoff == HANDOFF
            assert (await move.moving).kind == "live"
            assert f"stays {HANDOFF}" not in reader.events
            assert (await asked(target)).state == "going"
            assert any(slot["is_processing"] for slot in target.get("/slots"))


async def goes_on_at(target: EngineProcess) -> None:
    async with asyncio.timeout(30):
        while True:
            try:
                if (await asked(target)).state == "going":
                    return
            except EngineError:
                """It has not heard of the move."""
            await asyncio.sleep(0.02)


async def test_of_choices_that_go_on_together_none_does_where_one_cannot(
    tiny_model: Callable[..., SyntheticModel],
) -> None:
    model = tiny_model("llama")
    async with desk_of(model, **SETTINGS) as (home, desk), desk_of(model, **SETTINGS) as (away, other):
        works, terms, theirs = [endless(home, model) for _ in range(2)], await desk.terms(), await other.terms()
        arrived: list[tuple[Adopting, Manifest]] = []
        for index, work in enumerate(works):
            with slow_steps():
                await begun(home, work, 110)
                async with Leaving(home, terms, work, FENCE) as leaving:
                    arriving = await adopting(theirs, away, index, 400)
                    await blocks_sent(leaving, arriving, work)
                    manifest = await stopped(leaving)
                    await rest_of(leaving, arriving, manifest)
                    arrived.append((arriving, manifest))

        def lose_some(cache: PrefixCache) -> Generator[None, None, None]:
            yield from ()
            cache.slots[1].sequence.take_back(50)

        await away.perform(lose_some)
        going = [
            resumed(manifest, away.loaded, pytest.fail, Mailbox(), time.monotonic() + 60, arriving.tokens)
            for arriving, manifest in arrived
        ]
        with pytest.raises(StateError, match="lost"):
            await begin_together([arriving for arriving, _ in arrived], going)
        assert [slot.generation for slot in away.cache.slots] == [None, None]
        for arriving, _ in arrived:
            await arriving.__aexit__(None, None, None)
        assert all(slot.idle and not len(slot.sequence) for slot in away.cache.slots)
        for one, work in zip(going, works, strict=True):
            assert one.sampler is not None
            one.sampler.close()
            home.cancel(work)
        await idle(home)


async def test_who_gives_a_move_up_while_it_begins_leaves_the_slot_to_the_generation(
    tiny_model: Callable[..., SyntheticModel], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny_model("llama")
    async with desk_of(model, **SETTINGS) as (home, desk), desk_of(model, **SETTINGS) as (away, other):
        work, terms, theirs = endless(home, model), await desk.terms(), await other.terms()
        with slow_steps():
            await begun(home, work, 110)
            async with Leaving(home, terms, work, FENCE) as leaving:
                arriving = await adopting(theirs, away, 0, 800)
                await blocks_sent(leaving, arriving, work)
                manifest = await stopped(leaving)
                await rest_of(leaving, arriving, manifest)
        begins, given_up = threading.Event(), threading.Event()
        look = arriving.require_whole

        def held_up() -> None:
            look()
            begins.set()
            given_up.wait(60)

        monkeypatch.setattr(arriving, "require_whole", held_up)
        moved = resumed(manifest, away.loaded, pytest.fail, Mailbox(), time.monotonic() + 60, arriving.tokens)
        beginning = asyncio.create_task(begin_together([arriving], [moved]))
        assert await asyncio.to_thread(begins.wait, 60)
        leaves = asyncio.create_task(arriving.__aexit__(None, None, None))
        await asyncio.sleep(0.02)
        given_up.set()
        await asyncio.gather(beginning, leaves)
        assert len(away.cache.slots[0].sequence) >= len(manifest.tokens)
        assert (await finished(moved)).finish_reason == "length"
        assert moved.tokens[:110] == work.tokens[:110]
        home.cancel(work)
        await idle(home)


async def test_a_move_that_is_broken_off_while_its_generation_is_made_leaves_no_sampler(
    tiny_model: Callable[..., SyntheticModel], monkeypatch: pytest.MonkeyPatch, slowly: None
) -> None:
    model, free, changed, taken = tiny_model("llama"), threading.Event(), list[str](), list[int]()
    made, close = Sampler.__init__, Sampler.close

    def note_made(sampler: Sampler, *args: Any) -> None:
        made(sampler, *args)
        changed.append("made")

    def note_closed(sampler: Sampler) -> None:
        close(sampler)
        changed.append("closed")

    def take_a_thread() -> None:
        taken.append(1)
        free.wait(60)

    async with desk_of(model, **SETTINGS) as (home, desk), desk_of(model, **SETTINGS) as (away, other):
        work, terms, theirs = endless(home, model), await desk.terms(), await other.terms()
        await begun(home, work, 110)
        async with Leaving(home, terms, work, FENCE) as leaving, await adopting(theirs, away, 0, 800) as arriving:
            await blocks_sent(leaving, arriving, work)
            manifest = await stopped(leaving)
            await rest_of(leaving, arriving, manifest)
            monkeypatch.setattr(Sampler, "__init__", note_made)
            monkeypatch.setattr(Sampler, "close", note_closed)
            pool = theirs.dock._threads
            held = asyncio.gather(*(theirs.dock.in_thread(take_a_thread) for _ in range(pool._max_workers)))
            await until(lambda: len(taken) == pool._max_workers)
            preparation = Preparation(away.config, away)
            arrived = [(arriving, manifest)]
            making = making_of(arrived, preparation, theirs.dock, time.monotonic() + 60)
            going = asyncio.create_task(gone_on(arrived, making))
            await until(lambda: pool._work_queue.qsize() > 0)
            going.cancel()
            await asyncio.sleep(0.02)
            free.set()
            with pytest.raises(asyncio.CancelledError):
                await going
            await held
        assert changed == ["made", "closed"]
        home.cancel(work)
        await idle(home)
