"""Every message of the binary protocol, broken in every way: the engine stays up, others are served, nothing is leaked.

A table of faults times a table of messages, at places within each message: a few of them here, all under `make soak`.
"""

from __future__ import annotations

import itertools
import json
import socket
import struct
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.engine_process import EngineProcess, free_port
from tests.engines.runtime.plain_rpc import PlainClient, message
from tests.synthetic_gguf import SyntheticModel

STALL_S = 1.0
COLOUR = [{"role": "user", "content": "Name a colour. " * 12}]
LONG = [{"role": "user", "content": "Name a colour. " * 45}]
CHAT = json.dumps({"messages": COLOUR, "temperature": 0, "max_tokens": 5}).encode()
HELLO = json.dumps({"version": 1, "nonce": "ab" * 32}).encode()
OK, NOT_FOUND, ERROR, PARTIAL, BUSY, BAD_REQUEST, NOT_IMPLEMENTED = range(7)
MESSAGES = ("hello", "info", "configure", "state_meta", "state_get", "state_put", "prefill", "decode", "unknown")
MAX_GROWTH_BYTES = 24 << 20
# The scrape's own connection, and whatever the engine opens late.
SPARE_FILES = 4


@dataclass(frozen=True)
class Bench:
    """An engine, one bystander's connection that must go on working, a valid state, and what the process had at first."""

    engine: EngineProcess
    bystander: PlainClient
    state: bytes
    process: psutil.Process

    def own_bytes(self) -> int:
        """Private memory: pages of the arena for states count as shared, and are touched one after another."""
        memory = self.process.memory_info()
        return int(memory.rss - memory.shared)

    def message(self, name: str) -> bytes:
        opcode, key, payload = {
            "hello": (0x70, "", HELLO),
            "info": (0x41, "", b""),
            "configure": (0x40, "", b'{"n_predict":50}'),
            "state_meta": (0x32, "1", b""),
            "state_get": (0x30, "0", b""),
            "state_put": (0x31, "1", self.state),
            "prefill": (0x42, "", CHAT),
            "decode": (0x43, "", CHAT),
            "unknown": (0x6F, "k", b"payload"),
        }[name]
        return message(opcode, key, payload, "trace")

    def connect(self, name: str) -> PlainClient:
        return PlainClient(self.engine.config.rpc_port, hello=name != "hello", timeout_s=20)

    def require_sound(self) -> None:
        """The bystander is served, every slot is idle and free, and no connection but the bystander's is left."""
        assert self.bystander.ask(0x41).status == OK
        deadline = time.monotonic() + 20
        while True:
            metas = [self.bystander.ask(0x32, key=str(slot)).meta for slot in (0, 1)]
            taken = [meta for meta in metas if meta["is_processing"] or meta["is_transferring"]]
            if not taken and "hydra_rpc_connections 1.0" in self.engine.text("/metrics"):
                return
            assert time.monotonic() < deadline, metas
            time.sleep(0.01)


@pytest.fixture(scope="module")
def bench(tiny_model: Callable[..., SyntheticModel], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    model = tiny_model("llama", tie_free=True, utf8_cycle=True)
    settings: dict[str, Any] = {"slots": 2, "context_tokens": 2048, "max_body_bytes": 1 << 20, "rpc_port": free_port()}
    # Without the cache of earlier prompts in host memory, which is meant to grow.
    settings |= {"rpc_stall_s": STALL_S, "rpc_idle_s": 600, "max_state_bytes": 1 << 24, "host_cache_bytes": 0}
    with EngineProcess(tmp_path_factory.mktemp("rpc-faults"), model.path, **settings) as engine:
        with PlainClient(engine.config.rpc_port) as bystander:
            prefilled = bystander.ask(0x42, payload=CHAT[:-1] + b',"return_state":true}')
            assert prefilled.status == OK
            yield Bench(engine, bystander, prefilled.payload, psutil.Process(engine.process.pid))
        log = engine.log_path.read_text()
        assert "Traceback" not in log, log[-5000:]


@pytest.fixture(autouse=True)
def nothing_leaks(bench: Bench) -> Iterator[None]:
    bench.require_sound()
    files, memory_bytes = bench.process.num_fds(), bench.own_bytes()
    yield
    bench.require_sound()
    assert bench.process.num_fds() <= files + SPARE_FILES
    assert bench.own_bytes() < memory_bytes + MAX_GROWTH_BYTES


def outcome(client: PlainClient) -> int | None:
    """The status of the next answer, read wholly; None when the connection ended instead."""
    try:
        return client.answer().status
    except (EOFError, ConnectionResetError, BrokenPipeError):
        return None


def send(client: PlainClient, data: bytes) -> None:
    """Sends even where the other side has already had enough."""
    try:
        client.socket.sendall(data)
    except (ConnectionResetError, BrokenPipeError):
        return


def places(data: bytes) -> tuple[list[int], list[int]]:
    """Offsets in a message's header, and at most 300 behind it, the last one among them."""
    step = max(1, (len(data) - 16) // 300)
    return list(range(16)), [*range(16, len(data) - 1, step), len(data) - 1]


# --- the faults -----------------------------------------------------------------------------------

# Each sends what is broken and returns the connection if there is still something to be heard on it.


def cut(bench: Bench, name: str, at: int) -> PlainClient | None:
    """The client leaves in the middle of its message."""
    client = bench.connect(name)
    send(client, bench.message(name)[:at])
    client.socket.close()
    return None


def reset(bench: Bench, name: str, at: int) -> PlainClient | None:
    """The client's process dies in the middle: its kernel says so."""
    client = bench.connect(name)
    send(client, bench.message(name)[:at])
    client.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    client.socket.close()
    return None


def truncated(bench: Bench, name: str, at: int) -> PlainClient | None:
    """The client ends its sending half in the middle, and listens on."""
    client = bench.connect(name)
    send(client, bench.message(name)[:at])
    client.socket.shutdown(socket.SHUT_WR)
    return client


def stalled(bench: Bench, name: str, at: int) -> PlainClient | None:
    """The client falls silent in the middle."""
    client = bench.connect(name)
    send(client, bench.message(name)[: max(at, 1)])
    return client


def flipped(bench: Bench, name: str, at: int, bit: int = 0) -> PlainClient | None:
    """A bit changes on the way. A length that has grown waits for bytes that will not come."""
    data = bytearray(bench.message(name))
    data[at] ^= 1 << bit
    client = bench.connect(name)
    send(client, bytes(data))
    return client


FAULTS = {"cut": cut, "reset": reset, "truncated": truncated, "stalled": stalled, "flipped": flipped}
TOGETHER = 32


def break_it(bench: Bench, fault: str, name: str, at: list[int], bits: tuple[int, ...] = (0,)) -> None:
    """The fault at each place, many connections at a time, so that those that end by a stall end together."""
    spots = [(place, bit) for place in at for bit in (bits if fault == "flipped" else (0,))]
    # Those that say STATE_PUT would only find the slot busy by one another.
    together = 1 if name == "state_put" else TOGETHER
    for start in range(0, len(spots), together):
        batch = spots[start : start + together]
        with ExitStack() as opened:
            before = bench.bystander.ask(0x32, key="1").meta["n_past"]
            clients = []
            for place, bit in batch:
                sent = flipped(bench, name, place, bit) if fault == "flipped" else FAULTS[fault](bench, name, place)
                clients.append((place, opened.enter_context(sent) if sent else None))
            for place, client in clients:
                if client is not None:
                    require_right(bench, fault, name, place, outcome(client), before)


def require_right(bench: Bench, fault: str, name: str, at: int, status: int | None, held: int = 0) -> None:
    if fault in ("truncated", "stalled"):
        # What cannot be served is refused before its payload is there.
        assert status in ((None, NOT_IMPLEMENTED) if name == "unknown" else (None,)), (at, status)
    elif at < 2:
        assert status is None, "a wrong magic has no answer"
    elif name == "state_put" and at >= 22:
        # Behind the header stand a byte of key and five of trace: this one was in the state.
        assert status == BAD_REQUEST, at
        # Refused by its beginning it leaves the slot as it was, later it leaves it empty.
        assert bench.bystander.ask(0x32, key="1").meta["n_past"] in (0, held)


@pytest.mark.parametrize("name", MESSAGES)
@pytest.mark.parametrize("fault", [fault for fault in FAULTS if fault != "stalled"])
def test_a_message_broken_somewhere_harms_nobody(bench: Bench, fault: str, name: str) -> None:
    in_header, behind = places(bench.message(name))
    # Of the header another place for each message; the upper bytes of a length are not among them, for they wait for a stall.
    some = [in_header[MESSAGES.index(name) % 4], *behind[:: max(1, len(behind) // 5)][:5]]
    break_it(bench, fault, name, some)


@pytest.mark.parametrize("half", [0.4, 0.9])
def test_messages_that_stop_somewhere_are_not_waited_for(bench: Bench, half: float) -> None:
    sent = [(name, int(len(bench.message(name)) * half)) for name in MESSAGES]
    clients = [stalled(bench, name, at) for name, at in sent]
    for (name, at), client in zip(sent, clients, strict=True):
        assert client is not None
        require_right(bench, "stalled", name, at, outcome(client))
        client.socket.close()


@pytest.mark.soak
@pytest.mark.parametrize("name", MESSAGES)
@pytest.mark.parametrize("fault", FAULTS)
def test_a_message_broken_anywhere_harms_nobody(bench: Bench, fault: str, name: str) -> None:
    in_header, behind = places(bench.message(name))
    if name == "state_put" and fault == "stalled":
        # One after another, each for as long as the engine waits.
        in_header, behind = in_header[::4], behind[::40]
    header_bits = (0, 3, 7) if name == "state_put" else tuple(range(8))
    break_it(bench, fault, name, in_header[:6] if name == "state_put" else in_header, header_bits)
    break_it(bench, fault, name, behind, tuple(range(8)) if len(behind) < 200 else (0, 7))


@pytest.mark.parametrize("name", MESSAGES)
def test_a_message_sent_twice_at_once_is_answered_or_ends_the_connection(bench: Bench, name: str) -> None:
    with bench.connect(name) as client:
        send(client, bench.message(name) * 2)
        # The second HELLO is no operation, and a chat's second half counts as leaving.
        assert [outcome(client), outcome(client)][0] in (None, OK, NOT_FOUND, NOT_IMPLEMENTED)


@pytest.mark.parametrize("name", MESSAGES)
def test_a_wrong_magic_ends_the_connection_without_a_word(bench: Bench, name: str) -> None:
    for magic in (b"HY", b"GE", b"\x16\x03", b"\x0e\x00"):
        with bench.connect(name) as client:
            send(client, magic + bench.message(name)[2:])
            assert outcome(client) is None


@pytest.mark.parametrize("change", [-1, 1])
@pytest.mark.parametrize(("offset", "size"), [(4, 2), (6, 8), (14, 2)])
def test_a_length_that_is_wrong_by_one_ends_one_connection_at_most(
    bench: Bench, offset: int, size: int, change: int
) -> None:
    clients = []
    for name in MESSAGES:
        data = bytearray(bench.message(name))
        length = max(0, int.from_bytes(data[offset : offset + size], "little") + change)
        data[offset : offset + size] = length.to_bytes(size, "little")
        clients.append((name, bench.connect(name)))
        send(clients[-1][1], bytes(data))
    for name, client in clients:
        status = outcome(client)
        assert name != "state_put" or status != OK
        client.socket.close()


@pytest.mark.parametrize("name", MESSAGES)
@pytest.mark.parametrize("length", [(1 << 24) + 1, 1 << 40, (1 << 63) - 1, 1 << 63, (1 << 64) - 1])
def test_a_payload_beyond_all_bounds_is_refused_unread(bench: Bench, name: str, length: int) -> None:
    data = bytearray(bench.message(name))
    data[6:14] = length.to_bytes(8, "little")
    with bench.connect(name) as client:
        send(client, bytes(data))
        assert outcome(client) == (NOT_IMPLEMENTED if name == "unknown" else BAD_REQUEST)
        assert client.is_closed()


def test_the_longest_key_and_trace_are_taken(bench: Bench) -> None:
    with bench.connect("info") as client:
        client.socket.sendall(struct.pack("<HBBHQH", 0x4859, 0x6F, 0, 65535, 0, 65535) + b"k" * 131070)
        assert outcome(client) == NOT_IMPLEMENTED
        assert client.ask(0x41, trace="t" * 65535).status == OK


def test_clients_that_drip_are_not_waited_for(bench: Bench) -> None:
    clients = [(bench.connect(name), bench.message(name)) for name in ("hello", "info", "decode")]
    started = time.monotonic()
    # Each byte comes well within the stall, the header as a whole does not.
    for at in itertools.count():
        if time.monotonic() - started > 2 * STALL_S:
            break
        for client, data in clients:
            send(client, data[at : at + 1])
        time.sleep(STALL_S / 8)
    for client, _ in clients:
        assert outcome(client) is None
        client.socket.close()


def test_a_client_that_never_says_hello_is_not_waited_for(bench: Bench) -> None:
    with bench.connect("hello") as client:
        assert outcome(client) is None


def test_a_client_that_does_not_take_its_state_is_left(
    tiny_model: Callable[..., SyntheticModel], tmp_path: Path
) -> None:
    # Deep enough that a state is larger than all that two kernels keep of it.
    model = tiny_model("llama", tie_free=True, layers=24)
    settings: dict[str, Any] = {"slots": 1, "context_tokens": 2048, "rpc_port": free_port(), "rpc_stall_s": 3 * STALL_S}
    with EngineProcess(tmp_path, model.path, **settings) as engine, PlainClient(engine.config.rpc_port) as other:
        assert other.ask(0x42, payload=json.dumps({"messages": LONG}).encode()).meta["n_past"] > 600
        with PlainClient(engine.config.rpc_port) as client:
            client.socket.sendall(message(0x30, "0"))
            status, meta, size = client.head()
            assert (status, size) == (OK, meta["state_size"])
            assert size > 7 << 20
            assert other.ask(0x32, "0").meta["is_transferring"]
            deadline = time.monotonic() + 20
            while other.ask(0x32, "0").meta["is_transferring"]:
                assert time.monotonic() < deadline
                time.sleep(0.05)
            with pytest.raises((EOFError, ConnectionResetError)):
                client.exactly(size)
        assert len(other.ask(0x30, "0").payload) == size


def test_many_connections_at_once_that_all_break_leave_nothing(bench: Bench) -> None:
    names = [name for name in MESSAGES if name != "hello"]
    clients = [bench.connect(names[i % len(names)]) for i in range(40)]
    for i, client in enumerate(clients):
        data = bench.message(names[i % len(names)])
        send(client, data[: len(data) * (i % 5) // 4])
    for client in clients:
        client.socket.close()


@pytest.mark.soak
def test_memory_stays_flat_over_thousands_of_broken_exchanges(bench: Bench) -> None:
    def rounds(count: int) -> int:
        for i in range(count):
            name = MESSAGES[i % len(MESSAGES)]
            cut(bench, name, i * 7919 % len(bench.message(name)))
            if i % 5 == 0:
                break_it(bench, "flipped", "state_put", [22 + i * 104729 % len(bench.state)])
        bench.require_sound()
        return bench.own_bytes()

    settled = rounds(500)
    assert rounds(2000) < settled + (8 << 20)
