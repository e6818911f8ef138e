"""The only writer of hosts and their devices; and what other apps may ask about them, as frozen views.

Ages are told by the database's clock: each host's head writes its own rows, and the clocks of hosts differ.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import datetime, timedelta
from typing import Any

from django.db import transaction
from django.db.models import F, Q
from django.db.models.functions import Now
from django.utils import timezone

from pools.choices import LEAVING, HostDuty, HostState
from pools.db import database_now
from pools.events import publish_on_commit
from pools.models import Gpu, Host
from pools.readings import DeviceFacts, GpuProcess, GpuReading, HostReading, Inventory, UnreadableGpu
from pools.release import this_release

# Heads write every BEAT_S; beat sweeps every 2 s. A host that is gone is marked within LOST_AFTER_S and a sweep, 12 s at most.
LOST_AFTER_S = 9.0
GONE_PROBLEM = "NVIDIA's driver does not list the card any more"
GONE_HINT = "Look for Xid in the kernel's log; if the card was taken out, delete its row in the admin."


@dataclass(frozen=True, kw_only=True)
class GpuView(DeviceFacts):
    """A device with its last reading. While it has a `problem`, the numbers may be old."""

    id: int
    last_seen_at: datetime | None


@dataclass(frozen=True)
class HostView:
    """A host with its last reading and its devices, ordered by kind and index.

    `version_differs`: it runs another release than this process; `schema_differs`: it even knows other tables.
    """

    id: int
    name: str
    state: str
    cpu_model: str
    cpu_count: int
    memory_total_bytes: int
    memory_available_bytes: int | None
    load_1m: float | None
    last_seen_at: datetime | None
    gpus: tuple[GpuView, ...]
    duty: str = HostDuty.ACTIVE
    address: str = "127.0.0.1"
    version: str = ""
    version_differs: bool = False
    schema_differs: bool = False
    clock_offset_s: float | None = None
    driver_version: str = ""
    cuda_version: str = ""
    problem: str = ""
    problem_hint: str = ""


def join_host(name: str, address: str | None = None) -> int:
    """Make the host's row if it is missing, count its (re)joining in `agent_epoch`, and return its primary key.

    What is wanted of it stays: a host that was draining when it stopped still is. `address` None leaves that as it is, too.
    """
    release = this_release()
    values: dict[str, Any] = {"version": release.version, "schema": release.schema}
    if address is not None:
        values["address"] = address
    with transaction.atomic():
        host, _ = Host.objects.get_or_create(name=name)
        Host.objects.filter(pk=host.pk).update(
            agent_epoch=F("agent_epoch") + 1, state=HostState.UP, last_seen_at=Now(), **values
        )
        publish_on_commit("host", host.pk)
    return host.pk


def record_probe(
    host_name: str, reading: HostReading, gpus: Sequence[GpuReading], unreadable: Sequence[UnreadableGpu] = ()
) -> int:
    """Write what a probe read of a host and its devices, and that the host is up; returns the host's primary key.

    Devices that were not seen keep their last reading and its time: the page shows them as stale, not as zero.
    """
    with transaction.atomic():
        host, _ = Host.objects.get_or_create(name=host_name)
        _write_inventory(host.pk, Inventory(reading, tuple(gpus), tuple(unreadable)), state=HostState.UP)
        publish_on_commit("host", host.pk)
    return host.pk


def record_beat(host_name: str, inventory: Inventory) -> bool:
    """Write that a host's head lives, and its latest readings; False when it has no row.

    A lost host stays lost: it is up again once a probe has looked at its engines. Nobody is told, since pages read the
    numbers once a second anyway.
    """
    # A slow answer only widens the measure; the half of it is the best guess of when the database looked.
    asked_at = timezone.now()
    database_at = database_now()
    offset_s = (asked_at - database_at + (timezone.now() - asked_at) / 2).total_seconds()
    release = this_release()
    pk = Host.objects.filter(name=host_name).values_list("pk", flat=True).first()
    if pk is None:
        return False
    with transaction.atomic():
        _write_inventory(
            pk, inventory, version=release.version, schema=release.schema, clock_offset_s=round(offset_s, 3)
        )
    return True


def _write_inventory(host_id: int, inventory: Inventory, **values: Any) -> None:
    reading = inventory.host
    Host.objects.filter(pk=host_id).update(**asdict(reading), last_seen_at=Now(), **values)
    known = dict(Gpu.objects.filter(host_id=host_id).values_list("uuid", "pk"))
    for gpu in inventory.gpus:
        fields = {**asdict(gpu), "last_seen_at": Now()}
        uuid = fields.pop("uuid")
        if uuid in known:
            Gpu.objects.filter(pk=known[uuid]).update(**fields)
        else:
            Gpu.objects.update_or_create(host_id=host_id, uuid=uuid, defaults=fields)
    _mark_unread(host_id, inventory)


def _mark_unread(host_id: int, inventory: Inventory) -> None:
    """Write the problem of each card that was not read, and nothing else of it."""
    seen = {gpu.uuid for gpu in inventory.gpus}
    unread = Q(host_id=host_id, kind="cuda") & ~Q(uuid__in=seen)
    for card in inventory.unreadable:
        # Without its uuid, the place in NVML's order names it, unless another card has moved there.
        which = Q(uuid=card.uuid) if card.uuid else Q(index=card.index)
        Gpu.objects.filter(unread & which).update(problem=card.problem, problem_hint=card.problem_hint)
        unread &= ~which
    problem = inventory.host.problem or GONE_PROBLEM
    hint = inventory.host.problem_hint if inventory.host.problem else GONE_HINT
    Gpu.objects.filter(unread).exclude(problem=problem).update(problem=problem, problem_hint=hint)


def mark_lost_hosts(older_than_s: float = LOST_AFTER_S) -> list[str]:
    """Mark hosts that have not been heard of for `older_than_s` seconds as lost; returns the names of those it marked."""
    silent = Q(state=HostState.UP, last_seen_at__lt=Now() - timedelta(seconds=older_than_s))
    lost = []
    for pk, name in Host.objects.filter(silent).exclude(duty=HostDuty.RETIRED).values_list("pk", "name"):
        with transaction.atomic():
            if Host.objects.filter(silent, pk=pk).update(state=HostState.LOST):
                publish_on_commit("host", pk)
                lost.append(name)
    return lost


def change_duty(host_id: int, duty: HostDuty) -> bool:
    """Ask something else of a host; False when it is that already, has left, (draining) leaves, or (retiring) is no host that
    joined.

    Heads see it at their next look: engines of a host that drains or retires end once they are idle.
    """
    if duty not in (HostDuty.ACTIVE, HostDuty.DRAINING, HostDuty.RETIRING):
        raise ValueError(f"a host cannot be told to be {duty}")
    # The host that runs the site has no access of its own to give back.
    allowed = Q(access__isnull=False) if duty == HostDuty.RETIRING else Q()
    final = [HostDuty.RETIRED, *([HostDuty.RETIRING] if duty == HostDuty.DRAINING else [])]
    with transaction.atomic():
        due = Host.objects.filter(allowed, pk=host_id).exclude(duty__in=[duty, *final])
        # A join in the condition would make the UPDATE one over a subquery, which checks the row no second time.
        pk = due.select_for_update(of=("self",)).values_list("pk", flat=True).first()
        changed = pk is not None and Host.objects.filter(pk=pk).update(duty=duty, duty_since=Now())
        if changed:
            publish_on_commit("host", host_id)
    return bool(changed)


def finish_retirement(host_id: int) -> bool:
    """The last step of a host that retires: it has left. False when it is not retiring any more."""
    with transaction.atomic():
        left = Host.objects.filter(pk=host_id, duty=HostDuty.RETIRING).update(duty=HostDuty.RETIRED, duty_since=Now())
        if left:
            publish_on_commit("host", host_id)
    return bool(left)


def may_be_deleted(host_id: int) -> bool:
    """Whether nothing of a host is left but its row: it has retired, or it never joined and is lost."""
    gone = Q(duty=HostDuty.RETIRED) | Q(state=HostState.LOST, access__isnull=True)
    return Host.objects.filter(gone, pk=host_id).exists()


def retiring_hosts() -> list[tuple[int, str]]:
    """Primary keys and names of the hosts that are to leave."""
    return list(Host.objects.filter(duty=HostDuty.RETIRING).values_list("pk", "name"))


def host_names() -> list[str]:
    """The names of all hosts that have not left, lost ones included: only a probe brings one back."""
    return list(Host.objects.exclude(duty=HostDuty.RETIRED).values_list("name", flat=True))


def lost_host_names() -> list[str]:
    """The names of the hosts that are lost."""
    return list(Host.objects.filter(state=HostState.LOST).values_list("name", flat=True))


def leaving_host_ages_s() -> dict[str, float]:
    """The hosts that drain, retire or have left, and for how many seconds."""
    leaving = Host.objects.filter(duty__in=LEAVING).annotate(age=Now() - F("duty_since"))
    return {name: age.total_seconds() if age else 0.0 for name, age in leaving.values_list("name", "age")}


def host_address(name: str) -> str | None:
    """Where a host's engines and store listen; None when there is no such host."""
    return Host.objects.filter(name=name).values_list("address", flat=True).first()


def cpu_of(host_name: str) -> tuple[int, int] | None:
    """Primary keys of a host and its CPU device, or None before the first probe."""
    return Gpu.objects.filter(host__name=host_name, kind="cpu").values_list("host_id", "pk").first()


def card_keys() -> dict[str, int]:
    """Primary keys of the cards by the uuids that their drivers tell."""
    return dict(Gpu.objects.exclude(kind="cpu").values_list("uuid", "pk"))


def host_views() -> tuple[HostView, ...]:
    """All hosts with their devices, ordered by name. Read every second by each site, so devices are read as plain values."""
    gpus: dict[int, list[GpuView]] = {}
    for host_id, pk, processes, *values in Gpu.objects.order_by("kind", "index").values_list(
        "host_id", "pk", "processes", *_SAME_NAMES
    ):
        held = tuple(GpuProcess(**process) for process in processes)
        view = GpuView(id=pk, processes=held, **dict(zip(_SAME_NAMES, values, strict=True)))
        gpus.setdefault(host_id, []).append(view)
    return tuple(_host_view(host, tuple(gpus.get(host.pk, ()))) for host in Host.objects.order_by("name"))


_SAME_NAMES = [name for name in GpuView.__dataclass_fields__ if name not in ("id", "processes")]


def _host_view(host: Host, gpus: tuple[GpuView, ...]) -> HostView:
    probed = host.memory_total_bytes > 0
    release = this_release()
    return HostView(
        id=host.pk,
        name=host.name,
        state=host.state,
        cpu_model=host.cpu_model,
        cpu_count=host.cpu_count,
        memory_total_bytes=host.memory_total_bytes,
        memory_available_bytes=host.memory_available_bytes if probed else None,
        load_1m=host.load_1m if probed else None,
        last_seen_at=host.last_seen_at,
        gpus=gpus,
        duty=host.duty,
        address=host.address,
        version=host.version,
        version_differs=bool(host.version) and host.version != release.version,
        schema_differs=bool(host.schema) and host.schema != release.schema,
        clock_offset_s=host.clock_offset_s,
        driver_version=host.driver_version,
        cuda_version=host.cuda_version,
        problem=host.problem,
        problem_hint=host.problem_hint,
    )
