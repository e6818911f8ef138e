"""The engine's HTTP surface, as the official client and a hostile one meet it."""

from __future__ import annotations

import http.client
import json
import re
import socket
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import openai
import psutil
import pytest

from tests.engine_process import EngineProcess
from tests.official_clients import openai_client
from tests.synthetic_gguf import SyntheticModel

HELLO = [{"role": "user", "content": "Name a colour."}]


@pytest.fixture(scope="module")
def tiny(
    tiny_model: Callable[..., SyntheticModel], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[EngineProcess]:
    model = tiny_model("llama", tie_free=True, utf8_cycle=True)
    settings = {"slots": 2, "queue_limit": 1, "context_tokens": 4096, "max_body_bytes": 1 << 20}
    with EngineProcess(tmp_path_factory.mktemp("engine"), model.path, **settings) as engine:
        yield engine


def client(engine: EngineProcess) -> openai.OpenAI:
    return openai_client(engine.base_url)


def post(engine: EngineProcess, body: Any, headers: dict[str, str] | None = None) -> tuple[int, dict[str, Any], Any]:
    connection = http.client.HTTPConnection("127.0.0.1", engine.config.port, timeout=60)
    raw = body if isinstance(body, bytes) else json.dumps(body).encode()
    connection.request("POST", "/v1/chat/completions", raw, headers or {})
    answer = connection.getresponse()
    value = json.loads(answer.read())
    connection.close()
    return answer.status, value, answer.headers


def test_the_official_client_gets_an_answer_with_usage(smollm2_engine: EngineProcess) -> None:
    answer = client(smollm2_engine).chat.completions.create(model="x", messages=HELLO, max_tokens=30, temperature=0)
    assert answer.choices[0].message.role == "assistant"
    assert answer.choices[0].message.content
    assert answer.choices[0].finish_reason in ("stop", "length")
    assert answer.usage is not None
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens


def test_a_stream_carries_the_same_text_as_the_whole_answer(smollm2_engine: EngineProcess) -> None:
    # Computed anew both times: after a reused prefix other batch shapes may decide a near tie.
    arguments: dict[str, Any] = {"model": "x", "messages": HELLO, "max_tokens": 30, "temperature": 0}
    arguments["extra_body"] = {"cache_prompt": False}
    whole = client(smollm2_engine).chat.completions.create(**arguments)
    chunks = list(
        client(smollm2_engine).chat.completions.create(**arguments, stream=True, stream_options={"include_usage": True})
    )
    assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == whole.choices[0].message.content
    assert chunks[0].choices[0].delta.role == "assistant"
    assert [c.choices[0].finish_reason for c in chunks if c.choices][-1] == whole.choices[0].finish_reason
    assert chunks[-1].usage is not None
    assert whole.usage is not None
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens


def test_eight_clients_at_once_get_each_their_own_answer(smollm2_engine: EngineProcess) -> None:
    # Countries whose capital this small model knows without hesitation, so that a mixed-up answer shows.
    capitals = {
        "Japan": "Tokyo",
        "Egypt": "Cairo",
        "Russia": "Moscow",
        "Greece": "Athens",
        "China": "Beijing",
        "Germany": "Berlin",
        "India": "New Delhi",
        "Norway": "Oslo",
    }

    def ask(country: str) -> str:
        messages = [{"role": "user", "content": f"What is the capital of {country}?"}]
        answer = client(smollm2_engine).chat.completions.create(
            model="x", messages=messages, max_tokens=24, temperature=0
        )
        return answer.choices[0].message.content or ""

    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(ask, capitals))
    assert all(city in answer for city, answer in zip(capitals.values(), answers, strict=True)), answers
    smollm2_engine.wait_idle()


def test_a_stop_string_ends_the_answer_and_is_not_in_it(smollm2_engine: EngineProcess) -> None:
    messages = [{"role": "user", "content": "Count from one to ten in words."}]
    arguments: dict[str, Any] = {"model": "x", "messages": messages, "max_tokens": 60, "temperature": 0}
    arguments["extra_body"] = {"cache_prompt": False}
    whole = client(smollm2_engine).chat.completions.create(**arguments).choices[0].message.content or ""
    stop = whole[12:18]
    answer = client(smollm2_engine).chat.completions.create(**arguments, stop=[stop]).choices[0]
    assert (answer.message.content, answer.finish_reason) == (whole[: whole.index(stop)], "stop")


def test_log_probabilities_belong_to_the_text(smollm2_engine: EngineProcess) -> None:
    answer = client(smollm2_engine).chat.completions.create(
        model="x", messages=HELLO, max_tokens=8, temperature=0, logprobs=True, top_logprobs=3
    )
    entries = answer.choices[0].logprobs.content or []  # type: ignore[union-attr]
    assert b"".join(bytes(entry.bytes or []) for entry in entries).decode() == answer.choices[0].message.content
    for entry in entries:
        assert entry.logprob <= 0
        assert len(entry.top_logprobs) == 3
        assert entry.token == entry.top_logprobs[0].token  # greedy draws the likeliest


def test_several_choices_share_their_prompt_and_differ(smollm2_engine: EngineProcess) -> None:
    messages = [{"role": "user", "content": "Invent a name for a cat. " * 20}]
    arguments: dict[str, Any] = {
        "model": "x",
        "messages": messages,
        "max_tokens": 12,
        "temperature": 1.5,
        "n": 3,
        "seed": 5,
    }
    answer = client(smollm2_engine).chat.completions.create(**arguments)
    texts = {choice.index: choice.message.content for choice in answer.choices}
    assert sorted(texts) == [0, 1, 2]
    assert len(set(texts.values())) > 1
    assert answer.usage is not None
    assert answer.usage.completion_tokens <= 36
    streamed = dict.fromkeys(range(3), "")
    stream = client(smollm2_engine).chat.completions.create(
        **arguments, stream=True, stream_options={"include_usage": True}
    )
    reasons = []
    for chunk in stream:
        for choice in chunk.choices:
            streamed[choice.index] += choice.delta.content or ""
            reasons += [choice.finish_reason] if choice.finish_reason else []
    assert len(reasons) == 3
    assert all(streamed.values())
    smollm2_engine.wait_idle()


def test_a_second_turn_reuses_the_first(smollm2_engine: EngineProcess) -> None:
    first = client(smollm2_engine).chat.completions.create(model="x", messages=HELLO, max_tokens=20, temperature=0)
    messages = [
        *HELLO,
        {"role": "assistant", "content": first.choices[0].message.content},
        {"role": "user", "content": "Another."},
    ]
    second = client(smollm2_engine).chat.completions.create(model="x", messages=messages, max_tokens=5)
    assert second.usage is not None and second.usage.prompt_tokens_details is not None
    assert first.usage is not None
    assert (second.usage.prompt_tokens_details.cached_tokens or 0) >= first.usage.prompt_tokens


def test_no_chunk_of_a_stream_holds_a_broken_character(tiny: EngineProcess) -> None:
    stream = client(tiny).chat.completions.create(model="x", messages=HELLO, max_tokens=200, temperature=0, stream=True)
    texts = [chunk.choices[0].delta.content or "" for chunk in stream if chunk.choices]
    # The very last one may be cut off by max_tokens.
    assert "\ufffd" not in "".join(texts[:-2])
    assert any(ord(letter) > 0xFFFF for letter in "".join(texts))


@pytest.mark.parametrize(
    ("body", "status", "code"),
    [
        (b"{not json", 400, "invalid_request"),
        ({"messages": []}, 400, "invalid_request"),
        ({"messages": HELLO, "max_tokens": 0}, 400, "invalid_request"),
        ({"messages": HELLO, "tools": [{}]}, 400, "invalid_request"),
        ({"messages": HELLO, "logit_bias": {"100000": 1}}, 400, "invalid_request"),
        ({"messages": [{"role": "user", "content": "word " * 6000}]}, 400, "context_length_exceeded"),
        ({"messages": [{"role": "user", "content": "x" * 500_000}]}, 400, "context_length_exceeded"),
        (b'{"messages":"' + b"x" * (1 << 20) + b'"}', 413, "body_too_large"),
    ],
)
def test_a_bad_body_gets_its_error_and_harms_nothing(tiny: EngineProcess, body: Any, status: int, code: str) -> None:
    answered, value, _ = post(tiny, body)
    assert (answered, value["error"]["code"]) == (status, code)
    assert value["error"]["message"]
    assert post(tiny, {"messages": HELLO, "max_tokens": 3})[0] == 200
    tiny.wait_idle()


def test_unknown_paths_and_methods_answer_in_the_same_shape(tiny: EngineProcess) -> None:
    assert tiny.get("/v1/nothing")["error"]["code"] == "not_found"
    assert tiny.get("/v1/chat/completions")["error"]["code"] == "method_not_allowed"


@pytest.mark.parametrize(
    "headers",
    [
        {"Origin": "http://evil.example"},
        {"Sec-Fetch-Site": "cross-site"},
        {"Sec-Fetch-Site": "same-site"},
        {"Host": "rebound.example"},
    ],
)
def test_a_foreign_web_page_cannot_drive_the_engine(tiny: EngineProcess, headers: dict[str, str]) -> None:
    status, value, _ = post(tiny, {"messages": HELLO, "max_tokens": 3}, headers)
    assert (status, value["error"]["code"]) == (403, "foreign_origin")


def test_more_answers_than_ever_fit_are_not_told_to_come_back(tiny: EngineProcess) -> None:
    status, value, headers = post(tiny, {"messages": HELLO, "max_tokens": 3, "n": 4})
    assert (status, value["error"]["code"], value["error"]["param"]) == (429, "too_many_answers", "n")
    assert "Retry-After" not in headers
    assert len(post(tiny, {"messages": HELLO, "max_tokens": 3, "n": 3})[1]["choices"]) == 3


def test_clients_that_vanish_leave_no_slot_behind(tiny: EngineProcess) -> None:
    body = json.dumps({"messages": HELLO, "max_tokens": 4000, "stream": True, "temperature": 0}).encode()
    before = _outcomes(tiny).get("cancelled", 0)
    sockets = []
    for _ in range(3):  # two run, one waits
        connection = socket.create_connection(("127.0.0.1", tiny.config.port), timeout=30)
        head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: {len(body)}\r\n\r\n"
        connection.sendall(head.encode() + body)
        assert connection.recv(1000).startswith(b"HTTP/1.1 200")
        sockets.append(connection)
    status, value, headers = post(tiny, {"messages": HELLO})
    assert (status, value["error"]["code"]) == (429, "queue_full")
    assert int(headers["Retry-After"]) > 0
    for connection in sockets:
        connection.close()
    tiny.wait_idle()
    deadline = time.monotonic() + 60
    while _outcomes(tiny).get("cancelled", 0) < before + 3:
        assert time.monotonic() < deadline, _outcomes(tiny)
        time.sleep(0.05)
    assert post(tiny, {"messages": HELLO, "max_tokens": 3})[0] == 200


def test_a_client_that_waits_for_the_whole_answer_and_vanishes_is_noticed(tiny: EngineProcess) -> None:
    body = json.dumps({"messages": HELLO, "max_tokens": 4000, "temperature": 0}).encode()
    connection = socket.create_connection(("127.0.0.1", tiny.config.port), timeout=30)
    head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: {len(body)}\r\n\r\n"
    connection.sendall(head.encode() + body)
    deadline = time.monotonic() + 60
    while not any(slot["is_processing"] for slot in tiny.get("/slots")):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    before = _outcomes(tiny).get("cancelled", 0)
    connection.close()
    tiny.wait_idle()
    while _outcomes(tiny).get("cancelled", 0) == before:
        assert time.monotonic() < deadline
        time.sleep(0.05)


def _outcomes(engine: EngineProcess) -> dict[str, float]:
    lines = [line for line in engine.text("/metrics").splitlines() if line.startswith("hydra_engine_requests_total")]
    return {line.split('"')[1]: float(line.rsplit(" ", 1)[1]) for line in lines}


def test_metrics_use_the_names_that_llama_cpp_boards_read(tiny: EngineProcess) -> None:
    post(tiny, {"messages": HELLO, "max_tokens": 3})
    text = tiny.text("/metrics")
    for name in ("llamacpp:prompt_tokens_total", "llamacpp:tokens_predicted_total", "llamacpp:requests_processing"):
        assert f"\n{name} " in text
    assert "hydra_engine_time_to_first_token_seconds_bucket" in text
    waited = re.search(r'hydra_engine_wait_seconds_count{cause="preparation"} (\S+)', text)
    assert waited is not None
    assert float(waited[1]) >= 1


def test_an_answer_without_a_limit_ends_at_the_engines_own(
    tiny_model: Callable[..., SyntheticModel], tmp_path: Path
) -> None:
    settings = {"default_max_tokens": 7, "default_temperature": 0.0}
    with EngineProcess(tmp_path, tiny_model("llama", tie_free=True).path, **settings) as engine:
        # The template's process stands ready before anybody asks.
        process, deadline = psutil.Process(engine.process.pid), time.monotonic() + 60
        while not any("template_sandbox" in " ".join(child.cmdline()) for child in process.children()):
            assert time.monotonic() < deadline
            time.sleep(0.01)
        first, second = (post(engine, {"messages": HELLO})[1] for _ in range(2))
        assert first["usage"]["completion_tokens"] == 7
        assert first["choices"] == second["choices"]
        assert post(engine, {"messages": HELLO, "max_tokens": 9})[1]["usage"]["completion_tokens"] == 9
        whole = post(engine, {"messages": HELLO, "max_tokens": -1, "ignore_eos": True})[1]
        assert whole["usage"]["total_tokens"] == engine.config.context_tokens
        assert whole["choices"][0]["finish_reason"] == "length"


def test_models_and_slots_describe_what_runs(tiny: EngineProcess) -> None:
    (model,) = tiny.get("/v1/models")["data"]
    assert (model["id"], model["status"]["value"]) == ("test-model", "loaded")
    assert model["meta"]["n_ctx"] == 4096
    assert [slot["id"] for slot in tiny.get("/slots")] == [0, 1]
