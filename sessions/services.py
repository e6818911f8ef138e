"""The only writer of conversations and turns; and what pages ask about them, as frozen views."""

import uuid
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

from celery import current_app
from django.db import transaction
from django.db.models import F, OuterRef, Subquery
from django.utils import timezone
from kombu.exceptions import OperationalError as BrokerError

from engines.loading import touch
from pools import router_views
from pools.db import not_after
from pools.events import Outage, publish_on_commit
from sessions import snapshots
from sessions.choices import TurnState
from sessions.identity import Identity
from sessions.models import ChatSession, Turn
from sessions.times_told import TimesTold

# Longer than an engine lets any request run.
TURN_LOST_AFTER_S = 3600.0
ENDING_EXPIRES_S = 300.0
# What of a turn's end is told in other ways than by a column of its own.
_NO_COLUMNS = frozenset({"state", "split", "came", "ends_session"})
_outage = Outage("sessions that have ended keep their places until they are idle")


@dataclass(frozen=True)
class TurnStart:
    """A request as it arrived. `seen_wanted_engine_id` is the engine that its conversation was wanted on as it was routed;
    `ends_session`: its client says that it is the conversation's last."""

    request_id: uuid.UUID
    identity: Identity
    source: str
    title: str
    model_name: str
    engine_id: int
    route: str = "solo"
    is_background: bool = False
    explanation: dict[str, Any] | None = None
    predicted_first_token_s: float | None = None
    request_bytes: int = 0
    resumed: bool = False
    seen_wanted_engine_id: int | None = None
    ends_session: bool = False


@dataclass(frozen=True)
class TurnEnd:
    """How a request ended. Token counts are the engine's own, 0 where it did not get to tell them. `route` is the form in which
    it was answered in the end, `split` what became of an answer over two engines, `came` where its time went. With
    `ends_session` the conversation's place is given up behind it."""

    state: str
    engine_id: int
    duration_s: float
    finish_reason: str = ""
    error_code: str = ""
    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    queue_s: float | None = None
    first_token_s: float | None = None
    tokens_per_s: float | None = None
    answer_bytes: int = 0
    route: str = "solo"
    split: dict[str, Any] | None = None
    came: TimesTold | None = None
    ends_session: bool = False


@dataclass(frozen=True)
class SessionPlace:
    """Where a conversation's rows say it is: the engine that answered last, the one a person moved it to, its snapshots."""

    engine_id: int | None = None
    wanted_engine_id: int | None = None
    snapshots: tuple[router_views.SnapshotView, ...] = ()


@dataclass(frozen=True)
class ChatView:
    """A conversation as pages list it. `state` is "running" while a turn of it runs, else its last turn's; "" without turns.
    `split_engines` are those that share its last turn, who computes the prompt first; empty where one does all of it."""

    id: int
    title: str
    source: str
    model_name: str
    engine_name: str
    turn_count: int
    prompt_tokens: int
    completion_tokens: int
    state: str
    created_at: datetime
    last_active_at: datetime
    split_engines: tuple[str, ...] = ()


# --- turns -----------------------------------------------------------------------------------------


def begin_turn(start: TurnStart, until_s: float = float("inf")) -> int:
    """Write that a request runs, in the conversation it belongs to (made on its first turn); returns the turn's primary key.

    Raises OperationalError, with nothing written, where that takes until after `until_s` (monotonic).
    """
    touch(start.engine_id)
    now = timezone.now()
    latest: dict[str, Any] = {"model_name": start.model_name, "last_active_at": now}
    if not start.is_background:
        latest["engine_id"] = start.engine_id
    with transaction.atomic():
        if start.resumed and (turn_id := _resumed_turn(start)):
            not_after(until_s)
            return turn_id
        chat, _ = ChatSession.objects.get_or_create(
            key_hash=start.identity.key_hash,
            defaults={
                **latest,
                "engine_id": start.engine_id,
                "scope": start.identity.owner.scope,
                "api_key_id": start.identity.owner.api_key_id,
                "user_id": start.identity.owner.user_id,
                "title": start.title,
                "source": start.source,
            },
        )
        ChatSession.objects.filter(pk=chat.pk).update(turn_count=F("turn_count") + 1, **latest)
        if not start.is_background:
            # A wish that came while this was on its way, perhaps to another replica, is the next turn's.
            met = {start.engine_id, start.seen_wanted_engine_id} - {None}
            ChatSession.objects.filter(pk=chat.pk, wanted_engine_id__in=met).update(wanted_engine_id=None)
        turn = Turn.objects.create(
            chat=chat,
            request_id=start.request_id,
            model_name=start.model_name,
            engine_id=start.engine_id,
            started_at=now,
            route=start.route,
            is_background=start.is_background,
            explanation=start.explanation,
            predicted_first_token_s=start.predicted_first_token_s,
            request_bytes=start.request_bytes,
        )
        not_after(until_s)
        publish_on_commit("chat", chat.pk)
    return turn.pk


def _resumed_turn(start: TurnStart) -> int | None:
    """The turn that another replica of the site began, running again; None where it never wrote it. What that one has counted of
    it will be counted once more."""
    turns = Turn.objects.select_for_update().filter(request_id=start.request_id, chat__key_hash=start.identity.key_hash)
    turn = turns.defer("explanation").first()
    if turn is None or turn.state == TurnState.DONE:
        return None if turn is None else turn.pk
    ChatSession.objects.filter(pk=turn.chat_id).update(
        prompt_tokens=F("prompt_tokens") - turn.prompt_tokens,
        completion_tokens=F("completion_tokens") - turn.completion_tokens,
    )
    Turn.objects.filter(pk=turn.pk).update(
        state=TurnState.RUNNING,
        engine_id=start.engine_id,
        error_code="",
        ended_at=None,
        prompt_tokens=0,
        cached_tokens=0,
        completion_tokens=0,
    )
    return turn.pk


def end_turn(turn_id: int, end: TurnEnd) -> bool:
    """Write how a request ended and add its tokens to its conversation; False when it had already ended."""
    touch(end.engine_id)
    now = timezone.now()
    values = {name: value for name, value in vars(end).items() if name not in _NO_COLUMNS}
    with transaction.atomic():
        running = Turn.objects.filter(pk=turn_id, state=TurnState.RUNNING)
        explanation = _explained_at_end(running.values_list("explanation", flat=True).first(), end)
        if explanation is not None:
            values["explanation"] = explanation
        if not running.update(state=end.state, ended_at=now, **values):
            return False
        chat_id, is_background = Turn.objects.values_list("chat_id", "is_background").get(pk=turn_id)
        ChatSession.objects.filter(pk=chat_id).update(
            **({} if is_background else {"engine_id": end.engine_id}),
            prompt_tokens=F("prompt_tokens") + end.prompt_tokens,
            completion_tokens=F("completion_tokens") + end.completion_tokens,
            last_active_at=now,
        )
        publish_on_commit("chat", chat_id)
        if end.ends_session and not is_background:
            transaction.on_commit(lambda: _send_ending(turn_id), robust=True)
    return True


def _send_ending(turn_id: int) -> None:
    """An ending that gets lost costs a slot until the engine parks what is idle."""
    if _outage.lasts:
        return
    try:
        current_app.send_task("sessions.tasks.end_session", args=[turn_id], queue="control", expires=ENDING_EXPIRES_S)
    except BrokerError as error:
        _outage.tell(error)


def session_to_end(turn_id: int) -> str | None:
    """The key of the conversation whose last turn this is; None where another one came behind it, or it is gone."""
    turn = Turn.objects.filter(pk=turn_id).values_list("chat_id", "chat__key_hash", "started_at").first()
    if turn is None:
        return None
    chat_id, key, started_at = turn
    later = Turn.objects.filter(chat_id=chat_id, is_background=False, started_at__gt=started_at)
    return None if later.exists() else key


def _explained_at_end(explanation: dict[str, Any] | None, end: TurnEnd) -> dict[str, Any] | None:
    """The explanation with what became of it; None where there is nothing to add."""
    told: dict[str, Any] = {}
    if end.came is not None:
        told["came"] = end.came.to_dict()
    if end.split is not None:
        told["split"] = end.split
    elif explanation and "split" in explanation:
        # The place that was had is another engine's, or another replica went on with it.
        told["split"] = explanation["split"] | {"state": "", "fell_back": "another engine had to take it"}
    return (explanation or {}) | told if told else None


def sweep_turns(older_than_s: float = TURN_LOST_AFTER_S) -> int:
    """Close turns whose site died before it could write their end; returns how many."""
    limit = timezone.now() - timedelta(seconds=older_than_s)
    return Turn.objects.filter(state=TurnState.RUNNING, started_at__lt=limit).update(
        state=TurnState.FAILED, error_code="site_lost", ended_at=timezone.now()
    )


def session_place(session_key: str) -> SessionPlace:
    """What the rows say of a conversation; nothing of one that has none."""
    chat = ChatSession.objects.filter(key_hash=session_key).values_list("pk", "engine_id", "wanted_engine_id").first()
    if chat is None:
        return SessionPlace()
    chat_id, engine_id, wanted_engine_id = chat
    found = tuple(
        router_views.SnapshotView(
            view.host_name, view.fingerprint, view.tokens, view.size_bytes, f"{view.store_address}:{view.store_port}"
        )
        for view in snapshots.snapshots_of(chat_id)
        if view.ready
    )
    return SessionPlace(engine_id, wanted_engine_id, found)


@dataclass(frozen=True)
class SessionDetail:
    """A conversation as the sessions API and page show it."""

    id: int
    key_hash: str
    scope: str
    title: str
    source: str
    model_name: str
    engine_name: str
    wanted_engine_name: str
    turn_count: int
    prompt_tokens: int
    completion_tokens: int
    created_at: datetime
    last_active_at: datetime


def session_details(scope: str | None, session_key: str | None, limit: int) -> tuple[SessionDetail, ...]:
    """The conversations of an owner (None: everybody's) that were active last, or the one with this key; "" owns none."""
    rows = ChatSession.objects.select_related("engine", "wanted_engine").order_by("-last_active_at")
    if scope is not None:
        rows = rows.filter(scope=scope) if scope else rows.none()
    if session_key is not None:
        rows = rows.filter(key_hash=session_key)
    return tuple(
        SessionDetail(
            id=chat.pk,
            key_hash=chat.key_hash,
            scope=chat.scope,
            title=chat.title,
            source=chat.source,
            model_name=chat.model_name,
            engine_name=chat.engine.name if chat.engine else "",
            wanted_engine_name=chat.wanted_engine.name if chat.wanted_engine else "",
            turn_count=chat.turn_count,
            prompt_tokens=chat.prompt_tokens,
            completion_tokens=chat.completion_tokens,
            created_at=chat.created_at,
            last_active_at=chat.last_active_at,
        )
        for chat in rows[:limit]
    )


def move_session(chat_id: int, engine_id: int | None) -> bool:
    """Have a conversation's next turn go to this engine (None: wherever it costs least); False when it is gone."""
    with transaction.atomic():
        moved = bool(ChatSession.objects.filter(pk=chat_id).update(wanted_engine_id=engine_id))
        publish_on_commit("chat", chat_id)
    return moved


@dataclass(frozen=True)
class TurnView:
    """A request of a conversation, and why it went where it went. Times in seconds since it arrived."""

    request_id: uuid.UUID
    state: str
    engine_name: str
    route: str
    is_background: bool
    started_at: datetime
    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    queue_s: float | None
    first_token_s: float | None
    predicted_first_token_s: float | None
    duration_s: float | None
    error_code: str
    explanation: dict[str, Any] | None


def turn_views(chat_id: int | None, limit: int) -> tuple[TurnView, ...]:
    """The requests of a conversation (None: of all), the newest first."""
    rows = Turn.objects.select_related("engine").order_by("-started_at")
    if chat_id is not None:
        rows = rows.filter(chat_id=chat_id)
    names = [name for name in TurnView.__dataclass_fields__ if name != "engine_name"]
    return tuple(
        TurnView(engine_name=turn.engine.name if turn.engine else "", **{name: getattr(turn, name) for name in names})
        for turn in rows[:limit]
    )


def recent_sessions(limit: int = 20) -> tuple[ChatView, ...]:
    """The conversations that were active last, newest first."""
    turns = Turn.objects.filter(chat=OuterRef("pk"))
    newest = turns.order_by("-started_at")
    chats = (
        ChatSession.objects.select_related("engine")
        .annotate(
            running=Subquery(turns.filter(state=TurnState.RUNNING).order_by().values("state")[:1]),
            last_state=Subquery(newest.values("state")[:1]),
            last_route=Subquery(newest.values("route")[:1]),
            last_split=Subquery(newest.values("explanation__split")[:1]),
        )
        .order_by("-last_active_at")[:limit]
    )
    return tuple(
        ChatView(
            id=chat.pk,
            title=chat.title,
            source=chat.source,
            model_name=chat.model_name,
            engine_name=chat.engine.name if chat.engine else "",
            turn_count=chat.turn_count,
            prompt_tokens=chat.prompt_tokens,
            completion_tokens=chat.completion_tokens,
            state=chat.running or chat.last_state or "",
            created_at=chat.created_at,
            last_active_at=chat.last_active_at,
            split_engines=(chat.last_split["prefill"], chat.last_split["decode"])
            if chat.last_route == "pd" and chat.last_split
            else (),
        )
        for chat in chats
    )
