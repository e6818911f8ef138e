"""Requests of nobody's session (titles, tags, summaries) leave warm conversations where they are, and still always run."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from engines.runtime.core import EngineCore
from engines.runtime.generation import Generation
from engines.runtime.http_rates import sessions_held
from tests.engines.runtime.test_core import finished, generation, prompt_of, run, running
from tests.engines.runtime.test_prefix import made
from tests.synthetic_gguf import SyntheticModel

# Kinds of memory: one that is cut anywhere, one with recurrent state, one that forgets what lies behind its window.
KINDS = ("llama", "qwen35", "windowed")
FIRST, ANSWER = 100, 20


async def two_sessions(core: EngineCore, model: SyntheticModel) -> dict[str, Generation]:
    return {
        name: await run(core, prompt_of(model, FIRST, start=start), session=name) for start, name in enumerate("ab")
    }


async def ask_titles(core: EngineCore, model: SyntheticModel, count: int = 3) -> None:
    for start in range(count):
        await run(core, prompt_of(model, FIRST, start=start + 2))


async def next_turns(core: EngineCore, first: dict[str, Generation]) -> list[int]:
    """How many tokens of its first turn each conversation still finds, the most being FIRST + ANSWER - 1."""
    turns = [await run(core, [*work.tokens, 7, 8, 10], session=name) for name, work in first.items()]
    return [turn.cached_tokens for turn in turns]


@pytest.mark.parametrize("kind", KINDS)
async def test_titles_one_after_another_leave_two_warm_sessions_warm(
    tiny_model: Callable[..., SyntheticModel], kind: str
) -> None:
    model, settings = made(tiny_model, kind)
    async with running(model, slots=3, host_cache_bytes=0, **settings) as core:
        first = await two_sessions(core, model)
        await ask_titles(core, model)
        assert await next_turns(core, first) == [FIRST + ANSWER - 1] * 2


async def test_where_cells_are_short_a_title_goes_before_the_sessions(
    tiny_model: Callable[..., SyntheticModel],
) -> None:
    model = tiny_model("llama", tie_free=True)
    async with running(model, slots=5, context_tokens=256, cache_tokens=400, host_cache_bytes=0) as core:
        first = await two_sessions(core, model)
        await ask_titles(core, model)
        assert await next_turns(core, first) == [FIRST + ANSWER - 1] * 2


@pytest.mark.parametrize("kind", KINDS)
async def test_a_title_that_begins_like_a_session_does_not_take_its_slot(
    tiny_model: Callable[..., SyntheticModel], kind: str
) -> None:
    model, settings = made(tiny_model, kind)
    async with running(model, slots=3, host_cache_bytes=0, **settings) as core:
        first = await two_sessions(core, model)
        for work in first.values():
            await run(core, [*work.tokens, 3, 4, 10])
        assert sessions_held(core.cache) == dict.fromkeys("ab", FIRST + ANSWER - 1)
        # The title has computed the answer's last token too.
        assert min(await next_turns(core, first)) >= FIRST + ANSWER - 1


async def test_checkpoints_of_titles_go_before_those_of_sessions(tiny_model: Callable[..., SyntheticModel]) -> None:
    model = tiny_model("qwen35", tie_free=True)
    async with running(model, slots=5, checkpoints=3, host_cache_bytes=0) as core:
        for start, session in enumerate(("a", "b", "", "", "")):
            await run(core, prompt_of(model, FIRST, start=start), session=session, cuts=[60])
        assert sorted(checkpoint.sequence.origin.session for checkpoint in core.cache.checkpoints) == ["", "a", "b"]


async def test_titles_run_also_where_every_slot_is_a_sessions(tiny_model: Callable[..., SyntheticModel]) -> None:
    model = tiny_model("llama", tie_free=True)
    async with running(model, slots=2, host_cache_bytes=0) as core:
        first = await two_sessions(core, model)
        titles = [generation(prompt_of(model, FIRST, start=start + 2)) for start in range(3)]
        core.submit(titles[0])
        assert (await finished(titles[0])).error is None
        # The longest unused had to give way, and only that.
        assert list(sessions_held(core.cache)) == ["b"]
        core.submit(*titles[1:])
        for title in titles[1:]:
            assert (await finished(title)).error is None
        assert await next_turns(core, first) == [0, 0]


async def test_host_memory_gives_up_what_is_nobodys_first(tiny_model: Callable[..., SyntheticModel]) -> None:
    model = tiny_model("llama", tie_free=True)
    async with running(model, slots=1) as core:
        await run(core, prompt_of(model, FIRST, start=0), session="a")
        await run(core, prompt_of(model, FIRST, start=1), session="b")
        entry_bytes = core.cache.host.used_bytes
    async with running(model, slots=1, host_cache_bytes=int(3.5 * entry_bytes)) as core:
        first = await two_sessions(core, model)
        await ask_titles(core, model, 4)
        assert core.cache.host.evicted > 0
        assert await next_turns(core, first) == [FIRST + ANSWER - 1] * 2


async def test_of_idle_conversations_what_is_nobodys_is_put_away_first(
    tiny_model: Callable[..., SyntheticModel],
) -> None:
    model = tiny_model("llama", tie_free=True)
    async with running(model, slots=3, put_away_idle=True) as core:
        await run(core, prompt_of(model, FIRST, start=0), session="a")
        await run(core, prompt_of(model, FIRST, start=1))
        async with asyncio.timeout(60):
            while not len(core.cache.host):  # noqa: ASYNC110 - the core is another thread and sets no event for this
                await asyncio.sleep(0.01)
        assert [slot.sequence.origin.session for slot in core.cache.slots if len(slot.sequence)] == ["a"]
