"""Hydra's own client of the binary protocol, against a real engine, a dying one, and a peer that answers nonsense."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from engines.errors import (
    EngineError,
    EngineUnreachable,
    NotAuthenticated,
    ProtocolBroken,
    RpcBadRequest,
    RpcBusy,
    RpcNotFound,
    RpcTimeout,
)
from engines.rpc_client import Patience, RpcClient
from engines.wire import STREAMED, ResponseHead, SlotKey, Status, frame
from tests.engine_process import EngineProcess, free_port
from tests.synthetic_gguf import SyntheticModel

COLOUR = [{"role": "user", "content": "Name a colour. " * 30}]
SECRET = "another secret of enough bytes"
SHORT = Patience(connect_s=1, hello_s=0.3, look_s=0.3, prefill_s=0.3, silence_s=0.3, stall_s=0.3)


def settings(**values: Any) -> dict[str, Any]:
    return {"slots": 2, "context_tokens": 4096, "rpc_port": free_port(), **values}


@pytest.fixture(scope="module")
def engine(
    tiny_model: Callable[..., SyntheticModel], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[EngineProcess]:
    model = tiny_model("llama", tie_free=True, utf8_cycle=True)
    values = settings(rpc_idle_s=1, max_state_bytes=1 << 26)
    with EngineProcess(tmp_path_factory.mktemp("rpc-client"), model.path, **values) as running:
        yield running


@pytest.fixture
async def client(engine: EngineProcess) -> AsyncIterator[RpcClient]:
    async with RpcClient("127.0.0.1", engine.config.rpc_port, name="test") as connected:
        yield connected


def body(**values: Any) -> dict[str, Any]:
    return {"messages": COLOUR, "temperature": 0, **values}


async def count_tokens(client: RpcClient, **values: Any) -> int:
    return sum([len(chunk.get("token_ids", [])) async for chunk in client.decode(body(**values))])


# --- a sound engine -------------------------------------------------------------------------------


async def test_a_state_goes_through_a_client_in_pieces_and_into_a_buffer(client: RpcClient) -> None:
    prefilled = await client.prefill(body())
    source, target = SlotKey(prefilled.id_slot), SlotKey(1 - prefilled.id_slot)
    async with client.state_get(source) as (meta, state):
        buffer = bytearray(state.total_bytes)
        await state.read_into(memoryview(buffer))
    assert (meta.n_past, meta.state_size) == (prefilled.n_past, len(buffer))
    async with client.state_get(source) as (_, state):
        pieces = [piece async for piece in state]
    assert b"".join(pieces) == bytes(buffer)

    async def in_pieces() -> AsyncIterator[bytes]:
        for start in range(0, len(buffer), 10_000):
            yield bytes(buffer[start : start + 10_000])

    restored = await client.state_put(target, in_pieces(), len(buffer))
    assert (restored.n_past, restored.model_match) == (prefilled.n_past, "exact")
    assert (await client.state_meta(target)).n_past == prefilled.n_past
    async with client.prefill_state(body(return_state=True)) as (answer, state):
        assert (answer.tokens_processed, answer.state_size) == (0, state.total_bytes)
        assert b"".join([piece async for piece in state])
    assert (await client.state_put(target, bytes(buffer), len(buffer))).bytes == len(buffer)


async def test_a_call_inside_an_open_one_is_refused_instead_of_waiting_for_itself(client: RpcClient) -> None:
    slot = (await client.prefill(body())).id_slot
    async with client.state_get(SlotKey(slot)) as (_, state):
        with pytest.raises(RuntimeError):
            await client.info()
        assert len(b"".join([piece async for piece in state])) == state.total_bytes
    assert (await client.info()).state == "ready"


async def test_calls_at_once_wait_for_each_other(client: RpcClient) -> None:
    counts = await asyncio.gather(*(count_tokens(client, max_tokens=n) for n in (3, 5, 7)), client.info())
    assert counts[:3] == [3, 5, 7]


async def test_leaving_a_decode_ends_it_and_the_client_goes_on(client: RpcClient, engine: EngineProcess) -> None:
    chunks = client.decode(body(max_tokens=3900))
    async for chunk in chunks:
        if chunk.get("token_ids"):
            break
    await chunks.aclose()  # type: ignore[attr-defined]
    await asyncio.to_thread(engine.wait_idle)
    assert await count_tokens(client, max_tokens=4) == 4


@pytest.mark.parametrize("when", ["at once", "in the middle"])
async def test_a_cancelled_call_leaves_nothing_behind(client: RpcClient, engine: EngineProcess, when: str) -> None:
    slot = (await client.prefill(body())).id_slot

    async def look_at_it() -> None:
        async with client.state_get(SlotKey(slot)) as (_, state):
            async for _ in state:
                await asyncio.sleep(60)

    task = asyncio.ensure_future(look_at_it())
    await asyncio.sleep(0 if when == "at once" else 0.05)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    for _ in range(500):
        if not (await client.state_meta(SlotKey(slot))).is_transferring:
            break
        await asyncio.sleep(0.02)
    assert (await client.prefill(body())).cached_tokens > 100


async def test_an_error_of_the_callers_own_is_not_taken_for_the_engines(client: RpcClient) -> None:
    slot = (await client.prefill(body())).id_slot
    with pytest.raises(OSError, match="no space"):
        async with client.state_get(SlotKey(slot)):
            raise OSError("no space")
    assert (await client.info()).state == "ready"


async def test_refusals_come_as_what_they_are(client: RpcClient) -> None:
    for key, kind, code in (
        (SlotKey(9), RpcNotFound, "slot_not_found"),
        (SlotKey(0, form="none"), RpcBadRequest, "invalid_request"),
    ):
        with pytest.raises(kind) as caught:
            await client.state_meta(key)
        assert caught.value.peer_code == code
    with pytest.raises(RpcBadRequest):
        await client.prefill({"messages": []})
    with pytest.raises(RpcBadRequest):
        await count_tokens(client, temperature=9)
    with pytest.raises(RpcBadRequest):
        await client.state_put(SlotKey(0), b"nothing of the kind", 19)
    assert (await client.configure({"n_ctx": 1})).rejected
    assert (await client.info()).state == "ready"


async def test_a_state_that_is_too_large_is_refused_before_it_is_sent(client: RpcClient) -> None:
    sent = 0

    async def endless() -> AsyncIterator[bytes]:
        nonlocal sent
        while True:
            sent += 1 << 20
            yield bytes(1 << 20)

    with pytest.raises(RpcBadRequest) as caught:
        await client.state_put(SlotKey(0), endless(), 1 << 35)
    assert caught.value.peer_code == "body_too_large"
    # Far less than all: what went out until the refusal was read, which depends on how soon either side gets its turn.
    assert sent < 1 << 34
    assert (await client.info()).state == "ready"


async def test_a_connection_that_the_engine_closed_is_made_anew(client: RpcClient, engine: EngineProcess) -> None:
    await client.info()
    for _ in range(200):
        if "hydra_rpc_connections 0.0" in await asyncio.to_thread(engine.text, "/metrics"):
            break
        await asyncio.sleep(0.1)
    else:
        raise AssertionError("the idle connection was not closed")
    assert (await client.info()).state == "ready"


async def test_a_payload_of_another_length_than_announced_is_not_finished(client: RpcClient) -> None:
    for total in (5, 15):
        with pytest.raises(ProtocolBroken):
            await client.state_put(SlotKey(0), _once(bytes(10)), total)
    assert (await client.info()).state == "ready"


async def _once(data: bytes) -> AsyncIterator[bytes]:
    yield data


async def test_secrets_must_be_the_same_on_both_sides(
    engine: EngineProcess, tiny_model: Callable[..., SyntheticModel], tmp_path: Path
) -> None:
    with pytest.raises(NotAuthenticated):  # the engine asks for none
        await RpcClient("127.0.0.1", engine.config.rpc_port, secret=SECRET).info()
    values = settings(rpc_secret=SECRET)
    with EngineProcess(tmp_path, tiny_model("llama", tie_free=True).path, **values) as guarded:
        for secret in ("", "a wrong secret of enough bytes"):
            with pytest.raises(NotAuthenticated):
                await RpcClient("127.0.0.1", guarded.config.rpc_port, secret=secret).info()
        async with RpcClient("127.0.0.1", guarded.config.rpc_port, secret=SECRET) as known:
            assert (await known.info()).model_alias == "test-model"
        assert SECRET not in guarded.log_path.read_text()


async def test_nobody_at_the_port_is_said_so() -> None:
    with pytest.raises(EngineUnreachable):
        await RpcClient("127.0.0.1", free_port()).info()


# --- a peer that answers nonsense -----------------------------------------------------------------

HELLO = ResponseHead(Status.OK, b'{"version":1,"auth":"none","challenge":""}').encode()
NONSENSE: list[tuple[str, bytes, type[EngineError]]] = [
    ("unknown status", bytes([9]) + bytes(11), ProtocolBroken),
    ("meta that is no JSON", ResponseHead(Status.OK, b"{").encode(), ProtocolBroken),
    ("meta that lacks keys", ResponseHead(Status.OK, b"{}").encode(), ProtocolBroken),
    ("an error without words", ResponseHead(Status.ERROR, b"{}").encode(), ProtocolBroken),
    ("meta cut short", ResponseHead(Status.OK, b'{"a":1}').encode()[:15], EngineUnreachable),
    ("header cut short", bytes(5), EngineUnreachable),
    ("nothing", b"", EngineUnreachable),
    ("busy", ResponseHead(Status.BUSY, b'{"error":"later"}').encode(), RpcBusy),
]


@asynccontextmanager
async def peer(*answers: bytes, then: str = "close") -> AsyncIterator[RpcClient]:
    """A client whose peer answers its first, second, … message with these bytes, and then closes or falls silent."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        for answer in answers:
            if not await reader.read(1 << 16):
                break
            writer.write(answer)
            await writer.drain()
        if then == "silence":
            await over.wait()
        writer.close()

    over = asyncio.Event()
    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    # A busy machine must not look like a silent peer.
    patience = SHORT if then == "silence" else Patience()
    client = RpcClient("127.0.0.1", server.sockets[0].getsockname()[1], patience=patience)
    async with server, client:
        yield client
        over.set()


@pytest.mark.parametrize(("answer", "kind"), [row[1:] for row in NONSENSE], ids=[row[0] for row in NONSENSE])
async def test_nonsense_is_an_error_and_the_next_call_starts_anew(answer: bytes, kind: type[EngineError]) -> None:
    async with peer(HELLO, answer) as client:
        for _ in range(2):  # the second one says HELLO again
            with pytest.raises(kind):
                await client.info()
    async with peer(answer) as client:
        with pytest.raises(EngineError):
            await client.info()


@pytest.mark.parametrize(
    ("frames", "kind"),
    [
        (frame(b'{"a":1}'), EngineUnreachable),
        (frame(b'{"a":1}')[:7], EngineUnreachable),
        ((1 << 25).to_bytes(4, "little"), ProtocolBroken),
        (frame(b"{no json"), ProtocolBroken),
        (frame(b"[1]"), ProtocolBroken),
    ],
)
async def test_a_stream_that_breaks_is_an_error(frames: bytes, kind: type[EngineError]) -> None:
    head = ResponseHead(Status.OK, b"{}", STREAMED).encode()
    async with peer(HELLO, head + frames) as client:
        with pytest.raises(kind):
            await count_tokens(client)
    async with peer(HELLO, ResponseHead(Status.OK, b"{}", 3).encode() + b"abc") as client:
        with pytest.raises(ProtocolBroken):
            await count_tokens(client)


async def test_a_state_that_ends_too_early_is_an_error() -> None:
    meta = (
        b'{"slot_id":0,"n_past":1,"state_size":9,"is_processing":false,"is_transferring":false,"operation":"",'
        b'"model_alias":"","model_hash":"","fingerprint":"","form":"stream"}'
    )
    async with peer(HELLO, ResponseHead(Status.OK, meta, 1 << 40).encode() + b"some") as client:
        with pytest.raises(EngineUnreachable):
            async with client.state_get(SlotKey(0)) as (_, state):
                async for _ in state:
                    pass


CALLS: dict[str, Callable[[RpcClient], Awaitable[Any]]] = {
    "info": lambda client: client.info(),
    "prefill": lambda client: client.prefill(body()),
    "decode": lambda client: count_tokens(client),
    "state_meta": lambda client: client.state_meta(SlotKey(0)),
    "state_put": lambda client: client.state_put(SlotKey(0), bytes(1 << 24), 1 << 24),
}


@pytest.mark.parametrize("call", CALLS)
async def test_silence_ends_in_a_timeout_of_the_callers_own(call: str) -> None:
    async with peer(HELLO, b"", then="silence") as client:
        with pytest.raises(RpcTimeout):
            await CALLS[call](client)
    async with peer(b"", then="silence") as client:
        with pytest.raises(RpcTimeout):
            await CALLS[call](client)


# --- a dying engine -------------------------------------------------------------------------------


@pytest.mark.parametrize("step", ["before", "decode", "export"])
async def test_an_engine_that_is_killed_is_unreachable_at_once(
    tiny_model: Callable[..., SyntheticModel], tmp_path: Path, step: str
) -> None:
    await killed_at(step, tiny_model, tmp_path)


@pytest.mark.soak
@pytest.mark.parametrize("step", ["hello", "prefill", "import"])
async def test_an_engine_that_is_killed_at_any_step_is_unreachable_at_once(
    tiny_model: Callable[..., SyntheticModel], tmp_path: Path, step: str
) -> None:
    await killed_at(step, tiny_model, tmp_path)


async def killed_at(step: str, tiny_model: Callable[..., SyntheticModel], folder: Path) -> None:
    model = tiny_model("llama", tie_free=True)
    with EngineProcess(folder, model.path, **settings()) as engine:

        def kill() -> None:
            engine.process.kill()
            engine.process.wait()

        async with RpcClient("127.0.0.1", engine.config.rpc_port) as client:
            if step != "hello":
                slot = (await client.prefill(body())).id_slot
            started = time.monotonic()
            with pytest.raises(EngineUnreachable):
                if step in ("before", "hello"):
                    kill()
                    await client.info()
                elif step == "decode":
                    async for chunk in client.decode(body(max_tokens=3900)):
                        if chunk.get("token_ids"):
                            kill()
                elif step == "prefill":
                    asyncio.get_running_loop().call_later(0.02, kill)
                    await client.prefill(body(messages=[{"role": "user", "content": "x " * 1800}], cache_prompt=False))
                    await client.info()  # it may have been quicker than the kill
                elif step == "export":
                    async with client.state_get(SlotKey(slot)) as (_, state):
                        kill()
                        async for _ in state:
                            pass
                    await client.info()  # all of it may have been on its way
                else:
                    await client.state_put(SlotKey(slot), _killing(kill), 1 << 20)
            assert time.monotonic() - started < 30


async def _killing(kill: Callable[[], None]) -> AsyncIterator[bytes]:
    yield bytes(1000)
    kill()
    while True:
        yield bytes(1000)
        await asyncio.sleep(0.01)
