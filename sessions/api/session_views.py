"""Conversations over HTTP: list one's own, look at one, park it, bring it back, move it, delete it. Another's do not exist."""

from __future__ import annotations

import re
from dataclasses import asdict
from typing import Any

from django.http import HttpRequest, HttpResponseBase, JsonResponse
from pydantic import BaseModel, ConfigDict, Field

from engines.api_body import validated
from engines.api_schema import parse_json_object
from engines.errors import InvalidRequest
from pools.db import in_db
from sessions import lifecycle, services
from sessions.api.answers import endpoint
from sessions.api.auth import authenticate
from sessions.api.operations import JSON, Operation, Parameter
from sessions.errors import SessionUnknown
from sessions.services import TurnView

SHOWN_TURNS = 20
_ID = re.compile(r"[0-9a-f]{64}")
_SESSION = Parameter("session", "path", "The session's id, as X-Hydra-Session of its answers names it.")
_LIMIT = Parameter("limit", "query", "How many at most, the newest first.",
                   {"type": "integer", "minimum": 1, "maximum": lifecycle.MAX_LISTED})  # fmt: skip
_ACTS = (404, 409, 502, 503)


class TargetRequest(BaseModel):
    """The engine that the session's next turn is to go on at; of `resume`, "" leaves that to the router."""

    model_config = ConfigDict(strict=True, extra="ignore")
    engine: str = Field("", max_length=63)


@endpoint("GET", operations={"GET": Operation("Your own sessions and where they are", "sessions", None, (_LIMIT,))})
async def sessions(request: HttpRequest) -> HttpResponseBase:
    """GET /v1/sessions."""
    owner = await authenticate(request)
    views = await lifecycle.listed(owner.scope, _limit(request.GET.get("limit", "50")))
    return JsonResponse({"object": "list", "data": [view.to_dict() for view in views]})


@endpoint(
    "GET",
    "DELETE",
    operations={
        "GET": Operation("One session, with its last turns and why they went where they went", "sessions", None, (_SESSION,),
                         statuses=(404,)),
        "DELETE": Operation("Frees its slot, its snapshots and its rows", "sessions", None, (_SESSION,), statuses=_ACTS),
    },
)  # fmt: skip
async def session(request: HttpRequest, session: str) -> HttpResponseBase:
    """GET and DELETE /v1/sessions/{session}."""
    owner = await authenticate(request)
    if request.method == "DELETE":
        view = await lifecycle.delete(owner.scope, _id(session))
        return JsonResponse({"id": view.detail.key_hash, "object": "session", "deleted": True})
    view = await lifecycle.inspected(owner.scope, _id(session))
    turns = await in_db(services.turn_views, view.detail.id, SHOWN_TURNS)
    return JsonResponse({**view.to_dict(), "last_turns": [turn_object(turn) for turn in turns]})


def _act(summary: str, body: type[BaseModel] | None = None) -> dict[str, Operation]:
    return {"POST": Operation(summary, "sessions", body, (_SESSION,), (JSON,), _ACTS)}


@endpoint("POST", operations=_act("Saves it to its host's store and frees its slot"))
async def park(request: HttpRequest, session: str) -> HttpResponseBase:
    """POST /v1/sessions/{session}/park."""
    owner = await authenticate(request)
    return JsonResponse((await lifecycle.park(owner.scope, _id(session))).to_dict())


@endpoint(
    "POST", operations=_act("Has its next turn go on from what is saved, anywhere or at an engine", TargetRequest)
)
async def resume(request: HttpRequest, session: str) -> HttpResponseBase:
    """POST /v1/sessions/{session}/resume."""
    owner = await authenticate(request)
    return JsonResponse((await lifecycle.resume(owner.scope, _id(session), _engine(request))).to_dict())


@endpoint(
    "POST",
    operations=_act(
        "Moves it to another engine, live where it runs; where it cannot move it is saved, and its next turn goes on there",
        TargetRequest,
    ),
)
async def migrate(request: HttpRequest, session: str) -> HttpResponseBase:
    """POST /v1/sessions/{session}/migrate."""
    owner = await authenticate(request)
    name = _engine(request)
    if not name:
        raise InvalidRequest("engine: name the engine to move to", param="engine")
    return JsonResponse((await lifecycle.migrate(owner.scope, _id(session), name)).to_dict())


def turn_object(turn: TurnView) -> dict[str, Any]:
    values = asdict(turn)
    request_id, engine = str(values.pop("request_id")), values.pop("engine_name") or None
    return {"request_id": request_id, "engine": engine, **values, "started_at": turn.started_at.timestamp()}


def _engine(request: HttpRequest) -> str:
    return validated(TargetRequest, parse_json_object(request.body or b"{}")).engine


def _id(text: str) -> str:
    if not _ID.fullmatch(text):
        raise SessionUnknown("There is no session of this id.")
    return text


def _limit(text: str) -> int:
    if not (text.isascii() and text.isdigit() and len(text) <= 6 and 0 < int(text) <= lifecycle.MAX_LISTED):
        raise InvalidRequest(f"limit: it must be between 1 and {lifecycle.MAX_LISTED}", param="limit")
    return int(text)
