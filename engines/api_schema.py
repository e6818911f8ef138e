"""The OpenAI chat request: one definition for site and engine, so that both refuse the same bodies with the same words.

Knows neither Django nor llama.cpp. Unknown fields are ignored, as OpenAI's clients of other servers expect; known fields
that cannot be honoured yet are refused, never silently dropped.
"""

from __future__ import annotations

import json
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from engines.errors import InvalidRequest, UnsupportedParameter

MAX_STOPS = 16
MAX_STOP_CHARS = 1024
MAX_MESSAGES = 16384
MAX_LOGIT_BIAS = 1024
ROLES = ("system", "developer", "user", "assistant", "tool")

_STRICT = ConfigDict(strict=True, extra="ignore", allow_inf_nan=False)


def _clean(text: str) -> str:
    """Lone surrogates pass JSON's escapes, but are no text: no tokenizer can take them."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError("holds a lone surrogate, which is not valid Unicode") from error
    return text


class TextPart(BaseModel):
    model_config = _STRICT
    type: str
    text: str | None = None

    @model_validator(mode="after")
    def _only_text(self) -> TextPart:
        if self.type != "text":
            raise ValueError(f"content of type {self.type!r} needs a model with a projector; this one takes only text")
        if self.text is None:
            raise ValueError("a part of type 'text' needs its text")
        _clean(self.text)
        return self


class Message(BaseModel):
    """One turn's message. `content` may be a string or a list of text parts; an assistant may have none."""

    model_config = _STRICT
    role: str
    content: str | list[TextPart] | None = None
    name: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    tool_calls: list[dict[str, Any]] | None = None
    tool_call_id: str | None = None

    @model_validator(mode="after")
    def _known_role(self) -> Message:
        if self.role not in ROLES:
            raise ValueError(f"unknown role {self.role!r}; known are {', '.join(ROLES)}")
        if self.content is None and not (self.role == "assistant" and (self.tool_calls or self.thoughts)):
            raise ValueError(f"a message of role {self.role!r} needs content")
        for text in (self.content, self.name, self.thoughts):
            if isinstance(text, str):
                _clean(text)
        return self

    @property
    def thoughts(self) -> str | None:
        return self.reasoning_content if self.reasoning_content is not None else self.reasoning

    def text(self) -> str:
        """The content as one string; parts are joined by line breaks, as llama.cpp does."""
        if self.content is None:
            return ""
        if isinstance(self.content, str):
            return self.content
        return "\n".join(part.text or "" for part in self.content)


class StreamOptions(BaseModel):
    model_config = _STRICT
    include_usage: bool = False


class ChatRequest(BaseModel):
    """A validated `POST /v1/chat/completions` body. Bounds as in OpenAI's documentation."""

    model_config = _STRICT

    messages: Annotated[list[Message], Field(min_length=1, max_length=MAX_MESSAGES)]
    model: str | None = None
    stream: bool = False
    stream_options: StreamOptions | None = None
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    temperature: Annotated[float, Field(ge=0, le=5)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=-1, le=1_000_000)] | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    typical_p: Annotated[float, Field(gt=0, le=1)] | None = None
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    repeat_penalty: Annotated[float, Field(gt=0, le=10)] | None = None
    repeat_last_n: Annotated[int, Field(ge=0, le=65536)] | None = None
    dry_multiplier: Annotated[float, Field(ge=0, le=100)] | None = None
    dry_base: Annotated[float, Field(ge=1, le=100)] | None = None
    dry_allowed_length: Annotated[int, Field(ge=1, le=1024)] | None = None
    dry_penalty_last_n: Annotated[int, Field(ge=0, le=65536)] | None = None
    dry_sequence_breakers: (
        Annotated[list[Annotated[str, Field(min_length=1, max_length=40)]], Field(max_length=32)] | None
    ) = None
    xtc_probability: Annotated[float, Field(ge=0, le=1)] | None = None
    xtc_threshold: Annotated[float, Field(ge=0, le=1)] | None = None
    seed: int | None = None
    priority: Annotated[int, Field(ge=-100, le=100)] = 0
    stop: str | list[str] | None = None
    logit_bias: dict[str, Annotated[float, Field(ge=-100, le=100)]] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    ignore_eos: bool = False
    cache_prompt: bool = True
    return_progress: bool = False
    chat_template_kwargs: dict[str, Any] | None = None
    user: str | None = None
    prompt_cache_key: str | None = None
    n: Annotated[int, Field(ge=1, le=16)] | None = None
    response_format: dict[str, Any] | None = None
    tools: list[Any] | None = None
    functions: list[Any] | None = None
    audio: Any = None
    modalities: list[str] | None = None

    @field_validator("stop")
    @classmethod
    def _bounded_stops(cls, value: str | list[str] | None) -> str | list[str] | None:
        stops = [value] if isinstance(value, str) else value or []
        if len(stops) > MAX_STOPS:
            raise ValueError(f"at most {MAX_STOPS} stop strings, got {len(stops)}")
        for stop in stops:
            if not stop or len(stop) > MAX_STOP_CHARS:
                raise ValueError(f"a stop string must have 1 to {MAX_STOP_CHARS} characters")
            _clean(stop)
        return value

    @field_validator("logit_bias")
    @classmethod
    def _token_ids(cls, value: dict[str, float] | None) -> dict[str, float] | None:
        if value and len(value) > MAX_LOGIT_BIAS:
            raise ValueError(f"at most {MAX_LOGIT_BIAS} entries, got {len(value)}")
        for key in value or {}:
            if not (key.isascii() and key.isdigit() and len(key) < 10):
                raise ValueError(f"keys are token ids; {key[:40]!r} is none")
        return value

    @model_validator(mode="after")
    def _belongs_together(self) -> ChatRequest:
        if self.top_logprobs is not None and not self.logprobs:
            raise ValueError("top_logprobs needs logprobs: true")
        if self.stream_options is not None and not self.stream:
            raise ValueError("stream_options needs stream: true")
        return self

    @property
    def max_new_tokens(self) -> int | None:
        """The answer's bound: `max_completion_tokens`, else `max_tokens`, else None (until the context is full)."""
        return self.max_completion_tokens if self.max_completion_tokens is not None else self.max_tokens

    @property
    def stops(self) -> tuple[str, ...]:
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())

    @property
    def include_usage(self) -> bool:
        return self.stream_options is not None and self.stream_options.include_usage

    def refuse_unsupported(self) -> None:
        """Raises UnsupportedParameter for known parameters that would change the answer and are not there yet."""
        if self.response_format is not None and self.response_format.get("type") != "text":
            raise UnsupportedParameter(
                "Constrained output is not served yet; only response_format {'type': 'text'} is.",
                param="response_format",
            )
        for name, value in (("tools", self.tools), ("functions", self.functions), ("audio", self.audio)):
            if value:
                raise UnsupportedParameter(f"{name} is not served yet.", param=name)
        if self.modalities not in (None, ["text"]):
            raise UnsupportedParameter("Only the modality 'text' is served.", param="modalities")


def _no_constant(name: str) -> float:
    raise ValueError(f"{name} is not JSON")


def parse_json_object(raw: bytes) -> dict[str, Any]:
    """The body as a JSON object. Raises InvalidRequest for anything else, with the place where it broke."""
    if not raw.strip():
        raise InvalidRequest("The request body is empty; send a JSON object.")
    try:
        body: Any = json.loads(raw, parse_constant=_no_constant)
    except UnicodeDecodeError as error:
        raise InvalidRequest(f"The request body is not UTF-8: byte {error.start} is invalid.") from error
    except RecursionError as error:
        raise InvalidRequest("The request body is nested too deeply.") from error
    except ValueError as error:
        raise InvalidRequest(f"The request body is not valid JSON: {error}") from error
    if not isinstance(body, dict):
        raise InvalidRequest(f"The request body must be a JSON object, not {type(body).__name__}.")
    return body


def parse_chat_request(raw: bytes) -> ChatRequest:
    """Validates a chat completion body. Raises InvalidRequest (with `param`) or UnsupportedParameter."""
    body = parse_json_object(raw)
    try:
        request = ChatRequest.model_validate(body)
    except ValidationError as error:
        raise _first_problem(error) from error
    request.refuse_unsupported()
    return request


def _first_problem(error: ValidationError) -> InvalidRequest:
    # Of a union's failed branches the one that got deepest into the value is the one the client meant.
    problems = error.errors(include_url=False, include_context=False, include_input=False)
    problem = max(problems, key=lambda p: (p["loc"][:1] == problems[0]["loc"][:1], len(p["loc"])))
    steps = [str(step) for step in problem["loc"] if not _is_union_branch(step)]
    param = ".".join(steps) or None
    message = problem["msg"].removeprefix("Value error, ")
    return InvalidRequest(f"{param}: {message}" if param else message, param=param)


def _is_union_branch(step: int | str) -> bool:
    """Pydantic names the union branch it tried in `loc`; clients know only field names and indices."""
    return isinstance(step, str) and (step in ("str", "int", "float", "TextPart") or "[" in step)
