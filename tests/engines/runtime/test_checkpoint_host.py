"""Conversations of hybrids, more than there are checkpoints or slots: every turn goes on at its conversation's last user message,
wherever that state and its attention rows have come to lie, and answers as a cold run that is cut at the same places."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Callable, Generator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pytest

from engines.runtime.core import EngineCore
from engines.runtime.generation import Generation
from engines.runtime.host_cache import TOKEN_BYTES
from engines.runtime.park_survey import holding_of
from engines.runtime.prefix import PrefixCache
from engines.runtime.sampler import SamplingParams, TokenLogprob
from engines.runtime.state_snapshot import StatePiece
from engines.runtime.state_transfer import depart
from tests.engines.runtime.test_core import finished, generation, prompt_of, run, running
from tests.synthetic_gguf import SyntheticModel

Models = Callable[..., SyntheticModel]
SYSTEM, USER, OPENING = 70, 72, 3
LONGER = [("qwen35", 4), ("qwen35moe", 8)]
# What each conversation needs of the context, and no checkpoint for each of them.
TIGHT = {"slots": 4, "context_tokens": 768, "checkpoints": 4, "kv_block_tokens": 64}
COLD = {"slots": 1, "context_tokens": 768, "checkpoints": 0, "host_cache_bytes": 0}


@dataclass
class Talk:
    """A conversation whose template drops the reasoning, here the first part of each answer; `own` tells its system prompt from
    others' (None: they share one)."""

    name: str
    own: int | None
    said: list[int] = field(default_factory=list)
    system: int = 0
    user_cut: int = 0

    def begin(self, length: int = SYSTEM) -> None:
        first = 0 if self.own is None else self.own
        self.said = [(first * 13 + i * 7) % 250 for i in range(length)]
        self.system, self.user_cut = length, 0

    def ask(self, words: int) -> tuple[list[int], list[int]]:
        """The next turn's prompt, and its cuts: system prompt, user message."""
        self.said += [(words * 31 + i * 11) % 250 for i in range(USER)]
        return [*self.said, *range(4, 4 + OPENING - 1), 10], [self.system, len(self.said)]

    def hear(self, work: Generation) -> None:
        self.user_cut = len(self.said)
        answer = work.tokens[len(work.prompt) :]
        self.said += [5, *answer[len(answer) // 2 :], 6]


@asynccontextmanager
async def cold_engine(model: SyntheticModel) -> AsyncIterator[Callable[..., Any]]:
    """Answers as if it had never seen anything: the function takes a prompt, its length of answer and its cuts."""
    async with running(model, **COLD) as core:

        async def answer(prompt: list[int], count: int, cuts: list[int]) -> list[int]:
            work = await run(core, prompt, count, cuts=sorted(set(cuts)), reuse_prefix=False)
            return work.tokens[len(prompt) :]

        yield answer


async def turn(core: EngineCore, talk: Talk, words: int, count: int = 14) -> tuple[Generation, list[int]]:
    prompt, cuts = talk.ask(words)
    work = await run(core, prompt, count, session=talk.name, system_cut=talk.system, cuts=list(cuts))
    return work, cuts


async def begun(core: EngineCore, count: int) -> list[Talk]:
    """So many conversations with system prompts of their own, each after its first turn."""
    talks = [Talk(f"s{i}", own=i) for i in range(count)]
    for index, talk in enumerate(talks):
        talk.begin()
        talk.hear((await turn(core, talk, index))[0])
    return talks


async def assert_counted(core: EngineCore) -> None:
    """Every byte of host memory is counted once, and the ledger of cells agrees with what sequences hold."""

    def work(cache: PrefixCache) -> Generator[None, None, None]:
        while cache.moves.under_way or not all(slot.idle for slot in cache.slots):
            yield
        entries = list(cache.host)
        states = [a for e in entries for a in (*e.state.blocks, e.state.part, e.state.whole) if a is not None]
        assert len({id(array) for array in states}) == len(states)
        tokens = sum(len(entry.tokens) for entry in entries)
        assert cache.host.used_bytes == sum(array.nbytes for array in states) + TOKEN_BYTES * tokens
        assert cache.host.used_bytes <= cache.host.budget_bytes
        held = cache.ledger.distinct(holder.sequence.cells for holder in cache.holders)
        assert cache.ledger.count - cache.ledger.free == held
        for holder in cache.holders:
            assert cache.moves is not None
            assert core.loaded.last_position(holder.sequence.index) == len(holder.sequence) - 1

    await core.perform(work)


@pytest.mark.parametrize(
    ("architecture", "talks"),
    [("qwen35", 8), ("qwen35moe", 4), *(pytest.param(*kind, marks=pytest.mark.soak) for kind in LONGER)],
)
async def test_conversations_in_turn_go_on_at_their_last_user_message(
    tiny_model: Models, architecture: str, talks: int
) -> None:
    model = tiny_model(architecture)
    spoken = [Talk(f"s{i}", own=i) for i in range(talks)]
    seen: list[tuple[Generation, list[int]]] = []
    async with running(model, **TIGHT) as core:
        for number in range(3):
            for talk in spoken:
                if not number:
                    talk.begin()
                work, cuts = await turn(core, talk, number * talks + int(talk.name[1:]))
                assert work.cached_tokens >= talk.user_cut, (number, talk.name)
                seen.append((work, cuts))
                talk.hear(work)
        await assert_counted(core)
    async with cold_engine(model) as answer:
        for work, cuts in seen:
            expected = await answer(work.prompt, 14, [*cuts, work.cached_tokens] if work.cached_tokens else cuts)
            assert work.tokens[len(work.prompt) :] == expected


async def test_a_system_prompt_of_all_is_kept_once(tiny_model: Models) -> None:
    model = tiny_model("qwen35", tie_free=True)
    spoken = [Talk(f"s{i}", own=None) for i in range(6)]
    async with running(model, **TIGHT) as core:
        for number in range(3):
            for index, talk in enumerate(spoken):
                if not number:
                    talk.begin()
                work, _ = await turn(core, talk, number * 10 + index)
                assert work.cached_tokens >= (talk.user_cut or (SYSTEM if index else 0))
                talk.hear(work)
        # It is there once, in the context or, its rows being with the conversations, in host memory.
        held = [*(c.sequence.tokens for c in core.cache.checkpoints), *(entry.tokens for entry in core.cache.host)]
        assert [len(tokens) for tokens in held].count(SYSTEM) == 1
        newcomer = Talk("new", own=None)
        newcomer.begin()
        assert (await turn(core, newcomer, 99))[0].cached_tokens == SYSTEM


async def test_a_state_that_comes_back_while_others_write_disturbs_nobody(tiny_model: Models) -> None:
    """Its rows are in a slot, its state in host memory; it enters between two steps, and what others write is right."""
    model = tiny_model("qwen35", tie_free=True)
    async with running(model, **{**TIGHT, "checkpoints": 1}) as core:
        talks = await begun(core, 3)
        beside = generation(prompt_of(model, 30), 400)
        core.submit(beside)
        await beside.mailbox.take(10)
        for index, talk in enumerate(talks):
            work, _ = await turn(core, talk, 10 + index)
            assert work.cached_tokens == talk.user_cut
            assert work.tokens[len(work.prompt) :] == model.follow(10, 14)
        core.cancel(beside)
        await asyncio.wait_for(_ended(core), 60)
        assert beside.tokens[30:] == model.follow(10, len(beside.tokens) - 30)
        await assert_counted(core)


async def _ended(core: EngineCore) -> None:
    while core.cache.busy:  # noqa: ASYNC110 - the core is another thread and sets no event for this
        await asyncio.sleep(0.01)


async def test_what_the_budget_cannot_hold_keeps_the_cut_and_lets_the_end_go(tiny_model: Models) -> None:
    """Of a conversation in host memory the end, whose reasoning the template drops, goes before the last user message."""
    model = tiny_model("qwen35", tie_free=True)
    async with running(model, **{**TIGHT, "slots": 1, "checkpoints": 1}) as core:
        first, second = Talk("a", own=1), Talk("b", own=2)
        for index, talk in enumerate((first, second)):
            talk.begin()
            # The answer is long, so that the slot's end is worth saving, too.
            talk.hear((await turn(core, talk, index, 100))[0])
        host = core.cache.host
        of_first = [(len(entry.tokens), entry.is_cut) for entry in host if entry.origin.session == "a"]
        end = first.user_cut + OPENING + 99
        assert sorted(of_first) == [(SYSTEM, True), (first.user_cut, True), (end, False)]
        # Little room, so that one after the other has to go.
        host.budget_bytes = host.used_bytes + 1000
        work, _ = await turn(core, second, 5)
        assert work.cached_tokens == second.user_cut
        second.hear(work)
        kept = [entry for entry in host if entry.origin.session == "a"]
        assert [(len(entry.tokens), entry.is_cut) for entry in kept] == [(first.user_cut, False)]
        work, _ = await turn(core, first, 6)
        assert work.cached_tokens == first.user_cut
        assert work.tokens[len(work.prompt) :] == model.follow(10, 14)
        await assert_counted(core)


async def test_a_damaged_state_of_a_cut_is_computed_again(tiny_model: Models) -> None:
    model = tiny_model("qwen35")
    async with running(model, **{**TIGHT, "checkpoints": 1}) as core:
        talks = await begun(core, 2)
        for entry in core.cache.host:
            if entry.is_cut:
                assert entry.state.part is not None
                object.__setattr__(entry, "state", replace(entry.state, part=entry.state.part[:-8]))
        work, cuts = await turn(core, talks[0], 7)
        assert work.cached_tokens == 0
    async with cold_engine(model) as answer:
        assert work.tokens[len(work.prompt) :] == await answer(work.prompt, 14, cuts)


async def test_a_state_in_host_memory_leaves_with_its_conversation(tiny_model: Models) -> None:
    model = tiny_model("qwen35")
    async with running(model, **{**TIGHT, "checkpoints": 1}) as core:
        talks = await begun(core, 2)
        cut = talks[0].user_cut

        def leave(cache: PrefixCache) -> Generator[None, None, tuple[tuple[int, ...], bool]]:
            slot = next(slot for slot in cache.slots if slot.sequence.origin.session == "s0")
            kept = next(e.state.part for e in cache.host if e.tokens == slot.sequence.tokens[:cut])
            assert core.codec is not None
            assert kept is not None
            departure = yield from depart(cache, core.codec, slot.index)
            buffer = np.zeros(kept.nbytes, dtype=np.uint8)
            taken = departure.take(core.codec, StatePiece("checkpoint", 0, cut, kept.nbytes), buffer)
            same = np.array_equal(core.codec.finished_part(taken, cut), kept)
            yield from departure.end()
            return tuple(length for length, _ in departure.look.checkpoints), same

        assert await core.perform(leave) == ((SYSTEM, cut), True)

        def hold(cache: PrefixCache) -> Generator[None, None, tuple[int, ...]]:
            slot = next(slot for slot in cache.slots if slot.sequence.origin.session == "s0")
            yield from ()
            return holding_of(cache, slot).cuts

        assert await core.perform(hold) == (SYSTEM, cut)


async def test_the_last_turn_taken_back_begins_where_the_one_before_was_asked(tiny_model: Models) -> None:
    model = tiny_model("qwen35", tie_free=True)
    async with running(model, **TIGHT) as core:
        talk = Talk("s", own=1)
        talk.begin()
        for number in range(3):
            said, before = list(talk.said), talk.user_cut
            work, _ = await turn(core, talk, number)
            talk.hear(work)
        talk.said = said
        again, _ = await turn(core, talk, 77)
        assert again.cached_tokens == before > SYSTEM


async def test_a_beginning_that_no_template_names_is_kept_when_the_second_prompt_has_it(tiny_model: Models) -> None:
    model = tiny_model("qwen35")
    shots = prompt_of(model, 200)[:-1]
    async with running(model, **TIGHT) as core:
        works = [await run(core, [*shots, 20 + i, *range(30 + i, 60), 10], cuts=[]) for i in range(3)]
        assert [work.cached_tokens for work in works] == [0, 0, 199]
    async with cold_engine(model) as answer:
        assert works[2].tokens[len(works[2].prompt) :] == await answer(works[2].prompt, 20, [199])


# --- at random --------------------------------------------------------------------------------------

LOOKING = SamplingParams(temperature=0, top_logprobs=5)
# Sequences beside one, and other cuts of what was computed before the reused state, move log probabilities by less; one other
# token far back moves them by more (test_prefix.py). In a mixture low bits may choose another expert, also where nothing ever
# leaves the context, so that only one with clear choices can tell.
ROUNDING = {"qwen35": 5e-3, "qwen35moe": 0.1}
CLEAR: dict[str, dict[str, Any]] = {"qwen35": {}, "qwen35moe": {"tie_free": True, "residual_scale": 0.25}}


@dataclass
class Answered:
    prompt: list[int]
    cuts: list[int]
    cached_tokens: int
    drawn: tuple[TokenLogprob, ...]


async def _asked(core: EngineCore, prompt: list[int], count: int, cuts: list[int], **fields: Any) -> Answered:
    work = generation(prompt, count, params=LOOKING, cuts=cuts, **fields)
    core.submit(work)
    last = await finished(work)
    assert last.error is None
    return Answered(prompt, sorted({*cuts, *work.cuts, work.cached_tokens} - {0}), work.cached_tokens, last.logprobs)


async def _one_after_another(core: EngineCore, rng: random.Random, count: int) -> list[Answered]:
    """Turns of conversations that begin, go on, take back and repeat their last turn, or are given up."""
    talks = [Talk(f"s{i}", own=None if i % 3 == 0 else i) for i in range(7)]
    seen = []
    for number in range(count):
        # At first some of them, so that they go on soon.
        talk = rng.choice(talks[: 2 + number // 4])
        if not talk.said or len(talk.said) > 500:
            talk.begin(rng.randrange(40, 100))
        said = list(talk.said)
        prompt, cuts = talk.ask(number)
        fields = {"session": talk.name, "system_cut": talk.system}
        if rng.random() < 0.15:
            await _given_up(core, generation(prompt, 200, cuts=cuts, **fields), early=rng.random() < 0.5)
            talk.said = said
            continue
        seen.append(await _asked(core, prompt, rng.randrange(2, 90), cuts, **fields))
        if rng.random() < 0.3:  # it is asked again, or otherwise
            talk.said = said
        else:
            answer = [one.token for one in seen[-1].drawn]
            talk.said += [5, *answer[len(answer) // 2 :], 6]
    return seen


async def _given_up(core: EngineCore, work: Generation, *, early: bool) -> None:
    core.submit(work)
    if not early:
        await work.mailbox.take(10)
    core.cancel(work)
    await asyncio.wait_for(_ended(core), 60)


def assert_same(seen: Sequence[TokenLogprob], cold: Sequence[TokenLogprob], rounding: float) -> None:
    """The same greedy text with the same log probabilities, up to where two tokens are as likely as each other."""
    for mine, expected in zip(seen, cold, strict=True):
        there = dict(expected.top)
        if mine.token != expected.token:
            assert abs(there[expected.token] - there.get(mine.token, float("-inf"))) < 4 * rounding
            return
        assert mine.logprob == pytest.approx(expected.logprob, abs=rounding)


@pytest.mark.parametrize("count", [8, pytest.param(400, marks=[pytest.mark.soak, pytest.mark.timeout(1800)])])
@pytest.mark.parametrize("architecture", ["qwen35", "qwen35moe"])
async def test_whatever_is_reused_answers_as_a_cold_run(tiny_model: Models, architecture: str, count: int) -> None:
    model = tiny_model(architecture, **CLEAR[architecture])
    settings = {**TIGHT, "slots": 3, "cache_tokens": 1100, "checkpoints": 3, "host_cache_bytes": 9_000_000}
    async with running(model, **settings) as core:
        seen = await _one_after_another(core, random.Random(count), count)
        await assert_counted(core)
    assert sum(one.cached_tokens > 0 for one in seen) > len(seen) // 2
    async with running(model, **COLD) as core:
        for one in seen:
            cold = await _asked(core, one.prompt, len(one.drawn), one.cuts, reuse_prefix=False)
            assert_same(one.drawn, cold.drawn, ROUNDING[architecture])
