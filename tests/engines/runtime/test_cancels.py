"""Requests that end at every stage, by hundreds: no slot leaked, memory flat, the last answer still right."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Callable
from pathlib import Path

import aiohttp
import psutil
import pytest

from tests.engine_process import EngineProcess
from tests.synthetic_gguf import SyntheticModel

# Growth that allocators and caches may show; a leaked generation of these prompts would cost more within the first hundred.
ALLOWED_GROWTH_BYTES = 48 << 20


@pytest.mark.parametrize("count", [60, pytest.param(500, marks=pytest.mark.soak)])
@pytest.mark.parametrize("architecture", ["llama", "qwen35"])
async def test_random_cancels_leave_nothing_behind(
    tiny_model: Callable[..., SyntheticModel], tmp_path: Path, architecture: str, count: int
) -> None:
    model = tiny_model(architecture, tie_free=True)
    settings = {"slots": 4, "context_tokens": 1024, "queue_limit": 200, "host_cache_bytes": 8 << 20}
    with EngineProcess(tmp_path, model.path, checkpoint_min_tokens=16, **settings) as engine:
        process = psutil.Process(engine.process.pid)
        rng = random.Random(count)
        async with aiohttp.ClientSession(engine.base_url, timeout=aiohttp.ClientTimeout(total=120)) as session:
            await _burst(session, rng, 40)  # fills caches, so that what grows afterwards is a leak
            before_bytes = process.memory_info().rss
            for _ in range(count // 20):
                await _burst(session, rng, 20)
        engine.wait_idle()
        grown_bytes = process.memory_info().rss - before_bytes
        assert grown_bytes < ALLOWED_GROWTH_BYTES
        body = {"messages": [{"role": "user", "content": "Still there?"}], "max_tokens": 20, "temperature": 0}
        async with (
            aiohttp.ClientSession() as session,
            session.post(engine.base_url + "/v1/chat/completions", json=body) as answer,
        ):
            text = (await answer.json())["choices"][0]["message"]["content"]
        assert text.encode() == model.answer_bytes(20)
        metrics = engine.text("/metrics")
        assert "llamacpp:requests_processing 0.0" in metrics
        assert "llamacpp:requests_deferred 0.0" in metrics


async def _burst(session: aiohttp.ClientSession, rng: random.Random, count: int) -> None:
    """`count` requests at once, each dropped while it waits, fills, decodes, or not at all."""
    await asyncio.gather(
        *(_one(session, rng.random(), rng.randrange(1, 40), rng.choice((True, False))) for _ in range(count))
    )


async def _one(session: aiohttp.ClientSession, stage: float, words: int, stream: bool) -> None:
    content = f"{words} " + "word " * (words * 4)
    body = {"messages": [{"role": "user", "content": content}], "max_tokens": 40, "stream": stream, "temperature": 0}
    try:
        async with asyncio.timeout(0.4 * stage if stage < 0.7 else None):
            async with session.post("/v1/chat/completions", data=json.dumps(body)) as answer:
                assert answer.status == 200
                await answer.read()
    except TimeoutError:
        return
