"""Bodies that break the API's contract are refused with the field's name; known ones are read as OpenAI documents them."""

import json
from typing import Any

import pytest

from engines.api_schema import parse_chat_request
from engines.errors import InvalidRequest, UnsupportedParameter

HELLO = [{"role": "user", "content": "hello"}]


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
        ({"max_tokens": -1}, "max_tokens"),
        ({"max_tokens": "5"}, "max_tokens"),
        ({"max_completion_tokens": 0}, "max_completion_tokens"),
        ({"temperature": -0.1}, "temperature"),
        ({"temperature": True}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"top_p": 1.5}, "top_p"),
        ({"stop": [""]}, "stop"),
        ({"stop": ["x"] * 17}, "stop"),
        ({"stop": "x" * 1025}, "stop"),
        ({"logit_bias": {"abc": 1}}, "logit_bias"),
        ({"logit_bias": {"5": 101}}, "logit_bias.5"),
        ({"top_logprobs": 3}, None),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"stream_options": {"include_usage": True}}, None),
        ({"stream": "yes"}, "stream"),
    ],
)
def test_a_bad_field_is_named(fields: dict[str, Any], param: str | None) -> None:
    error = refusal(**fields)
    assert (error.http_status, error.param) == (400, param)


@pytest.mark.parametrize(
    "fields",
    [
        {"tools": [{"type": "function"}]},
        {"response_format": {"type": "json_object"}},
        {"modalities": ["audio"]},
        {"functions": [{}]},
    ],
)
def test_what_would_change_the_answer_and_is_not_served_is_refused(fields: dict[str, Any]) -> None:
    assert isinstance(refusal(**fields), UnsupportedParameter)


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


def test_an_assistant_message_may_consist_of_tool_calls() -> None:
    messages = [*HELLO, {"role": "assistant", "content": None, "tool_calls": [{"id": "1"}]}]
    assert parse_chat_request(json.dumps({"messages": messages}).encode()).messages[1].text() == ""
