"""What a careless or malicious client may send: nothing of it may answer 5xx, hang, or leave a slot behind."""

from __future__ import annotations

import gzip
import json
import random
import socket
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from pydantic import BaseModel

from engines.api_completions import CompletionBody
from engines.api_infill import InfillRequest
from engines.api_messages import MessagesRequest
from engines.api_responses import ResponsesRequest
from engines.api_schema import ChatRequest
from engines.api_slots import SlotFileRequest
from engines.api_text import DetokenizeRequest, TokenizeRequest
from tests.engine_client import call, post
from tests.engine_process import EngineProcess
from tests.synthetic_gguf import SyntheticModel

HELLO = [{"role": "user", "content": "hi"}]
# A sound body for each path, short to answer, and the model that knows all its fields.
SOUND: dict[str, tuple[dict[str, Any], type[BaseModel]]] = {
    "/v1/chat/completions": ({"messages": HELLO, "max_tokens": 2}, ChatRequest),
    "/v1/completions": ({"prompt": "hi", "max_tokens": 2}, CompletionBody),
    "/infill": ({"input_prefix": "hi", "n_predict": 2}, InfillRequest),
    "/v1/responses": ({"input": "hi", "max_output_tokens": 2}, ResponsesRequest),
    "/v1/messages": ({"messages": HELLO, "max_tokens": 2}, MessagesRequest),
    "/v1/messages/count_tokens": ({"messages": HELLO}, MessagesRequest),
    "/apply-template": ({"messages": HELLO}, ChatRequest),
    "/tokenize": ({"content": "hi"}, TokenizeRequest),
    "/detokenize": ({"tokens": [65]}, DetokenizeRequest),
    "/slots/0?action=save": ({"filename": "a"}, SlotFileRequest),
    "/slots/0?action=restore": ({"filename": "no-such-slot"}, SlotFileRequest),
}
GENERATING = ("/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages")


def nested(depth: int) -> Any:
    value: Any = 1
    for _ in range(depth):
        value = {"a": [value]}
    return value


WRONG: list[Any] = [
    None,
    True,
    0,
    -1,
    1 << 70,
    1e308,
    0.5,
    "",
    "x" * 5000,
    "\x00",
    "\ud800",
    "{{ 1/0 }}{% for x in range(99999999) %}",
    [],
    [[]],
    [None] * 3,
    ["\ud800"],
    list(range(2000)),
    {},
    {"type": "x"},
    {"type": "function"},
    {"\ud800": "\udfff"},
    nested(40),
    [{"type": "text", "text": None}],
    [{"role": "tool", "content": [{"type": "tool_result"}]}],
    [{"type": "function", "function": {"name": "f", "parameters": {"$ref": "#"}}}],
    {"type": "json_schema", "json_schema": {"name": "n", "schema": {"$ref": "http://localhost/x"}}},
    {"type": "json_schema", "json_schema": {"schema": {"pattern": "(((((a*)*)*)*)*)*$", "type": "string"}}},
    {"type": "json_schema", "json_schema": {"schema": {"allOf": [nested(30)] * 5}}},
]


@pytest.fixture(scope="module")
def engine(tie_free_model: SyntheticModel, tmp_path_factory: pytest.TempPathFactory) -> Iterator[EngineProcess]:
    folder = tmp_path_factory.mktemp("hostile")
    settings: dict[str, Any] = {"slots": 2, "context_tokens": 512, "max_body_bytes": 1 << 21}
    settings |= {"default_max_tokens": 2, "slot_save_path": str(folder / "slots")}
    with EngineProcess(folder, tie_free_model.path, **settings) as running:
        yield running


@pytest.fixture(autouse=True)
def unharmed(engine: EngineProcess) -> Iterator[None]:
    """After whatever a test sent: the same process answers, and no slot works."""
    yield
    assert engine.process.poll() is None, engine.log_path.read_text()[-4000:]
    engine.wait_idle()
    assert post(engine, "/v1/chat/completions", {"messages": HELLO, "max_tokens": 2}).status == 200


def wrong_fields() -> list[tuple[str, dict[str, Any]]]:
    """Every field of every body with every wrong value."""
    return [
        (path, {**body, name: value})
        for path, (body, model) in SOUND.items()
        for name in model.model_fields
        for value in WRONG
    ]


def refuse_all(engine: EngineProcess, bodies: list[tuple[str, dict[str, Any]]]) -> None:
    bad = []
    for path, body in bodies:
        answer = post(engine, path, body)
        if answer.status >= 500 or (answer.status >= 400 and not answer.value["error"]["message"]):
            bad.append((path, body, answer.status, answer.value))
    assert not bad, f"{len(bad)} of {len(bodies)}, the first: {bad[:3]}"


def test_wrong_values_in_any_field_are_the_clients_fault(engine: EngineProcess) -> None:
    refuse_all(engine, random.Random(5).sample(wrong_fields(), 400))


@pytest.mark.soak
def test_all_wrong_values_in_all_fields_are_the_clients_fault(engine: EngineProcess) -> None:
    refuse_all(engine, wrong_fields())


@pytest.mark.parametrize("path", SOUND)
def test_what_is_no_json_object_is_refused(engine: EngineProcess, path: str) -> None:
    for raw in (
        b"",
        b" ",
        b"{",
        b"[]",
        b"null",
        b'"text"',
        b"\xff\xfe{}",
        b'{"messages": NaN}',
        b'{"max_tokens": 1e999, "messages": [], "prompt": 1e999}',
        b'{"a": ' + b"9" * 5000 + b"}",
        b"[" * 100_000,
        b'{"a":' * 50_000,
        b"\x00" * 100,
        '{"messages": "\u0000'.encode("utf-16"),
    ):
        assert post(engine, path, raw).status == 400, raw[:40]


@pytest.mark.parametrize("path", GENERATING)
def test_huge_bodies_are_refused_before_they_are_read(engine: EngineProcess, path: str) -> None:
    assert post(engine, path, b'{"a": "' + b"x" * (1 << 21) + b'"}').status == 413
    packed = gzip.compress(b'{"a": "' + b"x" * (1 << 26) + b'"}')
    assert post(engine, path, packed, {"Content-Encoding": "gzip"}).status == 413
    assert post(engine, path, b"no gzip at all", {"Content-Encoding": "gzip"}).status == 400


def test_huge_arrays_are_refused(engine: EngineProcess) -> None:
    turn = {"role": "user", "content": "a"}
    tool = {"type": "function", "function": {"name": "f", "parameters": {}}}
    for path, body in (
        ("/v1/chat/completions", {"messages": [turn] * 17_000}),
        ("/v1/chat/completions", {"messages": HELLO, "tools": [tool] * 20_000}),
        ("/v1/chat/completions", {"messages": HELLO, "stop": ["a"] * 100_000}),
        ("/v1/chat/completions", {"messages": HELLO, "logit_bias": {str(i): 1 for i in range(50_000)}}),
        ("/v1/messages", {"messages": [turn] * 17_000, "max_tokens": 2}),
        ("/v1/messages", {"messages": HELLO, "max_tokens": 2, "tools": [{"name": "f", "input_schema": {}}] * 20_000}),
        ("/v1/responses", {"input": [turn] * 17_000}),
        ("/v1/completions", {"prompt": ["a"] * 100_000}),
        ("/v1/completions", {"prompt": [65] * 100_000}),
        ("/v1/completions", {"prompt": [[65]] * 100_000}),
    ):
        assert post(engine, path, body).status == 400, path


SCHEMAS: dict[str, Any] = {
    "deep": nested(31)["a"][0],
    "endless": {"$ref": "#"},
    "bomb": {"type": "array", "minItems": 1_000_000_000, "items": {"type": "array", "minItems": 1_000_000_000}},
    "long": {"type": "string", "minLength": 1 << 40},
    "wide": {"type": "object", "properties": {f"p{i}": {"type": "integer"} for i in range(3000)}},
    "pattern": {"type": "string", "pattern": "^(a|a)*(b{1,1000}){1,1000}$"},
    "lookaround": {"type": "string", "pattern": "(?=a)(?!b)\\1"},
    "remote": {"$ref": "https://example.org/schema.json"},
    "nonsense": {"type": 5, "properties": [], "required": "x", "enum": {}},
    "number": {"type": "number", "multipleOf": 0, "minimum": 1e308, "maximum": -1e308},
    "enum": {"enum": [str(i) for i in range(20_000)]},
}


@pytest.mark.parametrize("name", SCHEMAS)
def test_hostile_schemas_end_in_an_answer_or_a_refusal(engine: EngineProcess, name: str) -> None:
    schema = SCHEMAS[name]
    wanted = {"type": "json_schema", "json_schema": {"name": "n", "schema": schema}}
    tool = {"type": "function", "function": {"name": "f", "parameters": schema}}
    bodies: list[tuple[str, dict[str, Any]]] = [
        ("/v1/chat/completions", {"messages": HELLO, "max_tokens": 2, "response_format": wanted}),
        ("/v1/chat/completions", {"messages": HELLO, "max_tokens": 2, "tools": [tool], "tool_choice": "required"}),
    ]
    refuse_all(engine, bodies)


@pytest.mark.parametrize(
    "grammar",
    ["", "root ::= ", "root ::= root", "root ::= root root", "root ::= (" * 2000, 'root ::= "a"{1,1000000000}', "\x00"],
)
def test_hostile_grammars_end_in_an_answer_or_a_refusal(engine: EngineProcess, grammar: str) -> None:
    body = {"max_tokens": 2, "grammar": grammar}
    refuse_all(
        engine, [("/v1/chat/completions", {"messages": HELLO, **body}), ("/v1/completions", {"prompt": "a", **body})]
    )


@pytest.mark.parametrize("regex", ["(", "(a*)*" * 300, "a{1,1000000}{1,1000000}", "(?=a)", "\\", "[z-a]", "\x00"])
def test_hostile_patterns_end_in_an_answer_or_a_refusal(engine: EngineProcess, regex: str) -> None:
    refuse_all(engine, [("/v1/chat/completions", {"messages": HELLO, "max_tokens": 2, "regex": regex})])


@pytest.mark.parametrize(
    "name",
    ["", ".", "..", "../../etc/passwd", "/etc/passwd", "a/b", "a\\b", ".hidden", "x" * 129, "a\x00b", "a\n", "ä"],
)
def test_names_of_saved_slots_stay_in_their_folder(engine: EngineProcess, name: str) -> None:
    for action in ("save", "restore"):
        answer = post(engine, f"/slots/0?action={action}", {"filename": name})
        assert (answer.status, answer.value["error"]["param"]) == (400, "filename")


@pytest.mark.parametrize(
    "path", ["/slots/-1", "/slots/999", "/slots/x", "/slots/1e9", "/slots/%00", "/slots/" + "9" * 5000, "/slots/0%2F.."]
)
def test_slots_that_are_not_there_are_not_found(engine: EngineProcess, path: str) -> None:
    for action in ("erase", "save", "restore"):
        assert post(engine, f"{path}?action={action}", {"filename": "a"}).status in (404, 414), path


def test_actions_and_queries_are_checked(engine: EngineProcess) -> None:
    for query in ("", "?action=", "?action=format", "?action=%FF", "?" + "a=b&" * 500):
        assert call(engine, "POST", f"/slots/0{query}", b"{}").status == 400
    assert call(engine, "GET", "/v1/models/%ff%00%2e%2e").status == 404


RAW_REQUESTS: dict[str, bytes] = {
    "no http": b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
    "long line": b"GET /" + b"a" * 100_000 + b" HTTP/1.1\r\n\r\n",
    "long header": b"GET / HTTP/1.1\r\nHost: localhost\r\nX: " + b"a" * 100_000 + b"\r\n\r\n",
    "bad length": b"POST /tokenize HTTP/1.1\r\nHost: localhost\r\nContent-Length: -5\r\n\r\n",
    "two lengths": b"POST /tokenize HTTP/1.1\r\nHost: localhost\r\nContent-Length: 2\r\nContent-Length: 3\r\n\r\n{}",
    "length and chunks": b"POST /tokenize HTTP/1.1\r\nHost: localhost\r\nContent-Length: 2\r\n"
    b"Transfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
    "bad chunk": b"POST /tokenize HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n{}\r\n",
    "unknown expectation": b"POST /tokenize HTTP/1.1\r\nHost: localhost\r\nExpect: magic\r\nContent-Length: 2\r\n\r\n{}",
}


@pytest.mark.parametrize("name", RAW_REQUESTS)
def test_broken_http_is_answered_or_cut_off(engine: EngineProcess, name: str) -> None:
    with socket.create_connection(("127.0.0.1", engine.config.port), timeout=20) as connection:
        connection.sendall(RAW_REQUESTS[name])
        connection.shutdown(socket.SHUT_WR)
        answer = _all_of(connection.recv)
    assert answer == b"" or answer.split(b" ")[1][:1] == b"4", answer[:200]


def test_a_body_that_stops_midway_holds_nothing(engine: EngineProcess) -> None:
    head = b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 500\r\n\r\n"
    connections = [socket.create_connection(("127.0.0.1", engine.config.port), timeout=20) for _ in range(20)]
    for connection in connections:
        connection.sendall(head + json.dumps({"messages": HELLO}).encode())
    assert post(engine, "/tokenize", {"content": "a"}).status == 200
    for connection in connections:
        connection.close()


def _all_of(receive: Callable[[int], bytes]) -> bytes:
    """Everything until the other side closes; a reset counts as the end."""
    answer = b""
    try:
        while part := receive(65536):
            answer += part
    except ConnectionResetError:
        return answer
    return answer
