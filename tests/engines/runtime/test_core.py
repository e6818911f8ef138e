"""The core alone, in this process, on tie-free models whose right answer is known token by token."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import pytest

from engines.config import EngineConfig
from engines.errors import DeadlineExceeded, DecodeFailed, EngineStopping, QueueFull
from engines.runtime.core import EngineCore
from engines.runtime.generation import Generation, Mailbox, Piece
from engines.runtime.metrics import EngineMetrics
from engines.runtime.sampler import SamplingParams
from tests.paced_engine import slow_steps
from tests.synthetic_gguf import SyntheticModel

GREEDY = SamplingParams(temperature=0)
ARCHITECTURES = ("llama", "qwen3", "gemma3", "qwen35", "qwen35moe")


@asynccontextmanager
async def running(model: SyntheticModel, **settings: Any) -> AsyncIterator[EngineCore]:
    values: dict[str, Any] = {"slots": 4, "context_tokens": 512, "batch_tokens": 32, "micro_batch_tokens": 32}
    values["checkpoint_min_tokens"] = 16  # measured, it would be beyond these prompts: the models are so small
    values["put_away_idle"] = False  # the tests look at what slots hold
    config = EngineConfig(model_path=str(model.path), model_name="tiny", **{**values, **settings})
    core = EngineCore(config, 1, asyncio.get_running_loop(), EngineMetrics())
    core.start()
    async with asyncio.timeout(120):
        while core.state == "loading":
            await core.changed.wait()
            core.changed.clear()
    assert core.state == "ready", core.failure
    try:
        yield core
    finally:
        core.stop()
        await asyncio.to_thread(core.join, 60)
        assert not core.is_alive()


def generation(prompt: list[int], count: int = 20, **fields: Any) -> Generation:
    values: dict[str, Any] = {"params": GREEDY, "stops": (), "deadline_at": time.monotonic() + 60}
    return Generation("r", prompt, max_new_tokens=count, mailbox=Mailbox(), **{**values, **fields})


async def finished(work: Generation) -> Piece:
    """The last piece, with the whole text and all log probabilities in it."""
    text, logprobs = "", ()
    async with asyncio.timeout(60):
        while True:
            for piece in await work.mailbox.take(1.0):
                text, logprobs = text + piece.text, (*logprobs, *piece.logprobs)
                if piece.is_last:
                    return replace(piece, text=text, logprobs=logprobs)


async def run(core: EngineCore, prompt: list[int], count: int = 20, **fields: Any) -> Generation:
    work = generation(prompt, count, **fields)
    core.submit(work)
    last = await finished(work)
    assert last.error is None
    return work


def prompt_of(model: SyntheticModel, length: int, start: int = 1) -> list[int]:
    """`length` tokens that are no walk of the model, so that a wrong position shows in random-weight models too."""
    return [(start * 31 + i * 7) % 250 for i in range(length - 1)] + [10]


@pytest.mark.parametrize("architecture", ARCHITECTURES)
async def test_greedy_answers_are_right_alone_and_in_company(
    tiny_model: Callable[..., SyntheticModel], architecture: str
) -> None:
    model = tiny_model(architecture, tie_free=True)
    async with running(model) as core:
        works = [generation(prompt_of(model, 5 + 17 * i, start=i + 1), 30) for i in range(7)]
        for work in works:
            core.submit(work)
        for work in works:
            last = await finished(work)
            assert last.finish_reason == "length"
            assert work.tokens[len(work.prompt) :] == model.follow(work.prompt[-1], 30)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
async def test_an_extended_prompt_is_not_computed_again(
    tiny_model: Callable[..., SyntheticModel], architecture: str
) -> None:
    model = tiny_model(architecture, tie_free=True)
    async with running(model) as core:
        first = await run(core, prompt_of(model, 100))
        second = await run(core, [*first.tokens, 5, 6, 7])
        assert second.cached_tokens == 119
        assert second.tokens[len(second.prompt) :] == model.follow(7, 20)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
async def test_a_repeated_or_shortened_prompt_answers_as_the_first_time(
    tiny_model: Callable[..., SyntheticModel], architecture: str
) -> None:
    model = tiny_model(architecture, tie_free=True)
    async with running(model, slots=1) as core:
        prompt = prompt_of(model, 100)
        await run(core, prompt)
        again = await run(core, prompt)
        shorter = await run(core, prompt[:70])
        assert again.tokens[100:] == model.follow(10, 20)
        assert shorter.tokens[70:] == model.follow(prompt[69], 20)
        if architecture in ("llama", "qwen3"):
            assert (again.cached_tokens, shorter.cached_tokens) == (99, 69)


async def test_reuse_behind_a_sliding_window_gives_the_same_text_as_computing(
    tiny_model: Callable[..., SyntheticModel],
) -> None:
    # Plain random weights: the text depends on everything in the window, so a hole in it shows.
    model = tiny_model("gemma3", window_tokens=32)
    prompt = prompt_of(model, 200)
    async with running(model, slots=1) as core:
        await run(core, prompt, 60)
        edited = await run(core, [*prompt[:120], 3, 4, 10])
        cold = await run(core, [*prompt[:120], 3, 4, 10], reuse_prefix=False)
        assert edited.tokens == cold.tokens


async def test_a_hybrid_never_reuses_a_prefix_it_cannot_cut(tiny_model: Callable[..., SyntheticModel]) -> None:
    model = tiny_model("qwen35")
    prompt = prompt_of(model, 80)
    async with running(model, slots=1) as core:
        await run(core, prompt)
        edited = await run(core, [*prompt[:60], 3, 10])
        cold = await run(core, [*prompt[:60], 3, 10], reuse_prefix=False)
        assert edited.cached_tokens == 0
        assert edited.tokens == cold.tokens


async def test_a_short_shared_beginning_does_not_cost_another_conversation_its_cache(
    tiny_model: Callable[..., SyntheticModel],
) -> None:
    model = tiny_model("llama", tie_free=True)
    async with running(model, slots=2) as core:
        first = await run(core, prompt_of(model, 200))
        await run(core, [*first.prompt[:10], 77, 78, 10])
        back = await run(core, [*first.tokens, 10])
        assert back.cached_tokens == 219


async def test_a_full_cache_makes_the_youngest_give_way_and_no_text_is_lost(
    tiny_model: Callable[..., SyntheticModel],
) -> None:
    model = tiny_model("llama", tie_free=True)
    async with running(model, slots=4, context_tokens=200, cache_tokens=220) as core:
        works = [generation(prompt_of(model, 40, start=i + 1), 140) for i in range(4)]
        for work in works:
            core.submit(work)
        for work in works:
            last = await finished(work)
            assert last.error is None
            assert work.tokens[40:] == model.follow(10, 140)
            # What is computed again later is no part of the prompt's time.
            assert last.stats is not None
            assert last.stats.prompt_wait_s <= last.stats.prompt_s
        assert sum(work.preemptions for work in works) > 0
        assert works[0].preemptions == 0


async def test_a_request_that_llama_refuses_ends_alone(tiny_model: Callable[..., SyntheticModel]) -> None:
    model = tiny_model("llama", tie_free=True)
    async with running(model) as core:
        good = generation(prompt_of(model, 40), 200)
        bad = generation([*prompt_of(model, 10), model.vocab + 5])
        core.submit(good)
        core.submit(bad)
        assert isinstance((await finished(bad)).error, DecodeFailed)
        assert (await finished(good)).finish_reason == "length"
        assert good.tokens[40:] == model.follow(10, 200)
        assert (await run(core, prompt_of(model, 10))).tokens[10:] == model.follow(10, 20)


async def test_a_cancelled_generation_frees_its_slot_and_says_nothing_more(
    tiny_model: Callable[..., SyntheticModel],
) -> None:
    model = tiny_model("llama", tie_free=True)
    async with running(model, slots=1, queue_limit=2) as core:
        running_one, waiting_one = generation(prompt_of(model, 10), 400), generation(prompt_of(model, 10), 400)
        with slow_steps():
            core.submit(running_one)
            await running_one.mailbox.take(10)
            core.submit(waiting_one)
            core.cancel(waiting_one)
            core.cancel(running_one)
        after = await run(core, prompt_of(model, 12))
        assert after.tokens[12:] == model.follow(10, 20)
        assert await waiting_one.mailbox.take(0.05) == []
        assert not any(piece.is_last for piece in await running_one.mailbox.take(0.05))
        text = core.metrics.text().decode()
        assert 'hydra_engine_requests_total{outcome="cancelled"} 2.0' in text


async def test_the_waiting_line_is_bounded_and_served_in_order(tiny_model: Callable[..., SyntheticModel]) -> None:
    model = tiny_model("llama", tie_free=True)
    async with running(model, slots=1, queue_limit=1) as core:
        first = generation(prompt_of(model, 10), 300)
        with slow_steps():
            core.submit(first)
            await first.mailbox.take(10)
            second = generation(prompt_of(model, 11), 10)
            core.submit(second)
            with pytest.raises(QueueFull) as full:
                core.submit(generation(prompt_of(model, 12)))
        assert (full.value.http_status, full.value.retry_after_s) == (429, 2)
        assert (await finished(first)).finish_reason == "length"
        assert (await finished(second)).finish_reason == "length"


async def test_a_deadline_ends_who_waits_and_who_runs(tiny_model: Callable[..., SyntheticModel]) -> None:
    model = tiny_model("llama", tie_free=True)
    async with running(model, slots=1) as core:
        soon = time.monotonic() + 0.02
        runs = generation(prompt_of(model, 400), 100, deadline_at=soon)
        waits = generation(prompt_of(model, 10), deadline_at=soon)
        with slow_steps():
            core.submit(runs)
            core.submit(waits)
            for work in (runs, waits):
                error = (await finished(work)).error
                assert isinstance(error, DeadlineExceeded)
                assert error.http_status == 504


async def test_a_long_prompt_does_not_hold_up_others(tiny_model: Callable[..., SyntheticModel]) -> None:
    """Order, not time: the short request behind a long prompt ends before that prompt's first token."""
    for architecture in ("llama", "qwen35"):
        model = tiny_model(architecture, tie_free=True)
        async with running(model, context_tokens=4096, cache_tokens=8192) as core:
            long, short = generation(prompt_of(model, 4000), 5), generation(prompt_of(model, 10), 5)
            core.submit(long)
            core.submit(short)
            await finished(short)
            assert long.first_token_at is None
            assert (await finished(long)).error is None


async def test_stopping_ends_everybody_with_a_word(tiny_model: Callable[..., SyntheticModel]) -> None:
    model = tiny_model("llama", tie_free=True)
    async with running(model, slots=1) as core:
        works = [generation(prompt_of(model, 300), 100) for _ in range(3)]
        for work in works:
            core.submit(work)
        core.stop()
        for work in works:
            assert isinstance((await finished(work)).error, EngineStopping)
        with pytest.raises(EngineStopping):
            core.submit(generation(prompt_of(model, 10)))


async def test_a_shorter_wait_is_not_held_up_by_a_longer_ones_timer() -> None:
    mailbox = Mailbox()
    mailbox.put(Piece(text="x"))
    waiting = asyncio.create_task(mailbox.take(30))
    assert [piece.text for piece in await waiting] == ["x"]
    long = asyncio.create_task(mailbox.take(30))
    await asyncio.sleep(0.01)
    mailbox.put(Piece(text="y"))
    assert [piece.text for piece in await long] == ["y"]
    async with asyncio.timeout(5):
        assert await mailbox.take(0.02) == []
