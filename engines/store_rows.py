"""Rows of hosts' stores and their samples, as the heads write them; and what other apps may ask about stores, as frozen views.

Every change of state is a conditional UPDATE. Those that return bool say whether this caller made the change.
"""

import logging
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Any

from django.db import transaction
from django.db.models import F, Q, QuerySet
from django.utils import timezone

from engines.choices import STORE_LIVE, StoreState
from engines.models import Store, StoreSample
from engines.wire_store import StoreInfoAnswer
from pools import services as pools
from pools.events import publish_on_commit

MAX_ERROR_CHARS = 2000
SAMPLE_S = 60.0
RING_MINUTES = 24 * 60
# So long after its last failure a store counts as steady, and its failures are forgiven.
STEADY_S = 120.0
LOST = "its host is lost"
SAMPLED = (
    "used_bytes",
    "stored_bytes",
    "logical_bytes",
    "snapshots_stored",
    "hits",
    "misses",
    "evictions",
    "errors",
)

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class StoreEndpoint:
    """How a store is reached. Its port stays the same over restarts; all stores of a pool have one secret, since each host's
    engines fetch from the others' stores.
    """

    store_id: int
    host_name: str
    address: str
    port: int
    secret: str = field(repr=False)
    ready: bool = False


@dataclass(frozen=True)
class StoreRow:
    """A store as its head handles it. `pool_secret` is that of the pool's stores, "" before there is one."""

    store_id: int
    host_address: str
    state: str
    state_age_s: float
    pid: int | None
    pid_start_time: float | None
    restarts: int
    pool_secret: str = field(repr=False)


@dataclass(frozen=True)
class Figures:
    """What a store says of itself, as rows keep it. Counters begin with its process."""

    version: str
    capacity_bytes: int
    used_bytes: int
    stored_bytes: int
    logical_bytes: int
    objects_stored: int
    snapshots_stored: int
    sessions_stored: int
    hits: int
    misses: int
    evictions: int
    errors: int

    @classmethod
    def of(cls, info: StoreInfoAnswer) -> "Figures":
        """A figure that this store does not tell counts as 0."""
        status = {name: int(value) for name, value in info.status.items()}
        counts = info.counts
        return cls(
            version=info.version[:32],
            capacity_bytes=status.get("capacity_bytes", 0),
            used_bytes=status.get("slab_bytes", 0),
            stored_bytes=status.get("stored_bytes", 0),
            logical_bytes=status.get("logical_bytes", 0),
            objects_stored=status.get("objects", 0),
            snapshots_stored=status.get("manifests", 0),
            sessions_stored=status.get("sessions", 0),
            hits=counts.get("hits", 0),
            misses=counts.get("misses", 0),
            evictions=counts.get("evicted_manifests", 0),
            errors=sum(counts.get(name, 0) for name in ("damaged_objects", "refused_full", "disk_errors")),
        )


@dataclass(frozen=True)
class StoreView:
    """A store as pages show it: its last figures and when they were taken; None where nobody measured.

    `hit_share` is the share of look-ups that found something, over the last hour.
    """

    id: int
    host_id: int
    state: str
    version: str
    capacity_bytes: int
    used_bytes: int
    stored_bytes: int
    logical_bytes: int
    dedup_ratio: float | None
    snapshots: int
    sessions: int
    hits: int
    misses: int
    evictions: int
    errors: int
    hit_share: float | None
    restarts: int
    last_error: str
    last_seen_at: datetime | None


# --- asked by others -------------------------------------------------------------------------------


def endpoint(host_name: str) -> StoreEndpoint | None:
    """The store of a host; None where the host has none."""
    return next(iter(endpoints(host_name)), None)


def endpoints(host_name: str | None = None) -> list[StoreEndpoint]:
    """The stores of all hosts (or of one) that have one, whether or not they answer now (`ready`)."""
    wanted = Q(port__isnull=False) & ~Q(state=StoreState.OFF)
    if host_name is not None:
        wanted &= Q(host__name=host_name)
    rows = Store.objects.filter(wanted).order_by("pk")
    values = rows.values_list("pk", "host__name", "address", "port", "secret", "state")
    return [StoreEndpoint(*row, ready=state == StoreState.READY) for *row, state in values]


def store_views() -> tuple[StoreView, ...]:
    """The stores of all hosts that have one, ordered by host."""
    shares = _hit_shares()
    stores = Store.objects.exclude(state=StoreState.OFF).order_by("host__name")
    return tuple(
        StoreView(
            id=store.pk,
            host_id=store.host_id,
            state=store.state,
            version=store.version,
            capacity_bytes=store.capacity_bytes,
            used_bytes=store.used_bytes,
            stored_bytes=store.stored_bytes,
            logical_bytes=store.logical_bytes,
            dedup_ratio=store.dedup_ratio,
            snapshots=store.snapshots_stored,
            sessions=store.sessions_stored,
            hits=store.hits,
            misses=store.misses,
            evictions=store.evictions,
            errors=store.errors,
            hit_share=shares.get(store.pk),
            restarts=store.restarts,
            last_error=store.last_error,
            last_seen_at=store.last_seen_at,
        )
        for store in stores
    )


def _hit_shares() -> dict[int, float]:
    """By store: of the look-ups between the samples of the last hour the share that found something."""
    since = timezone.now() - timedelta(hours=1)
    found: dict[int, list[StoreSample]] = {}
    for sample in StoreSample.objects.filter(taken_at__gte=since).order_by("taken_at"):
        kept = found.setdefault(sample.store_id, [])
        if kept and kept[-1].process_start_time != sample.process_start_time:
            kept.clear()  # another process, which counts from 0
        kept.append(sample)
    shares = {}
    for store_id, samples in found.items():
        last = samples[-1]
        before = samples[0] if len(samples) > 1 else StoreSample(hits=0, misses=0)
        hits = last.hits - before.hits
        lookups = hits + last.misses - before.misses
        if lookups:
            shares[store_id] = round(hits / lookups, 3)
    return shares


# --- written by a head about its own store ---------------------------------------------------------


def ensure_store(host_name: str) -> StoreRow | None:
    """This host's store as it stands, its row made when there is none; None before the host's first probe."""
    cpu = pools.cpu_of(host_name)
    if cpu is None:
        return None
    store, _ = Store.objects.select_related("host").get_or_create(host_id=cpu[0])
    return StoreRow(
        store_id=store.pk,
        host_address=store.host.address,
        state=store.state,
        state_age_s=(timezone.now() - store.state_since).total_seconds(),
        pid=store.pid,
        pid_start_time=store.pid_start_time,
        restarts=store.restarts,
        pool_secret=_pool_secret(Store.objects.all()),
    )


def _pool_secret(stores: QuerySet[Store]) -> str:
    return stores.exclude(secret="").order_by("pk").values_list("secret", flat=True).first() or ""


def settle_secret(store_id: int, proposed: str) -> str:
    """The secret that this store is to have: the pool's, or `proposed` where the pool has none yet, which is written."""
    with transaction.atomic():
        # Two hosts that join a new pool at once wait for each other here.
        stores = Store.objects.select_for_update().order_by("pk")
        list(stores.values_list("pk", flat=True))
        secret = _pool_secret(Store.objects.all()) or proposed
        Store.objects.filter(pk=store_id).update(secret=secret)
    return secret


def claim_start(store_id: int) -> bool:
    """Take the start of a store that does not run: the caller launches it."""
    due = Q(pk=store_id, state__in=[StoreState.OFF, StoreState.FAILED])
    return _change(due, StoreState.STARTING, pid=None, pid_start_time=None)


def record_process(
    store_id: int, pid: int, pid_start_time: float, *, place: dict[str, Any], capacity_bytes: int
) -> bool:
    """Write which process the store is and where it listens (`place`: instance, address, port, http_port, secret)."""
    return _change(
        Q(pk=store_id),
        StoreState.STARTING,
        pid=pid,
        pid_start_time=pid_start_time,
        capacity_bytes=capacity_bytes,
        **place,
    )


def mark_seen(store_id: int, pid: int, figures: Figures) -> bool:
    """The process `pid` answered with these figures; a sample is kept of them once a minute. True when it came up just now."""
    now = timezone.now()
    values: dict[str, Any] = {**vars(figures), "last_seen_at": now}
    came_up = Q(pk=store_id, pid=pid, state__in=[StoreState.STARTING, StoreState.UNHEALTHY])
    came = _change(came_up, StoreState.READY, last_error="", **values)
    ready = Q(pk=store_id, pid=pid, state=StoreState.READY)
    if not came and not Store.objects.filter(ready).update(**values):
        return False
    Store.objects.filter(ready, restarts__gt=0, state_since__lt=now - timedelta(seconds=STEADY_S)).update(restarts=0)
    _sample(store_id, figures, now)
    return came


def mark_unhealthy(store_id: int, pid: int, error: str) -> bool:
    """The process `pid` lives, but does not answer any more."""
    due = Q(pk=store_id, pid=pid, state=StoreState.READY)
    return _change(due, StoreState.UNHEALTHY, last_error=error[:MAX_ERROR_CHARS])


def mark_failed(store_id: int, error: str) -> bool:
    """The store's process is gone or never came up; its port and secret stay."""
    return _change(
        Q(pk=store_id, state__in=STORE_LIVE),
        StoreState.FAILED,
        pid=None,
        pid_start_time=None,
        restarts=F("restarts") + 1,
        last_error=error[:MAX_ERROR_CHARS],
    )


def mark_off(store_id: int) -> bool:
    """No process of the store runs, and none is wanted, or none just now."""
    return _change(Q(pk=store_id), StoreState.OFF, pid=None, pid_start_time=None, restarts=0, last_error="")


def mark_lost(host_names: list[str]) -> int:
    """Stores of hosts that fell silent are not counted on; returns how many were until now."""
    stores = Store.objects.filter(host__name__in=host_names, state__in=[StoreState.READY, StoreState.STARTING])
    return sum(
        _change(Q(pk=pk, state__in=[StoreState.READY, StoreState.STARTING]), StoreState.UNHEALTHY, last_error=LOST)
        for pk in stores.values_list("pk", flat=True)
    )


def mark_swept(store_id: int) -> None:
    """Its snapshots were listed whole just now."""
    Store.objects.filter(pk=store_id).update(swept_at=timezone.now())


def _change(due: Q, state: StoreState, **values: Any) -> bool:
    with transaction.atomic():
        row = Store.objects.filter(due).values_list("pk", "state", "host_id").first()
        if row is None:
            return False
        pk, old_state, host_id = row
        if old_state != state:
            values["state_since"] = timezone.now()
        if not Store.objects.filter(due, state=old_state).update(state=state, **values):
            return False
        if old_state != state:
            # Pages show a store as a part of its host.
            publish_on_commit("host", host_id)
    if old_state != state:
        logger.info("store %d: %s → %s", pk, old_state, state.value)
    return True


def _sample(store_id: int, figures: Figures, now: datetime) -> None:
    """Keep a sample if the last one is of an earlier minute; it takes the place of the one a day ago."""
    minute = int(now.timestamp() // SAMPLE_S)
    latest = StoreSample.objects.filter(store_id=store_id).order_by("-taken_at").values_list("taken_at", flat=True)
    if (last := latest.first()) is not None and int(last.timestamp() // SAMPLE_S) >= minute:
        return
    process_start_time = Store.objects.values_list("pid_start_time", flat=True).get(pk=store_id)
    values = {"taken_at": now, "process_start_time": process_start_time or 0.0}
    values |= {name: getattr(figures, name) for name in SAMPLED}
    StoreSample.objects.update_or_create(store_id=store_id, slot=minute % RING_MINUTES, defaults=values)
