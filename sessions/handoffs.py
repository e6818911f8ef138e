"""Handoffs: a conversation moves from one engine to another, while it talks or between its turns. The only writer of their rows.

A row is written first; its key is the number under which the two engines know the move, larger than any earlier one's. A task
asks the source, which does the work together with the target, and writes down what it tells. A move whose task died is asked
after again: the source knows what came of it, and where that is lost or was started anew, the target.
"""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass
from datetime import datetime, timedelta

from celery import current_app
from django.db import IntegrityError, transaction
from django.db.models import Q
from django.db.models.functions import Now
from kombu.exceptions import OperationalError as BrokerError

from engines import services as engines
from engines.errors import (
    EngineError,
    EngineLoading,
    EngineStopping,
    EngineUnreachable,
    HandoffUnknown,
    NoEngineReady,
    NotAuthenticated,
    ProtocolBroken,
    RpcRefused,
    RpcTimeout,
    SessionNotHeld,
    TargetRefused,
)
from engines.rpc_handoff import HandoffClient
from engines.rpc_serving import TOO_MANY_CONNECTIONS
from engines.services import EngineEndpoint
from engines.wire_handoff import AskBody, HandoffAnswer, HandoffBody
from pools.db import database_now, in_db
from pools.events import publish_on_commit
from sessions import retention
from sessions.choices import OPEN_MOVES, HandoffCause, HandoffState
from sessions.errors import SessionBusy, SessionUnknown
from sessions.models import ChatSession, Handoff, SlotLease

DEADLINE_S = 60.0
TASK_EXPIRES_S = 30.0
# A planned move whose task is lost; a running one that is asked after, whether its task lives or not; and the time behind its
# own deadline after which a source that says nothing has lost it.
PLANNED_LOST_S = 45.0
RUNNING_LOOK_S = 45.0
SILENT_LOST_S = 45.0
# Beyond any deadline: nobody learns any more what came of it.
GIVEN_UP_S = 1800.0
# A source says at once what came of a move that is over.
SWEEP_PATIENCE_S = 3.0
# As long is a target waited for that is the only one left to say.
ASK_TARGET_S = 3.0
SWEPT_AT_ONCE, MOST_SWEPT = 8, 64
MAX_REASON_CHARS = 200
NOT_SERVED = "one of the two engines does not serve"
# Whoever ended or was started anew does not know what it gave away before, its target does.
FORGOTTEN = frozenset({SessionNotHeld.code, EngineStopping.code, EngineLoading.code, ProtocolBroken.code})
# Nothing of a move that was begun earlier.
UNSAID = frozenset({TOO_MANY_CONNECTIONS, NotAuthenticated.code, ProtocolBroken.code})

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class HandoffView:
    """A move as the API and pages show it. `cause` is why it was made, `reason` why it failed, and `hint` what would help.
    `pause_ms` is how long nothing was decoded, 0 between turns."""

    id: int
    session: str
    source: str
    target: str
    state: str
    cause: str
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
    hint: str = ""

    @property
    def why_not(self) -> str:
        """Reason and hint as one text."""
        return f"{self.reason} {self.hint}".strip()

    @property
    def is_open(self) -> bool:
        return self.state in OPEN_MOVES

    def to_dict(self) -> dict[str, object]:
        values = {**vars(self), "created": int(self.created_at.timestamp())}
        del values["created_at"], values["session"]
        return values


def name_of(handoff_id: int) -> str:
    """What the two engines call the move."""
    return f"handoff-{handoff_id}"


def start(
    chat_id: int,
    source_id: int,
    target_id: int,
    *,
    send: bool = True,
    request_id: str = "",
    deadline_s: float = DEADLINE_S,
    cause: str = HandoffCause.ASKED,
) -> int:
    """Plan a move and have it done; returns its key. Raises SessionBusy while another move of the conversation goes on, and
    SessionUnknown for one that was deleted.

    With `request_id` just that request moves, from the moment on that it reaches the source.
    """
    try:
        with transaction.atomic():
            handoff = Handoff.objects.create(
                chat_id=chat_id,
                source_id=source_id,
                target_id=target_id,
                request_id=request_id,
                deadline_s=deadline_s,
                cause=cause,
            )
            if send:
                transaction.on_commit(lambda: _send(handoff.pk), robust=True)
            publish_on_commit("chat", chat_id)
    except IntegrityError as error:
        if not ChatSession.objects.filter(pk=chat_id).exists():
            raise SessionUnknown("The session was deleted.") from error
        raise SessionBusy("The session is being moved already.") from error
    return handoff.pk


def _send(handoff_id: int) -> None:
    try:
        current_app.send_task("sessions.tasks.run_handoff", args=[handoff_id], queue="control", expires=TASK_EXPIRES_S)
    except BrokerError as error:
        logger.warning("handoff %d was not sent; the sweep gives it up: %s", handoff_id, error)


async def run(handoff_id: int, patience_s: float | None = None) -> HandoffView:
    """Do a planned move, or learn what came of one that was begun. Harmless to call twice. Raises SessionUnknown where the
    session was deleted meanwhile.

    A source that says nothing (for `patience_s`, None: beyond the move's deadline) may be moving it still: it stays running, and
    is asked after by the sweep. One that cannot be reached is given up, and the move with it if its target has not all of it.
    """
    begun = await in_db(_begun, handoff_id)
    if begun is None:
        return await in_db(view, handoff_id)
    source = begun.source
    if source is None:
        await _without_source(handoff_id, begun.body, NOT_SERVED)
        return await in_db(view, handoff_id)
    try:
        async with asyncio.timeout(patience_s):
            async with HandoffClient(source.address, source.port, secret=source.secret, name="site") as client:
                answer = await client.handoff(begun.body)
    except (RpcTimeout, TimeoutError):
        await _unsaid(handoff_id, begun)
    except EngineUnreachable as error:
        await _without_source(handoff_id, begun.body, f"the source was lost: {error.message}")
    except EngineError as error:
        code = error.peer_code if isinstance(error, RpcRefused) else error.code
        if code == TargetRefused.code:
            # Whatever that one said, the source knows that the conversation stays.
            reason = f"its target refused, {error.param}: {error.message}"
            await in_db(fail, handoff_id, reason, error.hint or "")
        elif code in UNSAID and not begun.is_new:
            await _unsaid(handoff_id, begun)
        elif code in FORGOTTEN:
            await _without_source(handoff_id, begun.body, f"{code}: {error.message}")
        else:
            await in_db(fail, handoff_id, f"{code}: {error.message}", error.hint or "")
    else:
        await in_db(commit, handoff_id, answer)
    return await in_db(view, handoff_id)


async def _unsaid(handoff_id: int, begun: _Begun) -> None:
    if begun.left_s < -SILENT_LOST_S:
        await _without_source(handoff_id, begun.body, "its source has not answered for long")


async def _without_source(handoff_id: int, body: HandoffBody, reason: str) -> None:
    """The source does not say what came of the move. Its target knows, and takes nothing more of it from here on."""
    target = HandoffClient(body.target_host, body.target_port, secret=body.target_secret, name="site")
    try:
        async with asyncio.timeout(ASK_TARGET_S), target:
            found = await target.adopt_ask(AskBody(body.handoff, body.fence, drop=True))
    except (EngineError, TimeoutError) as error:
        logger.info("handoff %d: its target does not tell of it either: %r", handoff_id, error)
    else:
        if found.state == "going":
            await in_db(commit_as_found, handoff_id, found.tokens)
            return
    await in_db(fail, handoff_id, reason)


@dataclass(frozen=True)
class _Begun:
    """What to ask of the source, None where that does not serve; `left_s` is negative behind the move's deadline, and with
    `is_new` nobody has asked yet."""

    body: HandoffBody
    source: engines.EngineRpc | None
    left_s: float
    is_new: bool


def _begun(handoff_id: int) -> _Begun | None:
    """What to ask of the source; None for a move that is over."""
    planned = Handoff.objects.filter(pk=handoff_id, state=HandoffState.PLANNED)
    is_new = bool(planned.update(state=HandoffState.RUNNING, started_at=Now()))
    row = Handoff.objects.select_related("chat").filter(pk=handoff_id, state=HandoffState.RUNNING).first()
    if row is None:
        return None
    source = engines.engine_rpc(row.source_id, leaving=True) if row.source_id else None
    # One that began to get empty meanwhile takes in what has begun, and knows what came of it.
    target = engines.engine_rpc(row.target_id, leaving=not is_new) if row.target_id else None
    if target is None:
        fail(handoff_id, NOT_SERVED)
        return None
    assert row.started_at is not None, "a running move was begun"
    left_s = row.deadline_s - (database_now() - row.started_at).total_seconds()
    body = HandoffBody(
        handoff=name_of(row.pk),
        fence=row.pk,
        session=row.chat.key_hash,
        target_host=target.address,
        target_port=target.port,
        target_secret=target.secret,
        # A source that never heard of it (its task died first) has what is left.
        deadline_s=max(1.0, left_s),
        request_id=row.request_id,
    )
    return _Begun(body, source, left_s, is_new)


def commit(handoff_id: int, answer: HandoffAnswer) -> bool:
    """Write down that the conversation is at the target; False when the move had ended before."""
    # A move that waited for a prompt to be computed was not slower for that.
    sending_s = answer.send_s or answer.seconds
    return _commit(
        handoff_id,
        kind=answer.kind,
        request_id=answer.request_id or "",
        tokens=answer.tokens,
        sent_bytes=answer.sent_bytes,
        skipped_bytes=answer.skipped_bytes,
        mb_per_s=answer.sent_bytes / 1e6 / sending_s if sending_s else None,
        pause_ms=answer.pause_ms,
        pause_steps=answer.pause_steps,
        duration_s=answer.seconds,
    )


def commit_as_found(handoff_id: int, tokens: int) -> bool:
    """The same of a move whose source cannot tell of it any more: without its figures."""
    return _commit(handoff_id, tokens=tokens)


def _commit(handoff_id: int, **told: object) -> bool:
    with transaction.atomic():
        running = Handoff.objects.filter(pk=handoff_id, state=HandoffState.RUNNING)
        splits = running.exclude(request_id="").exists()
        if not running.update(state=HandoffState.COMMITTED, ended_at=Now(), **told):
            return False
        row = Handoff.objects.select_related("chat").get(pk=handoff_id)
        # What a person moved is to go on there, also where a site remembers the source; of a split request only this answer was
        # meant. A drain leaves no wish, and ends one for the source.
        drains = row.cause == HandoffCause.DRAIN
        wanted = {} if splits or drains else {"wanted_engine_id": row.target_id}
        chat = ChatSession.objects.filter(pk=row.chat_id)
        if drains:
            chat.filter(wanted_engine_id=row.source_id).update(wanted_engine_id=None)
        chat.update(engine_id=row.target_id, **wanted)
        leased = SlotLease.objects.filter(engine_id=row.source_id)
        if row.request_id:
            leased.filter(request_id=row.request_id).update(engine_id=row.target_id)
        elif "request_id" not in told:
            # Nobody can say which request it was; none of before runs at a source that was lost.
            older = leased.filter(session=row.chat.key_hash, created_at__lt=row.started_at)
            older.update(engine_id=row.target_id)
        publish_on_commit("chat", row.chat_id)
    return True


def fail(handoff_id: int, reason: str, hint: str = "") -> bool:
    """Write down that the conversation stays; False when the move had ended before."""
    with transaction.atomic():
        ended = Handoff.objects.filter(pk=handoff_id, state__in=OPEN_MOVES).update(
            state=HandoffState.FAILED,
            reason=reason[:MAX_REASON_CHARS],
            hint=hint[:MAX_REASON_CHARS],
            ended_at=Now(),
        )
        if ended:
            publish_on_commit("chat", Handoff.objects.values_list("chat_id", flat=True).get(pk=handoff_id))
    return bool(ended)


async def sweep() -> None:
    """Give up moves that nobody began, and learn what came of those whose task may have died. One that fails is left for the
    next sweep."""
    places = asyncio.Semaphore(SWEPT_AT_ONCE)

    async def ask(handoff_id: int) -> None:
        async with places:
            try:
                await run(handoff_id, SWEEP_PATIENCE_S)
            except SessionUnknown:
                logger.debug("handoff %d: its session was deleted", handoff_id)
            except Exception:
                logger.exception("handoff %d could not be asked after", handoff_id)
                await in_db(give_up, handoff_id)

    await asyncio.gather(*map(ask, await in_db(stuck)))


def give_up(handoff_id: int) -> bool:
    """Whether it was begun so long ago that nobody will learn any more what came of it; then it has failed."""
    overdue = Handoff.objects.filter(pk=handoff_id, started_at__lt=Now() - timedelta(seconds=GIVEN_UP_S))
    return overdue.exists() and fail(handoff_id, "nobody could learn what came of it")


def stuck() -> list[int]:
    """Running moves whose task may have died, the oldest first; planned ones that nobody began are given up here."""
    planned = Q(state=HandoffState.PLANNED, created_at__lt=Now() - timedelta(seconds=PLANNED_LOST_S))
    for pk in Handoff.objects.filter(planned).values_list("pk", flat=True):
        fail(pk, "no task took it up")
    running = Q(state=HandoffState.RUNNING, started_at__lt=Now() - timedelta(seconds=RUNNING_LOOK_S))
    return list(Handoff.objects.filter(running).order_by("started_at").values_list("pk", flat=True)[:MOST_SWEPT])


def target_of(name: str) -> EngineEndpoint:
    """Where a generation goes on that the move of this name took. Raises HandoffUnknown or NoEngineReady."""
    digits = name.removeprefix("handoff-")
    if not (digits.isascii() and digits.isdigit() and len(digits) < 19):
        raise HandoffUnknown(f"There is no handoff {name[:40]!r}.")
    row = Handoff.objects.filter(pk=int(digits)).select_related("chat").first()
    if row is None:
        raise HandoffUnknown(f"There is no handoff {name[:40]!r}.")
    found = next((one for one in engines.holding_engines(None) if one.engine_id == row.target_id), None)
    if found is None:
        raise NoEngineReady("The engine that took the request over does not serve any more.")
    return found


def expire() -> int:
    """Delete moves that ended HYDRA_SESSION_RETENTION days ago; returns how many. Bounded a call."""
    return retention.expire(Handoff.objects.filter(ended_at__lt=retention.kept_since()), "ended_at")


def view(handoff_id: int) -> HandoffView:
    """Raises SessionUnknown: a move is deleted with its session only, while it goes on."""
    found = views(Q(pk=handoff_id), 1)
    if not found:
        raise SessionUnknown("The session was deleted while it moved.")
    return found[0]


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
            cause=row.cause,
            kind=row.kind,
            reason=row.reason,
            hint=row.hint,
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
