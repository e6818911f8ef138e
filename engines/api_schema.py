"""The OpenAI chat request: one definition for site and engine, so that both refuse the same bodies with the same words.

Knows neither Django nor llama.cpp. Unknown fields are ignored, as OpenAI's clients of other servers expect; known fields
that cannot be honoured yet are refused, never silently dropped.
"""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from engines.api_body import clean_text, validated
from engines.api_message import Message, ShownImage
from engines.api_tools import FunctionSpec, Tool, bounded_json, checked_tools, chosen_function
from engines.errors import InvalidRequest, UnsupportedParameter

MAX_STOPS = 16
MAX_STOP_CHARS = 1024
MAX_MESSAGES = 16384
MAX_IMAGES = 64
MAX_LOGIT_BIAS = 1024
MAX_TEMPLATE_KWARGS = 64
MAX_TEMPLATE_KWARGS_CHARS = 64 << 10
MAX_GRAMMAR_CHARS = 256 << 10
MAX_REGEX_CHARS = 16 << 10
MAX_SCHEMA_NESTING = 64
# As llama.cpp's users say it: as many tokens as the context holds.
UNBOUNDED, LONGEST_WINDOW_TOKENS = -1, 65536
# Variables that a template gets from the engine, so that a request cannot give them another meaning.
OWN_VARIABLES = ("messages", "tools", "documents", "add_generation_prompt", "bos_token", "eos_token")

_STRICT = ConfigDict(strict=True, extra="ignore", allow_inf_nan=False)


class StreamOptions(BaseModel):
    model_config = _STRICT
    include_usage: bool = False


# Fields of llama-server's and OpenAI's that are not served, and the values with which they mean nothing.
_UNSERVED: dict[str, tuple[Any, ...]] = {
    "mirostat": (0,),
    "dynatemp_range": (0,),
    "top_n_sigma": (-1, 0),
    "samplers": (),
    "min_keep": (0, 1),
    "continue_final_message": (False,),
    "add_generation_prompt": (True,),
    "lora": ([],),
    "web_search_options": (),
}


class ChatRequest(BaseModel):
    """A validated `POST /v1/chat/completions` body. Bounds as in OpenAI's documentation.

    Beside OpenAI's fields: `enable_thinking` and `chat_template_kwargs` reach the template; `thinking_budget_tokens` (also
    `reasoning_budget`) ends the reasoning after so many tokens, -1 never; `reasoning_format` "none" leaves reasoning in the
    content; `reasoning_field` is the name under which it leaves else. `json_schema`, `grammar` (GBNF) and `regex` (also
    `guided_regex`) constrain the answer.
    """

    model_config = _STRICT

    messages: Annotated[list[Message], Field(min_length=1, max_length=MAX_MESSAGES)]
    model: str | None = None
    stream: bool = False
    stream_options: StreamOptions | None = None
    max_tokens: Annotated[int, Field(ge=UNBOUNDED)] | None = None
    max_completion_tokens: Annotated[int, Field(ge=UNBOUNDED)] | None = None
    temperature: Annotated[float, Field(ge=0, le=5)] | None = None
    top_p: Annotated[float, Field(ge=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=-1, le=1_000_000)] | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    typical_p: Annotated[float, Field(gt=0, le=1)] | None = None
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    repeat_penalty: Annotated[float, Field(gt=0, le=10)] | None = None
    repeat_last_n: Annotated[int, Field(ge=UNBOUNDED, le=LONGEST_WINDOW_TOKENS)] | None = None
    dry_multiplier: Annotated[float, Field(ge=0, le=100)] | None = None
    dry_base: Annotated[float, Field(ge=1, le=100)] | None = None
    dry_allowed_length: Annotated[int, Field(ge=1, le=1024)] | None = None
    dry_penalty_last_n: Annotated[int, Field(ge=UNBOUNDED, le=LONGEST_WINDOW_TOKENS)] | None = None
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
    draft_min: Annotated[int, Field(ge=0, le=16)] = Field(0, alias="speculative.n_min")
    draft_max: Annotated[int, Field(ge=0, le=16)] | None = Field(None, alias="speculative.n_max")
    user: str | None = None
    prompt_cache_key: str | None = None
    n: Annotated[int, Field(ge=1, le=16)] | None = None
    chat_template_kwargs: Annotated[dict[str, Any], Field(max_length=MAX_TEMPLATE_KWARGS)] | None = None
    enable_thinking: bool | None = None
    reasoning_effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = None
    reasoning_format: Literal["auto", "deepseek", "none"] | None = None
    reasoning_field: Literal["reasoning_content", "reasoning"] = "reasoning_content"
    thinking_budget_tokens: Annotated[int, Field(ge=-1, le=1 << 30)] | None = None
    reasoning_budget: Annotated[int, Field(ge=-1, le=1 << 30)] | None = None
    response_format: dict[str, Any] | None = None
    json_schema: dict[str, Any] | None = None
    grammar: Annotated[str, Field(max_length=MAX_GRAMMAR_CHARS)] | None = None
    regex: Annotated[str, Field(max_length=MAX_REGEX_CHARS)] | None = None
    guided_regex: Annotated[str, Field(max_length=MAX_REGEX_CHARS)] | None = None
    tools: list[Tool] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    functions: list[Any] | None = None
    audio: Any = None
    modalities: list[str] | None = None

    @field_validator("max_tokens", "max_completion_tokens")
    @classmethod
    def _some_tokens(cls, value: int | None) -> int | None:
        if value == 0:
            raise ValueError(f"Input should be greater than 0, or {UNBOUNDED}: until the context is full")
        return value

    @field_validator("stop")
    @classmethod
    def _bounded_stops(cls, value: str | list[str] | None) -> str | list[str] | None:
        stops = [value] if isinstance(value, str) else value or []
        if len(stops) > MAX_STOPS:
            raise ValueError(f"at most {MAX_STOPS} stop strings, got {len(stops)}")
        for stop in stops:
            if not stop or len(stop) > MAX_STOP_CHARS:
                raise ValueError(f"a stop string must have 1 to {MAX_STOP_CHARS} characters")
            clean_text(stop)
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

    @field_validator("tools")
    @classmethod
    def _bounded_tools(cls, value: list[Tool] | None) -> list[Tool] | None:
        return checked_tools(value) if value else None

    @field_validator("tool_choice")
    @classmethod
    def _known_choice(cls, value: str | dict[str, Any] | None) -> str | dict[str, Any] | None:
        chosen_function(value)
        return value

    @field_validator("chat_template_kwargs")
    @classmethod
    def _bounded_kwargs(cls, value: dict[str, Any] | None) -> dict[str, Any] | None:
        for name in value or {}:
            if not name.isidentifier() or name in OWN_VARIABLES:
                raise ValueError(f"{name[:40]!r} cannot be given to a template")
        if not isinstance((value or {}).get("enable_thinking", True), bool):
            raise ValueError("enable_thinking must be true or false")
        bounded_json(value, chars=MAX_TEMPLATE_KWARGS_CHARS, nesting=16)
        return value

    @field_validator("response_format")
    @classmethod
    def _known_format(cls, value: dict[str, Any] | None) -> dict[str, Any] | None:
        if value is not None and value.get("type") not in ("text", "json_object", "json_schema"):
            raise ValueError("type must be 'text', 'json_object' or 'json_schema'")
        return value

    @field_validator("response_format", "json_schema")
    @classmethod
    def _bounded_schema(cls, value: dict[str, Any] | None) -> dict[str, Any] | None:
        bounded_json(value, chars=MAX_GRAMMAR_CHARS, nesting=MAX_SCHEMA_NESTING)
        return value

    @field_validator("grammar", "regex", "guided_regex")
    @classmethod
    def _valid_text(cls, value: str | None) -> str | None:
        return value if value is None else clean_text(value)

    @model_validator(mode="after")
    def _choice_is_offered(self) -> ChatRequest:
        named = chosen_function(self.tool_choice)
        if (named or self.tool_choice == "required") and not self.tools:
            raise InvalidRequest("tool_choice needs tools", param="tool_choice")
        if named and named not in self.functions_by_name:
            raise InvalidRequest(f"tool_choice names {named[:64]!r}, which is none of the tools", param="tool_choice")
        return self

    @model_validator(mode="after")
    def _bounded_images(self) -> ChatRequest:
        count = len(self.images())
        if count > MAX_IMAGES:
            raise InvalidRequest(f"the messages show {count} images; {MAX_IMAGES} are the most", param="messages")
        return self

    @model_validator(mode="after")
    def _belongs_together(self) -> ChatRequest:
        if self.top_logprobs is not None and not self.logprobs:
            raise InvalidRequest("top_logprobs needs logprobs: true", param="top_logprobs")
        if self.stream_options is not None and not self.stream:
            raise InvalidRequest("stream_options needs stream: true", param="stream_options")
        return self

    @property
    def max_new_tokens(self) -> int | None:
        """The answer's bound: `max_completion_tokens`, else `max_tokens`; None where it is not said, or `fills_context`."""
        return None if self.fills_context else self._asked_tokens

    @property
    def fills_context(self) -> bool:
        """Whether the answer may go on until the context is full, whatever the engine's default."""
        return self._asked_tokens == UNBOUNDED

    @property
    def _asked_tokens(self) -> int | None:
        return self.max_completion_tokens if self.max_completion_tokens is not None else self.max_tokens

    @property
    def stops(self) -> tuple[str, ...]:
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())

    @property
    def functions_by_name(self) -> dict[str, FunctionSpec]:
        """The functions that the answer may call: none with `tool_choice` "none"."""
        if self.tool_choice == "none":
            return {}
        return {tool.function.name: tool.function for tool in self.tools or ()}

    @property
    def thinking_budget(self) -> int | None:
        """Tokens of reasoning after which it is ended; None: as many as the model likes."""
        given = self.thinking_budget_tokens if self.thinking_budget_tokens is not None else self.reasoning_budget
        return None if given is None or given < 0 else given

    @property
    def thinking(self) -> bool | None:
        """Whether the model is to reason before it answers; None where the request does not say."""
        if self.enable_thinking is not None:
            return self.enable_thinking
        given = (self.chat_template_kwargs or {}).get("enable_thinking")
        if given is not None:
            return bool(given)
        if self.thinking_budget == 0 or self.reasoning_effort == "none":
            return False
        return None if self.reasoning_effort in (None, "minimal") else True

    @property
    def template_variables(self) -> dict[str, Any]:
        """What the request tells the template beside messages and tools."""
        told = (("enable_thinking", self.thinking), ("reasoning_effort", self.reasoning_effort))
        return {**(self.chat_template_kwargs or {}), **{name: value for name, value in told if value is not None}}

    def images(self) -> list[ShownImage]:
        """All images of the conversation, in order."""
        return [
            ShownImage(url, index, part) for index, message in enumerate(self.messages) for part, url in message.urls()
        ]

    @property
    def include_usage(self) -> bool:
        return self.stream_options is not None and self.stream_options.include_usage

    @model_validator(mode="before")
    @classmethod
    def _refuse_unserved(cls, values: Any) -> Any:
        """Fields of llama-server and OpenAI that change the answer and are not served; any other unknown field is ignored."""
        for name, neutral in _UNSERVED.items():
            value = values.get(name) if isinstance(values, dict) else None
            if value is not None and value not in neutral:
                raise UnsupportedParameter(f"{name} is not served.", param=name, hint="Leave it out.")
        return values

    def refuse_unsupported(self) -> None:
        """Raises UnsupportedParameter for known parameters that would change the answer and are not there yet."""
        if self.functions:
            raise UnsupportedParameter("functions is not served.", param="functions", hint="Send them as tools.")
        if self.audio:
            raise UnsupportedParameter("audio is not served yet.", param="audio", hint="Leave it out.")
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
    request = validated(ChatRequest, parse_json_object(raw))
    request.refuse_unsupported()
    return request
