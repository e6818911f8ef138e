"""Engines that die under streams: each stream goes on at another engine, and is the one that nothing had happened to."""

from __future__ import annotations

import asyncio
import re
import signal
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from engines.client import close_client_session
from engines.models import Engine
from pools.db import in_db
from sessions import failover
from sessions.errors import StreamUnknown
from sessions.identity import Owner
from sessions.kept_stream import KeptStream
from sessions.models import SlotLease, Turn
from sessions.relayed_request import lease_desk
from sessions.stream_desk import StreamDesk
from sessions.turn import wait_for_writes
from tests.paced_engine import PacedEngine
from tests.rows import add_engine, add_model, set_ready
from tests.sessions.loopback_engine import ENDING, frame, loopback_engine, streaming
from tests.sessions.stream_readers import Reader, call_of, me, said_in, until
from tests.synthetic_gguf import SyntheticModel

pytestmark = pytest.mark.django_db(transaction=True)
PATIENCE_S = 60.0
# The end is timed again where the former replica had not written it down yet.
TIMES = re.compile(rb'"timings":\{.*?\}')


@pytest.fixture
def engines(tiny_model: Callable[..., SyntheticModel], tmp_path: Path) -> Iterator[dict[str, PacedEngine]]:
    model = tiny_model("llama", tie_free=True, layers=6)
    with ExitStack() as stack:
        yield {
            name: stack.enter_context(PacedEngine(tmp_path, model.path, slots=8, context_tokens=2048))
            for name in ("cpu-0", "cpu-1")
        }


@pytest.fixture
async def pool(
    engines: dict[str, PacedEngine], tiny_model: Callable[..., SyntheticModel], tmp_path: Path
) -> AsyncIterator[dict[str, PacedEngine]]:
    def write() -> None:
        variant = add_model(tiny_model("llama", tie_free=True, layers=6).path, tmp_path)
        for name, engine in engines.items():
            row = add_engine(variant, name=name, slots=8)
            Engine.objects.filter(pk=row.pk).update(context_tokens=2048)
            set_ready(row, engine.config.port, engine.process.pid)

    await in_db(write)
    yield engines
    await wait_for_writes(10)
    await close_client_session()


@contextmanager
def slowed(pool: dict[str, PacedEngine]) -> Iterator[None]:
    with ExitStack() as stack:
        for engine in pool.values():
            stack.enter_context(engine.slowed())
        yield


@pytest.mark.parametrize("count", [7, pytest.param(20, marks=pytest.mark.soak)])
async def test_streams_do_not_see_their_engine_die(pool: dict[str, PacedEngine], count: int) -> None:
    readers = [Reader(number) for number in range(count)]
    async with asyncio.timeout(PATIENCE_S):
        running = [asyncio.create_task(reader.run()) for reader in readers]
        await asyncio.gather(*(reader.begun.wait() for reader in readers[:5]))
        homes = {reader.number: reader.answer.engine.name for reader in readers if reader.answer is not None}
        victim = next(iter(homes.values()))
        pool[victim].process.send_signal(signal.SIGKILL)
        await asyncio.gather(*running)
        alone = await asyncio.gather(*(Reader(number).run() for number in range(count)))
    for reader, undisturbed in zip(readers, alone, strict=True):
        assert reader.said == undisturbed.said, reader.number
    await wait_for_writes(10)
    await lease_desk().settled()
    assert await in_db(SlotLease.objects.count) == 0
    states = await in_db(lambda: list(Turn.objects.values_list("state", "engine__name").distinct()))
    assert set(states) <= {("done", "cpu-0"), ("done", "cpu-1")}
    (other,) = set(pool) - {victim}
    await asyncio.to_thread(pool[other].wait_idle)


@pytest.mark.soak
async def test_a_stream_waits_for_its_only_engine_to_come_back(
    pool: dict[str, PacedEngine], monkeypatch: pytest.MonkeyPatch
) -> None:
    await in_db(lambda: Engine.objects.filter(name="cpu-1").update(state="stopped", http_port=None))
    reader = Reader(0)
    async with asyncio.timeout(PATIENCE_S):
        with slowed(pool):
            running = asyncio.create_task(reader.run())
            await reader.begun.wait()
            pool["cpu-0"].process.kill()
        await asyncio.sleep(0.3)
        assert not running.done()

        def restarted() -> None:
            Engine.objects.filter(name="cpu-0").update(state="stopped", http_port=None)
            set_ready(Engine.objects.get(name="cpu-1"), pool["cpu-1"].config.port, pool["cpu-1"].process.pid)

        await in_db(restarted)
        await running
        assert reader.said == (await Reader(0).run()).said


@pytest.mark.soak
async def test_an_engine_that_stops_hands_its_streams_over(pool: dict[str, PacedEngine]) -> None:
    reader = Reader(1)
    async with asyncio.timeout(PATIENCE_S):
        with slowed(pool):
            running = asyncio.create_task(reader.run())
            await reader.begun.wait()
            assert reader.answer is not None
            pool[reader.answer.engine.name].process.terminate()
        await running
        assert reader.said == (await Reader(1).run()).said


async def test_a_request_that_kills_its_engines_does_not_kill_them_all(
    tiny_model: Callable[..., SyntheticModel], tmp_path: Path
) -> None:
    asked = []

    async def die(response: Any) -> None:
        asked.append(response._req.path)
        response._req.transport.abort()

    head = (
        b'event: hydra.begun\ndata: {"seed": 1}\n\n' + frame({"content": "Red"}) + b"event: hydra.mark\ndata: [1]\n\n"
    )
    lost = frame({"content": " never shown"})
    with ExitStack():
        async with (
            loopback_engine(streaming(head, lost, then=die)) as a,
            loopback_engine(streaming(then=die)) as b,
            loopback_engine(streaming(then=die)) as c,
            loopback_engine(streaming(then=die)) as d,
        ):

            def write() -> None:
                variant = add_model(tiny_model("llama").path, tmp_path)
                for number, port in enumerate((a, b, c, d)):
                    set_ready(add_engine(variant, name=f"cpu-{number}"), port)

            await in_db(write)
            reader = await Reader(0).run()
    assert [chunk["choices"][0]["delta"]["content"] for chunk in reader.said[:-1]] == ["Red"]
    assert "error" in reader.said[-1]
    assert len(asked) == 1 + failover.MOST_FAILOVERS
    assert asked[1:] == ["/continue"] * failover.MOST_FAILOVERS
    await wait_for_writes(10)
    await close_client_session()


async def test_a_stream_outlives_more_engines_that_are_stopped_than_may_be_lost(
    tiny_model: Callable[..., SyntheticModel], tmp_path: Path
) -> None:
    """As in an upgrade of all of them, one after the other."""
    head, mark = b'event: hydra.begun\ndata: {"seed": 1}\n\n', b"event: hydra.mark\ndata: [[0, 3, [1]]]\n\n"
    stopping = b'event: hydra.failed\ndata: {"code": "engine_stopping"}\n\ndata: {"error": {"message": "Bye."}}\n\n'
    closed = b'event: hydra.mark\ndata: [[0, 0, [], {"closed": true}]]\n\n'
    stops = failover.MOST_FAILOVERS + 1
    asked = 0

    async def answer(request: web.Request) -> web.StreamResponse:
        nonlocal asked
        asked += 1
        begun = head if asked == 1 else b""
        rest = ENDING + closed if asked > stops else stopping
        return await streaming(begun + frame({"content": "Red"}) + mark + rest)(request)

    async with loopback_engine(answer) as a, loopback_engine(answer) as b:

        def write() -> None:
            variant = add_model(tiny_model("llama").path, tmp_path)
            for number, port in enumerate((a, b)):
                set_ready(add_engine(variant, name=f"cpu-{number}"), port)

        await in_db(write)
        async with asyncio.timeout(PATIENCE_S):
            reader = await Reader(0).run()
        await wait_for_writes(10)
        await close_client_session()
    assert b"error" not in reader.text
    assert reader.text.count(b"Red") == asked == stops + 1


async def read(stream: KeptStream, start: int, until: int | None = None) -> list[bytes]:
    """Events of a kept stream from `start` on, to its end or as many as are wanted."""
    events: list[bytes] = []
    async for block in stream.read(start):
        events += [one + b"\n\n" for one in block.split(b"\n\n") if one and one[:1] != b":"]
        if until is not None and len(events) >= until:
            break
    return events[:until]


@pytest.mark.parametrize(
    "number", [1, pytest.param(0, marks=pytest.mark.soak), pytest.param(6, marks=pytest.mark.soak)]
)
async def test_another_replica_goes_on_with_a_kept_stream(pool: dict[str, PacedEngine], number: int) -> None:
    first, second, third = StreamDesk(), StreamDesk(), StreamDesk()
    owner, call, name = Owner(), call_of(number, 1000), f"replicated-{number}"
    async with asyncio.timeout(PATIENCE_S):
        alone = await read(await first.begin(call, me(90), "alone"), 0)
        with slowed(pool):
            begun = await first.begin(call, me(91), name)
            had = await read(begun, 0, 30)
            with pytest.raises(StreamUnknown):
                await second.found(Owner(api_key_id=7), str(begun.request_id))
            await until(lambda: begun.next_event > 60)
            await asyncio.sleep(0.2)
            taken = await second.found(owner, name)
        assert taken.request_id == begun.request_id
        rest = await read(taken, 30)
        # The former reader is told, and its engine is let go.
        *_, last = await read(begun, begun.next_event)
        await until(lambda: begun.state == "taken")
    assert b"stream_taken" in last
    assert said_in(had + rest) == said_in(alone)
    await wait_for_writes(10)
    turn = await in_db(lambda: Turn.objects.get(request_id=begun.request_id))
    assert (turn.state, turn.completion_tokens) == ("done", 1000)
    # What has ended can be read again, at any of them.
    again = await third.found(owner, str(begun.request_id))
    assert [TIMES.sub(b"", event) for event in await read(again, 0)] == [
        TIMES.sub(b"", event) for event in await read(taken, 0)
    ]
    await asyncio.gather(first.close(), second.close(), third.close())
