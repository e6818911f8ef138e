"""Where kept streams are: their bounds, their names, and those that another replica had."""

from __future__ import annotations

import asyncio
import json
import time
import uuid
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest
from aiohttp import web

from engines.client import close_client_session
from engines.errors import NoEngineReady
from engines.models import Engine
from pools.db import in_db
from sessions import kept_stream
from sessions.dialects import CHAT
from sessions.engine_call import EngineCall
from sessions.errors import StreamStopped, StreamUnknown, TooManyStreams
from sessions.models import Turn
from sessions.stream_desk import StreamBounds, StreamDesk
from sessions.stream_journal import StreamJournal
from sessions.stream_shelf import Ended, Shelved, StreamShelf
from sessions.turn import wait_for_writes
from tests.rows import add_engine, add_model, set_ready
from tests.sessions.counting_engine import (
    CALL,
    ME,
    PATIENCE_S,
    YOU,
    CountingEngine,
    counting_engine,
    is_over,
    until,
    words,
)
from tests.sessions.loopback_engine import loopback_engine, streaming
from tests.synthetic_gguf import SyntheticModel

pytestmark = pytest.mark.django_db(transaction=True)


@pytest.fixture
async def counting(tiny_model: Callable[..., SyntheticModel], tmp_path: Path) -> AsyncIterator[CountingEngine]:
    async with counting_engine(tiny_model("llama"), tmp_path) as counting:
        yield counting


async def test_a_new_turn_ends_the_old_one_of_its_conversation(counting: CountingEngine) -> None:
    desk = StreamDesk()
    old = await desk.begin(CALL, ME, "mine")
    new = await desk.begin(CALL, ME, "mine")
    assert (old.state, new.state) == ("stopped", "running")
    assert desk.find("open", "mine") is new
    assert desk.find("open", str(old.request_id)) is old
    strangers = await desk.begin(CALL, YOU, "mine")
    assert (new.state, strangers.state) == ("running", "running")
    await desk.close()


async def test_an_ended_stream_is_forgotten_after_a_while(counting: CountingEngine) -> None:
    counting.allow(6)
    desk = StreamDesk(StreamBounds(keep_s=0.05))
    stream = await desk.begin(CALL, ME, "mine")
    await is_over(stream)
    await until(lambda: not desk.of_owner("open"))
    with pytest.raises(StreamUnknown):
        desk.find("open", "mine")


async def test_a_stream_that_nobody_reads_is_stopped_in_the_end(counting: CountingEngine) -> None:
    desk = StreamDesk(StreamBounds(unread_s=0.0))
    stream = await desk.begin(CALL, ME, "")
    counting.allow(3)
    async with asyncio.timeout(PATIENCE_S):
        await counting.client_left.wait()
    assert stream.state == "stopped"


async def test_one_owner_has_a_bounded_number_and_an_ended_one_makes_place(counting: CountingEngine) -> None:
    desk = StreamDesk(StreamBounds(streams_per_owner=2))
    first, _ = await desk.begin(CALL, ME, "a"), await desk.begin(CALL, ME, "b")
    with pytest.raises(TooManyStreams):
        await desk.begin(CALL, ME, "c")
    await desk.begin(CALL, YOU, "c")
    await desk.stop(first)
    await desk.begin(CALL, ME, "c")
    assert [stream.conversation_id for stream in desk.of_owner("open")] == ["c", "b"]
    await desk.close()


async def test_a_long_stream_loses_its_beginning_and_says_so(
    counting: CountingEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    counting.words = 40
    monkeypatch.setattr(kept_stream, "MAX_STREAM_BYTES", 1500)
    desk = StreamDesk()
    stream = await desk.begin(CALL, ME, "")
    slow = stream.read(0)
    counting.allow(1)
    async with asyncio.timeout(PATIENCE_S):
        assert words(await anext(slow)) == "0 "
    counting.allow(40)
    await is_over(stream)
    assert stream.first_event > 10
    assert stream.size_bytes <= 1500
    assert json.loads((await anext(slow))[6:])["error"]["code"] == "stream_gap"
    with pytest.raises(StopAsyncIteration):
        await anext(slow)
    tail = b"".join([block async for block in stream.read(stream.first_event)])
    assert words(tail).endswith("37 38 39 ")


async def test_all_streams_together_stay_within_their_bound(counting: CountingEngine) -> None:
    counting.allow(6)
    desk = StreamDesk(StreamBounds(total_bytes=2500))
    for name in "abcd":
        await is_over(await desk.begin(CALL, ME, name))
    kept = desk.of_owner("open")
    assert kept[0].conversation_id == "d"
    assert len(kept) < 4
    assert sum(stream.size_bytes for stream in kept) <= 2500


@pytest.mark.parametrize("asked", [0, 1])
async def test_a_stream_can_be_stopped_before_the_engine_says_anything(counting: CountingEngine, asked: int) -> None:
    counting.is_mute = True
    desk = StreamDesk()
    beginning = asyncio.create_task(desk.begin(CALL, ME, "mine"))
    await until(lambda: bool(desk.of_owner("open")) and counting.asked >= asked)
    await desk.stop(desk.find("open", "mine"))
    with pytest.raises(StreamStopped):
        await beginning
    await wait_for_writes(10)
    assert await in_db(lambda: list(Turn.objects.values_list("state", flat=True))) == ["cancelled"] * asked


async def left_behind(*ids: uuid.UUID, ends_session: bool = False, name: str = "") -> None:
    """Streams that a replica read which is lost."""
    lost = StreamShelf()
    for request_id in ids:
        about = Shelved(
            str(request_id), request_id.hex * 2, name, CALL.dialect.path, time.time(), ends_session=ends_session
        )
        journal, now_s = StreamJournal(b"{}\n"), time.monotonic()
        lost.keep(request_id, ME.owner.scope, about, CALL.raw, journal, lambda _was_stopped: None, now_s)
    await lost.close()


async def test_who_takes_a_lost_replicas_stream_does_not_wait_for_anothers_engine(counting: CountingEngine) -> None:
    ids = [uuid.uuid4(), uuid.uuid4()]
    await left_behind(*ids)
    desk = StreamDesk()
    counting.is_mute = True
    waiting = [asyncio.create_task(desk.found(ME.owner, str(ids[0]))) for _ in range(2)]
    await until(lambda: counting.asked == 1)
    counting.is_mute = False
    counting.allow(6)
    async with asyncio.timeout(PATIENCE_S):
        other = await desk.found(ME.owner, str(ids[1]))
    assert other.request_id == ids[1]
    assert (counting.asked, [task.done() for task in waiting]) == (2, [False, False])
    await desk.stop(desk.find(ME.owner.scope, str(ids[0])))
    assert [type(error) for error in await asyncio.gather(*waiting, return_exceptions=True)] == [StreamStopped] * 2
    with pytest.raises(StreamUnknown):
        await StreamDesk().found(ME.owner, str(ids[0]))
    await desk.close()


async def test_a_replica_without_place_takes_no_stream_from_another(counting: CountingEngine) -> None:
    request_id = uuid.uuid4()
    await left_behind(request_id, name="theirs")
    full, roomy = StreamDesk(StreamBounds(streams_per_owner=1)), StreamDesk()
    running = await full.begin(CALL, ME, "")
    for name in (str(request_id), "theirs"):
        with pytest.raises(TooManyStreams):
            await full.found(ME.owner, name)
    for name in (str(uuid.uuid4()), "nobodys"):
        with pytest.raises(StreamUnknown):
            await full.found(ME.owner, name)
    counting.allow(12)
    taken = await roomy.found(ME.owner, str(request_id))
    assert taken.request_id == request_id
    await full.stop(running)
    await roomy.stop(taken)


async def on_its_way(request: web.Request) -> web.StreamResponse:
    """An answer that has begun, and says nothing more."""

    async def silence(_response: web.StreamResponse) -> None:
        await asyncio.Event().wait()

    return await streaming(b"event: hydra.begun\ndata: {}\n\n", then=silence)(request)


@pytest.mark.parametrize("way", ["stopped", "new turn"])
async def test_a_stream_that_another_replica_reads_is_ended_there(
    tiny_model: Callable[..., SyntheticModel], tmp_path: Path, way: str
) -> None:
    """By one that has no place for it; a new turn needs one of its own."""
    reading, full = StreamDesk(), StreamDesk(StreamBounds(streams_per_owner=2 if way == "new turn" else 1))
    async with loopback_engine(on_its_way) as port:
        await in_db(lambda: set_ready(add_engine(add_model(tiny_model("llama").path, tmp_path)), port))
        running = await full.begin(CALL, ME, "another")
        theirs = await reading.begin(CALL, ME, "theirs")
        async with asyncio.timeout(PATIENCE_S):
            while not await full._shelf.has("open", "theirs"):  # noqa: ASYNC110 -- nothing tells of it
                await asyncio.sleep(0.01)
            if way == "stopped":
                with pytest.raises(StreamUnknown):
                    await full.stop_named(YOU.owner, "theirs")
                ended = await full.stop_named(ME.owner, "theirs")
                assert isinstance(ended, Ended)
                assert (ended.about.request_id, ended.state) == (str(theirs.request_id), "stopped")
            else:
                await full.begin(CALL, ME, "theirs")
            await is_over(theirs)
        assert (theirs.state, running.state) == ("stopped", "running")
        assert await full.stop_named(ME.owner, "another") is running
        await asyncio.gather(reading.close(), full.close())
        await wait_for_writes(10)
        assert (await in_db(lambda: Turn.objects.get(request_id=theirs.request_id))).state == "cancelled"
        await close_client_session()


async def test_a_stream_that_came_back_is_not_forgotten_for_the_one_that_went(counting: CountingEngine) -> None:
    counting.allow(12)
    desk = StreamDesk()
    first, second = await desk.begin(CALL, ME, ""), await desk.begin(CALL, ME, "")
    await is_over(first)
    await is_over(second)
    # As if the first one had gone to another replica, and came back under the name that it has there too.
    del desk._streams[second.request_id]
    second.request_id = first.request_id
    desk._streams[first.request_id] = second
    desk._forget(first)
    assert desk._streams[first.request_id] is second
    desk._forget(second)
    assert desk._streams == {}


async def test_a_taken_stream_still_ends_its_session(counting: CountingEngine) -> None:
    request_id = uuid.uuid4()
    await left_behind(request_id, ends_session=True)
    counting.allow(40)
    desk = StreamDesk()
    async with asyncio.timeout(PATIENCE_S):
        stream = await desk.found(ME.owner, str(request_id))
    assert stream.answer is not None
    assert stream.answer._record._start.ends_session
    await desk.close()


async def test_what_no_engine_takes_is_refused_and_leaves_no_stream(counting: CountingEngine) -> None:
    desk = StreamDesk()
    await in_db(lambda: Engine.objects.update(state="starting"))
    with pytest.raises(NoEngineReady):
        await desk.begin(EngineCall(CHAT, CALL.raw, None, stream=True), ME, "mine")
    assert desk.of_owner("open") == []
