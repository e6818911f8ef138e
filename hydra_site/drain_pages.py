"""Emptying an engine, a card or a host from the panel: what would move where, then the moves as they go. For those of the staff
who may change it.

Plain pages that need no script; with one, the moves are followed as they go.
"""

from __future__ import annotations

from typing import Any

from asgiref.sync import async_to_sync
from django.contrib import messages
from django.contrib.auth.decorators import login_required
from django.http import Http404, HttpRequest, HttpResponse
from django.shortcuts import redirect, render
from django.template.defaultfilters import filesizeformat
from django.views.decorators.http import require_http_methods, require_POST, require_safe

from engines.errors import EngineError
from hydra_site.drain_rights import may_drain, may_look, require
from sessions import drains, evacuation
from sessions.choices import DrainKind
from sessions.drains import DrainView, Moved, Subject
from sessions.errors import DrainUnknown
from sessions.evacuation import PlannedMove

_TONES = {"running": "moving", "done": "ok", "partial": "warn", "ended": ""}
_OUTCOMES = {
    "moving": ("moves", "moving"),
    "moved": ("moved", "ok"),
    "saved": ("saved", "ok"),
    "stays": ("stays", "warn"),
}


@require_http_methods(["GET", "HEAD", "POST"])
@login_required
def preview(request: HttpRequest, kind: str, subject_id: int) -> HttpResponse:
    """What would move where if this got empty; by POST it is done. One that is being emptied already is shown so."""
    subject = _subject(request, kind, subject_id)
    if request.method == "POST":
        try:
            drain_id = drains.begin(subject, stops=bool(request.POST.get("stops")), user_id=request.user.pk)
        except EngineError as error:
            messages.error(request, str(error))
            return redirect("drain-preview", kind, subject_id)
        return redirect("drain", drain_id)
    if (going_on := drains.open_of(subject)) is not None:
        return redirect("drain", going_on.id)
    seen = async_to_sync(evacuation.preview)(subject.engine_ids)
    context = {
        "page": "dashboard",
        "subject": subject,
        "stops_by_default": kind == "host",
        "moves": [_foretold(move) for move in seen.moves],
        "going": len(seen.going),
        "staying": len(seen.staying),
        "running": sum(move.running for move in seen.going),
        "size": None if seen.foretold_bytes is None else filesizeformat(seen.foretold_bytes),
        "pause": _pause(seen.longest_pause_ms),
        "silent": seen.silent,
        "unserved": seen.unserved,
    }
    return render(request, "drain_preview.html", context)


@require_safe
@login_required
def drain(request: HttpRequest, drain_id: int) -> HttpResponse:
    """How far a drain is. With `?part` only what changes, for the page's script."""
    require(request.user.is_staff)
    try:
        view = drains.view(drain_id)
    except DrainUnknown as error:
        raise Http404 from error
    require(may_look(request.user, view.kind))
    try:
        subject = drains.subject_of(view.kind, view.subject_id)
    except DrainUnknown:
        subject = None  # It has left the pool; what was moved is told for all that.
    template = "drain_progress.html" if "part" in request.GET else "drain.html"
    acts = may_drain(request.user, view.kind)
    return render(request, template, {"page": "dashboard", "subject": subject, "acts": acts, **_progress(view)})


@require_POST
@login_required
def serve(request: HttpRequest, kind: str, subject_id: int) -> HttpResponse:
    """Have it take requests again, whatever was on its way."""
    subject = _subject(request, kind, subject_id)
    try:
        again = drains.serve_again(subject)
    except EngineError as error:
        messages.error(request, str(error))
    else:
        if again:
            messages.success(request, f"{subject.name} takes requests again. What has moved stays where it is.")
        else:
            messages.warning(request, f"{subject.name} takes requests already.")
    return redirect("dashboard")


def _subject(request: HttpRequest, kind: str, subject_id: int) -> Subject:
    require(request.user.is_staff)
    if kind in DrainKind:
        require(may_drain(request.user, kind))
    try:
        return drains.subject_of(kind, subject_id)
    except DrainUnknown as error:
        raise Http404 from error


def _foretold(move: PlannedMove) -> dict[str, Any]:
    return {
        "key": move.session if move.chat_id is not None else "",
        "title": move.title or f"Session {move.session[:8]}",
        "source": move.source,
        "target": move.target,
        "tokens": move.tokens,
        "running": move.running,
        "choices": move.choices,
        "size": None if move.foretold_bytes is None else filesizeformat(move.foretold_bytes),
        "pause": _pause(move.foretold_pause_ms),
        "displaces": move.displaces,
        "reason": move.reason,
    }


def _progress(view: DrainView) -> dict[str, Any]:
    moved, stays = view.of("moved"), view.of("stays")
    pauses = [move.pause_ms for move in moved if move.kind == "live" and move.pause_ms is not None]
    return {
        "drain": view,
        "tone": _TONES[view.state],
        "rows": [_row(move) for move in reversed(view.moves)],
        "moved": len(moved),
        "saved": len(view.of("saved")),
        "staying": len(stays),
        "sent": filesizeformat(sum(move.sent_bytes for move in moved)),
        "skipped_bytes": sum(move.skipped_bytes for move in moved),
        "skipped": filesizeformat(sum(move.skipped_bytes for move in moved)),
        "longest_pause": _pause(max(pauses, default=None)),
    }


def _row(move: Moved) -> dict[str, Any]:
    word, tone = _OUTCOMES[move.outcome]
    return {
        "key": move.session if len(move.session) == 64 else "",
        "title": move.title or (f"Session {move.session[:8]}" if len(move.session) == 64 else "What it holds"),
        "word": word,
        "tone": tone,
        "source": move.source,
        "target": move.target,
        "tokens": move.tokens,
        "running": move.kind == "live",
        "size": filesizeformat(move.sent_bytes) if move.outcome == "moved" else None,
        "pause": _pause(move.pause_ms) if move.kind == "live" else "",
        "reason": move.reason,
    }


def _pause(pause_ms: float | None) -> str:
    """ "" where nobody knows, or nothing pauses."""
    if not pause_ms:
        return ""
    return (
        f"{pause_ms / 1000:.1f} s"
        if pause_ms >= 1000
        else f"{pause_ms:.1f} ms"
        if pause_ms < 10
        else f"{pause_ms:.0f} ms"
    )
