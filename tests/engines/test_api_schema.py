"""Bodies that break the API's contract are refused with the field's name; known ones are read as OpenAI documents them."""

import json
from typing import Any

import pytest

from engines.api_schema import ChatRequest, parse_chat_request
from engines.errors import InvalidRequest, UnsupportedParameter

HELLO = [{"role": "user", "content": "hello"}]
TOOL = {"type": "function", "function": {"name": "f"}}


def tool(name: str, **fields: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, **fields}}


def nested(levels: int) -> dict[str, Any]:
    value: dict[str, Any] = {}
    for _ in range(levels):
        value = {"a": value}
    return value


def past_call(**function: Any) -> dict[str, Any]:
    return {"messages": [*HELLO, {"role": "assistant", "tool_calls": [{"id": "1", "function": function}]}]}


def refusal(**fields: Any) -> InvalidRequest:
    with pytest.raises(InvalidRequest) as caught:
        parse_chat_request(json.dumps({"messages": HELLO, **fields}).encode())
    return caught.value


@pytest.mark.parametrize(
    "raw",
    [b"", b"  ", b"{", b"[]", b'"text"', b"null", b'{"messages":', b"\xff{}", b"[" * 100_000, b'{"temperature":NaN}'],
)
def test_what_is_no_json_object_is_refused(raw: bytes) -> None:
    with pytest.raises(InvalidRequest) as caught:
        parse_chat_request(raw)
    assert caught.value.http_status == 400
    assert caught.value.message


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"messages": []}, "messages"),
        ({"messages": "hi"}, "messages"),
        ({"messages": [{"role": "wizard", "content": "x"}]}, "messages.0"),
        ({"messages": [{"content": "x"}]}, "messages.0.role"),
        ({"messages": [{"role": "user"}]}, "messages.0"),
        ({"messages": [{"role": "user", "content": 5}]}, "messages.0.content"),
        ({"messages": [{"role": "user", "content": "\ud800"}]}, "messages.0"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages.0.content.0"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": -2}, "max_tokens"),
        ({"repeat_last_n": -2}, "repeat_last_n"),
        ({"max_tokens": "5"}, "max_tokens"),
        ({"max_completion_tokens": 0}, "max_completion_tokens"),
        ({"temperature": -0.1}, "temperature"),
        ({"temperature": True}, "temperature"),
        ({"top_p": -0.1}, "top_p"),
        ({"top_p": 1.5}, "top_p"),
        ({"stop": [""]}, "stop"),
        ({"stop": ["x"] * 17}, "stop"),
        ({"stop": "x" * 1025}, "stop"),
        ({"logit_bias": {"abc": 1}}, "logit_bias"),
        ({"logit_bias": {"5": 101}}, "logit_bias.5"),
        ({"top_logprobs": 3}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"stream": "yes"}, "stream"),
        ({"tools": [{"type": "function"}]}, "tools.0.function"),
        ({"tools": [{"type": "web_search", "function": {"name": "f"}}]}, "tools.0.type"),
        ({"tools": [{**TOOL, "function": {"name": "no spaces"}}]}, "tools.0.function.name"),
        ({"tools": [{**TOOL, "function": {"name": "x" * 65}}]}, "tools.0.function.name"),
        ({"tools": [{**TOOL, "function": {"name": ""}}]}, "tools.0.function.name"),
        ({"tools": [{**TOOL, "function": {"name": "f", "parameters": []}}]}, "tools.0.function.parameters"),
        ({"tools": [TOOL, TOOL]}, "tools"),
        ({"tools": [tool(f"f{i}") for i in range(257)]}, "tools"),
        ({"tools": [tool("f", description="x" * (1 << 20))]}, "tools"),
        ({"tools": [tool("f", description="\ud800")]}, "tools"),
        ({"tools": [tool("f", parameters=nested(33))]}, "tools"),
        ({"tools": [TOOL], "tool_choice": "always"}, "tool_choice"),
        ({"tools": [TOOL], "tool_choice": {"type": "function"}}, "tool_choice"),
        ({"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "g"}}}, "tool_choice"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"reasoning_effort": "enormous"}, "reasoning_effort"),
        ({"reasoning_format": "xml"}, "reasoning_format"),
        ({"reasoning_field": "thoughts"}, "reasoning_field"),
        ({"thinking_budget_tokens": -2}, "thinking_budget_tokens"),
        ({"enable_thinking": "false"}, "enable_thinking"),
        ({"chat_template_kwargs": {"enable_thinking": "false"}}, "chat_template_kwargs"),
        ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs"),
        ({"chat_template_kwargs": {"a b": 1}}, "chat_template_kwargs"),
        ({"chat_template_kwargs": {"a": "x" * (64 << 10)}}, "chat_template_kwargs"),
        ({"chat_template_kwargs": {"a": nested(17)}}, "chat_template_kwargs"),
        ({"chat_template_kwargs": {f"k{i}": 1 for i in range(65)}}, "chat_template_kwargs"),
        ({"response_format": {"type": "yaml"}}, "response_format"),
        ({"json_schema": nested(65)}, "json_schema"),
        ({"grammar": "x" * (257 << 10)}, "grammar"),
        ({"regex": "\ud800"}, "regex"),
        (past_call(name="f", arguments=5), "messages.1.tool_calls.0.function.arguments"),
        (past_call(arguments="{}"), "messages.1.tool_calls.0.function.name"),
    ],
)
def test_a_bad_field_is_named(fields: dict[str, Any], param: str) -> None:
    error = refusal(**fields)
    assert (error.http_status, error.param) == (400, param)


@pytest.mark.parametrize(
    "fields",
    [
        {"modalities": ["audio"]},
        {"functions": [{}]},
        {"audio": {"voice": "alloy"}},
        {"web_search_options": {}},
    ],
)
def test_what_would_change_the_answer_and_is_not_served_is_refused(fields: dict[str, Any]) -> None:
    error = refusal(**fields)
    assert isinstance(error, UnsupportedParameter)
    assert error.param == next(iter(fields))


def test_unknown_fields_and_null_values_are_ignored() -> None:
    request = parse_chat_request(
        json.dumps({"messages": HELLO, "metadata": {"a": 1}, "tools": None, "n": 1, "stop": None}).encode()
    )
    assert request.stops == ()
    assert request.max_new_tokens is None


def test_text_parts_are_joined_and_developer_is_known() -> None:
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    request = parse_chat_request(json.dumps({"messages": [{"role": "developer", "content": parts}]}).encode())
    assert request.messages[0].text() == "one\ntwo"


def test_the_newer_name_of_the_token_limit_wins() -> None:
    body = {"messages": HELLO, "max_tokens": 5, "max_completion_tokens": 7}
    assert parse_chat_request(json.dumps(body).encode()).max_new_tokens == 7


def test_minus_one_means_until_the_context_is_full() -> None:
    for fields in ({"max_tokens": -1}, {"max_completion_tokens": -1}, {"max_completion_tokens": -1, "max_tokens": 5}):
        request = parsed(**fields)
        assert (request.fills_context, request.max_new_tokens) == (True, None)
    assert not parsed().fills_context
    assert parsed(max_tokens=-1, max_completion_tokens=3).max_new_tokens == 3


def test_an_assistant_message_may_consist_of_tool_calls() -> None:
    messages = [*HELLO, {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "f"}}]}]
    assert parse_chat_request(json.dumps({"messages": messages}).encode()).messages[1].text() == ""


def parsed(**fields: Any) -> ChatRequest:
    return parse_chat_request(json.dumps({"messages": HELLO, **fields}).encode())


def test_tools_are_kept_as_the_client_wrote_them() -> None:
    given = tool("f", parameters={"type": "object", "properties": {"a": {}}}, strict=True, vendor="x")
    request = parsed(tools=[given], parallel_tool_calls=False)
    assert request.tools is not None
    assert request.tools[0].model_dump(exclude_unset=True) == given
    assert list(request.functions_by_name) == ["f"]
    assert parsed(tools=[given], tool_choice="none").functions_by_name == {}


@pytest.mark.parametrize(
    ("fields", "thinking"),
    [
        ({}, None),
        ({"enable_thinking": False}, False),
        ({"enable_thinking": True, "reasoning_effort": "none"}, True),
        ({"chat_template_kwargs": {"enable_thinking": False}}, False),
        ({"reasoning_effort": "none"}, False),
        ({"reasoning_effort": "minimal"}, None),
        ({"reasoning_effort": "high"}, True),
        ({"thinking_budget_tokens": 0}, False),
        ({"thinking_budget_tokens": 5}, None),
    ],
)
def test_a_request_can_turn_reasoning_on_and_off(fields: dict[str, Any], thinking: bool | None) -> None:
    assert parsed(**fields).thinking is thinking


@pytest.mark.parametrize(
    ("fields", "budget"),
    [
        ({}, None),
        ({"thinking_budget_tokens": -1}, None),
        ({"thinking_budget_tokens": 7, "reasoning_budget": 9}, 7),
        ({"reasoning_budget": 9}, 9),
    ],
)
def test_the_reasoning_budget_has_two_names(fields: dict[str, Any], budget: int | None) -> None:
    assert parsed(**fields).thinking_budget == budget


@pytest.mark.parametrize(
    ("arguments", "values"),
    [
        ('{"a": 1}', {"a": 1}),
        ({"a": 1}, {"a": 1}),
        ("", {}),
        ('{"a": "x\ny"}', {"a": "x\ny"}),
        ('{"a": 1', {"arguments": '{"a": 1'}),
        ("[1]", {"arguments": "[1]"}),
    ],
)
def test_arguments_of_past_calls_become_the_objects_that_templates_read(arguments: Any, values: dict[str, Any]) -> None:
    call = parse_chat_request(json.dumps(past_call(name="f", arguments=arguments)).encode()).messages[1].tool_calls
    assert call is not None
    assert call[0].function.argument_values() == values


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("mirostat", 2),
        ("samplers", ["top_k"]),
        ("top_n_sigma", 1.5),
        ("continue_final_message", True),
        ("lora", [{"id": 0}]),
    ],
)
def test_fields_of_llama_servers_that_are_not_served_are_refused(field: str, value: object) -> None:
    with pytest.raises(UnsupportedParameter) as caught:
        parse_chat_request(json.dumps({"messages": [{"role": "user", "content": "x"}], field: value}).encode())
    assert caught.value.param == field


def test_values_that_mean_nothing_pass() -> None:
    neutral = {"mirostat": 0, "dynatemp_range": 0.0, "top_n_sigma": -1, "samplers": None, "lora": [], "id_slot": 3}
    parse_chat_request(json.dumps({"messages": [{"role": "user", "content": "x"}], **neutral}).encode())
