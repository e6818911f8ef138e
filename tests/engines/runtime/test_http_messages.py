"""Anthropic's API, as its official client and a raw one meet it."""

from __future__ import annotations

from typing import Any

import anthropic
import pytest

from engines.api_messages import parse_count_request
from tests.engine_client import events, post
from tests.engine_process import EngineProcess
from tests.official_clients import anthropic_client
from tests.synthetic_gguf import SyntheticModel

HELLO: list[Any] = [{"role": "user", "content": "hi"}]
TOOL: dict[str, Any] = {
    "name": "get_time",
    "description": "The time at a place.",
    "input_schema": {
        "type": "object",
        "properties": {"place": {"type": "string", "enum": ["Oslo"]}},
        "required": ["place"],
        "additionalProperties": False,
    },
}


def client(engine: EngineProcess) -> anthropic.Anthropic:
    return anthropic_client(engine.base_url)


def test_the_official_client_gets_a_message(endpoint_engine: EngineProcess, tie_free_model: SyntheticModel) -> None:
    message = client(endpoint_engine).messages.create(
        model="x", max_tokens=9, messages=HELLO, system="Be brief.", extra_body={"temperature": 0}
    )
    assert [block.type for block in message.content] == ["text"]
    assert message.content[0].text.encode() == tie_free_model.answer_bytes(9)  # type: ignore[union-attr]
    assert (message.role, message.stop_reason, message.stop_sequence) == ("assistant", "max_tokens", None)
    read = message.usage.cache_read_input_tokens or 0
    assert message.usage.input_tokens + read > 20
    assert message.usage.output_tokens == 9
    timings = (message.model_extra or {})["timings"]
    assert (timings["cache_n"] + timings["prompt_n"], timings["predicted_n"]) == (message.usage.input_tokens + read, 9)


def test_the_official_client_builds_the_same_message_from_events(
    endpoint_engine: EngineProcess, tie_free_model: SyntheticModel
) -> None:
    with client(endpoint_engine).messages.stream(
        model="x", max_tokens=9, messages=HELLO, extra_body={"temperature": 0}
    ) as stream:
        text = "".join(stream.text_stream)
        message = stream.get_final_message()
    assert text.encode() == tie_free_model.answer_bytes(9)
    assert message.content[0].text == text  # type: ignore[union-attr]
    assert (message.stop_reason, message.usage.output_tokens) == ("max_tokens", 9)


def test_events_come_in_anthropics_order(endpoint_engine: EngineProcess) -> None:
    body = {"max_tokens": 3, "messages": HELLO, "stream": True, "temperature": 0}
    frames = events(post(endpoint_engine, "/v1/messages", body).value)
    assert all(name == data["type"] for name, data in frames)
    assert [name for name, _ in frames] == [
        "message_start",
        "ping",
        "content_block_start",
        *["content_block_delta"] * 3,
        "content_block_stop",
        "message_delta",
        "message_stop",
    ]
    told = frames[-2][1]
    assert told["timings"]["predicted_n"] == told["usage"]["output_tokens"] == 3


def test_a_stop_sequence_is_named(endpoint_engine: EngineProcess, tie_free_model: SyntheticModel) -> None:
    text = tie_free_model.answer_bytes(12).decode()
    body = {"max_tokens": 12, "messages": HELLO, "temperature": 0, "stop_sequences": ["\x01", text[4:6]]}
    message = post(endpoint_engine, "/v1/messages", body).value
    assert (message["stop_reason"], message["stop_sequence"]) == ("stop_sequence", text[4:6])
    assert message["content"] == [{"type": "text", "text": text[:4]}]


def test_count_tokens_tells_what_a_message_would_cost(endpoint_engine: EngineProcess) -> None:
    count = client(endpoint_engine).messages.count_tokens(model="x", messages=HELLO, system="Be brief.")
    body = {"max_tokens": 1, "messages": HELLO, "system": "Be brief."}
    usage = post(endpoint_engine, "/v1/messages", body).value["usage"]
    assert count.input_tokens == usage["input_tokens"] + usage["cache_read_input_tokens"]


def test_blocks_become_messages_that_a_template_knows() -> None:
    body = b"""{"system": [{"type": "text", "text": "S", "cache_control": {"type": "ephemeral"}}],
      "messages": [
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
        {"role": "assistant", "content": [
          {"type": "thinking", "thinking": "hm", "signature": "x"}, {"type": "text", "text": "I look."},
          {"type": "tool_use", "id": "t1", "name": "get_time", "input": {"place": "Oslo"}}]},
        {"role": "user", "content": [
          {"type": "tool_result", "tool_use_id": "t1", "content": [{"type": "text", "text": "noon"}]},
          {"type": "text", "text": "and?"}]}],
      "tools": [{"name": "get_time", "input_schema": {"type": "object"}}],
      "tool_choice": {"type": "tool", "name": "get_time", "disable_parallel_tool_use": true},
      "thinking": {"type": "enabled", "budget_tokens": 99}}"""
    chat = parse_count_request(body)
    assert [(m.role, m.text()) for m in chat.messages] == [
        ("system", "S"),
        ("user", "a\nb"),
        ("assistant", "I look."),
        ("tool", "noon"),
        ("user", "and?"),
    ]
    assistant, result = chat.messages[2:4]
    assert assistant.thoughts == "hm"
    assert assistant.tool_calls is not None
    assert assistant.tool_calls[0].function.argument_values() == {"place": "Oslo"}
    assert result.tool_call_id == assistant.tool_calls[0].id == "t1"
    assert (chat.thinking, chat.thinking_budget, chat.parallel_tool_calls) == (True, 99, False)
    assert chat.tool_choice == {"type": "function", "function": {"name": "get_time"}}


@pytest.mark.parametrize(
    ("fields", "status", "kind", "about"),
    [
        ({"max_tokens": 5, "messages": []}, 400, "invalid_request_error", "messages"),
        ({"messages": HELLO}, 400, "invalid_request_error", "max_tokens"),
        ({"max_tokens": 0, "messages": HELLO}, 400, "invalid_request_error", "max_tokens"),
        (
            {"max_tokens": 5, "messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]},
            400,
            "invalid_request_error",
            "image",
        ),
        (
            {"max_tokens": 5, "messages": HELLO, "tools": [{"type": "web_search_20250305", "name": "web_search"}]},
            400,
            "invalid_request_error",
            "tools",
        ),
        ({"max_tokens": 5, "messages": [{"role": "user", "content": "x" * 1_100_000}]}, 413, "request_too_large", ""),
    ],
)
def test_errors_have_anthropics_shape(
    endpoint_engine: EngineProcess, fields: dict[str, Any], status: int, kind: str, about: str
) -> None:
    answer = post(endpoint_engine, "/v1/messages", fields)
    assert (answer.status, answer.value["type"], answer.value["error"]["type"]) == (status, "error", kind)
    assert about in answer.value["error"]["message"]


def test_the_official_client_raises_its_own_errors(endpoint_engine: EngineProcess) -> None:
    with pytest.raises(anthropic.BadRequestError):
        client(endpoint_engine).messages.create(model="x", max_tokens=5, messages=[])
    assert post(endpoint_engine, "/v1/messages/unknown", {}).value["error"]["type"] == "not_found_error"
