"""A last part that enters at the target while both engines still make its proof: nothing goes on before that is looked at."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import ExitStack, asynccontextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import pytest

from engines.errors import EngineError, StateInvalid
from engines.rpc_handoff import HandoffClient
from engines.runtime.core import EngineCore
from engines.runtime.generation import Generation as Work
from engines.runtime.handoff_out import LeavingHandoffs
from engines.runtime.state_adopt import adopting
from engines.runtime.state_follow import Leaving
from engines.runtime.state_forms import checksum_of
from engines.runtime.state_together import commit_together
from engines.runtime.state_transfer import Delivery
from engines.wire_handoff import AskBody, HandoffAnswer, HandoffBody
from tests.engine_process import EngineProcess
from tests.engines.runtime.handoff_pair import SECRET, engine_of
from tests.engines.runtime.held_moves import HANDOFF, asked, reading, until
from tests.engines.runtime.late_copies import LateCopies
from tests.engines.runtime.test_core import finished
from tests.engines.runtime.test_state_desk import desk_of
from tests.engines.runtime.test_state_follow import (
    FENCE,
    SETTINGS,
    begun,
    delivery_of,
    endless,
    followed,
    gone_on,
    left_alone,
    stopped,
)
from tests.paced_engine import slow_steps
from tests.synthetic_gguf import SyntheticModel

DRAFTS: dict[str, Any] = {"speculation": "mtp", "draft_tokens": 3}


@pytest.fixture(scope="module")
def drafting_model(tiny_model: Callable[..., SyntheticModel]) -> SyntheticModel:
    return tiny_model("qwen35moe", tie_free=True, nextn=True)


@pytest.fixture
def target(drafting_model: SyntheticModel, tmp_path_factory: pytest.TempPathFactory) -> Iterator[EngineProcess]:
    with engine_of(tmp_path_factory.mktemp("late"), drafting_model, **DRAFTS) as engine:
        yield engine


@dataclass
class Proofs:
    """What sources of this process tell of their last parts: not before `may_come`, and `spoiled`."""

    may_come: asyncio.Event
    spoiled: bool = False
    asked: int = 0

    async def of(self, real: asyncio.Future[bytes]) -> bytes:
        self.asked += 1
        proof = await real
        await self.may_come.wait()
        return bytes([proof[0] ^ 1]) + proof[1:] if self.spoiled else proof


@pytest.fixture
def proofs(monkeypatch: pytest.MonkeyPatch) -> Proofs:
    proofs, real = Proofs(asyncio.Event()), Leaving._proof
    monkeypatch.setattr(Leaving, "_proof", lambda *args: asyncio.ensure_future(proofs.of(real(*args))))
    return proofs


@asynccontextmanager
async def moving(
    model: SyntheticModel, target: EngineProcess, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[tuple[EngineCore, Work, asyncio.Task[HandoffAnswer]]]:
    """A generation of a card, as it were, whose last part has entered at the target and is not proved."""
    async with desk_of(model, slots=2, context_tokens=4096, **DRAFTS) as (core, desk):
        LateCopies(monkeypatch, core)
        leaving = LeavingHandoffs(core, desk)
        with slow_steps():
            work, reader = await reading(core, model)
            move = HandoffBody(HANDOFF, 1, "s", "127.0.0.1", target.config.rpc_port, SECRET, 30.0)
            task = asyncio.create_task(leaving.move(move))
            async with asyncio.timeout(60):
                while "part_entered" not in (marks := await marks_of_move(target)):
                    assert not task.done(), task.result()
            assert "part_proved" not in marks
            yield core, work, task
        core.cancel(work)
        reader.close()
        await leaving.close()


async def marks_of_move(target: EngineProcess) -> dict[str, float]:
    try:
        return (await asked(target)).marks_ms
    except EngineError:
        return {}  # it has not heard of the move yet


async def test_the_target_goes_on_once_the_proof_has_come(
    drafting_model: SyntheticModel, target: EngineProcess, monkeypatch: pytest.MonkeyPatch, proofs: Proofs
) -> None:
    async with moving(drafting_model, target, monkeypatch) as (_, _, task):
        assert (await asked(target)).state == "open"
        proofs.may_come.set()
        moved = await task
    assert (moved.kind, moved.way, proofs.asked) == ("live", "shelf", 1)
    now = await asked(target)
    assert now.state == "going"
    assert now.marks_ms["part_entered"] < now.marks_ms["part_proved"] <= now.marks_ms["going"]
    assert moved.marks_ms["part_taken"] <= moved.marks_ms["told"] <= moved.marks_ms["answered"] == moved.pause_ms
    assert set(moved.target_marks_ms) >= {"manifest_read", "part_came", "part_proved", "going"}


async def test_a_part_with_another_proof_is_thrown_away_and_the_source_goes_on(
    drafting_model: SyntheticModel, target: EngineProcess, monkeypatch: pytest.MonkeyPatch, proofs: Proofs
) -> None:
    proofs.spoiled = True
    async with moving(drafting_model, target, monkeypatch) as (_, work, task):
        proofs.may_come.set()
        with pytest.raises(EngineError, match="was damaged"):
            await task
        assert (await asked(target)).state == "over"
        slots = target.get("/slots")
        assert [(slot["state"], slot["cached_tokens"]) for slot in slots] == [("idle", 0)] * len(slots)
        written = work.new_tokens
        await until(lambda: work.new_tokens > written + 5)


async def test_a_move_that_is_dropped_before_its_proof_leaves_nothing(
    drafting_model: SyntheticModel, target: EngineProcess, monkeypatch: pytest.MonkeyPatch, proofs: Proofs
) -> None:
    async with moving(drafting_model, target, monkeypatch) as (_, work, task):
        async with HandoffClient("127.0.0.1", target.config.rpc_port, secret=SECRET) as client:
            assert (await client.adopt_ask(AskBody(HANDOFF, 1, drop=True))).state == "over"
        proofs.may_come.set()
        with pytest.raises(EngineError):
            await task
        assert [(slot["state"], slot["cached_tokens"]) for slot in target.get("/slots")] == [("idle", 0)] * 2
        written = work.new_tokens
        await until(lambda: work.new_tokens > written + 5)


@pytest.mark.parametrize("spoiled", [False, True])
async def test_what_entered_before_its_proof_goes_on_as_if_it_had_stayed(
    drafting_model: SyntheticModel, monkeypatch: pytest.MonkeyPatch, slow: ExitStack, *, spoiled: bool
) -> None:
    settings, fields = SETTINGS | DRAFTS, {"draft_min": 3}
    async with (
        desk_of(drafting_model, **settings) as (home, desk),
        desk_of(drafting_model, **settings) as (away, other),
    ):
        alone, _ = await left_alone(home, drafting_model, **fields)
        late = LateCopies(monkeypatch, home, away)
        work, terms, theirs = endless(home, drafting_model, **fields), await desk.terms(), await other.terms()
        slow.enter_context(slow_steps())
        await begun(home, work, 150)
        async with Leaving(home, terms, work, FENCE) as leaving, await adopting(theirs, away, 1, 800) as arriving:
            await followed(leaving, arriving, work)
            manifest = await stopped(leaving)
            slow.close()
            await arriving.complete(manifest)
            with pytest.raises(StateInvalid, match="was damaged") if spoiled else nullcontext():
                async for exported in leaving.rest(late=True):
                    if exported.proving is None:
                        await arriving.begin(delivery_of(exported))
                        continue
                    assert (exported.piece.kind, exported.proof) == ("part", b"")
                    there = Delivery(exported.piece, exported.data, exported.buffer.free, None, checksum_of)
                    with arriving.enters_unproved(there) as prove:
                        proof = await exported.proving
                        prove(bytes(16) if spoiled else proof)
                work_there = await gone_on(arriving, manifest, away)
            if not spoiled:
                await commit_together([leaving], FENCE)
        goes_on = work if spoiled else work_there
        await finished(goes_on)
        assert goes_on.tokens == alone.tokens
        assert (late.torn, late.under_way) == (0, 0)
        assert all(slot.idle for slot in (*home.cache.slots, *away.cache.slots))
        if spoiled:
            assert not any(len(slot.sequence) for slot in away.cache.slots)
