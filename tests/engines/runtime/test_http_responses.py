"""The Responses API, as the official client and a raw one meet it."""

from __future__ import annotations

import json
from typing import Any, Literal

import openai
import pydantic
import pytest

from engines.api_responses import parse_responses_request
from tests.engine_client import events, post
from tests.engine_process import EngineProcess
from tests.official_clients import openai_client
from tests.synthetic_gguf import SyntheticModel

TOOL: dict[str, Any] = {
    "type": "function",
    "name": "get_time",
    "strict": True,
    "parameters": {
        "type": "object",
        "properties": {"place": {"type": "string", "enum": ["Oslo"]}},
        "required": ["place"],
        "additionalProperties": False,
    },
}


def client(engine: EngineProcess) -> openai.OpenAI:
    return openai_client(engine.base_url)


def test_the_official_client_gets_a_response(endpoint_engine: EngineProcess, tie_free_model: SyntheticModel) -> None:
    response = client(endpoint_engine).responses.create(
        model="x", input="hi", instructions="Be brief.", max_output_tokens=9, temperature=0, metadata={"a": "b"}
    )
    assert response.output_text.encode() == tie_free_model.answer_bytes(9)
    assert response.status == "incomplete"
    assert response.incomplete_details is not None
    assert response.incomplete_details.reason == "max_output_tokens"
    assert response.usage is not None
    assert response.usage.output_tokens == 9
    assert response.usage.total_tokens == response.usage.input_tokens + 9
    assert (response.instructions, response.metadata, response.error) == ("Be brief.", {"a": "b"}, None)


def test_events_come_in_openais_order_and_are_numbered(endpoint_engine: EngineProcess) -> None:
    body = {"input": "hi", "max_output_tokens": 3, "temperature": 0, "stream": True}
    frames = events(post(endpoint_engine, "/v1/responses", body).value)
    assert all(name == data["type"] for name, data in frames)
    assert [data["sequence_number"] for _, data in frames] == list(range(len(frames)))
    assert [name.removeprefix("response.") for name, _ in frames] == [
        "created",
        "in_progress",
        "output_item.added",
        "content_part.added",
        *["output_text.delta"] * 3,
        "output_text.done",
        "content_part.done",
        "output_item.done",
        "incomplete",
    ]
    last = frames[-1][1]["response"]
    assert last["output"] == [frames[-2][1]["item"]]
    assert last["output"][0]["status"] == "incomplete"


def test_the_official_client_builds_the_same_response_from_events(smollm2_engine: EngineProcess) -> None:
    # Computed anew both times: after a reused prefix other batch shapes may decide a near tie.
    asked: dict[str, Any] = {"model": "x", "input": "What is the capital of Norway?", "temperature": 0}
    asked |= {"max_output_tokens": 60, "extra_body": {"cache_prompt": False}}
    whole = client(smollm2_engine).responses.create(**asked)
    with client(smollm2_engine).responses.stream(**asked) as stream:
        texts = [event.delta for event in stream if event.type == "response.output_text.delta"]
        built = stream.get_final_response()
    assert "Oslo" in whole.output_text
    assert "".join(texts) == built.output_text == whole.output_text
    assert (built.status, built.incomplete_details) == (whole.status, whole.incomplete_details) == ("completed", None)


def test_items_become_messages_that_a_template_knows() -> None:
    body = {
        "instructions": "S",
        "input": [
            {"role": "user", "content": [{"type": "input_text", "text": "a"}, {"type": "input_text", "text": "b"}]},
            {"type": "reasoning", "id": "r", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]},
            {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "I look."}]},
            {"type": "function_call", "call_id": "c1", "name": "get_time", "arguments": '{"place":"Oslo"}'},
            {"type": "function_call", "call_id": "c2", "name": "get_time", "arguments": "{}"},
            {"type": "function_call_output", "call_id": "c1", "output": "noon"},
            {"type": "function_call_output", "call_id": "c2", "output": [{"type": "input_text", "text": "late"}]},
            {"role": "assistant", "content": "It is noon."},
            {"role": "developer", "content": "and?"},
        ],
        "tools": [TOOL],
        "tool_choice": {"type": "function", "name": "get_time"},
        "parallel_tool_calls": False,
        "reasoning": {"effort": "low"},
        "text": {"format": {"type": "json_schema", "name": "n", "schema": {"type": "object"}, "strict": True}},
        "max_output_tokens": 7,
    }
    chat = parse_responses_request(json.dumps(body).encode()).chat()
    assert [(m.role, m.text()) for m in chat.messages] == [
        ("system", "S"),
        ("user", "a\nb"),
        ("assistant", "I look."),
        ("tool", "noon"),
        ("tool", "late"),
        ("assistant", "It is noon."),
        ("developer", "and?"),
    ]
    assistant = chat.messages[2]
    assert assistant.thoughts == "hm"
    assert [call.id for call in assistant.tool_calls or []] == ["c1", "c2"]
    assert [m.tool_call_id for m in chat.messages[3:5]] == ["c1", "c2"]
    assert chat.tool_choice == {"type": "function", "function": {"name": "get_time"}}
    assert (chat.parallel_tool_calls, chat.reasoning_effort, chat.max_new_tokens) == (False, "low", 7)
    assert chat.response_format is not None
    assert chat.response_format["json_schema"]["schema"] == {"type": "object"}


@pytest.mark.parametrize(
    ("fields", "code", "param"),
    [
        ({}, "invalid_request", "input"),
        ({"input": []}, "invalid_request", "input"),
        ({"input": "a", "store": True}, "unsupported_parameter", "store"),
        ({"input": "a", "background": True}, "unsupported_parameter", "background"),
        ({"input": "a", "previous_response_id": "r"}, "unsupported_parameter", "previous_response_id"),
        ({"input": "a", "conversation": {"id": "c"}}, "unsupported_parameter", "conversation"),
        ({"input": "a", "truncation": "auto"}, "unsupported_parameter", "truncation"),
        ({"input": "a", "top_logprobs": 2}, "unsupported_parameter", "top_logprobs"),
        ({"input": "a", "tools": [{"type": "web_search"}]}, "invalid_request", "tools"),
        ({"input": "a", "max_output_tokens": 0}, "invalid_request", "max_output_tokens"),
        ({"input": "a", "temperature": 9}, "invalid_request", "temperature"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "invalid_request", "input"),
        (
            {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]},
            "unsupported_parameter",
            "input",
        ),
        ({"input": "word " * 2000}, "context_length_exceeded", "input"),
    ],
)
def test_what_cannot_be_done_is_refused_by_name(
    endpoint_engine: EngineProcess, fields: dict[str, Any], code: str, param: str
) -> None:
    answer = post(endpoint_engine, "/v1/responses", fields)
    error = answer.value["error"]
    assert (answer.status, error["code"]) == (400, code)
    assert str(error["param"]).split(".")[0] == param


class Colour(pydantic.BaseModel):
    name: Literal["red", "blue"]
    shade: Literal[1, 2]


def test_the_official_client_parses_a_model_of_its_own(endpoint_engine: EngineProcess) -> None:
    response = client(endpoint_engine).responses.parse(
        model="x", input="hi", text_format=Colour, max_output_tokens=400, temperature=0
    )
    assert isinstance(response.output_parsed, Colour)
