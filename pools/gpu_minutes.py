"""Samples of every second become one row a minute and device: the only writer of GpuMinute."""

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from datetime import datetime, timedelta

from django.db.models.functions import Now

from pools.models import Gpu, GpuMinute
from pools.readings import GpuReading

# A day of minutes: 1,440 rows a device.
KEPT_MINUTES = 24 * 60


@dataclass(frozen=True)
class MinuteView:
    """What a device did in the minute that began at `began_at`; None where no sample told."""

    began_at: datetime
    samples: int
    utilization_mean_percent: float | None
    utilization_max_percent: float | None
    memory_used_max_bytes: int | None
    temperature_max_c: float | None
    power_mean_w: float | None
    power_max_w: float | None


def summed_up(began_at: datetime, samples: Sequence[GpuReading]) -> MinuteView:
    """One device's samples of a minute in one row; `samples` is not empty."""
    busy = [s.utilization_percent for s in samples if s.utilization_percent is not None]
    memory = [s.memory_used_bytes for s in samples if s.memory_used_bytes is not None]
    heat = [s.temperature_c for s in samples if s.temperature_c is not None]
    power = [s.power_w for s in samples if s.power_w is not None]
    return MinuteView(
        began_at=began_at,
        samples=len(samples),
        utilization_mean_percent=_mean(busy),
        utilization_max_percent=max(busy, default=None),
        memory_used_max_bytes=max(memory, default=None),
        temperature_max_c=max(heat, default=None),
        power_mean_w=_mean(power),
        power_max_w=max(power, default=None),
    )


def record_minutes(host_name: str, minutes: Iterable[tuple[str, MinuteView]]) -> int:
    """Write minutes by their device's uuid; returns how many were new. A minute that is there already stays as it is."""
    known = dict(Gpu.objects.filter(host__name=host_name).values_list("uuid", "pk"))
    rows = [GpuMinute(gpu_id=known[uuid], **asdict(minute)) for uuid, minute in minutes if uuid in known]
    return len(GpuMinute.objects.bulk_create(rows, ignore_conflicts=True))


def sweep_minutes() -> int:
    """Remove what is older than KEPT_MINUTES; returns how many rows went."""
    removed, _ = GpuMinute.objects.filter(began_at__lt=Now() - timedelta(minutes=KEPT_MINUTES)).delete()
    return removed


def _mean(values: Sequence[float]) -> float | None:
    return round(sum(values) / len(values), 2) if values else None
