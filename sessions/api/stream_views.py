"""Kept streams over HTTP: go on reading one, list one's own, stop one. Another owner's do not exist."""

from __future__ import annotations

from typing import Any

from django.http import HttpRequest, HttpResponseBase, JsonResponse

from engines.errors import InvalidRequest
from sessions.api.answers import endpoint
from sessions.api.auth import authenticate
from sessions.api.operations import JSON, SSE, Operation, Parameter
from sessions.api.relay_views import stream_response
from sessions.errors import StreamGap
from sessions.kept_stream import KeptStream
from sessions.stream_desk import stream_desk
from sessions.stream_shelf import Ended

MAX_DIGITS = 12
_NAME = Parameter("name", "path", "The answer's X-Request-Id, or the X-Conversation-Id that the request was sent with.")
_FROM = Parameter("from", "query", "How many events were received already.", {"type": "integer", "minimum": 0})
_CONVERSATION = Parameter("conversation_id", "query", "Only streams of this conversation.")
_RESUME = Operation(
    "Read a resumable stream from an event on, to its end", "streams", None, (_NAME, _FROM), (SSE,), (404, 410)
)
_STOP = Operation(
    "Stop a resumable stream; what came so far stays readable", "streams", None, (_NAME,), (JSON,), (404,)
)


@endpoint("GET", operations={"GET": Operation("Your own resumable streams", "streams", None, (_CONVERSATION,))})
async def streams(request: HttpRequest) -> HttpResponseBase:
    """GET /v1/streams: the caller's kept streams, the newest first."""
    owner = await authenticate(request)
    conversation_id = request.GET.get("conversation_id")
    own = [
        stream_object(stream)
        for stream in stream_desk().of_owner(owner.scope)
        if conversation_id in (None, stream.conversation_id)
    ]
    return JsonResponse({"object": "list", "data": own})


@endpoint("GET", "DELETE", operations={"GET": _RESUME, "DELETE": _STOP})
async def stream(request: HttpRequest, name: str) -> HttpResponseBase:
    """GET /v1/stream/{name}?from=N, and DELETE to stop it."""
    owner = await authenticate(request)
    if request.method == "DELETE":
        ended = await stream_desk().stop_named(owner, name)
        return JsonResponse(stream_object(ended) if isinstance(ended, KeptStream) else elsewhere_object(ended))
    found = await stream_desk().found(owner, name)
    position = _position(request.GET.get("from", "0"))
    if position > found.next_event and (found.is_over or not found.is_rewritten):
        raise InvalidRequest(f"from: only {found.next_event} events came so far, not {position}", param="from")
    if position < found.first_event:
        raise StreamGap(f"Events before {found.first_event} are not kept any more.", param="from")
    return stream_response(found, position)


def stream_object(stream: KeptStream) -> dict[str, Any]:
    """A kept stream as lists show it. `events` is the `from` of whoever has received all that came."""
    return {
        "id": str(stream.request_id),
        "object": "stream",
        "conversation_id": stream.conversation_id or None,
        "path": stream.path,
        "model": stream.answer.model_name if stream.answer else None,
        "created": int(stream.created_at),
        "status": stream.state,
        "first_event": stream.first_event,
        "events": stream.next_event,
        "size_bytes": stream.size_bytes,
    }


def elsewhere_object(ended: Ended) -> dict[str, Any]:
    """The same of one that another replica reads; how much of it there is, that one knows."""
    about = ended.about
    return {
        "id": about.request_id,
        "object": "stream",
        "conversation_id": about.conversation_id or None,
        "path": about.path,
        "model": None,
        "created": int(about.created_at),
        "status": ended.state,
        "first_event": None,
        "events": None,
        "size_bytes": None,
    }


def _position(text: str) -> int:
    if not (text.isascii() and text.isdigit() and len(text) <= MAX_DIGITS):
        raise InvalidRequest("from: it must be a number of events", param="from")
    return int(text)
