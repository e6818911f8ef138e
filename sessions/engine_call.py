"""A request as the site reads it before an engine does: which model, streamed or not, which conversation.

The body itself goes to the engine as it came, and the engine judges it; here it only has to be a JSON object, save for
chat completions, which both judge with the same schema.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from engines.api_schema import ChatRequest, parse_chat_request, parse_json_object
from engines.errors import InvalidRequest, ModelNotFound
from sessions.background import is_background
from sessions.key_chain import Item, Link, chain_of, pieces_of
from sessions.whole_rows import needs_whole_rows

if TYPE_CHECKING:
    from sessions.dialects import Dialect

MAX_MODEL_CHARS = 128
TITLE_CHARS = 80
# A growing text is known by how it begins.
OPENER_CHARS = 256
MAX_OPENER_ITEMS = 64
_OUTPUT_BOUNDS = ("max_output_tokens", "max_completion_tokens", "max_tokens")
_IMAGE_PART = b'"input_image"'
# What of a body reaches the template beside messages and tools, and the parts that do of what else asks for reasoning.
_TEMPLATE_FIELDS = ("chat_template_kwargs", "enable_thinking")
_TEMPLATE_PARTS = (("reasoning", "effort"), ("output_config", "effort"), ("thinking", "type"))


@dataclass(frozen=True)
class BodyHints:
    """What a body says of the conversation it belongs to. `opener` stays the same over all turns of it; `title` is a line.

    `chain` names the prompt's beginnings. `most_output_tokens` None: no bound was asked for. `deterministic`: the same request
    has the same answer. `background`: a program asks for itself, and nobody will go on with it. `whole_rows`: drawing its tokens
    takes whole rows of logits.
    """

    cache_key: str = ""
    user: str = ""
    opener: tuple[str, ...] = ()
    title: str = ""
    chain: tuple[Link, ...] = ()
    most_output_tokens: int | None = None
    needs: frozenset[str] = frozenset()
    deterministic: bool = False
    background: bool = False
    whole_rows: bool = False

    @property
    def prompt_bytes(self) -> int:
        return self.chain[-1].size_bytes if self.chain else 0


@dataclass(frozen=True)
class EngineCall:
    """One request for an engine. `model` None means the pool's default; `raw` is sent as it is."""

    dialect: Dialect
    raw: bytes
    model: str | None
    stream: bool = False
    resumable: bool = False
    hints: BodyHints = BodyHints()

    @property
    def is_conversation(self) -> bool:
        """Whether later requests may go on with what an engine computes for this one."""
        return self.dialect.is_turn and bool(self.hints.chain)

    def __post_init__(self) -> None:
        if self.model is not None and not (self.model.isprintable() and len(self.model) <= MAX_MODEL_CHARS):
            raise ModelNotFound("The model's name holds control characters or is too long.", param="model")


def chat_call(dialect: Dialect, raw: bytes) -> EngineCall:
    """A chat completion's body, judged. Raises InvalidRequest as the engine would."""
    request = parse_chat_request(raw)
    # The engine has no use for this field, so the schema does not know it.
    resumable = b'"resumable"' in raw and _flag(parse_json_object(raw), "resumable")
    return EngineCall(dialect, raw, request.model or None, request.stream, resumable, chat_hints(request))


def chat_hints(request: ChatRequest) -> BodyHints:
    """The hints of a chat: system prompt and first user message open it."""
    system = next((message.text() for message in request.messages if message.role in ("system", "developer")), "")
    first = next((message.text() for message in request.messages if message.role == "user"), "")
    others = [message for message in request.messages if message.role not in ("system", "developer")]
    has_images = any(message.urls() for message in request.messages)
    return BodyHints(
        request.prompt_cache_key or "",
        request.user or "",
        (request.model or "", system, first),
        title_of(first),
        chain_of(_chat_base(request), _chat_items(request)),
        request.max_new_tokens,
        frozenset({"vision"}) if has_images else frozenset(),
        deterministic=request.temperature == 0 and (request.n or 1) == 1,
        background=is_background(system, others[0].text() if others else "", len(others)),
        whole_rows=needs_whole_rows(lambda name: getattr(request, name, None)),
    )


def _chat_base(request: ChatRequest) -> Iterator[Item]:
    yield (request.model or "").encode(errors="surrogatepass"), 0
    yield from _template_items(request.template_variables)
    for tool in (request.tools or ()) if request.tool_choice != "none" else ():
        text = tool.model_dump_json(exclude_unset=True).encode()
        yield text, len(text)


def _chat_items(request: ChatRequest) -> Iterator[Item]:
    for message in request.messages:
        yield message.model_dump_json(exclude_unset=True).encode(), len(message.text())


def completion_call(dialect: Dialect, raw: bytes) -> EngineCall:
    body = parse_json_object(raw)
    prompt = body.get("prompt")
    if isinstance(prompt, list):
        prompt = prompt[0] if prompt and isinstance(prompt[0], str) else str(prompt[:MAX_OPENER_ITEMS])
    text = prompt if isinstance(prompt, str) else ""
    chain = chain_of([(_model_item(body), 0)], pieces_of(text))
    return _streamable(dialect, raw, body, ("completion", text[:OPENER_CHARS]), text, chain=chain)


def response_call(dialect: Dialect, raw: bytes) -> EngineCall:
    body = parse_json_object(raw)
    asked = body.get("input")
    first = asked if isinstance(asked, str) else _first_text(asked, "user")
    system = _text(body.get("instructions")) or _first_text(asked, "system", "developer")
    chain = _json_chain(body, ("instructions", "tools"), asked)
    background = is_background(system, first, len(asked) if isinstance(asked, list) else 1)
    return _streamable(dialect, raw, body, (system, first), first, chain=chain, background=background)


def message_call(dialect: Dialect, raw: bytes) -> EngineCall:
    body = parse_json_object(raw)
    metadata = body.get("metadata")
    user = _text(metadata.get("user_id")) if isinstance(metadata, dict) else ""
    messages = body.get("messages")
    first, system = _first_text(messages, "user"), _text(body.get("system"))
    chain = _json_chain(body, ("system", "tools"), messages)
    background = is_background(system, first, len(messages) if isinstance(messages, list) else 1)
    return _streamable(dialect, raw, body, (system, first), first, user=user, chain=chain, background=background)


def gathered_call(dialect: Dialect, raw: bytes) -> EngineCall:
    """A request that is no conversation: all of an owner's for one model and path count as one."""
    body = parse_json_object(raw)
    model = _model(body)
    opener = (model or "", dialect.path)
    title = f"{dialect.path.rpartition('/')[2].capitalize()} by {model or 'the default model'}"
    return EngineCall(dialect, raw, model, hints=BodyHints("", _text(body.get("user")), opener, title_of(title)))


def plain_call(dialect: Dialect, raw: bytes) -> EngineCall:
    """A request that nothing is remembered of."""
    return EngineCall(dialect, raw, _model(parse_json_object(raw)))


def title_of(text: str) -> str:
    """A title for lists: how a text begins, on one line."""
    line = " ".join(text[: 4 * TITLE_CHARS].replace("\0", "").encode(errors="replace").decode().split())
    return line if len(line) <= TITLE_CHARS else line[: TITLE_CHARS - 1] + "…"


def _streamable(
    dialect: Dialect,
    raw: bytes,
    body: dict[str, Any],
    opener: tuple[str, ...],
    title: str,
    user: str = "",
    *,
    chain: tuple[Link, ...] = (),
    background: bool = False,
) -> EngineCall:
    model = _model(body)
    stream = body.get("stream") is True
    most = next((value for name in _OUTPUT_BOUNDS if isinstance(value := body.get(name), int) and value > 0), None)
    hints = BodyHints(
        _text(body.get("prompt_cache_key")),
        user or _text(body.get("user")),
        (model or "", *opener),
        title_of(title),
        chain,
        most,
        frozenset({"vision"}) if _IMAGE_PART in raw else frozenset(),
        deterministic=body.get("temperature") == 0 and body.get("n") in (None, 1),
        background=background,
        whole_rows=needs_whole_rows(body.get),
    )
    return EngineCall(dialect, raw, model, stream, _flag(body, "resumable"), hints)


def _json_chain(body: dict[str, Any], before: tuple[str, ...], items: Any) -> tuple[Link, ...]:
    """The chain of a body whose messages are a list of JSON values, or one text."""
    if isinstance(items, str):
        items = [items]
    if not isinstance(items, list):
        return ()
    has_tools = body.get("tool_choice") not in ("none", {"type": "none"})
    base = [_item(body[name]) for name in before if body.get(name) and (has_tools or name != "tools")]
    return chain_of([(_model_item(body), 0), *_template_items(_told(body)), *base], map(_item, items))


def _told(body: dict[str, Any]) -> dict[str, Any]:
    """What a body that is not a chat's tells the template."""
    told = {name: body.get(name) for name in _TEMPLATE_FIELDS}
    for name, part in _TEMPLATE_PARTS:
        whole = body.get(name)
        told[name] = whole.get(part) if isinstance(whole, dict) else None
    # A budget of none asks for no reasoning at all; any other changes nothing of the prompt.
    told["thinking_budget_tokens"] = 0 if body.get("thinking_budget_tokens") == 0 else None
    return {name: value for name, value in told.items() if value is not None and value != {}}


def _template_items(told: dict[str, Any]) -> list[Item]:
    """What stands before all messages because it may change how each of them is rendered. It is no text of the prompt itself."""
    return [(b"template " + json.dumps(told, sort_keys=True).encode(), 0)] if told else []


def _model_item(body: dict[str, Any]) -> bytes:
    return (_model(body) or "").encode(errors="surrogatepass")


def _item(value: Any) -> Item:
    text = json.dumps(value, sort_keys=True).encode()
    said = _text(value.get("content")) if isinstance(value, dict) and "content" in value else None
    # Images stand as base64 text here, and as few tokens in the prompt.
    return text, len(text) if said is None else len(said)


def _model(body: dict[str, Any]) -> str | None:
    model = body.get("model")
    if model is not None and not isinstance(model, str):
        raise InvalidRequest("model: it must be a string", param="model")
    return model or None


def _flag(body: dict[str, Any], name: str) -> bool:
    value = body.get(name)
    if value is not None and not isinstance(value, bool):
        raise InvalidRequest(f"{name}: it must be true or false", param=name)
    return bool(value)


def _text(value: Any) -> str:
    """A string, or the joined texts of a list of parts; "" for anything else, which the engine will judge."""
    if isinstance(value, str):
        return value
    if isinstance(value, list):
        texts = (part.get("text") for part in value[:MAX_OPENER_ITEMS] if isinstance(part, dict))
        return "\n".join(text for text in texts if isinstance(text, str))
    return ""


def _first_text(messages: Any, *roles: str) -> str:
    for message in messages[:MAX_OPENER_ITEMS] if isinstance(messages, list) else ():
        if isinstance(message, dict) and message.get("role") in roles:
            return _text(message.get("content"))
    return ""
