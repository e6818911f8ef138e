"""Drains: an engine, a card or a host gets empty while it serves. The one way there, for pages, the admin and the command line.

First nothing new is sent there, then what runs and what is held moves to other engines (`sessions.drain_moves`), and then the
engines stop, if that was asked for. What cannot move stays where it is and says why. The only writer of Drain rows.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from datetime import datetime, timedelta

from celery import current_app
from django.db import IntegrityError, transaction
from django.db.models import Q
from django.db.models.functions import Now
from kombu.exceptions import OperationalError as BrokerError

from engines import emptying
from engines import services as engines
from engines.choices import StopReason, Wanted
from engines.services import EngineView
from pools import services as pools
from pools.choices import HostDuty
from sessions.choices import DrainKind, DrainState
from sessions.errors import DrainGoesOn, DrainUnknown, NothingToDrain
from sessions.models import Drain

# Engines are kept up for so long after the last sign of whoever moves their conversations.
HELD_S = 60.0
# A mover that has given no sign for so long is dead, and another one goes on.
BEAT_LOST_S = 30.0
TASK_EXPIRES_S = 30.0
MOST_TOLD = 512
SHOWN = 20
# Of these conversations nothing is lost where their engine goes.
SETTLED = frozenset({"moved", "saved"})
# An engine whose process may hold conversations, also one that does not answer just now.
_HOLDS = frozenset({"ready", "unhealthy", "draining"})

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Subject:
    """What gets empty, and its engines with a process, at this moment. `host_id` is 0, and `duty` "", but for
    hosts."""

    kind: str
    id: int
    name: str
    engines: tuple[EngineView, ...]
    serves: bool
    host_id: int = 0
    duty: str = ""

    @property
    def engine_ids(self) -> list[int]:
        return [engine.id for engine in self.engines]


@dataclass(frozen=True)
class Moved:
    """What became of one conversation. `outcome` is moving, moved, saved (to the store of its engine's host) or stays (with the
    reason); bytes and pause as measured."""

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


@dataclass(frozen=True)
class DrainView:
    """A drain as pages show it."""

    id: int
    kind: str
    subject_id: int
    subject: str
    stops: bool
    state: str
    moves: tuple[Moved, ...]
    created_at: datetime
    ended_at: datetime | None

    @property
    def is_open(self) -> bool:
        return self.state == DrainState.RUNNING

    def of(self, outcome: str) -> list[Moved]:
        return [move for move in self.moves if move.outcome == outcome]


def subject_of(kind: str, subject_id: int) -> Subject:
    """The engine, card or host of this key, as it is now. Raises DrainUnknown."""
    hosts = {host.id: host for host in pools.host_views()}
    views = engines.engine_views()
    if kind == DrainKind.ENGINE:
        found = next((one for one in views if one.id == subject_id), None)
        if found is not None:
            return Subject(kind, subject_id, found.name, _with_process([found]), found.takes_new)
    if kind == DrainKind.CARD:
        for host in hosts.values():
            for gpu in host.gpus:
                if gpu.id == subject_id:
                    own = _with_process(one for one in views if one.gpu_id == gpu.id)
                    name = f"{host.name}/{gpu.kind}{gpu.index}"
                    return Subject(kind, subject_id, name, own, not own or any(one.takes_new for one in own))
    if kind == DrainKind.HOST and subject_id in hosts:
        host = hosts[subject_id]
        own = _with_process(one for one in views if one.host_id == subject_id)
        serves = host.duty == HostDuty.ACTIVE and (not own or any(one.takes_new for one in own))
        return Subject(kind, subject_id, host.name, own, serves, subject_id, host.duty)
    raise DrainUnknown(f"There is no {kind} {subject_id}.")


def named(kind: str, name: str) -> Subject:
    """The same by its name: an engine's, a host's, a card's as HOST/cuda0 or its uuid. Raises DrainUnknown."""
    names: dict[str, int] = {}
    if kind == DrainKind.ENGINE:
        names = {engine.name: engine.id for engine in engines.engine_views()}
    for host in pools.host_views():
        if kind == DrainKind.HOST:
            names[host.name] = host.id
        if kind == DrainKind.CARD:
            names |= {f"{host.name}/{gpu.kind}{gpu.index}": gpu.id for gpu in host.gpus}
            names |= {gpu.uuid: gpu.id for gpu in host.gpus if gpu.kind != "cpu"}
    if name not in names:
        known = ", ".join(sorted(names)[:SHOWN]) or "none"
        raise DrainUnknown(f"There is no {kind} {name[:63]!r}; there are: {known}.")
    return subject_of(kind, names[name])


def begin(subject: Subject, *, stops: bool, user_id: int | None = None, send: bool = True) -> int:
    """Send nothing new there from now on and have its conversations moved; returns the drain's key.

    With `stops` its engines stop once they are done; a host then drains as a whole. Raises DrainGoesOn, and NothingToDrain for
    what has no engine and would not even be closed.
    """
    if not subject.engines and not (stops and subject.host_id):
        raise NothingToDrain(f"No engine runs on {subject.name}.")
    try:
        with transaction.atomic():
            drain = Drain.objects.create(
                kind=subject.kind,
                subject_id=subject.id,
                subject=subject.name,
                stops=stops,
                begun_by_id=user_id,
            )
            emptying.close(subject.engine_ids, HELD_S)
            if stops and subject.duty == HostDuty.ACTIVE:
                pools.change_duty(subject.host_id, HostDuty.DRAINING)
            if send:
                transaction.on_commit(lambda: _send(drain.pk), robust=True)
    except IntegrityError as error:
        raise DrainGoesOn(f"{subject.name} is being drained already.") from error
    logger.info("drain %d of %s %s begins", drain.pk, subject.kind, subject.name)
    return drain.pk


def serve_again(subject: Subject) -> bool:
    """End what empties it and send it requests again, its host too; False when it serves already.

    What has moved stays where it is. An engine that is meant itself is started, if its drain had it stop; a host's engines are
    wanted all along. A card's that were stopped are started one by one.
    """
    with transaction.atomic():
        ended = Drain.objects.filter(_of(subject), state=DrainState.RUNNING).update(
            state=DrainState.ENDED, ended_at=Now()
        )
        own = _all_of(subject)
        opened = emptying.open_again([engine.id for engine in own])
        for engine in own:
            if subject.kind == DrainKind.ENGINE and opened and engine.wanted == Wanted.STOPPED:
                engines.start(engine.id)
        active = bool(subject.host_id) and pools.change_duty(subject.host_id, HostDuty.ACTIVE)
    return bool(ended or opened or active)


def claim(drain_id: int) -> bool:
    """Be the one who moves its conversations for now; False while another one does, or when it is over."""
    free = Q(beat_at__isnull=True) | Q(beat_at__lt=Now() - timedelta(seconds=BEAT_LOST_S))
    return bool(Drain.objects.filter(free, pk=drain_id, state=DrainState.RUNNING).update(beat_at=Now()))


def beat(drain_id: int, moves: Iterable[Moved]) -> Subject | None:
    """Write how far it is, that its mover lives, and close what came up there since; None when it was ended meanwhile."""
    told = [asdict(move) for move in moves][-MOST_TOLD:]
    if not Drain.objects.filter(pk=drain_id, state=DrainState.RUNNING).update(beat_at=Now(), moves=told):
        return None
    kind, subject_id = Drain.objects.values_list("kind", "subject_id").get(pk=drain_id)
    subject = subject_of(kind, subject_id)
    emptying.close(subject.engine_ids, HELD_S)
    return subject


def pause(drain_id: int) -> None:
    """Somebody else may go on with it, and is asked to."""
    with transaction.atomic():
        if Drain.objects.filter(pk=drain_id, state=DrainState.RUNNING).update(beat_at=None):
            transaction.on_commit(lambda: _send(drain_id), robust=True)


def finish(drain_id: int, moves: Iterable[Moved]) -> bool:
    """Nothing more can be moved: its engines stop now, if that was asked for. False when it was ended meanwhile."""
    told = list(moves)[-MOST_TOLD:]
    stay = any(move.outcome not in SETTLED for move in told)
    state = DrainState.PARTIAL if stay else DrainState.DONE
    with transaction.atomic():
        ended = Drain.objects.filter(pk=drain_id, state=DrainState.RUNNING).update(
            state=state, moves=[asdict(move) for move in told], beat_at=None, ended_at=Now()
        )
        if not ended:
            return False
        drain = Drain.objects.get(pk=drain_id)
        subject = subject_of(drain.kind, drain.subject_id)
        emptying.let_go(subject.engine_ids)
        if drain.stops and not subject.host_id:
            # A host's engines end by its duty, and stay wanted.
            for engine_id in subject.engine_ids:
                engines.drain(engine_id, StopReason.PERSON)
    logger.info("drain %d of %s ends: %s", drain_id, subject.name, state.label)
    return True


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
    """Drains that nobody moves on with."""
    lost = Q(beat_at__isnull=True, created_at__lt=Now() - timedelta(seconds=2)) | Q(
        beat_at__lt=Now() - timedelta(seconds=BEAT_LOST_S)
    )
    return list(Drain.objects.filter(lost, state=DrainState.RUNNING).values_list("pk", flat=True))


_NOBODY = Moved("", "", "", "", 0, "")


def _of(subject: Subject) -> Q:
    return Q(kind=subject.kind, subject_id=subject.id)


def _all_of(subject: Subject) -> list[EngineView]:
    """Its engines, those without a process too."""
    keys = {DrainKind.ENGINE: "id", DrainKind.CARD: "gpu_id", DrainKind.HOST: "host_id"}
    return [one for one in engines.engine_views() if getattr(one, keys[DrainKind(subject.kind)]) == subject.id]


def _with_process(found: Iterable[EngineView]) -> tuple[EngineView, ...]:
    return tuple(one for one in found if one.state in _HOLDS and one.base_url is not None)


def _send(drain_id: int) -> None:
    try:
        current_app.send_task("sessions.tasks.run_drain", args=[drain_id], queue="control", expires=TASK_EXPIRES_S)
    except BrokerError as error:
        logger.warning("drain %d was not sent; the sweep sends it again: %s", drain_id, error)
