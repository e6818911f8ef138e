"""A request as the site reads it before an engine does: which model, streamed or not, which conversation.

The body itself goes to the engine as it came, and the engine judges it; here it only has to be a JSON object, save for
chat completions, which both judge with the same schema.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from engines.api_schema import ChatRequest, parse_chat_request, parse_json_object
from engines.errors import InvalidRequest, ModelNotFound

if TYPE_CHECKING:
    from sessions.dialects import Dialect

MAX_MODEL_CHARS = 128
TITLE_CHARS = 80
# A growing text is known by how it begins.
OPENER_CHARS = 256
MAX_OPENER_ITEMS = 64


@dataclass(frozen=True)
class BodyHints:
    """What a body says of the conversation it belongs to. `opener` stays the same over all turns of it; `title` is a line."""

    cache_key: str = ""
    user: str = ""
    opener: tuple[str, ...] = ()
    title: str = ""


@dataclass(frozen=True)
class EngineCall:
    """One request for an engine. `model` None means the pool's default; `raw` is sent as it is."""

    dialect: Dialect
    raw: bytes
    model: str | None
    stream: bool = False
    resumable: bool = False
    hints: BodyHints = BodyHints()

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
    opener = (request.model or "", system, first)
    return BodyHints(request.prompt_cache_key or "", request.user or "", opener, title_of(first))


def completion_call(dialect: Dialect, raw: bytes) -> EngineCall:
    body = parse_json_object(raw)
    prompt = body.get("prompt")
    if isinstance(prompt, list):
        prompt = prompt[0] if prompt and isinstance(prompt[0], str) else str(prompt[:MAX_OPENER_ITEMS])
    text = prompt if isinstance(prompt, str) else ""
    return _streamable(dialect, raw, body, ("completion", text[:OPENER_CHARS]), text)


def response_call(dialect: Dialect, raw: bytes) -> EngineCall:
    body = parse_json_object(raw)
    asked = body.get("input")
    first = asked if isinstance(asked, str) else _first_text(asked, "user")
    system = _text(body.get("instructions")) or _first_text(asked, "system", "developer")
    return _streamable(dialect, raw, body, (system, first), first)


def message_call(dialect: Dialect, raw: bytes) -> EngineCall:
    body = parse_json_object(raw)
    metadata = body.get("metadata")
    user = _text(metadata.get("user_id")) if isinstance(metadata, dict) else ""
    first = _first_text(body.get("messages"), "user")
    return _streamable(dialect, raw, body, (_text(body.get("system")), first), first, user=user)


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
    dialect: Dialect, raw: bytes, body: dict[str, Any], opener: tuple[str, ...], title: str, user: str = ""
) -> EngineCall:
    model = _model(body)
    stream = body.get("stream") is True
    hints = BodyHints(
        _text(body.get("prompt_cache_key")), user or _text(body.get("user")), (model or "", *opener), title_of(title)
    )
    return EngineCall(dialect, raw, model, stream, _flag(body, "resumable"), hints)


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
