"""Handoffs: a conversation moves from one engine to another, while it talks or between its turns. The only writer of their rows.

A row is written first; its key is the number under which the two engines know the move, larger than any earlier one's. A task
asks the source, which does the work together with the target, and writes down what it tells. A move whose task died is asked
after again: the source knows what came of it.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from datetime import datetime, timedelta

from celery import current_app
from django.db import IntegrityError, transaction
from django.db.models import Q
from django.db.models.functions import Now
from kombu.exceptions import OperationalError as BrokerError

from engines import services as engines
from engines.errors import EngineError, EngineUnreachable, HandoffUnknown, NoEngineReady, RpcRefused
from engines.rpc_handoff import HandoffClient
from engines.services import EngineEndpoint
from engines.wire_handoff import HandoffAnswer, HandoffBody
from pools.db import in_db
from pools.events import publish_on_commit
from sessions.choices import HandoffState
from sessions.errors import SessionBusy
from sessions.models import ChatSession, Handoff, SlotLease

DEADLINE_S = 60.0
TASK_EXPIRES_S = 30.0
# A planned move whose task is lost, and a running one that its task would have ended long ago.
PLANNED_LOST_S = 45.0
RUNNING_LOST_S = DEADLINE_S + 45.0
MAX_REASON_CHARS = 200
OPEN = (HandoffState.PLANNED, HandoffState.RUNNING)

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class HandoffView:
    """A move as the API and pages show it. `pause_ms` is how long nothing was decoded, 0 between turns."""

    id: int
    session: str
    source: str
    target: str
    state: str
    kind: str
    reason: str
    tokens: int
    sent_bytes: int
    skipped_bytes: int
    mb_per_s: float | None
    pause_ms: float | None
    pause_steps: float | None
    duration_s: float | None
    created_at: datetime

    @property
    def is_open(self) -> bool:
        return self.state in OPEN

    def to_dict(self) -> dict[str, object]:
        values = {**vars(self), "created": int(self.created_at.timestamp())}
        del values["created_at"], values["session"]
        return values


def name_of(handoff_id: int) -> str:
    """What the two engines call the move."""
    return f"handoff-{handoff_id}"


def start(chat_id: int, source_id: int, target_id: int, *, send: bool = True, request_id: str = "") -> int:
    """Plan a move and have it done; returns its key. Raises SessionBusy while another move of the conversation goes on.

    With `request_id` just that request moves, from the moment on that it reaches the source.
    """
    try:
        with transaction.atomic():
            handoff = Handoff.objects.create(
                chat_id=chat_id, source_id=source_id, target_id=target_id, request_id=request_id
            )
            if send:
                transaction.on_commit(lambda: _send(handoff.pk), robust=True)
            publish_on_commit("chat", chat_id)
    except IntegrityError as error:
        raise SessionBusy("The session is being moved already.") from error
    return handoff.pk


def _send(handoff_id: int) -> None:
    try:
        current_app.send_task("sessions.tasks.run_handoff", args=[handoff_id], queue="control", expires=TASK_EXPIRES_S)
    except BrokerError as error:
        logger.warning("handoff %d was not sent; the sweep gives it up: %s", handoff_id, error)


async def run(handoff_id: int, deadline_s: float = DEADLINE_S) -> HandoffView:
    """Do a planned move, or learn what came of one that was begun. Harmless to call twice."""
    body_and_source = await in_db(_begun, handoff_id, deadline_s)
    if body_and_source is None:
        return await in_db(view, handoff_id)
    body, source = body_and_source
    try:
        async with HandoffClient(source.address, source.port, secret=source.secret, name="site") as client:
            answer = await client.handoff(body)
    except EngineUnreachable as error:
        # It may have moved all the same, which its target knows; the conversation's next turn finds it by its rates.
        await in_db(fail, handoff_id, f"the source was lost: {error.message}")
    except EngineError as error:
        code = error.peer_code if isinstance(error, RpcRefused) else error.code
        await in_db(fail, handoff_id, f"{code}: {error.message}")
    else:
        await in_db(commit, handoff_id, answer)
    return await in_db(view, handoff_id)


def _begun(handoff_id: int, deadline_s: float) -> tuple[HandoffBody, engines.EngineRpc] | None:
    """What to ask of the source; None for a move that is over."""
    planned = Handoff.objects.filter(pk=handoff_id, state=HandoffState.PLANNED)
    planned.update(state=HandoffState.RUNNING, started_at=Now())
    row = Handoff.objects.select_related("chat").filter(pk=handoff_id, state=HandoffState.RUNNING).first()
    if row is None:
        return None
    source = engines.engine_rpc(row.source_id) if row.source_id else None
    target = engines.engine_rpc(row.target_id) if row.target_id else None
    if source is None or target is None:
        fail(handoff_id, "one of the two engines does not serve")
        return None
    body = HandoffBody(
        handoff=name_of(row.pk),
        fence=row.pk,
        session=row.chat.key_hash,
        target_host=target.address,
        target_port=target.port,
        target_secret=target.secret,
        deadline_s=deadline_s,
        request_id=row.request_id,
    )
    return body, source


def commit(handoff_id: int, answer: HandoffAnswer) -> bool:
    """Write down that the conversation is at the target; False when the move had ended before."""
    with transaction.atomic():
        running = Handoff.objects.filter(pk=handoff_id, state=HandoffState.RUNNING)
        splits = running.exclude(request_id="").exists()
        # A move that waited for a prompt to be computed was not slower for that.
        sending_s = answer.send_s or answer.seconds
        rate = answer.sent_bytes / 1e6 / sending_s if sending_s else None
        if not running.update(
            state=HandoffState.COMMITTED,
            kind=answer.kind,
            request_id=answer.request_id or "",
            tokens=answer.tokens,
            sent_bytes=answer.sent_bytes,
            skipped_bytes=answer.skipped_bytes,
            mb_per_s=rate,
            pause_ms=answer.pause_ms,
            pause_steps=answer.pause_steps,
            duration_s=answer.seconds,
            ended_at=Now(),
        ):
            return False
        row = Handoff.objects.get(pk=handoff_id)
        # What a person moved is to stay there; of a split request only this answer was meant.
        wanted = {} if splits else {"wanted_engine_id": row.target_id}
        ChatSession.objects.filter(pk=row.chat_id).update(engine_id=row.target_id, **wanted)
        if row.request_id:
            leased = SlotLease.objects.filter(request_id=row.request_id, engine_id=row.source_id)
            leased.update(engine_id=row.target_id)
        publish_on_commit("chat", row.chat_id)
    return True


def fail(handoff_id: int, reason: str) -> bool:
    """Write down that the conversation stays; False when the move had ended before."""
    with transaction.atomic():
        ended = Handoff.objects.filter(pk=handoff_id, state__in=OPEN).update(
            state=HandoffState.FAILED, reason=reason[:MAX_REASON_CHARS], ended_at=Now()
        )
        if ended:
            publish_on_commit("chat", Handoff.objects.values_list("chat_id", flat=True).get(pk=handoff_id))
    return bool(ended)


def stuck() -> list[int]:
    """Moves whose task died; planned ones that nobody began are given up here."""
    planned = Q(state=HandoffState.PLANNED, created_at__lt=Now() - timedelta(seconds=PLANNED_LOST_S))
    for pk in Handoff.objects.filter(planned).values_list("pk", flat=True):
        fail(pk, "no task took it up")
    running = Q(state=HandoffState.RUNNING, started_at__lt=Now() - timedelta(seconds=RUNNING_LOST_S))
    return list(Handoff.objects.filter(running).values_list("pk", flat=True))


def target_of(name: str) -> EngineEndpoint:
    """Where a generation goes on that the move of this name took. Raises HandoffUnknown or NoEngineReady."""
    digits = name.removeprefix("handoff-")
    if not (digits.isascii() and digits.isdigit() and len(digits) < 19):
        raise HandoffUnknown(f"There is no handoff {name[:40]!r}.")
    row = Handoff.objects.filter(pk=int(digits)).select_related("chat").first()
    if row is None:
        raise HandoffUnknown(f"There is no handoff {name[:40]!r}.")
    found = next((one for one in engines.serving_engines(None) if one.engine_id == row.target_id), None)
    if found is None:
        raise NoEngineReady("The engine that took the request over does not serve any more.")
    return found


def view(handoff_id: int) -> HandoffView:
    return views(Q(pk=handoff_id), 1)[0]


def views(chosen: Q, limit: int) -> tuple[HandoffView, ...]:
    """Moves, the newest first."""
    rows = Handoff.objects.filter(chosen).select_related("chat", "source", "target").order_by("-pk")[:limit]
    return tuple(
        HandoffView(
            id=row.pk,
            session=row.chat.key_hash,
            source=row.source.name if row.source else "",
            target=row.target.name if row.target else "",
            state=row.state,
            kind=row.kind,
            reason=row.reason,
            tokens=row.tokens,
            sent_bytes=row.sent_bytes,
            skipped_bytes=row.skipped_bytes,
            mb_per_s=row.mb_per_s,
            pause_ms=row.pause_ms,
            pause_steps=row.pause_steps,
            duration_s=row.duration_s,
            created_at=row.created_at,
        )
        for row in rows
    )
