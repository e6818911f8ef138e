"""What the site reads in answers of each API."""

from __future__ import annotations

import json
from typing import Any

import pytest

from engines.errors import EngineUnreachable
from sessions.answer_form import (
    CHAT_FORM,
    COMPLETION_FORM,
    MESSAGE_FORM,
    RESPONSE_FORM,
    USAGE_FORM,
    AnswerFacts,
    AnswerForm,
)

TIMINGS = {"cache_n": 4, "prompt_n": 6, "predicted_n": 2, "predicted_per_second": 50.0}
OPENAI_USAGE = {"prompt_tokens": 10, "completion_tokens": 2, "prompt_tokens_details": {"cached_tokens": 4}}
RESPONSE_USAGE = {"input_tokens": 10, "output_tokens": 2, "input_tokens_details": {"cached_tokens": 4}}
MESSAGE_USAGE = {"input_tokens": 6, "cache_read_input_tokens": 4, "output_tokens": 2}


def noted(form: AnswerForm, *chunks: dict[str, Any]) -> AnswerFacts:
    facts = AnswerFacts()
    for chunk in chunks:
        form.note(chunk, facts)
    return facts


@pytest.mark.parametrize(
    ("form", "chunks", "reason"),
    [
        (CHAT_FORM, [{"choices": [{"finish_reason": "stop"}], "timings": TIMINGS}], "stop"),
        (CHAT_FORM, [{"choices": [{"finish_reason": "length"}]}, {"choices": [], "usage": OPENAI_USAGE}], "length"),
        (COMPLETION_FORM, [{"choices": [{"text": "", "finish_reason": "stop"}], "usage": OPENAI_USAGE}], "stop"),
        (RESPONSE_FORM, [{"response": {"status": "completed", "usage": RESPONSE_USAGE}}], "completed"),
        (
            RESPONSE_FORM,
            [{"status": "incomplete", "incomplete_details": {"reason": "max_output_tokens"}, "usage": RESPONSE_USAGE}],
            "max_output_tokens",
        ),
        (
            MESSAGE_FORM,
            [
                {"type": "message_start", "message": {"usage": {"input_tokens": 10, "output_tokens": 0}}},
                {"type": "message_delta", "delta": {"stop_reason": "end_turn"}, "usage": MESSAGE_USAGE},
            ],
            "end_turn",
        ),
        (MESSAGE_FORM, [{"type": "message", "stop_reason": "tool_use", "usage": MESSAGE_USAGE}], "tool_use"),
    ],
)
def test_reason_and_tokens_are_read_in_every_apis_words(
    form: AnswerForm, chunks: list[dict[str, Any]], reason: str
) -> None:
    facts = noted(form, *chunks)
    assert (facts.finish_reason, facts.prompt_tokens, facts.cached_tokens, facts.completion_tokens) == (
        reason,
        10,
        4,
        2,
    )


def _ended(index: int, **timings: int) -> dict[str, Any]:
    return {"choices": [{"index": index, "finish_reason": "stop"}], "timings": timings}


def _counted(facts: AnswerFacts) -> tuple[int, int, int]:
    return facts.prompt_tokens, facts.cached_tokens, facts.completion_tokens


@pytest.mark.parametrize("form", [CHAT_FORM, COMPLETION_FORM])
def test_the_tokens_of_all_choices_count_and_their_prompt_once(form: AnswerForm) -> None:
    """The second choice shares the first one's prompt, which it did not find there."""
    first = _ended(0, cache_n=0, prompt_n=10, predicted_n=3, queue_ms=1)
    second = _ended(1, cache_n=9, prompt_n=1, predicted_n=4, queue_ms=50)
    usage = {"prompt_tokens": 10, "completion_tokens": 7, "prompt_tokens_details": {"cached_tokens": 0}}
    for chunks in ((first, second), (second, first), (first, first, second)):
        facts = noted(form, *chunks)
        assert (*_counted(facts), facts.timings["queue_ms"]) == (10, 0, 7, 1)
        assert _counted(noted(form, *chunks, {"choices": [], "usage": usage})) == (10, 0, 7)
    whole = {"choices": [*first["choices"], *second["choices"]], "timings": first["timings"], "usage": usage}
    assert _counted(noted(form, whole)) == (10, 0, 7)


def test_an_answer_of_vectors_has_only_usage() -> None:
    facts = noted(USAGE_FORM, {"data": [], "usage": {"prompt_tokens": 7, "total_tokens": 7}})
    assert (facts.prompt_tokens, facts.completion_tokens, facts.finish_reason) == (7, 0, "")


def test_a_response_that_failed_has_no_reason_to_have_ended() -> None:
    assert noted(RESPONSE_FORM, {"response": {"status": "failed", "usage": None}}).finish_reason == ""


@pytest.mark.parametrize("form", [CHAT_FORM, COMPLETION_FORM, RESPONSE_FORM, MESSAGE_FORM, USAGE_FORM])
@pytest.mark.parametrize(
    "nonsense",
    [
        {},
        {"usage": 5, "timings": "x", "choices": "y", "response": [], "message": 7, "delta": []},
        {
            "usage": {"prompt_tokens": "1", "input_tokens": True, "output_tokens": -4},
            "choices": [5, {"finish_reason": {}}],
        },
    ],
)
def test_nonsense_is_passed_over(form: AnswerForm, nonsense: dict[str, Any]) -> None:
    facts = noted(form, nonsense)
    assert (facts.prompt_tokens, facts.completion_tokens, facts.finish_reason) == (0, 0, "")


@pytest.mark.parametrize(
    ("form", "opening", "text"),
    [
        (
            CHAT_FORM,
            b'data: {"choices":[{"index":0,"delta":{"role":"assistant","content":""},"finish_reason":null}]}',
            b'data: {"choices":[{"index":0,"delta":{"content":"Red"},"finish_reason":null}]}',
        ),
        (
            CHAT_FORM,
            b'data: {"choices":[],"prompt_progress":{"total":8}}',
            b'data: {"choices":[{"index":0,"delta":{"tool_calls":[{"index":0}]},"finish_reason":null}]}',
        ),
        (
            COMPLETION_FORM,
            b'data: {"choices":[{"text":"","finish_reason":null}]}',
            b'data: {"choices":[{"text":"Red","finish_reason":null}]}',
        ),
        (
            RESPONSE_FORM,
            b'event: response.created\ndata: {"type":"response.created","response":{}}',
            b'event: response.output_text.delta\ndata: {"type":"response.output_text.delta","delta":"Red"}',
        ),
        (
            MESSAGE_FORM,
            b'event: message_start\ndata: {"type":"message_start","message":{}}',
            b'event: content_block_delta\ndata: {"type":"content_block_delta","delta":{"text":"Red"}}',
        ),
    ],
)
def test_the_first_text_is_told_apart_from_what_opens_the_stream(form: AnswerForm, opening: bytes, text: bytes) -> None:
    assert form.text.search(opening) is None
    assert form.text.search(text) is not None


def test_a_stream_breaks_in_the_words_of_its_api() -> None:
    lost = EngineUnreachable("Gone.")
    chat = CHAT_FORM.lost_frame(lost, 5)
    assert json.loads(chat.removeprefix(b"data: "))["error"]["code"] == "engine_unreachable"
    name, _, data = RESPONSE_FORM.lost_frame(lost, 5).partition(b"\n")
    values = json.loads(data.removeprefix(b"data: "))
    assert (name, values["type"], values["sequence_number"]) == (b"event: error", "error", 5)
    name, _, data = MESSAGE_FORM.lost_frame(lost, 5).partition(b"\n")
    values = json.loads(data.removeprefix(b"data: "))
    assert (name, values["type"], values["error"]["type"]) == (b"event: error", "error", "overloaded_error")
