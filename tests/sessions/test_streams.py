"""Streams that outlive their connection."""

from __future__ import annotations

import asyncio
import json
import time
import uuid
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from django.test import AsyncClient

from engines.client import close_client_session
from engines.errors import NoEngineReady
from engines.models import Engine
from pools.db import in_db
from sessions import api_keys, kept_stream
from sessions.dialects import CHAT
from sessions.engine_call import EngineCall
from sessions.errors import StreamStopped, StreamUnknown, TooManyStreams
from sessions.identity import Identity, Owner
from sessions.kept_stream import KeptStream
from sessions.models import Turn
from sessions.stream_desk import StreamBounds, StreamDesk, stream_desk
from sessions.stream_journal import StreamJournal
from sessions.stream_shelf import Shelved, StreamShelf
from sessions.turn import wait_for_writes
from tests.rows import add_engine, add_model, set_ready
from tests.sessions.local_client import LocalClient
from tests.sessions.loopback_engine import ENDING, frame, loopback_engine
from tests.synthetic_gguf import SyntheticModel

pytestmark = pytest.mark.django_db(transaction=True)

PATIENCE_S = 20.0
ME = Identity(Owner(), "c" * 64)
YOU = Identity(Owner(api_key_id=7), "d" * 64)
BODY = {"messages": [{"role": "user", "content": "Count."}], "stream": True}
CALL = CHAT.read(json.dumps(BODY).encode())


class PacedEngine:
    """Says "0 ", "1 ", … as far as `allow` goes, pings between, and ends after `words`."""

    def __init__(self, words: int = 6) -> None:
        self.words = words
        self.allowed = 0
        self.asked = 0
        self.is_mute = False
        self.client_left = asyncio.Event()
        self._more = asyncio.Event()

    def allow(self, words: int) -> None:
        self.allowed = words
        self._more.set()

    async def answer(self, request: web.Request) -> web.StreamResponse:
        self.asked += 1
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        try:
            if self.is_mute:
                await asyncio.Event().wait()
            await response.prepare(request)
            for word in range(self.words):
                while word >= self.allowed:
                    self._more.clear()
                    await self._more.wait()
                await response.write(b": ping\n\n" + frame({"content": f"{word} "}))
        except (asyncio.CancelledError, ConnectionError):
            self.client_left.set()
            raise
        await response.write(ENDING)
        return response


@pytest.fixture
async def engine(tiny_model: Callable[..., SyntheticModel], tmp_path: Path) -> AsyncIterator[PacedEngine]:
    paced = PacedEngine()
    async with loopback_engine(paced.answer) as port:
        await in_db(lambda: set_ready(add_engine(add_model(tiny_model("llama").path, tmp_path)), port))
        yield paced
        await stream_desk().close()
        await wait_for_writes(10)
        await close_client_session()


@pytest.fixture
def api(engine: PacedEngine, settings: Any) -> AsyncClient:
    settings.ALLOWED_HOSTS = ["localhost"]
    return LocalClient()


async def ask(api: AsyncClient, **headers: str) -> Any:
    named = {"X-Hydra-Resumable": "1", **{name.replace("_", "-"): value for name, value in headers.items()}}
    return await api.post("/v1/chat/completions", json.dumps(BODY).encode(), content_type="text/plain", headers=named)


async def read(answer: Any, events: int) -> list[bytes]:
    """The first events of a response, without pings; then the client leaves in the middle of waiting for more."""
    received: list[bytes] = []
    async with asyncio.timeout(PATIENCE_S):
        parts = aiter(answer)
        while len(received) < events:
            part = await anext(parts)
            received += [event + b"\n\n" for event in part.split(b"\n\n") if event and not event.startswith(b":")]
    waiting = asyncio.ensure_future(anext(parts))
    await asyncio.sleep(0.01)
    waiting.cancel()
    await asyncio.wait([waiting])
    return received


async def rest(answer: Any) -> bytes:
    async with asyncio.timeout(PATIENCE_S):
        return b"".join([part async for part in answer.streaming_content])


def words(raw: bytes) -> str:
    chunks = [json.loads(event[6:]) for event in raw.split(b"\n\n") if event.startswith(b"data: {")]
    return "".join(choice["delta"].get("content", "") for chunk in chunks for choice in chunk["choices"])


async def is_over(stream: KeptStream) -> None:
    async with asyncio.timeout(PATIENCE_S):
        # Many events at once push a reader out of a small buffer.
        while not stream.is_over:
            async for _ in stream.read(stream.next_event):
                """Until there is no more."""


async def until(is_so: Callable[[], bool]) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while not is_so():  # noqa: ASYNC110 -- nothing tells of it
            await asyncio.sleep(0)


async def test_a_cut_stream_goes_on_and_is_read_on_from_where_it_was_cut(api: AsyncClient, engine: PacedEngine) -> None:
    engine.allow(2)
    answer = await ask(api)
    first = await read(answer, 2)
    engine.allow(6)
    again = await api.get(f"/v1/stream/{answer['X-Request-Id']}?from=2")
    assert (again["Content-Type"], again["X-Hydra-Engine"]) == ("text/event-stream", "cpu-0")
    second = await rest(again)
    assert words(b"".join(first)) + words(second) == "0 1 2 3 4 5 "
    assert second.endswith(b"data: [DONE]\n\n")
    assert engine.asked == 1
    await wait_for_writes(10)
    assert (await in_db(Turn.objects.get)).state == "done"


async def test_a_stream_that_has_ended_can_be_read_again_from_anywhere(api: AsyncClient, engine: PacedEngine) -> None:
    engine.allow(6)
    answer = await ask(api, X_Conversation_Id="mine")
    whole = await rest(answer)
    assert b": ping" not in whole
    for name in (answer["X-Request-Id"], "mine"):
        assert await rest(await api.get(f"/v1/stream/{name}")) == whole
        assert words(await rest(await api.get(f"/v1/stream/{name}?from=4"))) == "4 5 "
    (listed,) = (await api.get("/v1/streams?conversation_id=mine")).json()["data"]
    assert (listed["id"], listed["status"], listed["events"]) == (answer["X-Request-Id"], "done", 8)
    assert listed["path"] == "/v1/chat/completions"
    assert (await api.get("/v1/streams?conversation_id=other")).json()["data"] == []
    assert await rest(await api.get("/v1/stream/mine?from=8")) == b""


async def test_two_may_listen_to_one_stream(api: AsyncClient, engine: PacedEngine) -> None:
    answer = await ask(api, X_Conversation_Id="mine")
    other = await api.get("/v1/stream/mine")
    engine.allow(6)
    assert await rest(answer) == await rest(other)


async def test_without_being_asked_for_a_stream_ends_with_its_client(api: AsyncClient, engine: PacedEngine) -> None:
    engine.allow(2)
    answer = await ask(api, X_Hydra_Resumable="0", X_Conversation_Id="mine")
    await read(answer, 2)
    async with asyncio.timeout(PATIENCE_S):
        await engine.client_left.wait()
    assert (await api.get("/v1/stream/mine")).status_code == 404


async def test_stopping_frees_the_engine_and_keeps_what_was_said(api: AsyncClient, engine: PacedEngine) -> None:
    engine.allow(2)
    answer = await ask(api)
    await read(answer, 2)
    path = f"/v1/stream/{answer['X-Request-Id']}"
    for _ in range(2):
        assert (await api.delete(path)).json()["status"] == "stopped"
    async with asyncio.timeout(PATIENCE_S):
        await engine.client_left.wait()
    assert words(await rest(await api.get(path))) == "0 1 "
    await wait_for_writes(10)
    assert (await in_db(Turn.objects.get)).state == "cancelled"


async def test_another_owner_does_not_find_it(api: AsyncClient, engine: PacedEngine) -> None:
    _, key = await in_db(api_keys.create_key, "other")
    engine.allow(6)
    answer = await ask(api, X_Conversation_Id="mine")
    stranger = {"Authorization": f"Bearer {key}"}
    for name in (answer["X-Request-Id"], "mine"):
        assert (await api.get(f"/v1/stream/{name}", headers=stranger)).status_code == 404
        assert (await api.delete(f"/v1/stream/{name}", headers=stranger)).status_code == 404
    assert (await api.get("/v1/streams", headers=stranger)).json()["data"] == []
    assert words(await rest(answer)) == "0 1 2 3 4 5 "


@pytest.mark.parametrize(
    ("path", "status", "code"),
    [
        ("/v1/stream/nothing", 404, "stream_unknown"),
        ("/v1/stream/00000000-0000-0000-0000-000000000000", 404, "stream_unknown"),
        ("/v1/stream/mine?from=9", 400, "invalid_request"),
        ("/v1/stream/mine?from=-1", 400, "invalid_request"),
        ("/v1/stream/mine?from=" + "9" * 5000, 400, "invalid_request"),
    ],
)
async def test_what_is_not_there_cannot_be_read(
    api: AsyncClient, engine: PacedEngine, path: str, status: int, code: str
) -> None:
    engine.allow(6)
    await rest(await ask(api, X_Conversation_Id="mine"))
    answer = await api.get(path)
    assert (answer.status_code, answer.json()["error"]["code"]) == (status, code)


async def test_only_streams_can_be_resumed(api: AsyncClient) -> None:
    body = json.dumps({**BODY, "stream": False, "resumable": True}).encode()
    answer = await api.post("/v1/chat/completions", body, content_type="text/plain")
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "resumable")
    assert (await ask(api, X_Hydra_Resumable="maybe")).status_code == 400


async def test_a_new_turn_ends_the_old_one_of_its_conversation(engine: PacedEngine) -> None:
    desk = StreamDesk()
    old = await desk.begin(CALL, ME, "mine")
    new = await desk.begin(CALL, ME, "mine")
    assert (old.state, new.state) == ("stopped", "running")
    assert desk.find("open", "mine") is new
    assert desk.find("open", str(old.request_id)) is old
    strangers = await desk.begin(CALL, YOU, "mine")
    assert (new.state, strangers.state) == ("running", "running")
    await desk.close()


async def test_an_ended_stream_is_forgotten_after_a_while(engine: PacedEngine) -> None:
    engine.allow(6)
    desk = StreamDesk(StreamBounds(keep_s=0.05))
    stream = await desk.begin(CALL, ME, "mine")
    await is_over(stream)
    await until(lambda: not desk.of_owner("open"))
    with pytest.raises(StreamUnknown):
        desk.find("open", "mine")


async def test_a_stream_that_nobody_reads_is_stopped_in_the_end(engine: PacedEngine) -> None:
    desk = StreamDesk(StreamBounds(unread_s=0.0))
    stream = await desk.begin(CALL, ME, "")
    engine.allow(3)
    async with asyncio.timeout(PATIENCE_S):
        await engine.client_left.wait()
    assert stream.state == "stopped"


async def test_one_owner_has_a_bounded_number_and_an_ended_one_makes_place(engine: PacedEngine) -> None:
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
    engine: PacedEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine.words = 40
    monkeypatch.setattr(kept_stream, "MAX_STREAM_BYTES", 1500)
    desk = StreamDesk()
    stream = await desk.begin(CALL, ME, "")
    slow = stream.read(0)
    engine.allow(1)
    async with asyncio.timeout(PATIENCE_S):
        assert words(await anext(slow)) == "0 "
    engine.allow(40)
    await is_over(stream)
    assert stream.first_event > 10
    assert stream.size_bytes <= 1500
    assert json.loads((await anext(slow))[6:])["error"]["code"] == "stream_gap"
    with pytest.raises(StopAsyncIteration):
        await anext(slow)
    tail = b"".join([block async for block in stream.read(stream.first_event)])
    assert words(tail).endswith("37 38 39 ")


async def test_all_streams_together_stay_within_their_bound(engine: PacedEngine) -> None:
    engine.allow(6)
    desk = StreamDesk(StreamBounds(total_bytes=2500))
    for name in "abcd":
        await is_over(await desk.begin(CALL, ME, name))
    kept = desk.of_owner("open")
    assert kept[0].conversation_id == "d"
    assert len(kept) < 4
    assert sum(stream.size_bytes for stream in kept) <= 2500


@pytest.mark.parametrize("asked", [0, 1])
async def test_a_stream_can_be_stopped_before_the_engine_says_anything(engine: PacedEngine, asked: int) -> None:
    engine.is_mute = True
    desk = StreamDesk()
    beginning = asyncio.create_task(desk.begin(CALL, ME, "mine"))
    await until(lambda: bool(desk.of_owner("open")) and engine.asked >= asked)
    await desk.stop(desk.find("open", "mine"))
    with pytest.raises(StreamStopped):
        await beginning
    await wait_for_writes(10)
    assert await in_db(lambda: list(Turn.objects.values_list("state", flat=True))) == ["cancelled"] * asked


async def left_behind(*ids: uuid.UUID, ends_session: bool = False) -> None:
    """Streams that a replica read which is lost."""
    lost = StreamShelf()
    for request_id in ids:
        about = Shelved(
            str(request_id), request_id.hex * 2, "", CALL.dialect.path, time.time(), ends_session=ends_session
        )
        lost.keep(request_id, ME.owner.scope, about, CALL.raw, StreamJournal(b"{}\n"), lambda: None)
    await lost.close()


async def test_who_takes_a_lost_replicas_stream_does_not_wait_for_anothers_engine(engine: PacedEngine) -> None:
    ids = [uuid.uuid4(), uuid.uuid4()]
    await left_behind(*ids)
    desk = StreamDesk()
    engine.is_mute = True
    waiting = [asyncio.create_task(desk.found(ME.owner, str(ids[0]))) for _ in range(2)]
    await until(lambda: engine.asked == 1)
    engine.is_mute = False
    engine.allow(6)
    async with asyncio.timeout(PATIENCE_S):
        other = await desk.found(ME.owner, str(ids[1]))
    assert other.request_id == ids[1]
    assert (engine.asked, [task.done() for task in waiting]) == (2, [False, False])
    await desk.stop(desk.find(ME.owner.scope, str(ids[0])))
    assert [type(error) for error in await asyncio.gather(*waiting, return_exceptions=True)] == [StreamStopped] * 2
    with pytest.raises(StreamUnknown):
        await StreamDesk().found(ME.owner, str(ids[0]))
    await desk.close()


async def test_a_replica_without_place_takes_no_stream_from_another(engine: PacedEngine) -> None:
    request_id = uuid.uuid4()
    await left_behind(request_id)
    full, roomy = StreamDesk(StreamBounds(streams_per_owner=1)), StreamDesk()
    running = await full.begin(CALL, ME, "")
    with pytest.raises(TooManyStreams):
        await full.found(ME.owner, str(request_id))
    engine.allow(12)
    taken = await roomy.found(ME.owner, str(request_id))
    assert taken.request_id == request_id
    await full.stop(running)
    await roomy.stop(taken)


async def test_a_stream_that_came_back_is_not_forgotten_for_the_one_that_went(engine: PacedEngine) -> None:
    engine.allow(12)
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


async def test_a_taken_stream_still_ends_its_session(engine: PacedEngine) -> None:
    request_id = uuid.uuid4()
    await left_behind(request_id, ends_session=True)
    engine.allow(40)
    desk = StreamDesk()
    async with asyncio.timeout(PATIENCE_S):
        stream = await desk.found(ME.owner, str(request_id))
    assert stream.answer is not None
    assert stream.answer._record._start.ends_session
    await desk.close()


async def test_what_no_engine_takes_is_refused_and_leaves_no_stream(engine: PacedEngine) -> None:
    desk = StreamDesk()
    await in_db(lambda: Engine.objects.update(state="starting"))
    with pytest.raises(NoEngineReady):
        await desk.begin(EngineCall(CHAT, CALL.raw, None, stream=True), ME, "mine")
    assert desk.of_owner("open") == []
