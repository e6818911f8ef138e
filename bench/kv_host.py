"""What a stream feels while another conversation goes to host memory and comes back: `python -m bench kv-host`.

A made-up state lies in one of two slots, a stream decodes in the other. A short request takes the state's slot, then the
conversation's next turn wants it back. The last line has the stream's longest gap and its 99th percentile meanwhile over those
without, and how long both requests waited for their first token.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import time
from collections.abc import Generator
from dataclasses import replace

import uvloop

from bench.errors import BenchError
from bench.kv import NEIGHBOUR_TOKENS, engine
from bench.kv_forge import forge
from bench.measures import percentile
from bench.servers import model_path
from engines.config import EngineConfig
from engines.runtime.core import EngineCore
from engines.runtime.generation import Generation, Mailbox
from engines.runtime.prefix import PrefixCache
from engines.runtime.sampler import SamplingParams

MB = 1_000_000


async def measured(model: str, state_mb: int, threads: int, rounds: int) -> dict[str, float]:
    config = EngineConfig(
        str(model_path(model)), "bench", slots=2, threads=threads, put_away_idle=False, log_level="WARNING",
        speculation="none",
    )  # fmt: skip
    async with engine(replace(config, context_tokens=512)) as (core, _):
        assert core.codec is not None
        tokens = state_mb * MB // core.codec.layout.attention.token_bytes
    cells = tokens + 4 * NEIGHBOUR_TOKENS + 1024
    config = replace(config, context_tokens=tokens + 512, cache_tokens=cells, host_cache_bytes=2 * state_mb * MB)
    alone: list[float] = []
    beside: list[float] = []
    waits: dict[str, list[float]] = {"newcomer_s": [], "return_s": []}
    async with engine(config) as (core, _):
        for number in range(rounds):
            await forge(core, tokens)
            held: list[int] = await core.perform(_held)
            alone += await _stream(core)
            gaps = asyncio.ensure_future(_stream(core))
            await asyncio.sleep(0.05)
            waits["newcomer_s"].append(await _first_token(core, [11 + number, 9, 9], 0))
            waits["return_s"].append(await _first_token(core, [*held, 5], tokens - 512))
            beside += await gaps
            await core.perform(_emptied)
    best = {name: min(seconds) for name, seconds in waits.items()}
    worst = {"gap_max_ms": max(beside) * 1e3, "alone_max_ms": max(alone) * 1e3, "step_ms": percentile(alone, 0.5) * 1e3}
    ratios = {"max_ratio": max(beside) / max(alone), "p99_ratio": percentile(beside, 0.99) / percentile(alone, 0.99)}
    return {**ratios, **worst, **best, "tokens": tokens}


def _held(cache: PrefixCache) -> Generator[None, None, list[int]]:
    yield from ()
    return list(cache.slots[0].sequence.tokens)


def _emptied(cache: PrefixCache) -> Generator[None, None, None]:
    """The next round's state is a new one."""
    while not all(slot.idle for slot in cache.slots):
        yield
    for slot in cache.slots:
        slot.sequence.clear()
    for entry in cache.host:
        cache.host.forget(entry)


def _generation(core: EngineCore, prompt: list[int], count: int, *, reuse: bool) -> Generation:
    assert core.llama is not None
    never = tuple((token, float("-inf")) for token in core.llama.vocabulary.end_tokens)
    params = SamplingParams(temperature=0, logit_bias=never)
    return Generation("bench", prompt, params, (), count, Mailbox(), time.monotonic() + 600, reuse_prefix=reuse)


async def _stream(core: EngineCore) -> list[float]:
    """Seconds between a stream's tokens."""
    stream = _generation(core, [5, 6, 7], 3 * NEIGHBOUR_TOKENS, reuse=False)
    core.submit(stream)
    arrivals: list[float] = []
    while True:
        for piece in await stream.mailbox.take(60):
            if piece.error is not None:
                raise BenchError(f"the stream failed: {piece.error}")
            arrivals.append(time.perf_counter())
            if piece.is_last:
                return [later - earlier for earlier, later in itertools.pairwise(arrivals)]


async def _first_token(core: EngineCore, prompt: list[int], least_cached: int) -> float:
    request = _generation(core, prompt, 1, reuse=True)
    began = time.perf_counter()
    core.submit(request)
    while True:
        for piece in await request.mailbox.take(60):
            if piece.error is not None:
                raise BenchError(f"a request failed: {piece.error}")
            if piece.is_last:
                if request.cached_tokens < least_cached:
                    raise BenchError(f"only {request.cached_tokens} tokens of the conversation came back")
                return time.perf_counter() - began


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", default="synthetic:kv", help="smollm2, synthetic:NAME or a path")
    parser.add_argument("--state-mb", type=int, default=256, help="about how large the conversation's state is")
    parser.add_argument("--threads", type=int, default=1, help="compute threads of the engine")
    parser.add_argument("--rounds", type=int, default=3)


def run(options: argparse.Namespace) -> dict[str, float]:
    found = uvloop.run(measured(options.model, options.state_mb, options.threads, options.rounds))
    return {name: round(value, 3) for name, value in found.items()}
