"""A generation that moves while it runs: the same text as of one that stayed, and a source that loses nothing before the end."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Generator
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import pytest

from engines.errors import SessionNotHeld, StateError, StateInvalid
from engines.runtime import state_follow
from engines.runtime.constraint import ConstraintCompiler
from engines.runtime.core import EngineCore
from engines.runtime.generation import Generation as Work
from engines.runtime.generation import Mailbox
from engines.runtime.prefix import PrefixCache
from engines.runtime.sampler import SamplingParams
from engines.runtime.state_adopt import Adopting, adopting
from engines.runtime.state_desk import StateDesk
from engines.runtime.state_export import ExportedPiece
from engines.runtime.state_follow import Leaving
from engines.runtime.state_forms import checksum_of
from engines.runtime.state_snapshot import Manifest, resumed
from engines.runtime.state_together import begin_together, commit_together, stop_together
from engines.runtime.state_transfer import Delivery
from engines.runtime.thinking_budget import ThinkingBudget
from tests.engines.runtime.test_core import finished, generation, prompt_of, run
from tests.engines.runtime.test_state_desk import desk_of
from tests.paced_engine import slow_steps
from tests.synthetic_gguf import SyntheticModel

SAMPLED = SamplingParams(temperature=1.2, top_k=30, seed=77, repeat_penalty=1.3, repeat_last_n=32)
COUNT = 450
SETTINGS: dict[str, Any] = {"slots": 2, "context_tokens": 1024}
FENCE = 7
GREEDY = SamplingParams(temperature=0)
END_OF_THOUGHT = (40, 41, 42)


def endless(core: EngineCore, model: SyntheticModel, params: SamplingParams = GREEDY, **fields: Any) -> Work:
    """Long enough not to end before it was moved."""
    bias = tuple((token, float("-inf")) for token in core.loaded.vocabulary.end_tokens)
    return generation(
        prompt_of(model, 100), COUNT, params=replace(params, logit_bias=bias), reuse_prefix=False, **fields
    )


def budget(core: EngineCore) -> ThinkingBudget:
    return ThinkingBudget(45, core.loaded.vocabulary.pieces, END_OF_THOUGHT, opens_thought=True)


async def left_alone(core: EngineCore, model: SyntheticModel, params: SamplingParams = GREEDY, **fields: Any) -> Any:
    """The generation that nobody moves, and its whole text."""
    work = endless(core, model, params, **fields)
    core.submit(work)
    return work, (await finished(work)).text


def delivery_of(exported: ExportedPiece) -> Delivery:
    """As if it had come over a wire."""
    data = exported.data.copy()
    exported.buffer.free()
    return Delivery(exported.piece, data, lambda: None, exported.proof, checksum_of)


async def begun(core: EngineCore, work: Work, tokens: int) -> str:
    """Submits it and waits until it has so many tokens; the text so far."""
    core.submit(work)
    return await text_until(work, tokens)


async def text_until(work: Work, tokens: int) -> str:
    text = ""
    async with asyncio.timeout(60):
        while len(work.tokens) < tokens:
            text += "".join(piece.text for piece in await work.mailbox.take(10))
    return text


async def followed(leaving: Leaving, arriving: Adopting, work: Work) -> int:
    """Moves what is finished by now; the blocks that did."""
    count = 0
    async for exported in leaving.finished_blocks():
        piece = exported.piece
        await arriving.begin(delivery_of(exported), work.tokens[piece.start : piece.end])
        count += 1
    await arriving.settled()
    return count


async def stopped(leaving: Leaving) -> Manifest:
    return (await stop_together([leaving]))[leaving]


async def rest_of(leaving: Leaving, arriving: Adopting, manifest: Manifest) -> None:
    wanted = await arriving.complete(manifest)
    async for exported in leaving.rest():
        assert exported.piece == wanted.pop(0)
        await arriving.begin(delivery_of(exported))
    assert not wanted
    await arriving.settled()


async def gone_on(arriving: Adopting, manifest: Manifest, away: EngineCore) -> Work:
    def compiler() -> ConstraintCompiler:
        return ConstraintCompiler(away.loaded.vocabulary)

    going = resumed(manifest, away.loaded, compiler, Mailbox(), time.monotonic() + 60, arriving.tokens)
    await begin_together([arriving], [going])
    return going


@pytest.mark.parametrize(
    ("architecture", "params", "drafts"),
    [
        ("llama", SAMPLED, False),
        ("gemma3", SamplingParams(temperature=0), False),
        ("qwen35", SAMPLED, False),
        ("qwen35moe", SamplingParams(temperature=0), True),
    ],
)
async def test_what_moves_while_it_runs_writes_what_it_would_have_written(
    tiny_model: Callable[..., SyntheticModel], slow: ExitStack, architecture: str, params: SamplingParams, drafts: bool
) -> None:
    model = tiny_model(architecture, **({"nextn": True, "tie_free": True} if drafts else {}))
    settings = SETTINGS | ({"speculation": "mtp", "draft_tokens": 3} if drafts else {})
    fields: dict[str, Any] = {"draft_min": 3} if drafts else {}
    async with desk_of(model, **settings) as (home, desk), desk_of(model, **settings) as (away, other):
        # Reasoning that the prompt opened, and that is ended behind the move.
        thinks = architecture == "llama"
        alone, whole = await left_alone(home, model, params, **fields, thinking_budget=budget(home) if thinks else None)
        fields |= {"session": "s", "tenant": "ab", "thinking_budget": budget(home) if thinks else None}
        work = endless(home, model, params, **fields)
        terms, theirs = await desk.terms(), await other.terms()
        slow.enter_context(slow_steps())
        text = await begun(home, work, 110)
        async with Leaving(home, terms, work, FENCE) as leaving, await adopting(theirs, away, 1, 800) as arriving:
            assert await followed(leaving, arriving, work) >= 1
            text += await text_until(work, 135)
            await followed(leaving, arriving, work)
            manifest = await stopped(leaving)
            manifest = Manifest.from_json(manifest.to_json(), manifest.before)
            slow.close()
            text += "".join(piece.text for piece in await work.mailbox.take(0.01))
            await rest_of(leaving, arriving, manifest)
            moved = await gone_on(arriving, manifest, away)
            await commit_together([leaving], FENCE)
        last = (await work.mailbox.take(10))[-1]
        assert last.finish_reason == "moved"
        rest = await finished(moved)
        assert moved.tokens == alone.tokens
        assert text + rest.text == whole
        assert rest.stats is not None
        assert (rest.stats.completion_tokens, rest.stats.prompt_tokens) == (COUNT, 100)
        assert (moved.session, moved.tenant) == ("s", "ab")
        assert all(slot.idle for slot in (*home.cache.slots, *away.cache.slots))
        assert away.metrics.preemptions._value.get() == 0
        if drafts:
            assert moved.accepted_tokens == moved.drafted_tokens > 100
            # Counted over both engines: a round more or less, where it was stopped.
            assert abs(moved.accepted_tokens - alone.accepted_tokens) <= 6
        if thinks:
            assert tuple(moved.tokens[145:148]) == END_OF_THOUGHT


@pytest.mark.parametrize(
    ("architecture", "until"), [("llama", "stop"), ("llama", "rest"), ("qwen35", "blocks"), ("qwen35", "taken")]
)
async def test_whatever_fails_before_the_commit_leaves_the_source_running(
    tiny_model: Callable[..., SyntheticModel], slow: ExitStack, architecture: str, until: str
) -> None:
    model = tiny_model(architecture)
    async with desk_of(model, **SETTINGS) as (home, desk), desk_of(model, **SETTINGS) as (away, other):
        alone, _ = await left_alone(home, model)
        work, terms, theirs = endless(home, model), await desk.terms(), await other.terms()
        slow.enter_context(slow_steps())
        await begun(home, work, 110)
        with pytest.raises(ConnectionError):
            async with Leaving(home, terms, work, FENCE) as leaving, await adopting(theirs, away, 0, 800) as arriving:
                await followed(leaving, arriving, work)
                if until != "blocks":
                    manifest = await stopped(leaving)
                if until in ("rest", "taken"):
                    await rest_of(leaving, arriving, manifest)
                if until == "taken":
                    with pytest.raises(StateError, match="granted as number 7"):
                        await commit_together([leaving], FENCE + 1)
                raise ConnectionError
        slow.close()
        assert (await finished(work)).finish_reason == "length"
        assert work.tokens == alone.tokens
        assert not len(away.cache.slots[0].sequence)
        assert (await run(away, prompt_of(model, 30), 4)).new_tokens == 4


async def test_a_stop_does_not_last_and_a_late_commit_is_refused(
    tiny_model: Callable[..., SyntheticModel], slow: ExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(state_follow, "STOP_LIMIT_S", 0.05)
    model = tiny_model("llama")
    async with desk_of(model, **SETTINGS) as (home, desk):
        alone, _ = await left_alone(home, model)
        work, terms = endless(home, model), await desk.terms()
        slow.enter_context(slow_steps())
        await begun(home, work, 110)
        async with Leaving(home, terms, work, FENCE) as leaving:
            await stopped(leaving)
            slow.close()
            assert (await finished(work)).finish_reason == "length"
            with pytest.raises(StateError, match="goes on here again"):
                await commit_together([leaving], FENCE)
            with pytest.raises(SessionNotHeld):
                await stopped(leaving)
        assert work.tokens == alone.tokens


async def test_a_cancel_or_an_end_of_the_engine_meanwhile_reaches_whoever_waits(
    tiny_model: Callable[..., SyntheticModel], slow: ExitStack
) -> None:
    model = tiny_model("llama")
    slow.enter_context(slow_steps())
    async with desk_of(model, **SETTINGS) as (home, desk):
        for ends in ("cancel", "stop"):
            work, terms = endless(home, model), await desk.terms()
            await begun(home, work, 110)
            async with Leaving(home, terms, work, FENCE) as leaving:
                await stopped(leaving)
                if ends == "cancel":
                    home.cancel(work)
                else:
                    home.stop()
                    await asyncio.to_thread(home.join, 10)
            if ends == "stop":
                assert (await finished(work)).error is not None
            else:
                await idle(home)


async def idle(core: EngineCore) -> None:
    async with asyncio.timeout(20):
        while not all(slot.idle for slot in core.cache.slots):
            await core.perform(nothing)


def nothing(_cache: PrefixCache) -> Generator[None, None, None]:
    yield from ()


async def test_pieces_of_another_beginning_are_refused(
    tiny_model: Callable[..., SyntheticModel], slow: ExitStack
) -> None:
    model = tiny_model("llama")

    async def attempt(desk: StateDesk, home: EngineCore, other: StateDesk, away: EngineCore, *, wrong: bool) -> None:
        work, terms, theirs = endless(home, model), await desk.terms(), await other.terms()
        slow.enter_context(slow_steps())
        await begun(home, work, 110)
        async with Leaving(home, terms, work, FENCE) as leaving, await adopting(theirs, away, 0, 800) as arriving:
            async for exported in leaving.finished_blocks():
                tokens = work.tokens[exported.piece.start : exported.piece.end]
                await arriving.begin(delivery_of(exported), tokens[::-1] if wrong else tokens)
            manifest = await stopped(leaving)
            assert manifest.before == leaving.sent_tokens > 0
            if wrong:
                # Whoever tells the beginning again, tells the same.
                manifest = replace(manifest, tokens=tuple(work.tokens[: manifest.count]), before=0)
            slow.close()
            with pytest.raises(StateInvalid, match=r"not those that|did not come in"):
                await arriving.complete(manifest)
                await gone_on(arriving, manifest, away)

    async with desk_of(model, **SETTINGS) as (home, desk), desk_of(model, **SETTINGS) as (away, other):
        for wrong in (True, False):
            await attempt(desk, home, other, away, wrong=wrong)
        assert not len(away.cache.slots[0].sequence)


async def test_a_block_that_does_not_follow_is_refused_before_it_enters(
    tiny_model: Callable[..., SyntheticModel], slow: ExitStack
) -> None:
    model = tiny_model("llama")
    async with desk_of(model, **SETTINGS) as (home, desk), desk_of(model, **SETTINGS) as (away, other):
        work, terms, theirs = endless(home, model), await desk.terms(), await other.terms()
        slow.enter_context(slow_steps())
        await begun(home, work, 110)
        async with Leaving(home, terms, work, FENCE) as leaving, await adopting(theirs, away, 0, 800) as arriving:
            async for exported in leaving.finished_blocks():
                delivery, piece = delivery_of(exported), exported.piece
                tokens = work.tokens[piece.start : piece.end]
                for wrong in (
                    replace(piece, start=piece.start + 1, end=piece.end + 1),
                    replace(piece, end=piece.end + 1),
                    replace(piece, size_bytes=piece.size_bytes + 1),
                    replace(piece, kind="part"),
                ):
                    with pytest.raises(StateInvalid, match="are not what they have to be"):
                        await arriving.begin(replace(delivery, piece=wrong), tokens)
                await arriving.begin(delivery, tokens)
            slow.close()
            manifest = await stopped(leaving)
            await rest_of(leaving, arriving, manifest)


async def test_a_move_that_is_given_up_leaves_its_slot_to_whoever_has_it_then(
    tiny_model: Callable[..., SyntheticModel], slow: ExitStack
) -> None:
    model = tiny_model("llama")
    async with desk_of(model, **SETTINGS) as (home, desk), desk_of(model, **SETTINGS) as (away, other):
        work, terms, theirs = endless(home, model), await desk.terms(), await other.terms()
        slow.enter_context(slow_steps())
        await begun(home, work, 110)
        async with Leaving(home, terms, work, FENCE) as leaving:
            arriving = await adopting(theirs, away, 0, 800)
            await followed(leaving, arriving, work)
            await arriving.__aexit__(None, None, None)
            held = await run(away, prompt_of(model, 60), 4)
            before = [list(slot.sequence.tokens) for slot in away.cache.slots]
            assert held.tokens[:-1] in before
            # An exchange that was under way, and whoever ends the move once more.
            await text_until(work, leaving.sent_tokens + terms.block_tokens + 2)
            exported = await anext(leaving.finished_blocks())
            with pytest.raises(StateInvalid, match="move is over"):
                await arriving.begin(delivery_of(exported), work.tokens[exported.piece.start : exported.piece.end])
                await arriving.settled()
            await arriving.__aexit__(None, None, None)
            assert [list(slot.sequence.tokens) for slot in away.cache.slots] == before
            assert [(slot.awaited_cells, slot.transfer) for slot in away.cache.slots] == [(0, "")] * len(
                away.cache.slots
            )


async def test_a_reader_hears_of_the_move_before_the_core_has_time_to_free_the_slot(
    tiny_model: Callable[..., SyntheticModel], slow: ExitStack
) -> None:
    model, held, free = tiny_model("llama"), threading.Event(), threading.Event()

    def hold(_cache: PrefixCache) -> Generator[None, None, None]:
        yield from ()
        held.set()
        assert free.wait(60)

    async with desk_of(model, **SETTINGS) as (home, desk):
        work, terms = endless(home, model), await desk.terms()
        slow.enter_context(slow_steps())
        await begun(home, work, 110)
        async with Leaving(home, terms, work, FENCE) as leaving:
            await stopped(leaving)
            await work.mailbox.take(0.01)
            leaving.is_there = True
            holding = asyncio.ensure_future(home.perform(hold))
            assert await asyncio.to_thread(held.wait, 60)
            committing = asyncio.create_task(commit_together([leaving], FENCE))
            told = await work.mailbox.take(60)
            assert [piece.finish_reason for piece in told] == ["moved"]
            assert not committing.done()
            # Its reader has left by then, as a client's does that is gone.
            home.cancel(work)
            free.set()
            await committing
            await holding
        assert not await work.mailbox.take(0.01)
        assert all(slot.idle and not len(slot.sequence) for slot in home.cache.slots)
        labels = {"outcome": "moved"}
        assert home.metrics.registry.get_sample_value("hydra_engine_requests_total", labels) == 1


async def test_blocks_that_are_just_as_many_as_were_expected_are_not_taken_for_all(
    tiny_model: Callable[..., SyntheticModel], slow: ExitStack
) -> None:
    model = tiny_model("llama")
    async with desk_of(model, **SETTINGS) as (home, desk), desk_of(model, **SETTINGS) as (away, other):
        alone, _ = await left_alone(home, model)
        work, terms, theirs = endless(home, model), await desk.terms(), await other.terms()
        slow.enter_context(slow_steps())
        await begun(home, work, 130)
        expected = 2 * terms.block_tokens
        async with Leaving(home, terms, work, FENCE) as leaving, await adopting(theirs, away, 0, expected) as arriving:
            assert await followed(leaving, arriving, work) == 2
            manifest = await stopped(leaving)
            slow.close()
            await rest_of(leaving, arriving, manifest)
            moved = await gone_on(arriving, manifest, away)
            await commit_together([leaving], FENCE)
        await finished(moved)
        assert moved.tokens == alone.tokens
