"""Drains: an engine, a card or a host gets empty while it serves. The one way there, for pages, the admin and the command line.

First nothing new is sent there, then what runs and what is held moves to other engines (`sessions.drain_moves`), and then the
engines stop, if that was asked for. What cannot move stays where it is and says why. The only writer of Drain rows.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import datetime, timedelta
from functools import partial
from uuid import UUID

from celery import current_app
from django.db import IntegrityError, transaction
from django.db.models import F, Q, QuerySet
from django.db.models.functions import Coalesce, Now
from kombu.exceptions import OperationalError as BrokerError

from engines import closed_places, emptying
from engines import services as engines
from engines.choices import Wanted
from pools import services as pools
from pools.choices import HostDuty
from sessions import retention
from sessions.choices import DrainKind, DrainState
from sessions.drain_subjects import SHOWN, Subject, named, subject_of
from sessions.errors import DrainGoesOn, DrainUnknown, NothingToDrain
from sessions.models import Drain

__all__ = [
    "DrainView",
    "Moved",
    "Subject",
    "beat",
    "begin",
    "begin_all",
    "claim",
    "expire",
    "finish",
    "is_open",
    "keep_closed",
    "named",
    "open_of",
    "pause",
    "serve_again",
    "stuck",
    "subject_of",
    "view",
    "views",
]

# Engines are kept up for so long after the last sign of whoever moves their conversations.
HELD_S = 60.0
# A mover that has given no sign for so long is dead, and another one goes on.
BEAT_LOST_S = 30.0
TASK_EXPIRES_S = 30.0
# Tasks that move at once: they share their workers with all else that the site does. The other drains wait for their turn.
MOST_MOVERS = 2
# One that was just begun is taken up by its own task.
JUST_BEGUN_S = 2.0
MOST_TOLD = 512
# Of these conversations nothing is lost where their engine goes.
SETTLED = frozenset({"moved", "saved"})

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Moved:
    """What became of one conversation. `outcome` is moving, moved, saved (to the store of its engine's host) or stays (with the
    reason); bytes and pause as measured. `tries` are the moves of it that were begun, and its
    saving where that failed too."""

    session: str
    title: str
    source: str
    target: str
    tokens: int
    outcome: str
    kind: str = ""
    sent_bytes: int = 0
    skipped_bytes: int = 0
    pause_ms: float | None = None
    duration_s: float | None = None
    reason: str = ""
    tries: int = 0


@dataclass(frozen=True)
class DrainView:
    """A drain as pages show it. `moving_since` is when it was first taken up."""

    id: int
    kind: str
    subject_id: int
    subject: str
    stops: bool
    state: str
    moves: tuple[Moved, ...]
    created_at: datetime
    moving_since: datetime | None
    ended_at: datetime | None

    @property
    def is_open(self) -> bool:
        return self.state == DrainState.RUNNING

    def of(self, outcome: str) -> list[Moved]:
        return [move for move in self.moves if move.outcome == outcome]


def begin(subject: Subject, *, stops: bool, user_id: int | None = None, send: bool = True) -> int:
    """Send nothing new there from now on and have its conversations moved; returns the drain's key.

    With `stops` its engines stop once they are done; a host then drains as a whole. Raises DrainGoesOn, and NothingToDrain for
    what has no engine and would not even be closed.
    """
    (drain_id,) = begin_all([subject], stops=stops, user_id=user_id, send=send)
    return drain_id


def begin_all(subjects: Sequence[Subject], *, stops: bool, user_id: int | None = None, send: bool = False) -> list[int]:
    """Begin all of them or none; without `send` for whoever moves them himself. Raises as `begin` does."""
    # Everybody takes rows in one order: hosts, drains, engines; of each kind those of lower keys first.
    ordered = sorted(subjects, key=lambda subject: (subject.kind, subject.id))
    begun: dict[tuple[str, int], int] = {}
    with transaction.atomic():
        closed_places.plan_alone()
        for subject in ordered:
            _begin_duty(subject, stops)
        for subject in ordered:
            begun[subject.kind, subject.id] = _create(subject, stops, user_id)
        emptying.lock([engine.id for subject in ordered for engine in subject.own])
        # As they are now that nobody starts one any more.
        now = [subject_of(subject.kind, subject.id) for subject in ordered]
        emptying.close([engine_id for subject in now for engine_id in subject.closed_ids], HELD_S)
        if send:
            for drain_id in begun.values():
                transaction.on_commit(partial(_send, drain_id), robust=True)
    for subject in ordered:
        logger.info("drain %d of %s %s begins", begun[subject.kind, subject.id], subject.kind, subject.name)
    return [begun[subject.kind, subject.id] for subject in subjects]


def _begin_duty(subject: Subject, stops: bool) -> None:
    """Raises NothingToDrain, and DrainGoesOn for a host that drains or leaves."""
    if not subject.engines and not (stops and subject.host_id):
        raise NothingToDrain(f"No engine runs on {subject.name}.")
    goes = stops and subject.duty == HostDuty.ACTIVE
    if goes and not pools.change_duty(subject.host_id, HostDuty.DRAINING):
        raise DrainGoesOn(f"{subject.name} drains or leaves already.")


def _create(subject: Subject, stops: bool, user_id: int | None) -> int:
    """The drain's row; nothing comes up there from now on. Raises DrainGoesOn."""
    named_by = {"kind": subject.kind, "subject_id": subject.id, "subject": subject.name}
    try:
        with transaction.atomic():
            drain = Drain.objects.create(**named_by, stops=stops, begun_by_id=user_id)
    except IntegrityError as error:
        raise DrainGoesOn(f"{subject.name} is being drained already.") from error
    closed_places.close(subject.kind, subject.id, HELD_S)
    return drain.pk


def serve_again(subject: Subject) -> bool:
    """End what empties it, or a part of it, and send it requests again, its host too; False when it serves already.

    What has moved stays where it is. An engine that is meant itself is started, if its drain had it stop; a host's engines are
    wanted all along. A card's that were stopped are started one by one. Raises DrainGoesOn while its card or host is drained,
    DrainUnknown.
    """
    with transaction.atomic():
        active = bool(subject.host_id) and pools.change_duty(subject.host_id, HostDuty.ACTIVE)
        going_on = Drain.objects.filter(_any_of([(subject.kind, subject.id), *subject.parts]), state=DrainState.RUNNING)
        locked = {drain.pk: drain for drain in going_on.defer("moves").select_for_update().order_by("pk")}
        around = Drain.objects.filter(_any_of(subject.around), state=DrainState.RUNNING).first()
        if around is not None:
            raise DrainGoesOn(f"The whole {around.kind} {around.subject} is being drained: have that serve again.")
        ended = Drain.objects.filter(pk__in=locked).update(state=DrainState.ENDED, ended_at=Now(), mover=None)
        for kind, place_id in {(subject.kind, subject.id), *((one.kind, one.subject_id) for one in locked.values())}:
            closed_places.open_again(kind, place_id)
        own = subject_of(subject.kind, subject.id).own
        opened = emptying.open_again([engine.id for engine in own])
        for engine in own:
            if subject.kind == DrainKind.ENGINE and opened and engine.wanted == Wanted.STOPPED:
                engines.start(engine.id)
    return bool(ended or opened or active)


def claim(drain_id: int, mover: UUID, most: int | None = None) -> bool:
    """Be the one who moves its conversations for now; False while another one does, when it is over, or where `most` others
    are being moved."""
    running = Drain.objects.filter(state=DrainState.RUNNING)
    with transaction.atomic():
        # All of them, so that two who come at once count each other.
        list(running.select_for_update().order_by("pk").values_list("pk"))
        if most is not None and running.exclude(_free()).exclude(pk=drain_id).count() >= most:
            return False
        taken = running.filter(_free(), pk=drain_id).update(
            mover=mover, beat_at=Now(), moving_since=Coalesce("moving_since", Now())
        )
    return bool(taken)


def beat(drain_id: int, mover: UUID, moves: Iterable[Moved]) -> Subject | None:
    """Write how far it is, that its mover lives, and close what came up there since; None when it was ended meanwhile, or is
    another's."""
    told = [asdict(move) for move in _most_told(moves)]
    with transaction.atomic():
        # The drain's row first: whoever has it serve again waits for this, or this finds it ended.
        if not _own(drain_id, mover).update(beat_at=Now(), moves=told):
            return None
        return _closed(Drain.objects.defer("moves").get(pk=drain_id))


def keep_closed() -> None:
    """What waits for a mover takes nothing new meanwhile, and its engines are kept up."""
    waiting = Drain.objects.filter(_free(), state=DrainState.RUNNING).defer("moves").order_by("pk")
    for drain_id in waiting.values_list("pk", flat=True):
        with transaction.atomic():
            drain = waiting.filter(pk=drain_id).select_for_update().first()
            if drain is not None:
                _closed(drain)


def pause(drain_id: int, mover: UUID, moves: Iterable[Moved]) -> None:
    """Write how far it is. Somebody else may go on with it, and whoever has waited longest is asked to be next."""
    told = [asdict(move) for move in _most_told(moves)]
    with transaction.atomic():
        if _own(drain_id, mover).update(mover=None, beat_at=Now(), moves=told):
            transaction.on_commit(_send_next, robust=True)


def finish(drain_id: int, mover: UUID, moves: Iterable[Moved]) -> bool:
    """Nothing more can be moved: its engines stop now, if that was asked for. False when it was ended meanwhile, or is
    another's."""
    moves = list(moves)
    told = [asdict(move) for move in _most_told(moves)]
    with transaction.atomic():
        drain = _own(drain_id, mover).defer("moves").select_for_update().first()
        if drain is None:
            return False
        # What lies in a host's own store goes with the host.
        left = {move.outcome for move in moves} - (SETTLED - {"saved"} if drain.kind == DrainKind.HOST else SETTLED)
        state = DrainState.PARTIAL if left else DrainState.DONE
        Drain.objects.filter(pk=drain_id).update(state=state, moves=told, mover=None, beat_at=None, ended_at=Now())
        _stopped(drain)
        transaction.on_commit(_send_next, robust=True)
    logger.info("drain %d of %s ends: %s", drain_id, drain.subject, state.label)
    return True


def is_open(drain_id: int) -> bool:
    """Whether it still goes on, whoever moves it."""
    return Drain.objects.filter(pk=drain_id, state=DrainState.RUNNING).exists()


def view(drain_id: int) -> DrainView:
    """Raises DrainUnknown."""
    found = views(Q(pk=drain_id), 1)
    if not found:
        raise DrainUnknown(f"There is no drain {drain_id}.")
    return found[0]


def views(chosen: Q, limit: int = SHOWN) -> tuple[DrainView, ...]:
    """Drains, the newest first."""
    names = [name for name in DrainView.__dataclass_fields__ if name != "moves"]
    return tuple(
        DrainView(
            moves=tuple(replace(_NOBODY, **move) for move in row.moves), **{name: getattr(row, name) for name in names}
        )
        for row in Drain.objects.filter(chosen).order_by("-pk")[:limit]
    )


def open_of(subject: Subject) -> DrainView | None:
    """The drain of it that goes on."""
    return next(iter(views(_of(subject) & Q(state=DrainState.RUNNING), 1)), None)


def stuck() -> list[int]:
    """Drains that nobody moves on with, those first that have waited longest; as many as may be moved beside the others."""
    running = Drain.objects.filter(state=DrainState.RUNNING)
    room = MOST_MOVERS - running.exclude(_free()).count()
    known = Q(beat_at__isnull=False) | Q(created_at__lt=Now() - timedelta(seconds=JUST_BEGUN_S))
    waiting = running.filter(_free(), known)
    return list(waiting.order_by(F("beat_at").asc(nulls_first=True), "pk").values_list("pk", flat=True)[: max(0, room)])


def expire() -> int:
    """Delete drains that ended HYDRA_SESSION_RETENTION days ago, as the moves they made; returns how many. Bounded a call."""
    return retention.expire(Drain.objects.filter(ended_at__lt=retention.kept_since()), "ended_at")


_NOBODY = Moved("", "", "", "", 0, "")


def _of(subject: Subject) -> Q:
    return Q(kind=subject.kind, subject_id=subject.id)


def _any_of(places: Sequence[tuple[str, int]]) -> Q:
    found = Q(pk__in=())
    for kind, subject_id in places:
        found |= Q(kind=kind, subject_id=subject_id)
    return found


def _free() -> Q:
    """Drains that nobody moves: none has begun, it paused, or it gives no sign any more."""
    return Q(mover__isnull=True) | Q(beat_at__lt=Now() - timedelta(seconds=BEAT_LOST_S))


def _own(drain_id: int, mover: UUID) -> QuerySet[Drain]:
    """The drain while it goes on and is this mover's: one that was silent for long has been replaced."""
    return Drain.objects.filter(pk=drain_id, state=DrainState.RUNNING, mover=mover)


def _closed(drain: Drain) -> Subject | None:
    """What it empties, closed, in the transaction that holds the drain's row; what is gone has nothing left to drain."""
    try:
        subject = subject_of(drain.kind, drain.subject_id)
    except DrainUnknown:
        Drain.objects.filter(pk=drain.pk).update(state=DrainState.ENDED, ended_at=Now(), mover=None)
        closed_places.open_again(drain.kind, drain.subject_id)
        logger.info("drain %d ends: %s left the pool", drain.pk, drain.subject)
        return None
    closed_places.close(subject.kind, subject.id, HELD_S)
    emptying.close(subject.closed_ids, HELD_S)
    return subject


def _stopped(drain: Drain) -> None:
    """Nobody holds its engines up any more, and they stop if that was asked for; a host's end by its duty, and stay wanted."""
    closed_places.open_again(drain.kind, drain.subject_id)
    try:
        subject = subject_of(drain.kind, drain.subject_id)
    except DrainUnknown:
        return
    # Those too that came up, or are about to, since the last look.
    emptying.close(subject.closed_ids, 0.0)
    emptying.let_go(subject.closed_ids)
    if drain.stops and not subject.host_id:
        emptying.stop(subject.closed_ids)


def _most_told(moves: Iterable[Moved]) -> list[Moved]:
    """The moves, without the oldest settled ones where they are too many to keep."""
    told = list(moves)
    room = max(0, MOST_TOLD - sum(move.outcome not in SETTLED for move in told))
    settled = [number for number, move in enumerate(told) if move.outcome in SETTLED]
    cut = frozenset(settled[: max(0, len(settled) - room)])
    return [move for number, move in enumerate(told) if number not in cut][-MOST_TOLD:]


def _send_next() -> None:
    for drain_id in stuck():
        _send(drain_id)


def _send(drain_id: int) -> None:
    try:
        current_app.send_task("sessions.tasks.run_drain", args=[drain_id], queue="control", expires=TASK_EXPIRES_S)
    except BrokerError as error:
        logger.warning("drain %d was not sent; the sweep sends it again: %s", drain_id, error)
