"""OpenAI's Responses API: the request body, and its translation to the engine's own chat request.

Nothing is stored here, so whatever refers to an earlier response is refused by name.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Discriminator, Field, Tag, field_validator

from engines.api_body import plain_json, validated
from engines.api_sampling import passed_on
from engines.api_schema import ChatRequest, parse_json_object
from engines.errors import UnsupportedParameter

_STRICT = ConfigDict(strict=True, extra="ignore", allow_inf_nan=False)
MAX_ITEMS = 16384
MAX_PARTS = 4096
MAX_TOOLS = 1024
MAX_METADATA = 16


class TextContent(BaseModel):
    """Text in a message, whoever wrote it. Files are refused by their type."""

    model_config = _STRICT
    type: Literal["input_text", "output_text", "text"]
    text: str


class RefusalContent(BaseModel):
    model_config = _STRICT
    type: Literal["refusal"]
    refusal: str


class ImageContent(BaseModel):
    """An image as a data: URI. Uploaded files are refused: nothing is stored here."""

    model_config = _STRICT
    type: Literal["input_image"]
    image_url: str
    detail: str | None = None


Content = str | Annotated[list[TextContent | RefusalContent | ImageContent], Field(max_length=MAX_PARTS)]


class MessageItem(BaseModel):
    model_config = _STRICT
    type: Literal["message"] = "message"
    role: Literal["user", "assistant", "system", "developer"]
    content: Content


class FunctionCallItem(BaseModel):
    model_config = _STRICT
    type: Literal["function_call"]
    call_id: str
    name: str
    arguments: str


class FunctionOutputItem(BaseModel):
    model_config = _STRICT
    type: Literal["function_call_output"]
    call_id: str
    output: Content


class ReasoningText(BaseModel):
    model_config = _STRICT
    type: Literal["reasoning_text", "summary_text"]
    text: str


class ReasoningItem(BaseModel):
    """Earlier reasoning. `content` is what was thought; a client that kept only the summary gives that."""

    model_config = _STRICT
    type: Literal["reasoning"]
    content: Annotated[list[ReasoningText], Field(max_length=MAX_PARTS)] | None = None
    summary: Annotated[list[ReasoningText], Field(max_length=MAX_PARTS)] = []

    @property
    def thoughts(self) -> str:
        return "\n".join(part.text for part in self.content or self.summary)


def _item_type(value: Any) -> str:
    kind = value.get("type", "message") if isinstance(value, dict) else getattr(value, "type", "")
    return kind if isinstance(kind, str) else ""


Item = Annotated[
    Annotated[MessageItem, Tag("message")]
    | Annotated[FunctionCallItem, Tag("function_call")]
    | Annotated[FunctionOutputItem, Tag("function_call_output")]
    | Annotated[ReasoningItem, Tag("reasoning")],
    Discriminator(_item_type),
]


class FunctionTool(BaseModel):
    """A function that the client runs. Tools that OpenAI's servers run have another `type`."""

    model_config = _STRICT
    type: Literal["function"]
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class FunctionChoice(BaseModel):
    model_config = _STRICT
    type: Literal["function"]
    name: str


class TextFormat(BaseModel):
    model_config = ConfigDict(strict=True, extra="ignore", allow_inf_nan=False, populate_by_name=True)
    type: Literal["text", "json_object", "json_schema"]
    name: str | None = None
    description: str | None = None
    json_schema: Annotated[dict[str, Any] | None, Field(alias="schema")] = None
    strict: bool | None = None


class TextOptions(BaseModel):
    model_config = _STRICT
    format: TextFormat | None = None
    verbosity: str | None = None


class Reasoning(BaseModel):
    """`summary` asks for reasoning in summary events. There is no summariser: the text is the model's own."""

    model_config = _STRICT
    effort: str | None = None
    summary: Literal["auto", "concise", "detailed"] | None = None


class ResponsesRequest(BaseModel):
    """A validated `POST /v1/responses` body. Extra fields are ignored, but for llama.cpp's (see api_sampling.py)."""

    model_config = ConfigDict(strict=True, extra="allow", allow_inf_nan=False)
    input: str | Annotated[list[Item], Field(min_length=1, max_length=MAX_ITEMS)]
    model: str | None = None
    instructions: str | None = None
    stream: bool = False
    max_output_tokens: Annotated[int, Field(ge=1, lt=1 << 31)] | None = None
    temperature: float | None = None
    top_p: float | None = None
    tools: Annotated[list[FunctionTool], Field(max_length=MAX_TOOLS)] = []
    tool_choice: Literal["none", "auto", "required"] | FunctionChoice = "auto"
    parallel_tool_calls: bool = True
    text: TextOptions | None = None
    reasoning: Reasoning | None = None
    metadata: Annotated[dict[str, str], Field(max_length=MAX_METADATA)] | None = None
    user: str | None = None
    prompt_cache_key: str | None = None
    safety_identifier: str | None = None
    top_logprobs: int | None = None
    store: bool | None = None
    background: bool | None = None
    previous_response_id: str | None = None
    conversation: Any = None
    prompt: Any = None
    truncation: Literal["auto", "disabled"] | None = None
    max_tool_calls: int | None = None

    @field_validator("tools", "metadata", "text")
    @classmethod
    def _can_be_echoed(cls, value: Any) -> Any:
        """The answer repeats these, so they must be JSON."""
        items = value if isinstance(value, list) else [value]
        plain_json([item.model_dump() if isinstance(item, BaseModel) else item for item in items])
        return value

    def refuse_unsupported(self) -> None:
        """Raises UnsupportedParameter for what needs a store, or would change the answer and is not served."""
        stored = "Responses are not stored; send the whole conversation as input."
        for name in ("store", "background", "previous_response_id", "conversation", "prompt"):
            if getattr(self, name):
                raise UnsupportedParameter(f"{name} is not served. {stored}", param=name)
        if self.truncation == "auto":
            raise UnsupportedParameter("Input is never truncated.", param="truncation")
        if self.top_logprobs:
            raise UnsupportedParameter(
                "Log probabilities are not served here.",
                param="top_logprobs",
                hint="POST /v1/chat/completions serves them.",
            )
        if self.max_tool_calls is not None:
            raise UnsupportedParameter("max_tool_calls bounds built-in tools; there are none.", param="max_tool_calls")

    def chat(self) -> ChatRequest:
        """The request as the engine's own. Raises InvalidRequest and UnsupportedParameter."""
        reasoning = self.reasoning or Reasoning()
        fields = passed_on(self) | {
            "messages": self._messages(),
            "stream": self.stream,
            "max_completion_tokens": self.max_output_tokens,
            "temperature": self.temperature,
            "top_p": self.top_p,
            "tools": [_chat_tool(tool) for tool in self.tools] or None,
            "tool_choice": self._tool_choice() if self.tools or self.tool_choice != "auto" else None,
            "parallel_tool_calls": self.parallel_tool_calls if self.tools else None,
            "response_format": self._response_format(),
            "reasoning_effort": reasoning.effort,
            "user": self.user if self.user is not None else self.safety_identifier,
            "prompt_cache_key": self.prompt_cache_key,
        }
        request = validated(ChatRequest, {name: value for name, value in fields.items() if value is not None})
        request.refuse_unsupported()
        return request

    def _messages(self) -> list[dict[str, Any]]:
        messages = [{"role": "system", "content": self.instructions}] if self.instructions else []
        if isinstance(self.input, str):
            return [*messages, {"role": "user", "content": self.input}]
        return messages + _joined(self.input)

    def _tool_choice(self) -> str | dict[str, Any]:
        if isinstance(self.tool_choice, FunctionChoice):
            return {"type": "function", "function": {"name": self.tool_choice.name}}
        return self.tool_choice

    def _response_format(self) -> dict[str, Any] | None:
        wanted = self.text.format if self.text else None
        if wanted is None or wanted.type == "text":
            return None
        if wanted.type == "json_object":
            return {"type": "json_object"}
        schema = {"name": wanted.name or "answer", "schema": wanted.json_schema or {}, "strict": wanted.strict}
        return {"type": "json_schema", "json_schema": schema}


def parse_responses_request(raw: bytes) -> ResponsesRequest:
    """Validates a body of `/v1/responses`. Raises InvalidRequest (with `param`) or UnsupportedParameter."""
    request = validated(ResponsesRequest, parse_json_object(raw))
    request.refuse_unsupported()
    return request


# --- translation -----------------------------------------------------------------------------------


def _joined(items: list[Item]) -> list[dict[str, Any]]:
    """Items as messages: reasoning, text and calls of one turn stand in one assistant message."""
    messages: list[dict[str, Any]] = []
    turn: dict[str, Any] | None = None
    for item in items:
        if isinstance(item, FunctionOutputItem):
            messages.append({"role": "tool", "tool_call_id": item.call_id, "content": _content(item.output)})
            turn = None
        elif isinstance(item, MessageItem) and item.role != "assistant":
            messages.append({"role": item.role, "content": _content(item.content)})
            turn = None
        else:
            if turn is None or not _can_take(turn, item):
                turn = {"role": "assistant", "content": None}
                messages.append(turn)
            _put(turn, item)
    for message in messages:
        if message["content"] is None and "tool_calls" not in message:
            message["content"] = ""
    return messages


def _can_take(turn: dict[str, Any], item: MessageItem | FunctionCallItem | ReasoningItem) -> bool:
    if isinstance(item, FunctionCallItem):
        return True
    if isinstance(item, ReasoningItem):
        return turn["content"] is None and "tool_calls" not in turn and "reasoning_content" not in turn
    return turn["content"] is None and "tool_calls" not in turn


def _put(turn: dict[str, Any], item: MessageItem | FunctionCallItem | ReasoningItem) -> None:
    if isinstance(item, ReasoningItem):
        turn["reasoning_content"] = item.thoughts
    elif isinstance(item, MessageItem):
        turn["content"] = _content(item.content)
    else:
        function = {"name": item.name, "arguments": item.arguments}
        turn.setdefault("tool_calls", []).append({"id": item.call_id, "type": "function", "function": function})


def _content(content: Content) -> str | list[dict[str, Any]]:
    """One text, or where there are images a list of parts."""
    if isinstance(content, str):
        return content
    parts = [_part(part) for part in content]
    if any(part["type"] != "text" for part in parts):
        return parts
    return "\n".join(part["text"] for part in parts)


def _part(part: TextContent | RefusalContent | ImageContent) -> dict[str, Any]:
    if isinstance(part, ImageContent):
        return {"type": "image_url", "image_url": part.image_url}
    return {"type": "text", "text": part.text if isinstance(part, TextContent) else part.refusal}


def _chat_tool(tool: FunctionTool) -> dict[str, Any]:
    function = {
        "name": tool.name,
        "description": tool.description,
        "parameters": tool.parameters,
        "strict": tool.strict,
    }
    return {"type": "function", "function": {name: value for name, value in function.items() if value is not None}}
