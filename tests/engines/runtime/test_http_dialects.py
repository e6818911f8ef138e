"""What all dialects have in common: calls of tools, forms of the answer, errors inside a stream, progress."""

from __future__ import annotations

import json
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.engine_client import events, post
from tests.engine_process import EngineProcess
from tests.synthetic_gguf import SyntheticModel

HELLO = [{"role": "user", "content": "hi"}]
PARAMETERS: dict[str, Any] = {
    "type": "object",
    "properties": {"place": {"type": "string", "enum": ["Oslo"]}},
    "required": ["place"],
    "additionalProperties": False,
}
FUNCTION = {"name": "get_time", "parameters": PARAMETERS, "strict": True}
# The same forced call in each dialect.
CHAT_CALL = {
    "messages": HELLO,
    "tools": [{"type": "function", "function": FUNCTION}],
    "tool_choice": "required",
    "parallel_tool_calls": False,
    "max_tokens": 200,
    "temperature": 0,
}
RESPONSES_CALL = {
    "input": "hi",
    "tools": [{"type": "function", **FUNCTION}],
    "tool_choice": "required",
    "parallel_tool_calls": False,
    "max_output_tokens": 200,
    "temperature": 0,
}
MESSAGES_CALL = {
    "messages": HELLO,
    "tools": [{"name": "get_time", "input_schema": PARAMETERS, "strict": True}],
    "tool_choice": {"type": "any", "disable_parallel_tool_use": True},
    "max_tokens": 200,
    "temperature": 0,
}


def test_a_forced_call_reaches_each_dialect(endpoint_engine: EngineProcess) -> None:
    chat = post(endpoint_engine, "/v1/chat/completions", CHAT_CALL).value["choices"][0]
    function = chat["message"]["tool_calls"][0]["function"]
    assert (chat["finish_reason"], function["name"]) == ("tool_calls", "get_time")
    assert json.loads(function["arguments"]) == {"place": "Oslo"}
    message = post(endpoint_engine, "/v1/messages", MESSAGES_CALL).value
    assert message["stop_reason"] == "tool_use"
    assert [(b["type"], b["name"], b["input"]) for b in message["content"]] == [
        ("tool_use", "get_time", {"place": "Oslo"})
    ]
    response = post(endpoint_engine, "/v1/responses", RESPONSES_CALL).value
    (item,) = response["output"]
    assert (response["status"], item["type"], item["name"]) == ("completed", "function_call", "get_time")
    assert json.loads(item["arguments"]) == {"place": "Oslo"}
    assert item["call_id"]


def test_a_streamed_call_is_the_same_call(endpoint_engine: EngineProcess) -> None:
    frames = events(post(endpoint_engine, "/v1/messages", {**MESSAGES_CALL, "stream": True}).value)
    deltas = [data["delta"] for name, data in frames if name == "content_block_delta"]
    assert {delta["type"] for delta in deltas} == {"input_json_delta"}
    assert json.loads("".join(delta["partial_json"] for delta in deltas)) == {"place": "Oslo"}
    assert next(d for n, d in frames if n == "message_delta")["delta"]["stop_reason"] == "tool_use"
    frames = events(post(endpoint_engine, "/v1/responses", {**RESPONSES_CALL, "stream": True}).value)
    stem = "response.function_call_arguments"
    arguments = "".join(data["delta"] for name, data in frames if name == f"{stem}.delta")
    (done,) = [data for name, data in frames if name == f"{stem}.done"]
    assert json.loads(arguments) == {"place": "Oslo"}
    assert (done["arguments"], done["name"]) == (arguments, "get_time")
    assert frames[-1][0] == "response.completed"


def test_a_form_holds_in_each_dialect(endpoint_engine: EngineProcess) -> None:
    schema = {"type": "object", "properties": {"n": {"enum": [7]}}, "required": ["n"], "additionalProperties": False}
    limits = {"temperature": 0, "max_tokens": 60}
    wanted = {"type": "json_schema", "json_schema": {"name": "n", "schema": schema, "strict": True}}
    chat = post(endpoint_engine, "/v1/chat/completions", {"messages": HELLO, "response_format": wanted, **limits})
    text = post(endpoint_engine, "/v1/completions", {"prompt": "x", "json_schema": schema, **limits})
    flat = {"type": "json_schema", "name": "n", "schema": schema, "strict": True}
    body = {"input": "hi", "text": {"format": flat}, "temperature": 0, "max_output_tokens": 60}
    response = post(endpoint_engine, "/v1/responses", body)
    asked = {"messages": HELLO, "output_config": {"format": {"type": "json_schema", "schema": schema}}, **limits}
    message = post(endpoint_engine, "/v1/messages", asked)
    for given in (
        chat.value["choices"][0]["message"]["content"],
        text.value["choices"][0]["text"],
        response.value["output"][0]["content"][0]["text"],
        message.value["content"][0]["text"],
    ):
        assert json.loads(given) == {"n": 7}


def test_llama_cpps_sampling_fields_work_in_each_dialect(endpoint_engine: EngineProcess) -> None:
    for path, asked in (
        ("/v1/completions", {"prompt": "x"}),
        ("/v1/responses", {"input": "x"}),
        ("/v1/messages", {"messages": HELLO, "max_tokens": 2}),
    ):
        wrong = post(endpoint_engine, path, {**asked, "min_p": 7, "max_output_tokens": 2})
        assert (wrong.status, "min_p" in wrong.value["error"]["message"]) == (400, True)
        right = {**asked, "seed": 5, "logit_bias": {"65": 100}, "max_tokens": 3, "max_output_tokens": 3}
        assert "AAA" in json.dumps(post(endpoint_engine, path, right).value)


def test_a_form_that_does_not_compile_is_refused_by_name(endpoint_engine: EngineProcess) -> None:
    answer = post(endpoint_engine, "/v1/completions", {"prompt": "x", "regex": "("})
    assert (answer.status, answer.value["error"]["param"]) == (400, "regex")
    body = {"messages": HELLO, "max_tokens": 5, "tools": [{"name": "f", "input_schema": {"type": "nonsense"}}]}
    assert post(endpoint_engine, "/v1/messages", body).value["error"]["type"] == "invalid_request_error"


def test_choices_have_each_their_own_place_in_the_form(endpoint_engine: EngineProcess) -> None:
    body = {"prompt": "x", "regex": "[a-c]{5}", "n": 4, "temperature": 1.5, "max_tokens": 20, "top_k": 0}
    choices = post(endpoint_engine, "/v1/completions", body).value["choices"]
    assert all(len(c["text"]) == 5 and set(c["text"]) <= set("abc") for c in choices)
    assert {choice["finish_reason"] for choice in choices} == {"stop"}


def test_an_error_inside_a_stream_has_the_dialects_shape(
    tiny_model: Callable[..., SyntheticModel], tmp_path: Path
) -> None:
    settings = {"context_tokens": 8192, "request_deadline_s": 2.5, "slots": 4}
    endless = {"stream": True, "temperature": 0, "max_tokens": 8000}
    bodies = {
        "/v1/chat/completions": {"messages": HELLO, **endless},
        "/v1/completions": {"prompt": "hi\n", **endless},
        "/v1/responses": {"input": "hi", "stream": True, "temperature": 0, "max_output_tokens": 8000},
        "/v1/messages": {"messages": HELLO, **endless},
    }
    model = tiny_model("llama", tie_free=True, layers=6)
    with EngineProcess(tmp_path, model.path, **settings) as engine, ThreadPoolExecutor(4) as pool:
        streams = list(pool.map(lambda path: events(post(engine, path, bodies[path]).value), bodies))
        engine.wait_idle()
    last = dict(zip(bodies, (frames[-1] for frames in streams), strict=True))
    assert all(len(frames) > 10 for frames in streams)
    for path in ("/v1/chat/completions", "/v1/completions"):
        assert last[path][1]["error"]["code"] == "deadline_exceeded"
    name, failed = last["/v1/responses"]
    assert (name, failed["response"]["status"]) == ("response.failed", "failed")
    assert failed["response"]["error"]["message"]
    name, error = last["/v1/messages"]
    assert (name, error["type"], error["error"]["type"]) == ("error", "error", "timeout_error")


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
def test_progress_of_a_long_prompt_is_told(endpoint_engine: EngineProcess, path: str) -> None:
    long = "word by word " * 90
    asked = {"prompt": long} if path == "/v1/completions" else {"messages": [{"role": "user", "content": long}]}
    body = {**asked, "stream": True, "return_progress": True, "max_tokens": 2, "cache_prompt": False}
    told = [
        data["prompt_progress"]
        for _, data in events(post(endpoint_engine, path, body).value)[:-1]
        if "prompt_progress" in data
    ]
    assert len(told) >= 2
    assert told[-1]["processed"] == told[-1]["total"]
    assert [entry["processed"] for entry in told] == sorted(entry["processed"] for entry in told)
