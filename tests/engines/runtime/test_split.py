"""One engine computes a prompt and another writes its answer: two engine processes, the same text as one alone writes."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import ExitStack
from typing import Any

import aiohttp
import pytest

from engines.errors import EngineError, RpcRefused
from engines.rpc_handoff import HandoffClient
from engines.wire_handoff import HandoffAnswer, HandoffBody
from tests.engines.runtime.handoff_pair import SECRET, Follower, body, engine_of, stayed
from tests.paced_engine import PacedEngine
from tests.synthetic_gguf import SyntheticModel

# The site's own test of a split (tests/sessions/test_split.py) is in every run.
pytestmark = pytest.mark.soak
Pair = tuple[PacedEngine, PacedEngine]
# Pieces of prompts that are small enough for a tiny model to be busy for a while.
SLOW, SLOWER = ({"batch_tokens": count, "micro_batch_tokens": count} for count in (64, 32))
LONG = "Tell a story about a river that nobody has crossed. " * 60
COUNT = 400


@pytest.fixture(scope="module")
def pair(
    tiny_model: Callable[..., SyntheticModel], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Callable[..., Pair]]:
    """`pair(architecture)`: a fast and a slow engine of one model, or of two quants of a family."""
    made: dict[tuple[str, bool], Pair] = {}
    folder = tmp_path_factory.mktemp("split")
    with ExitStack() as stack:

        def make(architecture: str, *, mixed: bool = False) -> Pair:
            if (architecture, mixed) not in made:
                drafts = architecture == "qwen35moe"
                options: dict[str, Any] = {"nextn": True} if drafts else {}
                settings: dict[str, Any] = {"speculation": "mtp", "draft_tokens": 3} if drafts else {}
                settings |= {"kv_family": "tiny"} if mixed else {}
                # Another quant's weights are near, and the text is the same.
                scales = (0.05, 0.04 if mixed else 0.05)
                models = [tiny_model(architecture, tie_free=True, residual_scale=scale, **options) for scale in scales]
                first = stack.enter_context(engine_of(folder, models[0], **settings, **SLOW))
                second = stack.enter_context(engine_of(folder, models[1], **settings, **SLOWER))
                made[architecture, mixed] = first, second
            return made[architecture, mixed]

        yield make


@pytest.fixture
def session(request: pytest.FixtureRequest) -> str:
    return re.sub(r"[^A-Za-z0-9_.:-]", ".", request.node.name)[:50]


@pytest.fixture
async def web() -> AsyncIterator[aiohttp.ClientSession]:
    async with aiohttp.ClientSession() as session:
        yield session


async def handed_over(session: str, engines: Pair, request_id: str) -> HandoffAnswer:
    source, target = (engine.config.rpc_port for engine in engines)
    asked = HandoffBody(
        f"h1.{session}", 1, session, "127.0.0.1", target, SECRET, deadline_s=30.0, request_id=request_id
    )
    async with HandoffClient("127.0.0.1", source, secret=SECRET) as client:
        return await client.handoff(asked)


async def split(
    web: aiohttp.ClientSession, session: str, engines: Pair, request: dict[str, Any]
) -> tuple[Follower, HandoffAnswer]:
    """As a site does it: the request and the move go out at once. No answer is over before its prompt has left."""
    follower = Follower(web, session, request, f"id-{session}")
    with engines[0].slowed():
        reading = asyncio.ensure_future(follower.read(engines[0], {1: engines[1]}))
        told = await handed_over(session, engines, f"id-{session}")
    await reading
    return follower, told


@pytest.mark.parametrize("architecture", ["llama", "qwen35", "qwen35moe"])
async def test_the_answer_is_that_of_one_engine_and_the_state_left_while_the_prompt_was_computed(
    pair: Callable[..., Pair], web: aiohttp.ClientSession, session: str, architecture: str
) -> None:
    engines = pair(architecture)
    request = body(LONG, COUNT)
    follower, told = await split(web, session, engines, request)
    alone = await stayed(web, engines[0], {**request, "cache_prompt": False})
    assert follower.moves == [f"h1.{session}"]
    assert (follower.text, follower.finish_reasons) == (alone.text, ["length"])
    assert follower.usage["completion_tokens"] == COUNT
    assert told.kind == "live"
    assert 0 < told.hidden_bytes <= told.sent_bytes
    for engine in engines:
        await asyncio.to_thread(engine.wait_idle)
    held = [engine.get("/rates")["sessions"].get(session, 0) for engine in engines]
    assert held[0] == 0
    assert held[1] >= told.tokens


async def test_another_quant_of_the_family_goes_on_with_the_state(
    pair: Callable[..., Pair], web: aiohttp.ClientSession, session: str
) -> None:
    engines = pair("qwen35", mixed=True)
    request = body(LONG, COUNT)
    follower, told = await split(web, session, engines, request)
    alone = await stayed(web, engines[1], {**request, "cache_prompt": False})
    assert (follower.text, follower.moves) == (alone.text, [f"h1.{session}"])
    assert told.hidden_bytes > 0


async def test_a_request_that_never_comes_holds_nothing(pair: Callable[..., Pair], session: str) -> None:
    engines = pair("qwen35moe")
    async with asyncio.timeout(20):
        with pytest.raises(RpcRefused) as refused:
            await handed_over(session, engines, "nobody")
    assert refused.value.peer_code == "session_not_held"
    assert all(not slot["is_processing"] for engine in engines for slot in engine.get("/slots"))


@pytest.mark.parametrize("lost", [0, 1])
async def test_an_engine_that_dies_while_the_prompt_is_computed_leaves_the_other_one_whole(
    tiny_model: Callable[..., SyntheticModel],
    tmp_path_factory: pytest.TempPathFactory,
    web: aiohttp.ClientSession,
    session: str,
    lost: int,
) -> None:
    folder, model = tmp_path_factory.mktemp("dying"), tiny_model("llama", tie_free=True, layers=12)
    with engine_of(folder, model, **SLOW) as first, engine_of(folder, model, **SLOW) as second:
        engines = first, second
        request = body(LONG, 40)
        follower = Follower(web, session, request, "id")
        with first.slowed():
            reading = asyncio.ensure_future(follower.read(first, {1: second}))
            moving = asyncio.ensure_future(handed_over(session, engines, "id"))
            async with asyncio.timeout(30):
                while not any(  # noqa: ASYNC110
                    slot["state"] != "idle" for slot in await asyncio.to_thread(second.get, "/slots")
                ):
                    await asyncio.sleep(0.01)
            engines[lost].process.kill()
            with pytest.raises(EngineError):
                await moving
        if lost == 1:
            await reading
            assert (follower.moves, follower.finish_reasons) == ([], ["length"])
            assert follower.text == (await stayed(web, first, request)).text
        else:
            with pytest.raises(aiohttp.ClientError):
                await reading
        left = engines[1 - lost]
        await asyncio.to_thread(left.wait_idle)
        assert (await stayed(web, left, request)).finish_reasons == ["length"]
