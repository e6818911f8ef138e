"""A request's way through the site, with engines that behave and engines that do not."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from engines.client import close_client_session
from engines.errors import EngineUnreachable, ModelNotFound
from engines.models import Engine
from pools.db import in_db
from sessions import dialects, known_engines
from sessions.dialects import CHAT, Dialect
from sessions.engine_call import EngineCall
from sessions.errors import EngineRefused
from sessions.identity import Identity, Owner
from sessions.models import ChatSession, Turn
from sessions.relay import ask_engine
from sessions.turn import wait_for_writes
from tests.engine_process import free_port
from tests.rows import add_engine, add_model, set_ready
from tests.sessions.loopback_engine import ENDING, frame, loopback_engine, refusing, streaming
from tests.synthetic_gguf import SyntheticModel

pytestmark = pytest.mark.django_db(transaction=True)

ME = Identity(Owner(), "c" * 64)
OPENING = frame({"role": "assistant", "content": ""})
RED = frame({"content": "Red"})


def request(**fields: Any) -> EngineCall:
    body = {"messages": [{"role": "user", "content": "Name a colour."}], **fields}
    return CHAT.read(json.dumps(body).encode())


@pytest.fixture
async def pool(
    background: None, tiny_model: Callable[..., SyntheticModel], tmp_path: Path
) -> AsyncIterator[Callable[..., Any]]:
    """`await pool(port, …)`: a pool whose ready engines listen on these ports."""

    def write(*ports: int) -> None:
        variant = add_model(tiny_model("llama").path, tmp_path)
        for number, port in enumerate(ports):
            set_ready(add_engine(variant, name=f"cpu-{number}"), port)

    async def make(*ports: int) -> None:
        await in_db(write, *ports)

    yield make
    await close_client_session()


async def the_turn() -> Turn:
    await wait_for_writes(10)
    return await in_db(Turn.objects.select_related("engine", "chat").get)


async def nobody() -> int:
    """A port where nothing listens, nor will: not one of those that the kernel gives to whoever asks for any."""
    return free_port()


async def test_a_stream_passes_as_it_is_and_its_turn_is_written(pool: Any) -> None:
    async with loopback_engine(streaming(OPENING, RED, ENDING)) as port:
        await pool(port)
        stream = await ask_engine(request(stream=True), ME)
        received = b"".join([frames async for frames in stream.raw()])
        await stream.aclose()
    assert received == OPENING + RED + ENDING
    turn = await the_turn()
    assert (turn.state, turn.finish_reason, turn.engine.name) == ("done", "stop", "cpu-0")
    assert (turn.prompt_tokens, turn.cached_tokens, turn.completion_tokens) == (10, 4, 2)
    assert (turn.queue_s, turn.tokens_per_s) == (0.003, 50.0)
    assert turn.first_token_s is not None
    assert turn.request_id == stream.request_id
    assert (turn.chat.title, turn.chat.completion_tokens) == ("Name a colour.", 2)


async def test_frames_are_whole_however_the_engines_bytes_arrive(pool: Any) -> None:
    whole = OPENING + RED + ENDING
    async with loopback_engine(streaming(*[whole[i : i + 7] for i in range(0, len(whole), 7)])) as port:
        await pool(port)
        stream = await ask_engine(request(stream=True), ME)
        parts = [frames async for frames in stream.raw()]
        await stream.aclose()
    assert all(part.endswith(b"\n\n") for part in parts)
    assert b"".join(parts) == whole


async def test_chunks_can_be_read_as_values(pool: Any) -> None:
    async with loopback_engine(streaming(b": ping\n\n" + OPENING + RED, ENDING)) as port:
        await pool(port)
        stream = await ask_engine(request(stream=True), ME, "playground")
        chunks = [chunk async for chunk in stream]
        await stream.aclose()
    assert [chunk["choices"][0]["delta"].get("content") for chunk in chunks] == ["", "Red", None]
    assert (await the_turn()).chat.source == "playground"


async def test_a_client_that_leaves_frees_the_engine_and_the_turn_is_cancelled(pool: Any) -> None:
    gone = asyncio.Event()

    async def go_on(response: web.StreamResponse) -> None:
        try:
            while True:
                await response.write(RED)
                await asyncio.sleep(0.01)
        finally:
            gone.set()

    async with loopback_engine(streaming(OPENING, then=go_on)) as port:
        await pool(port)
        stream = await ask_engine(request(stream=True), ME)
        await anext(stream.raw())
        await stream.aclose()
        async with asyncio.timeout(60):
            await gone.wait()
    assert (await the_turn()).state == "cancelled"


async def test_an_engine_that_dies_in_the_middle_ends_the_stream_with_an_error_frame(pool: Any) -> None:
    async def die(response: web.StreamResponse) -> None:
        await response.write(b'data: {"choi')
        assert response._req is not None
        assert response._req.transport is not None
        response._req.transport.abort()

    async with loopback_engine(streaming(OPENING, RED, then=die)) as port:
        await pool(port)
        stream = await ask_engine(request(stream=True), ME)
        frames = b"".join([frames async for frames in stream.raw()]).split(b"\n\n")
        await stream.aclose()
    assert frames[-1] == b""
    assert json.loads(frames[-2][6:])["error"]["code"] == "engine_unreachable"
    assert not any(part.startswith(b'data: {"choi') and part.endswith(b'{"choi') for part in frames)
    turn = await the_turn()
    assert (turn.state, turn.error_code) == ("failed", "engine_unreachable")


async def test_the_error_of_a_numbered_stream_has_the_next_number_whatever_its_text(pool: Any) -> None:
    async def die(response: web.StreamResponse) -> None:
        assert response._req is not None
        assert response._req.transport is not None
        response._req.transport.abort()

    told = {"type": "response.output_text.delta", "delta": "SSE:\ndata: one\ndata: two", "sequence_number": 0}
    event = b"event: response.output_text.delta\ndata: " + json.dumps(told).encode() + b"\n\n"
    call = dialects.RESPONSES.read(json.dumps({"input": "Explain SSE.", "stream": True}).encode())
    async with loopback_engine(streaming(event, event, then=die)) as port:
        await pool(port)
        stream = await ask_engine(call, ME)
        frames = b"".join([frames async for frames in stream.raw()]).split(b"\n\n")
        await stream.aclose()
    name, _, data = frames[-2].partition(b"\ndata: ")
    assert (name, json.loads(data)["sequence_number"]) == (b"event: error", 2)


async def test_an_engine_that_gives_an_answer_up_says_so_itself(pool: Any) -> None:
    error = b'data: {"error":{"message":"Broken.","code":"decode_failed"}}\n\n'
    async with loopback_engine(streaming(OPENING, error)) as port:
        await pool(port)
        stream = await ask_engine(request(stream=True), ME)
        assert [frames async for frames in stream.raw()][-1].endswith(error)
        await stream.aclose()
    assert (await the_turn()).state == "failed"


async def test_an_engine_that_does_not_answer_is_replaced_and_gets_no_more_requests(pool: Any) -> None:
    async with loopback_engine(streaming(OPENING, ENDING)) as port:
        await pool(await nobody(), port)
        stream = await ask_engine(request(stream=True), ME)
        assert stream.engine.name == "cpu-1"
        await stream.aclose()
    states = await in_db(lambda: dict(Engine.objects.values_list("name", "state")))
    assert states == {"cpu-0": "unhealthy", "cpu-1": "ready"}
    assert (await the_turn()).engine.name == "cpu-1"


@pytest.mark.parametrize(("status", "code"), [(429, "queue_full"), (503, "engine_loading")])
async def test_a_full_engine_passes_the_request_to_another(pool: Any, status: int, code: str) -> None:
    async with loopback_engine(refusing(status, code)) as full, loopback_engine(streaming(OPENING, ENDING)) as free:
        await pool(full, free)
        stream = await ask_engine(request(stream=True), ME)
        assert stream.engine.name == "cpu-1"
        await stream.aclose()


async def test_a_prompt_that_is_too_long_for_one_engine_goes_to_one_with_a_longer_context(pool: Any) -> None:
    """How long it is, the site only guesses."""
    asked = []

    async def short(asking: web.Request) -> web.StreamResponse:
        asked.append(asking.path)
        return await refusing(400, "context_length_exceeded")(asking)

    answering = streaming(OPENING, ENDING)
    async with loopback_engine(short) as a, loopback_engine(short) as b, loopback_engine(answering) as c:
        await pool(a, b, c)
        await in_db(lambda: Engine.objects.filter(name="cpu-2").update(context_tokens=4096))
        stream = await ask_engine(request(stream=True), ME)
        assert stream.engine.name == "cpu-2"
        await stream.aclose()
    # Nor is one asked whose context is no longer.
    assert len(asked) <= 1
    assert await in_db(lambda: set(Engine.objects.values_list("state", flat=True))) == {"ready"}


async def test_an_engine_that_was_restarted_elsewhere_is_found_there_at_once(
    pool: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(known_engines, "READY_CACHE_S", 600.0)
    async with loopback_engine(streaming(OPENING, ENDING)) as old, loopback_engine(streaming(OPENING, ENDING)) as new:
        await pool(old)
        await (await ask_engine(request(stream=True), ME)).aclose()
        await close_client_session()
        # While the old port is remembered.
        await in_db(Engine.objects.update, http_port=await nobody())
        stream = await ask_engine(request(stream=True), ME)
        assert stream.engine.base_url.endswith(str(old))
        await stream.aclose()
        await in_db(Engine.objects.update, http_port=new)
    # Now the remembered one is gone, and the row names a port where nothing is.
    async with loopback_engine(streaming(OPENING, ENDING)) as newer:
        await in_db(Engine.objects.update, http_port=newer)
        stream = await ask_engine(request(stream=True), ME)
        assert stream.engine.base_url.endswith(str(newer))
        await stream.aclose()
    assert await in_db(lambda: Engine.objects.get().state) == "ready"


async def test_an_engine_that_stops_while_it_is_remembered_hands_over(
    pool: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(known_engines, "READY_CACHE_S", 600.0)
    async with loopback_engine(streaming(OPENING, ENDING)) as port:
        await pool(port)
        await (await ask_engine(request(stream=True), ME)).aclose()
    await close_client_session()
    async with loopback_engine(streaming(OPENING, ENDING)) as other:
        await in_db(lambda: Engine.objects.update(state="stopped", http_port=None))
        await in_db(lambda: set_ready(_twin(), other))
        stream = await ask_engine(request(stream=True), ME)
        assert stream.engine.name == "cpu-1"
        await stream.aclose()


def _twin() -> Engine:
    engine = Engine.objects.get()
    engine.pk, engine.name = None, "cpu-1"
    engine.save(force_insert=True)
    return engine


async def test_the_only_engine_being_gone_is_a_retryable_503(pool: Any) -> None:
    await pool(await nobody())
    with pytest.raises(EngineUnreachable) as raised:
        await ask_engine(request(), ME)
    assert (raised.value.http_status, raised.value.retryable) == (503, True)
    assert "127.0.0.1" not in raised.value.message
    assert ((await the_turn()).state, (await the_turn()).error_code) == ("failed", "engine_unreachable")


WHOLE = {"usage": {"prompt_tokens": 5, "total_tokens": 5}}


@pytest.mark.parametrize(
    ("dialect", "path", "turns"),
    [
        (dialects.EMBEDDINGS, "/v1/embeddings", 1),
        (dialects.RERANK, "/v1/rerank", 1),
        (dialects.COUNT_TOKENS, "/v1/messages/count_tokens", 0),
        (dialects.TOKENIZE, "/tokenize", 0),
    ],
)
async def test_other_paths_go_to_the_engines_same_path_and_only_work_is_written_down(
    pool: Any, dialect: Dialect, path: str, turns: int
) -> None:
    asked: list[tuple[str, str, bytes]] = []

    async def answer(http_request: web.Request) -> web.StreamResponse:
        asked.append((http_request.method, http_request.path, await http_request.read()))
        return web.json_response(WHOLE)

    async with loopback_engine(answer) as port:
        await pool(port)
        reply = await ask_engine(dialect.read(b'{"input":"a"}'), ME)
        assert json.loads(await reply.read()) == WHOLE
        await reply.aclose()
    assert asked == [("POST", path, b'{"input":"a"}')]
    await wait_for_writes(10)
    assert await in_db(lambda: list(Turn.objects.values_list("state", "prompt_tokens"))) == [("done", 5)] * turns


async def test_a_message_stream_that_breaks_ends_with_an_event_its_clients_know(pool: Any) -> None:
    start = b'event: message_start\ndata: {"type":"message_start","message":{"usage":{"input_tokens":3}}}\n\n'

    async def die(response: web.StreamResponse) -> None:
        assert response._req is not None
        assert response._req.transport is not None
        response._req.transport.abort()

    async with loopback_engine(streaming(start, then=die)) as port:
        await pool(port)
        stream = await ask_engine(dialects.MESSAGES.read(b'{"stream":true}'), ME)
        received = b"".join([frames async for frames in stream.raw()])
        await stream.aclose()
    assert received.startswith(start + b"event: error\ndata: ")
    assert json.loads(received.rpartition(b"data: ")[2])["error"]["type"] == "overloaded_error"
    turn = await the_turn()
    assert (turn.state, turn.prompt_tokens) == ("failed", 3)


@pytest.mark.parametrize(("status", "code"), [(400, "context_length_exceeded"), (429, "queue_full")])
async def test_an_engines_refusal_is_passed_on_as_it_is(pool: Any, status: int, code: str) -> None:
    async with loopback_engine(refusing(status, code)) as port:
        await pool(port)
        with pytest.raises(EngineRefused) as raised:
            await ask_engine(request(), ME)
    assert (raised.value.http_status, raised.value.code, raised.value.retry_after_s) == (status, code, 7)
    assert json.loads(raised.value.body_bytes)["error"]["message"] == "No."
    assert (await the_turn()).error_code == code


@pytest.mark.parametrize("model", ["unknown", "a\0b", "\ud800", "x" * 200])
async def test_a_model_that_nobody_has_is_not_found_and_leaves_no_turn(pool: Any, model: str) -> None:
    await pool(1)
    with pytest.raises(ModelNotFound):
        await ask_engine(request(model=model), ME)
    assert await in_db(ChatSession.objects.count) == 0


async def test_a_cancelled_request_in_one_piece_is_written_as_cancelled(pool: Any) -> None:
    asked = asyncio.Event()

    async def think(http_request: web.Request) -> web.StreamResponse:
        asked.set()
        await asyncio.sleep(60)
        raise AssertionError("nobody waits for this")

    async with loopback_engine(think) as port:
        await pool(port)
        waiting = asyncio.create_task(ask_engine(request(), ME))
        await asked.wait()
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
    assert (await the_turn()).state == "cancelled"
