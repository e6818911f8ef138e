"""What the site reads in the answers that it passes on: that text began, how it ended, and how many tokens it took.

Each API has its own names for these. Frames pass as bytes; only those that carry such facts are parsed.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from engines.errors import EngineError

Values = dict[str, Any]


@dataclass
class AnswerFacts:
    """What an answer has told of itself so far. `timings` are llama.cpp's, where the engine sends them, of several choices the
    first one's: the others wait for its prompt. `predicted` are tokens by choice."""

    finish_reason: str = ""
    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    timings: Values = field(default_factory=dict)
    predicted: dict[int, int] = field(default_factory=dict)


@dataclass(frozen=True)
class AnswerForm:
    """One API's answers. `text` matches a frame with text for the user, `telling` one that is worth parsing.

    `note` writes what a parsed chunk, or a whole answer, says into the facts. `lost_frame` is how a stream says that it broke,
    given the number of events before it; `error_body` the same for a request without a stream.
    """

    text: re.Pattern[bytes]
    telling: re.Pattern[bytes]
    note: Callable[[Values, AnswerFacts], None]
    lost_frame: Callable[[EngineError, int], bytes]
    error_body: Callable[[EngineError], dict[str, object]]


def _note_timings(values: Values, facts: AnswerFacts, choice: int = 0) -> None:
    """Of one choice; what usage says of all together counts more, and is noted behind it."""
    timings = values.get("timings")
    if not isinstance(timings, dict):
        return
    if choice == 0 or not facts.timings:
        facts.timings = timings
        facts.cached_tokens = count(timings, "cache_n")
        facts.prompt_tokens = facts.cached_tokens + count(timings, "prompt_n")
    facts.predicted[choice] = count(timings, "predicted_n")
    facts.completion_tokens = sum(facts.predicted.values())


def _note_usage(usage: Any, facts: AnswerFacts) -> None:
    """Usage by OpenAI's older names, its newer names, or both."""
    if not isinstance(usage, dict):
        return
    details = usage.get("prompt_tokens_details") or usage.get("input_tokens_details")
    facts.prompt_tokens = count(usage, "prompt_tokens", "input_tokens") or facts.prompt_tokens
    facts.completion_tokens = count(usage, "completion_tokens", "output_tokens") or facts.completion_tokens
    if isinstance(details, dict) and "cached_tokens" in details:
        facts.cached_tokens = count(details, "cached_tokens")


def _note_choices(values: Values, facts: AnswerFacts) -> None:
    told = values.get("choices")
    choices = [choice for choice in told if isinstance(choice, dict)] if isinstance(told, list) else []
    # A chunk has one choice, whose timings it tells; a whole answer tells those of its first one.
    _note_timings(values, facts, count(choices[0], "index") if len(choices) == 1 else 0)
    _note_usage(values.get("usage"), facts)
    for choice in choices:
        reason = choice.get("finish_reason")
        facts.finish_reason = reason if isinstance(reason, str) else facts.finish_reason


def _note_response(values: Values, facts: AnswerFacts) -> None:
    """Of a Responses API event, or of the response itself."""
    response = values.get("response", values)
    if not isinstance(response, dict):
        return
    _note_timings(response, facts)
    _note_usage(response.get("usage"), facts)
    status = response.get("status")
    if status in ("completed", "incomplete"):
        details = response.get("incomplete_details")
        reason = details.get("reason") if isinstance(details, dict) else None
        facts.finish_reason = reason if isinstance(reason, str) else str(status)


def _note_message(values: Values, facts: AnswerFacts) -> None:
    """Of a Messages API event, or of the message itself. Its input tokens are those that were not cached."""
    message = values.get("message", values)
    if not isinstance(message, dict):
        return
    _note_timings(message, facts)
    for usage in (message.get("usage"), values.get("usage")):
        if isinstance(usage, dict):
            if "cache_read_input_tokens" in usage:
                facts.cached_tokens = count(usage, "cache_read_input_tokens")
            if "input_tokens" in usage:
                facts.prompt_tokens = facts.cached_tokens + count(usage, "input_tokens")
            facts.completion_tokens = count(usage, "output_tokens") or facts.completion_tokens
    delta = values.get("delta")
    reason = delta.get("stop_reason") if isinstance(delta, dict) else message.get("stop_reason")
    facts.finish_reason = reason if isinstance(reason, str) else facts.finish_reason


def _note_usage_only(values: Values, facts: AnswerFacts) -> None:
    _note_usage(values.get("usage"), facts)


def count(values: Any, *names: str) -> int:
    """The first of these names that holds a whole number from 0 up, else 0."""
    for name in names:
        value = values.get(name) if isinstance(values, dict) else None
        if isinstance(value, int) and not isinstance(value, bool) and value >= 0:
            return value
    return 0


def _event(values: object, name: str = "") -> bytes:
    prefix = f"event: {name}\n" if name else ""
    return f"{prefix}data: {json.dumps(values, ensure_ascii=False)}\n\n".encode()


def _lost_response(error: EngineError, events: int) -> bytes:
    fields = {"code": error.code, "message": error.message, "param": error.param, "sequence_number": events}
    return _event({"type": "error", **fields}, "error")


def _never() -> re.Pattern[bytes]:
    return re.compile(rb"(?!)")


_NUMBERS = rb'"(?:timings|usage)":\s?\{'

CHAT_FORM = AnswerForm(
    # The opening delta has a role before its empty content.
    text=re.compile(rb'"delta":\s?\{"(?:content|reasoning_content|reasoning|tool_calls)":'),
    telling=re.compile(_NUMBERS + rb'|"finish_reason":\s?"'),
    note=_note_choices,
    lost_frame=lambda error, events: _event(error.body()),
    error_body=EngineError.body,
)
COMPLETION_FORM = AnswerForm(
    text=re.compile(rb'"text":\s?"[^"]'),
    telling=CHAT_FORM.telling,
    note=_note_choices,
    lost_frame=CHAT_FORM.lost_frame,
    error_body=EngineError.body,
)
RESPONSE_FORM = AnswerForm(
    text=re.compile(rb'"type":\s?"response\.[a-z_.]+\.delta"'),
    telling=re.compile(rb'"type":\s?"response\.(?:completed|incomplete|failed)"'),
    note=_note_response,
    lost_frame=_lost_response,
    error_body=EngineError.body,
)
MESSAGE_FORM = AnswerForm(
    text=re.compile(rb'"type":\s?"content_block_delta"'),
    telling=re.compile(rb'"type":\s?"message_(?:start|delta)"'),
    note=_note_message,
    lost_frame=lambda error, events: _event(error.messages_body(), "error"),
    error_body=EngineError.messages_body,
)
# Answers in one piece.
USAGE_FORM = AnswerForm(_never(), _never(), _note_usage_only, CHAT_FORM.lost_frame, EngineError.body)
