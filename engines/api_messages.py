"""Anthropic's Messages API: the request body, and its translation to the engine's own chat request.

Blocks and options that need something the engine does not have (documents, server tools) are refused by name.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator

from engines.api_body import plain_json, validated
from engines.api_sampling import passed_on
from engines.api_schema import ChatRequest, parse_json_object

_STRICT = ConfigDict(strict=True, extra="ignore", allow_inf_nan=False)
MAX_BLOCKS = 4096
MAX_TOOLS = 1024


class TextBlock(BaseModel):
    model_config = _STRICT
    type: Literal["text"]
    text: str


class ImageSource(BaseModel):
    """An image's bytes. Addresses and files (`url`, `file`) are refused by their type: the engine fetches nothing."""

    model_config = _STRICT
    type: Literal["base64"]
    media_type: Literal["image/png", "image/jpeg", "image/gif", "image/webp"]
    data: str


class ImageBlock(BaseModel):
    model_config = _STRICT
    type: Literal["image"]
    source: ImageSource


class ThinkingBlock(BaseModel):
    """Earlier reasoning. The signature is accepted and not checked: nothing here makes any."""

    model_config = _STRICT
    type: Literal["thinking"]
    thinking: str


class RedactedThinkingBlock(BaseModel):
    model_config = _STRICT
    type: Literal["redacted_thinking"]


class ToolUseBlock(BaseModel):
    model_config = _STRICT
    type: Literal["tool_use"]
    id: str
    name: str
    input: dict[str, Any]

    @field_validator("input")
    @classmethod
    def _plain(cls, value: dict[str, Any]) -> dict[str, Any]:
        plain_json(value)
        return value


class ToolResultBlock(BaseModel):
    model_config = _STRICT
    type: Literal["tool_result"]
    tool_use_id: str
    content: str | list[Annotated[TextBlock | ImageBlock, Field(discriminator="type")]] | None = None


Block = Annotated[
    TextBlock | ImageBlock | ThinkingBlock | RedactedThinkingBlock | ToolUseBlock | ToolResultBlock,
    Field(discriminator="type"),
]


class Turn(BaseModel):
    model_config = _STRICT
    role: Literal["user", "assistant", "system"]
    content: str | Annotated[list[Block], Field(max_length=MAX_BLOCKS)]


class Tool(BaseModel):
    """A tool that the client runs. Tools that Anthropic's servers run have another `type`."""

    model_config = _STRICT
    type: Literal["custom"] | None = None
    name: str
    description: str | None = None
    input_schema: dict[str, Any]
    strict: bool | None = None


class ToolChoice(BaseModel):
    model_config = _STRICT
    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool = False


class Thinking(BaseModel):
    model_config = _STRICT
    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: Annotated[int, Field(ge=0, lt=1 << 31)] | None = None


class OutputFormat(BaseModel):
    model_config = ConfigDict(strict=True, extra="ignore", allow_inf_nan=False, populate_by_name=True)
    type: Literal["json_schema"]
    json_schema: Annotated[dict[str, Any], Field(alias="schema")]


class OutputConfig(BaseModel):
    model_config = _STRICT
    effort: str | None = None
    format: OutputFormat | None = None


class Metadata(BaseModel):
    model_config = _STRICT
    user_id: str | None = None


class CountTokensRequest(BaseModel):
    """A validated `POST /v1/messages/count_tokens` body. Extra fields are ignored, but for llama.cpp's (see api_sampling.py)."""

    model_config = ConfigDict(strict=True, extra="allow", allow_inf_nan=False)
    messages: Annotated[list[Turn], Field(min_length=1)]
    model: str | None = None
    system: str | list[TextBlock] | None = None
    tools: Annotated[list[Tool], Field(max_length=MAX_TOOLS)] | None = None
    tool_choice: ToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None

    def chat(self) -> ChatRequest:
        """The request as the engine's own. Raises InvalidRequest and UnsupportedParameter."""
        request = validated(ChatRequest, {name: value for name, value in self.fields().items() if value is not None})
        request.refuse_unsupported()
        return request

    def fields(self) -> dict[str, Any]:
        """A chat request's fields; None for what was not given."""
        system = [{"role": "system", "content": _text(self.system)}] if self.system else []
        given = self.output_config or OutputConfig()
        return passed_on(self) | {
            "messages": system + [message for turn in self.messages for message in _messages(turn)],
            "tools": [_tool(tool) for tool in self.tools] if self.tools else None,
            "tool_choice": _tool_choice(self.tool_choice),
            "parallel_tool_calls": False if self.tool_choice and self.tool_choice.disable_parallel_tool_use else None,
            "reasoning_effort": given.effort,
            "response_format": _response_format(given.format),
            **(_thinking(self.thinking) if self.thinking else {}),
        }


class MessagesRequest(CountTokensRequest):
    """A validated `POST /v1/messages` body. Anthropic asks for `max_tokens`, so it is required here too."""

    max_tokens: Annotated[int, Field(ge=1, lt=1 << 31)]
    stream: bool = False
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    stop_sequences: list[str] | None = None
    metadata: Metadata | None = None

    def fields(self) -> dict[str, Any]:
        return super().fields() | {
            "max_tokens": self.max_tokens,
            "stream": self.stream,
            "temperature": self.temperature,
            "top_p": self.top_p,
            "top_k": self.top_k,
            "stop": self.stop_sequences,
            "user": self.metadata.user_id if self.metadata else None,
        }


def parse_messages_request(raw: bytes) -> ChatRequest:
    """A body of `/v1/messages` as the engine's own request. Raises InvalidRequest and UnsupportedParameter."""
    return validated(MessagesRequest, parse_json_object(raw)).chat()


def parse_count_request(raw: bytes) -> ChatRequest:
    return validated(CountTokensRequest, parse_json_object(raw)).chat()


# --- translation -----------------------------------------------------------------------------------


def _text(content: str | list[TextBlock] | None) -> str:
    return content if isinstance(content, str) else "\n".join(block.text for block in content or [])


def _content(shown: str | Sequence[TextBlock | ImageBlock] | None) -> str | list[dict[str, Any]]:
    """Blocks as a chat's content: one text, or where there are images a list of parts."""
    if shown is None or isinstance(shown, str):
        return shown or ""
    if not any(isinstance(block, ImageBlock) for block in shown):
        return "\n".join(block.text for block in shown if isinstance(block, TextBlock))
    return [
        {"type": "text", "text": block.text}
        if isinstance(block, TextBlock)
        else {"type": "image_url", "image_url": f"data:{block.source.media_type};base64,{block.source.data}"}
        for block in shown
    ]


def _messages(turn: Turn) -> list[dict[str, Any]]:
    """A turn's messages: results of tools come before what the user says beside them."""
    if isinstance(turn.content, str):
        return [{"role": turn.role, "content": turn.content}]
    results = [block for block in turn.content if isinstance(block, ToolResultBlock)]
    messages: list[dict[str, Any]] = [
        {"role": "tool", "tool_call_id": block.tool_use_id, "content": _content(block.content)} for block in results
    ]
    shown = [block for block in turn.content if isinstance(block, TextBlock | ImageBlock)]
    if turn.role == "assistant":
        messages.append(_assistant(turn.content, _content(shown) if shown else None))
    elif shown or not results:
        messages.append({"role": turn.role, "content": _content(shown)})
    return messages


def _assistant(blocks: list[Block], text: str | list[dict[str, Any]] | None) -> dict[str, Any]:
    calls = [
        {
            "id": block.id,
            "type": "function",
            "function": {"name": block.name, "arguments": plain_json(block.input)},
        }
        for block in blocks
        if isinstance(block, ToolUseBlock)
    ]
    thoughts = "\n".join(block.thinking for block in blocks if isinstance(block, ThinkingBlock))
    message: dict[str, Any] = {"role": "assistant", "content": text if text is not None or calls else ""}
    if calls:
        message["tool_calls"] = calls
    if thoughts:
        message["reasoning_content"] = thoughts
    return message


def _thinking(thinking: Thinking) -> dict[str, Any]:
    return {"enable_thinking": thinking.type != "disabled", "thinking_budget_tokens": thinking.budget_tokens}


def _tool(tool: Tool) -> dict[str, Any]:
    function: dict[str, Any] = {"name": tool.name, "parameters": tool.input_schema}
    if tool.description is not None:
        function["description"] = tool.description
    if tool.strict is not None:
        function["strict"] = tool.strict
    return {"type": "function", "function": function}


def _tool_choice(choice: ToolChoice | None) -> str | dict[str, Any] | None:
    if choice is None:
        return None
    if choice.type == "tool":
        return {"type": "function", "function": {"name": choice.name or ""}}
    return {"auto": "auto", "any": "required", "none": "none"}[choice.type]


def _response_format(wanted: OutputFormat | None) -> dict[str, Any] | None:
    if wanted is None:
        return None
    return {"type": "json_schema", "json_schema": {"name": "answer", "schema": wanted.json_schema, "strict": True}}
