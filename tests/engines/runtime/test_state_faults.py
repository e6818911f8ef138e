"""A state on its way from one engine to another, broken in every way and with either end killed: what the receiver then answers
is what it would have answered in peace.

The sender does what a careful one does: it tries again what may be tried again, and gives up what was refused; whatever came of
it, the receiver is then asked, and computes what it lacks. A few places in the message in the normal run, many under
`make soak`; how often it tried again, computed or was refused stands in the table at the end.
"""

from __future__ import annotations

import asyncio
import re
import urllib.request
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

import pytest

from engines.errors import EngineError, RpcBusy, RpcRefused
from engines.rpc_client import Patience, RpcClient
from engines.wire import Opcode, RequestHead, SlotKey
from tests.engine_process import EngineProcess, free_port
from tests.fault_table import FaultTable
from tests.synthetic_gguf import SyntheticModel

TABLE = FaultTable(
    "states between engines under faults",
    "trials", "went through", "retried", "refused", "re-prefilled", "wrong tokens", "aborts",
)  # fmt: skip
MESSAGES = [{"role": "user", "content": "Name a colour. " * 12}]
TARGET = SlotKey(1)
TRIES, PAUSE_S = 8, 0.3
STALL_S = 1.0
# Bytes that come twice.
SPAN = 64


@dataclass
class Link:
    """A way to a port of this host that breaks one message at its byte `at`, and afterwards none."""

    target: int
    fault: str = ""
    at: int = 0
    on_fault: Callable[[], None] = lambda: None
    seen: int = 0
    done: bool = False
    _open: set[asyncio.Task[None]] = field(default_factory=set)

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._open.add(task)
        ends = [writer]
        back: asyncio.Future[None] | None = None
        try:
            back_reader, there = await asyncio.open_connection("127.0.0.1", self.target)
            ends.append(there)
            back = asyncio.ensure_future(self._carry(back_reader, writer))
            await self._forth(reader, there)
        except (OSError, asyncio.CancelledError):
            pass  # one of the two has gone, or the test is over
        finally:
            if back is not None:
                back.cancel()
                await asyncio.wait((back,))
                if not back.cancelled():
                    back.exception()  # looked at: an end that is gone
            for end in ends:
                end.transport.abort()
                with suppress(OSError):
                    await end.wait_closed()
            self._open.discard(task)

    async def close(self) -> None:
        for task in list(self._open):
            task.cancel()
        if self._open:
            await asyncio.wait(self._open)

    async def _carry(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(1 << 16):
            writer.write(data)
        writer.transport.abort()

    async def _forth(self, reader: asyncio.StreamReader, there: asyncio.StreamWriter) -> None:
        self.seen = 0
        while data := await reader.read(1 << 16):
            start, self.seen = self.seen, self.seen + len(data)
            if self.fault and not self.done and start <= self.at < self.seen:
                self.done = True
                if not await self._break(bytearray(data), self.at - start, there):
                    return
            else:
                there.write(data)

    async def _break(self, data: bytearray, at: int, there: asyncio.StreamWriter) -> bool:
        """False where the connection is over."""
        if self.fault == "flipped":
            data[at] ^= 1 << (self.at % 8)
            there.write(data)
            return True
        there.write(data[:at])
        if self.fault == "duplicated":
            there.write(data[at : at + SPAN])
            there.write(data[at:])
            return True
        await there.drain()
        if self.fault == "killed":
            await asyncio.to_thread(self.on_fault)
        elif self.fault == "truncated":
            there.write_eof()
            await asyncio.sleep(2 * STALL_S)
        elif self.fault == "stalled":
            await asyncio.sleep(2 * STALL_S)
        return False


@asynccontextmanager
async def linked(link: Link) -> AsyncIterator[RpcClient]:
    server = await asyncio.start_server(link.serve, "127.0.0.1", 0)
    patience = Patience(connect_s=1, hello_s=2 * STALL_S, look_s=2 * STALL_S, stall_s=2 * STALL_S)
    try:
        async with RpcClient(
            "127.0.0.1", server.sockets[0].getsockname()[1], name="sender", patience=patience
        ) as client:
            yield client
    finally:
        server.close()
        await link.close()


@dataclass
class Pair:
    """What the sender gave and would have gone on with, and the receiver."""

    state: bytes
    answer: list[int]
    receiver: EngineProcess
    hello_bytes: int = 0
    deaths: int = 0

    @property
    def port(self) -> int:
        return self.receiver.config.rpc_port

    def kill(self) -> None:
        self.receiver.process.kill()
        self.receiver.process.wait()
        self.deaths += 1

    async def revive(self) -> None:
        """A receiver that the test has killed comes back; one that ended by itself has aborted."""
        if self.receiver.process.poll() is not None:
            await asyncio.to_thread(self.receiver.__enter__)

    async def begin(self) -> None:
        """Nothing is left in the receiver that would hide a loss."""
        async with RpcClient("127.0.0.1", self.port) as client:
            for slot in (0, 1):
                await _when_free(client, SlotKey(slot))
        for slot in (0, 1):
            await asyncio.to_thread(_erase, self.receiver, slot)


async def _when_free(client: RpcClient, slot: SlotKey) -> None:
    for _ in range(200):
        meta = await client.state_meta(slot)
        if not meta.is_processing and not meta.is_transferring:
            return
        await asyncio.sleep(0.05)
    raise AssertionError("a slot was not given back")


def _erase(engine: EngineProcess, slot: int) -> None:
    request = urllib.request.Request(f"{engine.base_url}/slots/{slot}?action=erase", b"{}", method="POST")
    with urllib.request.urlopen(request, timeout=10) as answer:
        assert answer.status == 200


def body(**values: Any) -> dict[str, Any]:
    return {"messages": MESSAGES, "temperature": 0, "max_tokens": 12, **values}


async def answer_of(port: int) -> tuple[list[int], int]:
    """The answer's tokens, and how many of the prompt's were not computed."""
    tokens: list[int] = []
    cached = 0
    async with RpcClient("127.0.0.1", port) as client:
        async for chunk in client.decode(body(stream=True, stream_options={"include_usage": True})):
            tokens += chunk.get("token_ids", [])
            usage = chunk.get("usage")
            cached = usage["prompt_tokens_details"]["cached_tokens"] if usage else cached
    return tokens, cached


@pytest.fixture(scope="module")
def pair(tiny_model: Callable[..., SyntheticModel], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    model = tiny_model("llama")  # its answers depend on every token before
    folder = tmp_path_factory.mktemp("state-faults")
    settings: dict[str, Any] = {"slots": 2, "context_tokens": 1024, "host_cache_bytes": 0, "rpc_stall_s": STALL_S}

    async def given(port: int) -> tuple[bytes, list[int]]:
        async with RpcClient("127.0.0.1", port) as client:
            async with client.prefill_state(body(return_state=True)) as (_, state):
                raw = b"".join([piece async for piece in state])
            return raw, (await answer_of(port))[0]

    async def hello_bytes(port: int, state: bytes) -> int:
        link = Link(port)
        async with linked(link) as client:
            await client.state_put(TARGET, state, len(state))
        return link.seen - message_bytes(state)

    with EngineProcess(folder, model.path, **settings, rpc_port=free_port()) as sender:
        state, answer = asyncio.run(given(sender.config.rpc_port))
    with EngineProcess(folder, model.path, **settings, rpc_port=free_port()) as receiver:
        made = Pair(state, answer, receiver)
        made.hello_bytes = asyncio.run(hello_bytes(made.port, state))
        yield made
        assert "Traceback" not in receiver.log_path.read_text()


def message_bytes(state: bytes) -> int:
    return len(RequestHead(Opcode.STATE_PUT, key=TARGET.encode(), payload_bytes=len(state)).encode()) + len(state)


async def moved(client: RpcClient, pair: Pair, state: bytes) -> tuple[str, int]:
    """How it ended: moved, refused, or given up; and how often it was tried again."""
    again = 0
    for _ in range(TRIES):
        try:
            await client.state_put(TARGET, state, len(state))
        except RpcBusy:
            again += 1
        except RpcRefused:
            return "refused", again
        except EngineError as error:
            if not error.retryable and pair.receiver.process.poll() is None:
                return "given up", again
            again += 1
            await pair.revive()
        else:
            return "moved", again
        await asyncio.sleep(PAUSE_S)
    return "given up", again


async def tried(pair: Pair, fault: str, at: int, state: bytes | None = None) -> None:
    """One state, one fault, and what the receiver answers then."""
    await pair.begin()
    deaths = pair.deaths
    link = Link(pair.port, fault, at, pair.kill)
    async with linked(link) as client:
        end, again = await moved(client, pair, state or pair.state)
    await pair.revive()
    tokens, cached = await answer_of(pair.port)
    alive = pair.receiver.process.poll() is None
    TABLE.add(
        fault or "wrong fingerprint",
        trials=1,
        went_through=end == "moved" and not again,
        retried=again > 0,
        refused=end == "refused",
        **{"re-prefilled": cached == 0},
        wrong_tokens=tokens != pair.answer,
        aborts=not alive or (fault != "killed" and pair.deaths != deaths),
    )
    assert alive
    assert tokens == pair.answer, (fault, at)
    assert (cached > 0) == (end == "moved"), (fault, at, end, cached)


def places(pair: Pair, count: int) -> list[int]:
    """Bytes of the connection, HELLO apart: the message's header, and evenly through the state to its last byte."""
    size = message_bytes(pair.state)
    header = range(0, 17, max(1, 34 // count))
    behind = [17 + (size - 18) * place // count for place in range(count + 1)]
    return [pair.hello_bytes + at for at in (*header, *behind)]


FAULTS = ("cut", "stalled", "truncated", "duplicated", "flipped")


@pytest.mark.parametrize("count", [1, pytest.param(60, marks=[pytest.mark.soak, pytest.mark.timeout(3600)])])
@pytest.mark.parametrize("fault", FAULTS)
async def test_a_state_that_is_broken_on_the_way_never_gives_another_answer(pair: Pair, fault: str, count: int) -> None:
    # Each stall takes as long as the two sides wait.
    some = places(pair, min(count, 8) if fault in ("stalled", "truncated") else count)
    for at in some:
        await tried(pair, fault, at)


@pytest.mark.parametrize("by", [-1, 1, pytest.param(1 << 20, marks=pytest.mark.soak)])
async def test_a_state_of_another_length_than_it_says_is_refused(pair: Pair, by: int) -> None:
    await pair.begin()
    wrong = pair.state[:by] if by < 0 else pair.state + bytes(by)
    async with linked(Link(pair.port)) as client:
        end, _ = await moved(client, pair, wrong)
    tokens, cached = await answer_of(pair.port)
    TABLE.add(
        "wrong length",
        trials=1,
        refused=end == "refused",
        **{"re-prefilled": cached == 0},
        wrong_tokens=tokens != pair.answer,
        aborts=pair.receiver.process.poll() is not None,
    )
    assert (end, cached, tokens) == ("refused", 0, pair.answer)


async def test_a_state_of_another_fingerprint_is_refused(pair: Pair) -> None:
    found = re.search(rb'"fingerprint":"([^"]+)"', pair.state)
    assert found is not None
    start, end = found.span(1)
    for other in (b"0" * (end - start), found[1][::-1]):
        await tried(pair, "", 0, pair.state[:start] + other + pair.state[end:])


@pytest.mark.parametrize("count", [1, pytest.param(16, marks=[pytest.mark.soak, pytest.mark.timeout(3600)])])
async def test_a_receiver_that_is_killed_on_the_way_computes_or_gets_it_again(pair: Pair, count: int) -> None:
    size = message_bytes(pair.state)
    for place in range(count):
        await tried(pair, "killed", pair.hello_bytes + (size - 1) * (place + 1) // (count + 1))
