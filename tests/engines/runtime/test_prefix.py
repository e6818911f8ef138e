"""What is reused must answer as if it had been computed: on models whose text depends on all of the context.

A cold run is cut at the same places and alone in its cache, since other shapes and neighbours give other low bits.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from engines.runtime.cells import CellLedger, common_prefix
from engines.runtime.core import EngineCore
from engines.runtime.generation import Generation
from engines.runtime.host_cache import MIN_TOKENS
from engines.runtime.sampler import SamplingParams
from tests.engines.runtime.test_core import finished, generation, prompt_of, run, running
from tests.synthetic_gguf import SyntheticModel

# "windowed" is gemma3 with layers that keep nothing but their window.
ARCHITECTURES = ("llama", "qwen3", "gemma3", "windowed", "qwen35", "qwen35moe")
CUTS_ANYWHERE = ("llama", "qwen3", "gemma3")
# A conversation's first prompt: a system prompt of 96 tokens, a user message, the answer's opening of 4 tokens.
SYSTEM, USER = 96, 176
FIRST = 180


def first_prompt(model: SyntheticModel) -> list[int]:
    return prompt_of(model, FIRST)


def made(tiny_model: Callable[..., SyntheticModel], architecture: str) -> tuple[SyntheticModel, dict[str, Any]]:
    """The model of an architecture, and the settings it is run with."""
    if architecture == "windowed":
        return tiny_model("gemma3"), {"full_window": False}
    return tiny_model(architecture), {}


async def cold(model: SyntheticModel, prompt: list[int], cuts: list[int], **settings: Any) -> list[int]:
    """The answer of an engine that has never seen anything."""
    async with running(model, slots=1, context_tokens=1024, **settings) as core:
        return (await run(core, prompt, cuts=cuts)).tokens


CASES = {
    # name: (second prompt from the first's tokens and answer, reusable in a dense model, reusable at a cut)
    "replay of the same prompt": (lambda p, a: p, FIRST - 1, USER),
    "a prompt that is a prefix of the cached one": (lambda p, a: p[:150], 149, SYSTEM),
    "an edited last turn": (lambda p, a: [*p[:120], 7, 8, 9, *range(60, 90), 10], 120, SYSTEM),
    "a template that drops old reasoning": (lambda p, a: [*p[:USER], 5, 6, *a[10:], 1, 2, 3, 10], USER, USER),
    "one more turn": (lambda p, a: [*p, *a[:-1], 5, 6, 10], FIRST + 19, FIRST + 19),
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("architecture", ARCHITECTURES)
async def test_a_second_prompt_reuses_what_it_can_and_answers_as_a_cold_run(
    tiny_model: Callable[..., SyntheticModel], architecture: str, case: str
) -> None:
    model, settings = made(tiny_model, architecture)
    second_prompt, dense_cached, cut_cached = CASES[case]
    # So long a preface that a window of 64 tokens has really forgotten it by the end.
    preface = prompt_of(model, 600, start=9) if architecture == "windowed" else []
    shift = len(preface)
    async with running(model, slots=1, context_tokens=1024, **settings) as core:
        first = await run(core, [*preface, *first_prompt(model)], cuts=[shift + SYSTEM, shift + USER])
        asked = first.tokens[shift : shift + FIRST]
        prompt = [*preface, *second_prompt(asked, first.tokens[shift + FIRST :])]
        second = await run(core, prompt)
    if architecture == "windowed":  # cuts its own slot too, as far back as its cells have not been needed again
        assert second.cached_tokens >= shift + cut_cached
    else:
        assert second.cached_tokens == (dense_cached if architecture in CUTS_ANYWHERE else cut_cached)
    # The cold run stops where the reused state ends, so that both decode the rest in the same batches.
    assert second.tokens == await cold(model, prompt, [second.cached_tokens], **settings)


@pytest.mark.parametrize("architecture", ["llama", "qwen35", "qwen35moe", "gemma3"])
async def test_eight_sessions_that_share_a_system_prompt_compute_it_once(
    tiny_model: Callable[..., SyntheticModel], architecture: str
) -> None:
    model = tiny_model(architecture, tie_free=True)
    system = prompt_of(model, 300)
    async with running(model, slots=8, context_tokens=512) as core:
        works = [generation([*system, 20 + i, 30 + i, 10], 30, cuts=[300]) for i in range(8)]
        core.submit(*works)
        for work in works:
            assert (await finished(work)).error is None
            assert work.tokens[303:] == model.follow(10, 30)
        assert sorted(work.cached_tokens for work in works) == [0] + [300] * 7
        assert core.metrics.prompt_tokens._value.get() == 300 + 8 * 3
        # The system prompt lies in the cache once, whoever holds it.
        assert core.cache.ledger.count - core.cache.ledger.free == 300 + 8 * (3 + 29)


async def test_a_fork_without_a_known_cut_is_computed_once_too(tiny_model: Callable[..., SyntheticModel]) -> None:
    """A hybrid's leader leaves a checkpoint where a waiting prompt branches off, though no template named the place."""
    model = tiny_model("qwen35", tie_free=True)
    system = prompt_of(model, 200)
    async with running(model, slots=4) as core:
        works = [generation([*system, 40 + i, 10], 10) for i in range(4)]
        core.submit(*works)
        for work in works:
            assert (await finished(work)).error is None
            assert work.tokens[202:] == model.follow(10, 10)
        assert sorted(work.cached_tokens for work in works) == [0, 200, 200, 200]


@pytest.mark.parametrize("architecture", CUTS_ANYWHERE)
async def test_a_busy_slot_lends_its_prefix_and_is_not_disturbed(
    tiny_model: Callable[..., SyntheticModel], architecture: str
) -> None:
    model = tiny_model(architecture)
    async with running(model, slots=2) as core:
        busy = generation(first_prompt(model), 200)
        core.submit(busy)
        await busy.mailbox.take(10)
        borrower = await run(core, [*busy.prompt[:150], 3, 10])
        assert borrower.cached_tokens == 150
        assert (await finished(busy)).error is None
        lent = busy.tokens
    assert lent[: FIRST + 1] == (await cold(model, first_prompt(model), []))[: FIRST + 1]


@pytest.mark.parametrize("architecture", ARCHITECTURES)
async def test_what_the_context_cannot_hold_comes_back_from_host_memory(
    tiny_model: Callable[..., SyntheticModel], architecture: str
) -> None:
    """Compared by log probabilities: a state that comes back lies in other cells, which changes low bits."""
    model, settings = made(tiny_model, architecture)
    looking = SamplingParams(temperature=0, top_logprobs=5)
    small = {"checkpoints": 1, "context_tokens": 300, "cache_tokens": 300, "kv_block_tokens": 64}
    async with running(model, slots=1, **small, **settings) as core:
        first = await run(core, first_prompt(model), cuts=[SYSTEM, USER])
        for start in (3, 4):  # others push it out
            await run(core, prompt_of(model, 200, start=start), cuts=[150])
        assert len(core.cache.host) > 0
        assert core.cache.host.used_bytes > 0
        # A state with windows comes back whole or not at all; only "windowed" left one at the cut.
        known_to = len(first.tokens) - 1 if architecture == "gemma3" else USER
        prompt = [*first.tokens[:known_to], 9, 9, 10]
        back = generation(prompt, 1, cuts=[USER], params=looking)
        core.submit(back)
        seen = (await finished(back)).logprobs[0]
    assert back.cached_tokens == known_to
    async with running(model, slots=1, context_tokens=1024, **settings) as core:
        known, other = (generation(p, 1, params=looking) for p in (prompt, [*prompt[:50], 99, *prompt[51:]]))
        core.submit(known, other)
        expected = (await finished(known)).logprobs[0]
        stranger = (await finished(other)).logprobs[0]
    both = dict(seen.top).keys() & dict(expected.top).keys()
    assert len(both) >= 4  # the fifth and sixth may change places
    for token in both:
        assert dict(seen.top)[token] == pytest.approx(dict(expected.top)[token], abs=2e-3)
    # One other token far back moves them by far more than that, so the tolerance can tell.
    assert abs(stranger.top[0][1] - expected.top[0][1]) > 1e-2


async def test_idle_conversations_leave_the_context_between_requests_and_come_back(
    tiny_model: Callable[..., SyntheticModel],
) -> None:
    model = tiny_model("llama", tie_free=True)
    async with running(model, slots=3, put_away_idle=True) as core:
        works = [await run(core, prompt_of(model, 150, start=start), cuts=[]) for start in (1, 2, 3)]
        async with asyncio.timeout(60):
            # Only the last used one still takes cells then that every step would have to walk.
            while core.cache.ledger.count - core.cache.ledger.free > len(works[-1].tokens) - 1:  # noqa: ASYNC110 - no event
                await asyncio.sleep(0.01)
        assert len(core.cache.host) == 2
        for work in works:
            again = await run(core, [*work.tokens, 10])
            assert again.cached_tokens == len(work.tokens) - 1
            assert again.tokens[len(again.prompt) :] == model.follow(10, 20)
    async with running(model, slots=3, put_away_idle=True, host_cache_bytes=1000) as core:
        works = [await run(core, prompt_of(model, 150, start=start)) for start in (1, 2, 3)]
        # There is no room for them outside, so they stay.
        assert [(await run(core, [*work.tokens, 10])).cached_tokens for work in works] == [169, 169, 169]


async def test_a_windowed_state_from_host_memory_is_not_cut_where_its_window_is_missing(
    tiny_model: Callable[..., SyntheticModel],
) -> None:
    model = tiny_model("gemma3")
    async with running(model, slots=1, context_tokens=300, cache_tokens=300) as core:
        first = await run(core, first_prompt(model))
        await run(core, prompt_of(model, 200, start=3))
        back = await run(core, [*first.tokens[:-1], 9, 10])
        assert back.cached_tokens == len(first.tokens) - 1
        # The window before this cut did not come back with the state, although the slot holds these tokens.
        cut = [*first.tokens[:USER], 9, 9, 10]
        edited = await run(core, cut)
        assert edited.cached_tokens == 0
    assert edited.tokens == await cold(model, cut, [])


async def test_host_memory_is_bounded_by_its_budget(tiny_model: Callable[..., SyntheticModel]) -> None:
    model = tiny_model("llama")
    budget = 300_000
    async with running(model, slots=1, host_cache_bytes=budget) as core:
        for start in range(1, 8):
            await run(core, prompt_of(model, 200, start=start))
            assert core.cache.host.used_bytes <= budget
        assert core.cache.host.evicted > 0
    async with running(model, slots=1, host_cache_bytes=0) as core:
        for start in range(1, 4):
            await run(core, prompt_of(model, 200, start=start))
        assert len(core.cache.host) == 0


async def test_a_damaged_host_state_is_computed_again(tiny_model: Callable[..., SyntheticModel]) -> None:
    for architecture in ("llama", "qwen35"):
        model = tiny_model(architecture)
        async with running(model, slots=1, checkpoints=0) as core:
            first = await run(core, first_prompt(model))
            await run(core, prompt_of(model, 200, start=5))
            entry, length = core.cache.host.best([*first.tokens, 1])
            assert entry is not None
            assert length >= MIN_TOKENS
            *blocks, last = entry.state.blocks
            last[len(last) // 2 :] = 0
            object.__setattr__(entry, "state", replace(entry.state, blocks=(*blocks, last[:-100])))
            prompt = [*first.tokens[:-1], 4, 10]
            again = await run(core, prompt)
            assert again.cached_tokens == 0
        assert again.tokens == await cold(model, prompt, [])


@pytest.mark.parametrize("architecture", ["qwen35", "qwen35moe"])
async def test_checkpoints_of_a_long_conversation_are_bounded_and_the_first_stays(
    tiny_model: Callable[..., SyntheticModel], architecture: str
) -> None:
    model = tiny_model(architecture, tie_free=True)
    async with running(model, slots=1, checkpoints=8, checkpoint_spacing_tokens=0) as core:
        tokens = prompt_of(model, 60)
        cuts = [50]
        for _ in range(6):
            work = await run(core, tokens, 10, cuts=list(cuts))
            tokens = [*work.tokens, *range(30, 50), 10]
            cuts.append(len(tokens) - 2)
        lengths = sorted(len(c.sequence) for c in core.cache.checkpoints if len(c.sequence))
        assert lengths[0] == 50
        assert len(lengths) <= 3


async def test_the_ledger_agrees_with_llama_after_everything(tiny_model: Callable[..., SyntheticModel]) -> None:
    """Cancels, forks, preemption and eviction: afterwards an empty cache has all its cells again."""
    for architecture in ("llama", "qwen35", "gemma3"):
        model = tiny_model(architecture, tie_free=True)
        async with running(model, slots=4, context_tokens=256, cache_tokens=400) as core:
            works = [generation(prompt_of(model, 60 + i, start=i % 3 + 1), 60, cuts=[40]) for i in range(12)]
            core.submit(*works)
            for work in works[::4]:
                core.cancel(work)
            for work in works:
                if not work.cancelled:
                    assert (await finished(work)).error is None
            for slot in core.cache.slots:
                await _cleared(core, slot.sequence.index)
            for checkpoint in core.cache.checkpoints:
                await _cleared(core, checkpoint.sequence.index)
            assert core.cache.make_room(400, at_once=True)
            assert core.cache.ledger.free == 400


async def _cleared(core: EngineCore, index: int) -> None:
    """Positions that llama.cpp knows are those that the bookkeeping knows."""
    sequences = {s.sequence.index: s.sequence for s in (*core.cache.slots, *core.cache.checkpoints)}
    async with asyncio.timeout(60):
        while core.cache.busy:  # noqa: ASYNC110 - the core is another thread and sets no event for this
            await asyncio.sleep(0.01)
    assert core.loaded.last_position(index) == len(sequences[index]) - 1


def test_the_ledger_counts_shared_cells_once() -> None:
    ledger = CellLedger(10)
    cells = np.array(ledger.take(4), dtype=np.int32)
    ledger.share(cells[:3])
    assert (ledger.free, ledger.held_alone(cells), ledger.distinct([cells, cells[:3]])) == (6, 1, 4)
    ledger.drop(cells)
    assert ledger.free == 7
    ledger.drop(cells[:3])
    assert ledger.free == 10
    with pytest.raises(ValueError, match="11 cells"):
        ledger.take(11)


@pytest.mark.parametrize(
    ("a", "b", "length"), [([], [1], 0), ([1, 2], [1, 2, 3], 2), ([1, 2, 9], [1, 2, 3], 2), ([5], [6], 0)]
)
def test_the_common_prefix_is_the_longest(a: list[int], b: list[int], length: int) -> None:
    assert common_prefix(a, b) == length


async def test_priority_then_fairness_then_arrival_decide_who_runs(tiny_model: Callable[..., SyntheticModel]) -> None:
    model = tiny_model("llama", tie_free=True)
    async with running(model, slots=2) as core:
        ended: list[str] = []

        async def follow(name: str, work: Generation) -> None:
            await finished(work)
            ended.append(name)

        works = {
            "a1": generation(prompt_of(model, 10), 150, owner="a"),
            "a2": generation(prompt_of(model, 11), 100, owner="a"),
            "a3": generation(prompt_of(model, 12), 60, owner="a"),
            "b1": generation(prompt_of(model, 13), 60, owner="b"),
            "late but urgent": generation(prompt_of(model, 14), 5, owner="a", priority=-1),
        }
        core.submit(works["a1"], works["a2"])
        await works["a2"].mailbox.take(10)
        core.submit(*list(works.values())[2:])
        async with asyncio.timeout(60):
            await asyncio.gather(*(follow(name, work) for name, work in works.items()))
        # a1 still runs when a2 ends: the urgent one takes its slot, then b, who runs nothing, then a's third.
        assert ended.index("late but urgent") < ended.index("b1") < ended.index("a3")
