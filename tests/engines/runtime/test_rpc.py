"""The engine's binary protocol, as a client meets it that was written from the page alone."""

from __future__ import annotations

import json
import socket
import time
import urllib.request
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.engine_process import EngineProcess, free_port
from tests.engines.runtime.plain_rpc import PlainClient, message
from tests.paced_engine import PacedEngine
from tests.synthetic_gguf import SyntheticModel

SECRET = "a secret of more than sixteen bytes"
COLOUR = [{"role": "user", "content": "Name a colour. " * 12}]
OK, NOT_FOUND, ERROR, PARTIAL, BUSY, BAD_REQUEST, NOT_IMPLEMENTED = range(7)


@pytest.fixture(scope="module")
def engine(
    tiny_model: Callable[..., SyntheticModel], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[PacedEngine]:
    model = tiny_model("llama", tie_free=True, utf8_cycle=True)
    settings: dict[str, Any] = {"slots": 2, "queue_limit": 1, "context_tokens": 4096, "max_body_bytes": 1 << 20}
    settings |= {"rpc_port": free_port(), "rpc_secret": SECRET, "rpc_connections": 12, "rpc_stall_s": 5}
    with PacedEngine(tmp_path_factory.mktemp("rpc"), model.path, **settings) as running:
        yield running
        log = running.log_path.read_text()
        assert SECRET not in log
        assert "Traceback" not in log, log


@pytest.fixture
def client(engine: EngineProcess) -> Iterator[PlainClient]:
    with PlainClient(engine.config.rpc_port, SECRET) as connected:
        yield connected
    engine.wait_idle()


def chat(**values: Any) -> bytes:
    return json.dumps({"messages": COLOUR, "temperature": 0, **values}).encode()


def tokens(frames: list[Any], choice: int = 0) -> list[int]:
    mine = [frame for frame in frames if frame.get("choices") and frame["choices"][0]["index"] == choice]
    return [token for frame in mine for token in frame.get("token_ids", [])]


def text(frames: list[Any], choice: int = 0) -> str:
    parts = [frame["choices"][0] for frame in frames if frame.get("choices")]
    return "".join(part["delta"].get("content") or "" for part in parts if part["index"] == choice)


# --- HELLO ----------------------------------------------------------------------------------------


def test_a_wrong_secret_is_refused_and_the_connection_closed(engine: EngineProcess) -> None:
    with PlainClient(engine.config.rpc_port, hello=False) as stranger:
        body = json.dumps({"version": 1, "nonce": "ab" * 32}).encode()
        assert stranger.ask(0x70, payload=body).status == PARTIAL
        answer = stranger.ask(0x70, payload=json.dumps({"answer": "cd" * 32}).encode())
        assert (answer.status, answer.meta["code"]) == (BAD_REQUEST, "not_authenticated")
        assert stranger.is_closed()


@pytest.mark.parametrize(
    ("opcode", "payload", "code"),
    [
        (0x41, b"", "not_authenticated"),
        (0x30, b"", "not_authenticated"),
        (0x70, b"", "invalid_request"),
        (0x70, b'{"version":2,"nonce":"' + b"ab" * 32 + b'"}', "invalid_request"),
        (0x70, b'{"version":1,"nonce":"abc"}', "invalid_request"),
        (0x70, b'{"version":1,"nonce":"abcd"}', "invalid_request"),
        (0x70, b" " * 5000, "invalid_request"),
    ],
)
def test_nothing_else_opens_a_connection(engine: EngineProcess, opcode: int, payload: bytes, code: str) -> None:
    with PlainClient(engine.config.rpc_port, hello=False) as stranger:
        answer = stranger.ask(opcode, payload=payload)
        assert (answer.status, answer.meta["code"]) == (BAD_REQUEST, code)
        assert stranger.is_closed()


def test_a_challenge_cannot_be_skipped_by_another_request(engine: EngineProcess) -> None:
    with PlainClient(engine.config.rpc_port, hello=False) as stranger:
        body = json.dumps({"version": 1, "nonce": "ab" * 32}).encode()
        assert stranger.ask(0x70, payload=body).status == PARTIAL
        assert stranger.ask(0x41).meta["code"] == "not_authenticated"
        assert stranger.is_closed()


def test_more_connections_than_allowed_are_told_so(engine: EngineProcess) -> None:
    clients = [PlainClient(engine.config.rpc_port, SECRET) for _ in range(12)]
    try:
        with PlainClient(engine.config.rpc_port, hello=False) as late:
            answer = late.answer()
            assert (answer.status, answer.meta["code"]) == (BUSY, "too_many_connections")
            assert late.is_closed()
        assert clients[0].ask(0x41).status == OK
    finally:
        for connected in clients:
            connected.socket.close()
    deadline = time.monotonic() + 10
    while f"hydra_rpc_connections {0.0}" not in engine.text("/metrics"):
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_who_never_says_who_it_is_keeps_nobody_out(engine: EngineProcess) -> None:
    """Half of a HELLO, on as many connections as there may be."""
    strangers = [PlainClient(engine.config.rpc_port, hello=False) for _ in range(12)]
    try:
        for stranger in strangers:
            stranger.socket.sendall(message(0x70, payload=b" " * 100)[:50])
        deadline = time.monotonic() + 10
        while True:
            try:
                with PlainClient(engine.config.rpc_port, hello=False) as late:
                    late.hello(SECRET)
                    assert late.ask(0x41).status == OK
                break
            except (AssertionError, OSError, EOFError):
                assert time.monotonic() < deadline
                time.sleep(0.1)
        closed = [ended(stranger.socket) for stranger in strangers]
        assert closed == [True] + [False] * 11, "one made place, the oldest"
    finally:
        for stranger in strangers:
            stranger.socket.close()


def ended(connection: socket.socket) -> bool:
    connection.setblocking(False)
    try:
        return connection.recv(1) == b""
    except BlockingIOError:
        return False
    except ConnectionResetError:
        return True


# --- control --------------------------------------------------------------------------------------


def test_info_says_what_the_engine_is(client: PlainClient, engine: EngineProcess) -> None:
    answer = client.ask(0x41, trace="t1")
    assert (answer.status, answer.payload) == (OK, b"")
    assert (answer.meta["engine"], answer.meta["protocol"], answer.meta["state"]) == ("hydra", 1, "ready")
    assert (answer.meta["model_alias"], answer.meta["slots"], answer.meta["context_tokens"]) == ("test-model", 2, 4096)
    assert answer.meta["max_body_bytes"] == engine.config.max_body_bytes
    assert {"prefill", "decode", "state_transfer"} <= set(answer.meta["capabilities"])


def test_configure_takes_each_key_by_itself_and_says_what_became_of_it(client: PlainClient) -> None:
    params = {"n_predict": 4, "temp": 0, "top_p": 7, "n_ctx": 99, "model_path": "x", "n_keep": 1, "nonsense": 1}
    answer = client.ask(0x40, payload=json.dumps(params).encode())
    assert (answer.status, answer.meta["tier"]) == (PARTIAL, 4)
    assert answer.meta["params_applied"] == ["n_predict", "temp"]
    assert sorted(answer.meta["rejected"]) == ["model_path", "n_ctx", "n_keep", "top_p"]
    assert "context_tokens" in answer.meta["rejected"]["n_ctx"]
    assert (answer.meta["unrecognised"], answer.meta["deferred_keys"]) == (["nonsense"], [])
    assert answer.meta["params"]["max_tokens"] == 4
    try:
        body = json.dumps({"messages": COLOUR}).encode()
        assert len(tokens(client.ask(0x43, payload=body).frames)) == 4
        assert (
            len(tokens(client.ask(0x43, payload=json.dumps({"messages": COLOUR, "max_tokens": 6}).encode()).frames))
            == 6
        )
    finally:
        answer = client.ask(0x40, payload=json.dumps({"n_predict": -1, "temp": None}).encode())
    assert (answer.status, answer.meta["params"]["max_tokens"]) == (OK, 0)


def test_a_default_seed_and_stop_hold_over_http_too(client: PlainClient, engine: EngineProcess) -> None:
    assert client.ask(0x40, payload=b'{"seed":7,"temperature":2,"n_predict":12,"stop":["\\n"]}').status == OK
    try:

        def ask() -> Any:
            url = engine.base_url + "/v1/chat/completions"
            with urllib.request.urlopen(
                url, json.dumps({"messages": COLOUR, "cache_prompt": False}).encode()
            ) as answer:
                return json.load(answer)

        first, second = ask(), ask()
        assert first["choices"] == second["choices"]
        assert first["usage"]["completion_tokens"] <= 12
    finally:
        client.ask(0x40, payload=b'{"seed":null,"temperature":null,"n_predict":null,"stop":null}')


def test_configure_clamps_the_chunk_size_and_refuses_what_is_no_number(client: PlainClient) -> None:
    assert client.ask(0x40, payload=b'{"state_chunk_size":1}').meta["state_chunk_size_applied"] == 65536
    answer = client.ask(0x40, payload=b'{"state_chunk_size":"big"}')
    assert (answer.status, list(answer.meta["rejected"])) == (BAD_REQUEST, ["state_chunk_size"])
    assert client.ask(0x40, payload=b'{"state_chunk_size":2097152}').meta["state_chunk_size_applied"] == 2097152
    assert client.ask(0x40, payload=b"[]").meta["code"] == "invalid_request"
    assert client.ask(0x40, payload=b"{}").status == OK


@pytest.mark.parametrize("opcode", [0x01, 0x02, 0x05, 0x10, 0x15, 0x33, 0x44, 0x45, 0x46, 0x71, 0x74, 0x16, 0x00, 0xFF])
def test_what_is_not_served_is_said_so_and_the_connection_goes_on(client: PlainClient, opcode: int) -> None:
    answer = client.ask(opcode, key="kv/x", payload=b"some body")
    assert (answer.status, answer.meta["code"]) == (NOT_IMPLEMENTED, "not_served")
    assert client.ask(0x41).status == OK


@pytest.mark.parametrize(
    ("sent", "code"),
    [
        (message(0x41, key="x"), "invalid_request"),
        (message(0x41, payload=b"x"), "body_too_large"),
        (b"\x59\x48\x41\x01" + bytes(12), "invalid_request"),
        (b"\x59\x48\x32\x00\x01\x00" + bytes(10) + b"\xff", "invalid_request"),
        (message(0x32, key="zero"), "invalid_request"),
        (message(0x32, key="0?form"), "invalid_request"),
        (message(0x42, payload=b"{"), "invalid_request"),
        (message(0x43, payload=b'{"messages":[]}'), "invalid_request"),
        (message(0x43, payload=chat(temperature="hot")), "invalid_request"),
        (message(0x42, payload=chat(hydra_config={})), "unsupported_parameter"),
        (message(0x42, payload=chat(n=2)), "unsupported_parameter"),
        (
            message(0x43, payload=chat(messages=[{"role": "user", "content": "word " * 9000}])),
            "context_length_exceeded",
        ),
        (message(0x40, payload=b" " * 70_000), "body_too_large"),
        (message(0x43, payload=b" " * (1 << 20) + b"x"), "body_too_large"),
        (message(0x70, payload=b"{}"), "not_served"),
    ],
)
def test_a_bad_request_is_answered_and_the_connection_goes_on(client: PlainClient, sent: bytes, code: str) -> None:
    client.socket.sendall(sent)
    answer = client.answer()
    assert answer.status in (BAD_REQUEST, NOT_IMPLEMENTED)
    assert answer.meta["code"] == code
    assert client.ask(0x41).status == OK


# --- chats ----------------------------------------------------------------------------------------


def test_a_decode_gives_the_text_of_the_http_stream_and_its_tokens(client: PlainClient, engine: EngineProcess) -> None:
    url = engine.base_url + "/v1/chat/completions"
    with urllib.request.urlopen(url, chat(max_tokens=40, cache_prompt=False)) as response:
        whole = json.load(response)
    body = chat(max_tokens=40, cache_prompt=False, stream=True, stream_options={"include_usage": True})
    answer = client.ask(0x43, payload=body, trace="trace-1")
    assert (answer.status, answer.meta["request_id"], answer.meta["choices"]) == (OK, "trace-1", 1)
    assert text(answer.frames) == whole["choices"][0]["message"]["content"]
    assert (
        len(tokens(answer.frames))
        == whole["usage"]["completion_tokens"]
        == answer.frames[-1]["usage"]["completion_tokens"]
    )
    assert answer.frames[0]["choices"][0]["delta"]["role"] == "assistant"
    assert answer.frames[0]["id"] == "chatcmpl-trace-1"


def test_token_ids_are_those_that_the_model_draws(
    client: PlainClient, tiny_model: Callable[..., SyntheticModel]
) -> None:
    model = tiny_model("llama", tie_free=True, utf8_cycle=True)
    drawn = tokens(client.ask(0x43, payload=chat(max_tokens=50)).frames)
    assert drawn[1:] == model.follow(drawn[0], 49)


def test_several_choices_tell_their_tokens_apart(client: PlainClient) -> None:
    frames = client.ask(0x43, payload=chat(max_tokens=9, n=2, temperature=1.5, seed=1)).frames
    assert [len(tokens(frames, choice)) for choice in (0, 1)] == [9, 9]


def test_a_prefill_leaves_all_but_the_last_token_to_a_decode(client: PlainClient) -> None:
    messages = [{"role": "user", "content": "A prompt that nobody has sent yet. " * 9}]
    answer = client.ask(0x42, payload=chat(messages=messages, model="other"))
    assert (answer.status, answer.payload) == (OK, b"")
    meta = answer.meta
    assert meta["n_past"] == meta["prompt_tokens"] - 1 == meta["tokens_processed"] + meta["cached_tokens"]
    assert meta["tokens_processed"] > 100
    assert (meta["state_size"], meta["logits_size"], meta["model_fallback"]) == (0, 0, True)
    again = client.ask(0x42, payload=chat(messages=messages)).meta
    assert (again["tokens_processed"], again["cached_tokens"], again["id_slot"]) == (0, meta["n_past"], meta["id_slot"])
    frames = client.ask(0x43, payload=chat(messages=messages, max_tokens=3)).frames
    timings = next(frame["timings"] for frame in frames if "timings" in frame)
    assert (timings["cache_n"], timings["prompt_n"]) == (meta["n_past"], 1)


# --- states ---------------------------------------------------------------------------------------


def test_a_state_travels_from_slot_to_slot(client: PlainClient) -> None:
    messages = [{"role": "user", "content": "A conversation that moves. " * 9}]
    prefilled = client.ask(0x42, payload=chat(messages=messages)).meta
    source = prefilled["id_slot"]
    meta = client.ask(0x32, key=str(source)).meta
    assert (meta["slot_id"], meta["n_past"], meta["is_processing"]) == (source, prefilled["n_past"], False)
    answer = client.ask(0x30, key=str(source))
    assert answer.status == OK
    assert len(answer.payload) == answer.meta["state_size"] == meta["state_size"]
    target = 1 - source
    restored = client.ask(0x31, key=str(target), payload=answer.payload)
    assert (restored.status, restored.meta["model_match"]) == (OK, "exact")
    assert (restored.meta["n_past"], restored.meta["bytes"]) == (prefilled["n_past"], len(answer.payload))
    assert client.ask(0x32, key=str(target)).meta["n_past"] == prefilled["n_past"]
    frames = client.ask(0x43, payload=chat(messages=messages, max_tokens=3)).frames
    assert next(frame["timings"] for frame in frames if "timings" in frame)["prompt_n"] == 1


def test_a_prefill_hands_out_its_state_when_asked(client: PlainClient) -> None:
    messages = [{"role": "user", "content": "Another conversation that moves. " * 9}]
    answer = client.ask(0x42, payload=chat(messages=messages, return_state=True))
    assert answer.status == OK
    assert len(answer.payload) == answer.meta["state_size"] > 0
    assert answer.meta["form"] == "stream"
    restored = client.ask(0x31, key=str(1 - answer.meta["id_slot"]), payload=answer.payload)
    assert (restored.status, restored.meta["n_past"]) == (OK, answer.meta["n_past"])


def test_a_damaged_state_is_refused_and_leaves_the_slot_empty(client: PlainClient) -> None:
    prefilled = client.ask(0x42, payload=chat())
    state = bytearray(client.ask(0x30, key=str(prefilled.meta["id_slot"])).payload)
    target = 1 - prefilled.meta["id_slot"]
    state[len(state) // 2] ^= 1
    answer = client.ask(0x31, key=str(target), payload=bytes(state))
    assert (answer.status, answer.meta["code"]) == (BAD_REQUEST, "state_invalid")
    assert client.ask(0x32, key=str(target)).meta["n_past"] == 0
    answer = client.ask(0x31, key=str(target), payload=b"no state at all")
    assert (answer.status, answer.meta["code"]) == (BAD_REQUEST, "state_invalid")
    assert client.ask(0x30, key=str(target)).meta["code"] == "slot_empty"


def test_a_slot_that_is_not_there_is_not_found(client: PlainClient) -> None:
    state = client.ask(0x42, payload=chat(return_state=True)).payload
    for opcode, payload in ((0x30, b""), (0x31, state), (0x32, b"")):
        answer = client.ask(opcode, key="77", payload=payload)
        assert (answer.status, answer.meta["code"]) == (NOT_FOUND, "slot_not_found")


def test_a_working_slot_is_busy_and_a_full_line_too(client: PlainClient, engine: PacedEngine) -> None:
    state = client.ask(0x42, payload=chat(return_state=True)).payload
    working = [PlainClient(engine.config.rpc_port, SECRET) for _ in range(3)]
    try:
        with engine.slowed():
            for other in working:
                other.socket.sendall(message(0x43, payload=chat(max_tokens=3500)))
                assert other.head()[0] == OK
                while other is not working[-1] and b"token_ids" not in other.frame():
                    pass
            for opcode, payload in ((0x30, b""), (0x31, state)):
                answer = client.ask(opcode, key="0", payload=payload)
                assert (answer.status, answer.meta["code"]) == (BUSY, "slot_busy")
            assert client.ask(0x32, key="0").meta["is_processing"] is True
            answer = client.ask(0x43, payload=chat())
            assert (answer.status, answer.meta["code"]) == (BUSY, "queue_full")
    finally:
        for other in working:
            other.socket.close()
    engine.wait_idle()
    assert client.ask(0x43, payload=chat(max_tokens=2)).status == OK


# --- leaving --------------------------------------------------------------------------------------


@pytest.mark.parametrize("way", ["close", "half-close", "reset", "speak"])
def test_a_client_that_leaves_a_decode_ends_its_generation(engine: EngineProcess, way: str) -> None:
    before = cancelled(engine)
    client = PlainClient(engine.config.rpc_port, SECRET)
    client.socket.sendall(message(0x43, payload=chat(max_tokens=3900)))
    assert client.head()[0] == OK
    client.frame()
    if way == "reset":
        client.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\x01\0\0\0\0\0\0\0")
    if way == "speak":
        client.socket.sendall(message(0x41))
    if way == "half-close":
        client.socket.shutdown(socket.SHUT_WR)
    if way in ("close", "reset"):
        client.socket.close()
    deadline = time.monotonic() + 20
    while cancelled(engine) != before + 1:
        assert time.monotonic() < deadline
        time.sleep(0.02)
    engine.wait_idle()
    client.socket.close()


def cancelled(engine: EngineProcess) -> float:
    lines = [line for line in engine.text("/metrics").splitlines() if 'requests_total{outcome="cancelled"}' in line]
    return sum(float(line.rsplit(" ", 1)[1]) for line in lines)


def test_one_connection_serves_many_requests_one_after_another(client: PlainClient) -> None:
    for count in range(1, 20):
        assert len(tokens(client.ask(0x43, payload=chat(max_tokens=count)).frames)) == count
        assert client.ask(0x41).status == OK
