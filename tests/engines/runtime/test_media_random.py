"""Conversations with images and without, at random: shared, cut, put away, given up, cancelled; the text stays right."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from engines.runtime.core import EngineCore
from engines.runtime.media_prompt import MediaPrompt
from tests.engines.runtime.test_core import finished
from tests.engines.runtime.test_media_core import (
    answer,
    asked,
    assert_nothing_leaked,
    question,
    seeing,
    until_idle,
    work_of,
)
from tests.engines.runtime.test_media_projector import image
from tests.synthetic_gguf import SyntheticModel

SMALL = {"batch_tokens": 16, "micro_batch_tokens": 16, "context_tokens": 512, "cache_tokens": 700}
# name: model, its options, the engine's settings
CASES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "hybrid": ("qwen35", {}, {"slots": 4, "host_cache_bytes": 4 << 20, **SMALL}),
    "hybrid with drafts": ("qwen35", {"nextn": True}, {"slots": 3, "speculation": "mtp"}),
    "dense": ("gemma3", {"window_tokens": 32}, {"slots": 4, **SMALL}),
    "windowed": ("gemma3", {"window_tokens": 32}, {"slots": 3, "full_window": False}),
}


def some_prompt(core: EngineCore, rng: random.Random) -> MediaPrompt:
    pieces = [
        image(rng.randrange(32, 200), rng.randrange(32, 200), rng.randrange(4))
        if rng.random() < 0.6
        else "word " * rng.randrange(1, 12)
        for _ in range(rng.randrange(1, 5))
    ]
    return asked(core, *question(*pieces, f" number {rng.randrange(3)}"))


async def one_after_another(
    core: EngineCore, model: SyntheticModel, prompts: list[MediaPrompt], rng: random.Random, count: int
) -> int:
    """Asks `count` times, leaving at times; returns how often something was reused."""
    reused = 0
    for _ in range(count):
        prompt = rng.choice(prompts)
        if rng.random() < 0.4:
            more = [rng.randrange(3, 250) for _ in range(rng.randrange(1, 20))]
            prompt = MediaPrompt([*prompt.tokens, *more, 10], prompt.spans, prompt.ends)
        cuts = {prompt.spans.whole(rng.randrange(16, len(prompt.tokens))) for _ in range(2)}
        work = work_of(prompt, rng.randrange(1, 60), cuts=sorted(cuts), draft_min=rng.choice([0, 2]))
        core.submit(work)
        if rng.random() < 0.3:
            await asyncio.sleep(rng.random() * 0.05)
            core.cancel(work)
            continue
        assert (await finished(work)).error is None
        assert answer(work) == model.follow(work.prompt[-1], len(answer(work)))
        reused += work.cached_tokens > 0
    return reused


@pytest.mark.parametrize("count", [8, pytest.param(200, marks=pytest.mark.soak)])
@pytest.mark.parametrize("case", CASES)
async def test_whatever_happens_the_text_is_right_and_nothing_leaks(
    tiny_model: Callable[..., SyntheticModel], projectors: Path, case: str, count: int
) -> None:
    kind, options, settings = CASES[case]
    model, rng = tiny_model(kind, tie_free=True, **options), random.Random(count)
    async with seeing(model, projectors / f"{kind}.gguf", **settings) as core:
        prompts = [prompt for prompt in (some_prompt(core, rng) for _ in range(8)) if len(prompt.tokens) < 400]
        asking = (one_after_another(core, model, prompts, random.Random(seed), count) for seed in range(5))
        assert sum(await asyncio.gather(*asking)) > 0
        await core.perform(until_idle)
        assert_nothing_leaked(core)
