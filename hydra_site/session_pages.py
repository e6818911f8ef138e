"""The sessions pages: where each conversation is, why its requests went where they went, and buttons to move it.

Plain pages that need no script. People of the staff see all conversations, others their own.
"""

from __future__ import annotations

from typing import Any

from asgiref.sync import async_to_sync
from django.contrib import messages
from django.contrib.auth.decorators import login_required
from django.http import Http404, HttpRequest, HttpResponse
from django.shortcuts import redirect, render
from django.views.decorators.http import require_POST, require_safe

from engines.errors import EngineError
from engines.services import serving_engines
from hydra_site import lineage
from hydra_site.explained import explained
from sessions import lifecycle, services
from sessions.errors import SessionUnknown
from sessions.identity import Owner
from sessions.lifecycle import SessionView

SHOWN = 100
SHOWN_TURNS = 20
_TONES = {"warm": "ok", "parked": "", "resumable": "warn", "expired": ""}


@require_safe
@login_required
def sessions(request: HttpRequest) -> HttpResponse:
    """All conversations that this user may see, the newest first."""
    views = async_to_sync(lifecycle.listed)(_scope(request), SHOWN)
    return render(request, "sessions.html", {"page": "sessions", "rows": [_row(view) for view in views]})


@require_safe
@login_required
def session(request: HttpRequest, key: str) -> HttpResponse:
    """One conversation: where it is, and its last requests."""
    try:
        view = async_to_sync(lifecycle.inspected)(_scope(request), key)
    except SessionUnknown as error:
        raise Http404 from error
    turns = services.turn_views(view.detail.id, SHOWN_TURNS)
    context = {
        "page": "sessions",
        "row": _row(view),
        "holders": view.holders,
        "prospect": lineage.PROSPECTS[view.state],
        "places": lineage.places(view, turns),
        "is_saved": bool(view.snapshots),
        "steps": lineage.steps(view, turns),
        "turns": [explained(turn) for turn in turns],
        "engines": _engine_names(view),
    }
    return render(request, "session.html", context)


@require_POST
@login_required
def act(request: HttpRequest, key: str, name: str) -> HttpResponse:
    """Park, bring back, move or delete a conversation."""
    acts = {
        "park": lambda: async_to_sync(lifecycle.park)(_scope(request), key),
        "resume": lambda: async_to_sync(lifecycle.resume)(_scope(request), key),
        "migrate": lambda: _moved(request, key),
        "delete": lambda: async_to_sync(lifecycle.delete)(_scope(request), key),
    }
    if name not in acts:
        raise Http404
    try:
        came = acts[name]()
    except SessionUnknown as error:
        raise Http404 from error
    except EngineError as error:
        messages.error(request, str(error))
    else:
        done = {
            "park": "Parked",
            "resume": "Its next turn goes on from what is saved",
            "migrate": came,
            "delete": "Deleted",
        }
        messages.success(request, f"{done[name]}.")
    return redirect("sessions") if name == "delete" else redirect("session", key=key)


def _moved(request: HttpRequest, key: str) -> str:
    """What came of the move, as a sentence without its stop."""
    target = request.POST.get("engine", "")
    before = async_to_sync(lifecycle.inspected)(_scope(request), key)
    after = async_to_sync(lifecycle.migrate)(_scope(request), key, target)
    if {holder.endpoint.name for holder in before.holders} == {target}:
        return f"It is at {target} already, and its next turn goes on there"
    if target in {holder.endpoint.name for holder in after.holders}:
        return f"Moved to {target}"
    return f"Its next turn goes on at {target}"


def _scope(request: HttpRequest) -> str | None:
    user = request.user
    return None if user.is_staff else Owner(user_id=user.pk).scope


def _row(view: SessionView) -> dict[str, Any]:
    detail = view.detail
    return {
        "key": detail.key_hash,
        "title": detail.title or f"Session {detail.id}",
        "model": detail.model_name,
        "where": ", ".join(holder.endpoint.name for holder in view.holders) or detail.engine_name,
        "wanted": detail.wanted_engine_name,
        "state": view.state,
        "tone": _TONES[view.state],
        "turns": detail.turn_count,
        "saved_tokens": max((snapshot.tokens for snapshot in view.snapshots), default=0),
        "last_active_at": detail.last_active_at,
    }


def _engine_names(view: SessionView) -> list[str]:
    """Where it can be moved to: not where all of it is, unless a person wants it elsewhere by now."""
    held = {holder.endpoint.name for holder in view.holders}
    here = held if len(held) == 1 and view.detail.wanted_engine_name in ("", *held) else set()
    return [endpoint.name for endpoint in serving_engines(view.detail.model_name) if endpoint.name not in here]
