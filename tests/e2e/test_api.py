"""The OpenAI endpoint of a running Hydra, through site, dispatch and engine."""

from __future__ import annotations

import http.client
import json
import socket
import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import openai
import pytest

from tests.official_clients import openai_client
from tests.stack import Stack

HELLO = [{"role": "user", "content": "Name a colour."}]


def client(stack: Stack) -> openai.OpenAI:
    return openai_client(stack.url)


def request(
    stack: Stack, method: str, path: str, body: bytes | None = None, headers: dict[str, str] | None = None
) -> tuple[int, bytes, Any]:
    connection = http.client.HTTPConnection("127.0.0.1", stack.port, timeout=60)
    try:
        connection.request(method, path, body, headers or {})
        answer = connection.getresponse()
        return answer.status, answer.read(), answer.headers
    finally:
        connection.close()


def chat(stack: Stack, body: Any, headers: dict[str, str] | None = None) -> tuple[int, dict[str, Any]]:
    raw = body if isinstance(body, bytes) else json.dumps(body).encode()
    status, answer, _ = request(stack, "POST", "/v1/chat/completions", raw, headers)
    return status, json.loads(answer)


def wait_idle(stack: Stack) -> list[dict[str, Any]]:
    """Until no slot of the engine works, which is how a leaked one would show."""
    deadline = time.monotonic() + 60
    while True:
        with urllib.request.urlopen(f"http://127.0.0.1:{stack.engine_port()}/slots", timeout=30) as answer:
            slots: list[dict[str, Any]] = json.load(answer)
        if not any(slot["is_processing"] for slot in slots):
            return slots
        assert time.monotonic() < deadline, slots
        time.sleep(0.05)


def test_plain_curl_gets_text_usage_and_a_reason(stack: Stack) -> None:
    # As `curl -d` sends it: no model, and a form's content type.
    headers = {"Content-Type": "application/x-www-form-urlencoded"}
    status, answer = chat(stack, {"messages": HELLO}, headers)
    assert status == 200
    assert answer["choices"][0]["message"]["content"]
    assert answer["choices"][0]["finish_reason"] in ("stop", "length")
    assert 0 < answer["usage"]["completion_tokens"] <= 512  # the model's own bound, not the whole context
    assert answer["model"] == "smollm2-135m"


def test_a_stream_ends_with_done(stack: Stack) -> None:
    body = json.dumps({"messages": HELLO, "stream": True, "max_tokens": 20}).encode()
    status, raw, headers = request(stack, "POST", "/v1/chat/completions", body)
    assert status == 200
    assert headers["Content-Type"].startswith("text/event-stream")
    frames = [frame for frame in raw.decode().split("\n\n") if frame]
    assert frames[-1] == "data: [DONE]"
    assert all(frame.startswith(("data: ", ": ")) for frame in frames)


def test_the_official_client_works_stream_and_not(stack: Stack) -> None:
    # Computed anew both times: after a reused prefix other batch shapes may decide a near tie.
    arguments: dict[str, Any] = {"model": "smollm2-135m", "messages": HELLO, "max_tokens": 20, "temperature": 0}
    arguments["extra_body"] = {"cache_prompt": False}
    whole = client(stack).chat.completions.create(**arguments)
    stream = client(stack).chat.completions.create(**arguments, stream=True, stream_options={"include_usage": True})
    chunks = list(stream)
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == whole.choices[0].message.content
    assert chunks[-1].usage is not None
    assert whole.usage is not None
    assert chunks[-1].usage.total_tokens == whole.usage.total_tokens


def test_eight_clients_at_once_get_each_a_coherent_answer(stack: Stack) -> None:
    capitals = {
        "Japan": "Tokyo", "Egypt": "Cairo", "Russia": "Moscow", "Greece": "Athens",
        "China": "Beijing", "Germany": "Berlin", "India": "New Delhi", "Norway": "Oslo",
    }  # fmt: skip

    def ask(country: str) -> str:
        messages = [{"role": "user", "content": f"What is the capital of {country}?"}]
        answer = client(stack).chat.completions.create(
            model="smollm2-135m", messages=messages, max_tokens=24, temperature=0
        )
        return answer.choices[0].message.content or ""

    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(ask, capitals))
    assert all(city in answer for city, answer in zip(capitals.values(), answers, strict=True)), answers


def test_the_models_are_listed(stack: Stack) -> None:
    models = client(stack).models.list().data
    assert [model.id for model in models] == ["smollm2-135m"]
    assert client(stack).models.retrieve("smollm2-135m").id == "smollm2-135m"
    with pytest.raises(openai.NotFoundError):
        client(stack).models.retrieve("nothing")


def test_health_answers_without_a_key(stack: Stack) -> None:
    for path in ("/health", "/healthz", "/readyz"):
        status, body, _ = request(stack, "GET", path)
        assert status == 200, (path, body)
    assert json.loads(request(stack, "GET", "/health")[1])["status"] == "ok"


@pytest.mark.parametrize(
    ("body", "status"),
    [
        (b"{malformed", 400),
        (b"", 400),
        ({"messages": HELLO, "model": "no-such-model"}, 404),
        ({"model": "smollm2-135m"}, 400),
        ({"messages": []}, 400),
        ({"messages": [{"role": "wizard", "content": "x"}]}, 400),
        ({"messages": HELLO, "max_tokens": 0}, 400),
        ({"messages": HELLO, "max_tokens": -5}, 400),
        ({"messages": [{"role": "user", "content": "word " * 5000}]}, 400),
        (b'{"messages":[{"role":"user","content":"' + b"x" * 40_000_000 + b'"}]}', 413),
    ],
    ids=lambda value: str(value)[:40],
)
def test_bad_input_gets_its_status_and_the_engine_goes_on(stack: Stack, body: Any, status: int) -> None:
    answered, value = chat(stack, body)
    assert answered == status
    assert value["error"]["message"]
    assert set(value["error"]) >= {"message", "type", "param", "code"}
    assert chat(stack, {"messages": HELLO, "max_tokens": 3})[0] == 200
    wait_idle(stack)


def test_a_chunked_body_beyond_the_limit_is_refused_too(stack: Stack) -> None:
    def chunks() -> Any:
        for _ in range(40):
            yield b"x" * 1_000_000

    connection = http.client.HTTPConnection("127.0.0.1", stack.port, timeout=60)
    connection.request(
        "POST", "/v1/chat/completions", chunks(), encode_chunked=True, headers={"Transfer-Encoding": "chunked"}
    )
    answer = connection.getresponse()
    assert answer.status == 413
    assert json.loads(answer.read())["error"]["code"]
    connection.close()


def test_unknown_paths_and_methods_answer_in_openai_s_shape(stack: Stack) -> None:
    status, body, _ = request(stack, "GET", "/v1/nothing")
    assert (status, json.loads(body)["error"]["type"]) == (404, "not_found_error")
    status, body, _ = request(stack, "GET", "/v1/chat/completions")
    assert status == 405
    assert json.loads(body)["error"]["message"]


@pytest.mark.parametrize(
    "headers",
    [
        {"Origin": "http://evil.example"},
        {"Sec-Fetch-Site": "cross-site"},
        {"Host": "rebound.example"},
        {"X-Forwarded-For": "203.0.113.9"},
        {"Authorization": "Bearer sk-hydra-revoked"},
    ],
)
def test_foreign_pages_proxied_strangers_and_wrong_keys_are_refused(stack: Stack, headers: dict[str, str]) -> None:
    status, body, _ = request(
        stack, "POST", "/v1/chat/completions", json.dumps({"messages": HELLO, "max_tokens": 2}).encode(), headers
    )
    assert status in (400, 401, 403), body
    assert json.loads(body)["error"]["message"]


@pytest.mark.parametrize("stream", [True, False])
def test_clients_that_vanish_running_or_queued_leave_no_slot_behind(stack: Stack, stream: bool) -> None:
    body = json.dumps({"messages": HELLO, "max_tokens": 1500, "stream": stream, "ignore_eos": True}).encode()
    head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: 127.0.0.1:{stack.port}\r\nContent-Length: {len(body)}\r\n\r\n"
    sockets = []
    for _ in range(6):  # four run, two wait
        connection = socket.create_connection(("127.0.0.1", stack.port), timeout=60)
        connection.sendall(head.encode() + body)
        sockets.append(connection)
    deadline = time.monotonic() + 60
    while sum(slot["is_processing"] for slot in _slots(stack)) < 4:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    for connection in sockets:
        connection.close()
    wait_idle(stack)
    assert chat(stack, {"messages": HELLO, "max_tokens": 3})[0] == 200


def _slots(stack: Stack) -> list[dict[str, Any]]:
    with urllib.request.urlopen(f"http://127.0.0.1:{stack.engine_port()}/slots", timeout=30) as answer:
        slots: list[dict[str, Any]] = json.load(answer)
    return slots
