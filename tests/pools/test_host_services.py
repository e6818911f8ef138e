"""Hosts and devices as rows: what a pulse and a probe write, and what they never do."""

from __future__ import annotations

import dataclasses
import threading
from datetime import UTC, datetime, timedelta

import pytest
from django.db.models.functions import Now

from pools import gpu_minutes, host_services, pulse, tasks
from pools.models import Gpu, GpuMinute, Host
from pools.nvml import NvmlSession
from pools.probe import _CpuMeter, read_inventory
from pools.pulse import Pulse
from pools.readings import Inventory
from pools.release import Release, this_release
from tests.pools.replayed_nvml import ReplayedNvml
from tests.pools.test_nvml import NOTHING
from tests.rows import CPU, HOST

pytestmark = pytest.mark.django_db


def inventory_of(library: ReplayedNvml) -> Inventory:
    cards = NvmlSession(library, NOTHING).read()
    host = dataclasses.replace(HOST, driver_version=cards.driver_version, cuda_version=cards.cuda_version)
    return Inventory(host, (CPU, *cards.gpus), cards.unreadable)


def silence(name: str, seconds: float) -> None:
    Host.objects.filter(name=name).update(last_seen_at=Now() - timedelta(seconds=seconds))


def test_a_probe_writes_all_that_the_cards_tell() -> None:
    read = inventory_of(ReplayedNvml("p100", "rtx3060"))
    host_services.record_probe("here", read.host, read.gpus, read.unreadable)
    (host,) = host_services.host_views()
    _, p100, rtx3060 = host.gpus
    assert (host.driver_version, host.cuda_version) == ("535.183.01", "12.2")
    assert (p100.arch, p100.power_w, p100.power_limit_w, p100.clock_mhz) == ("sm_60", 148.213, 250.0, 1328)
    assert (p100.processes[0].pid, p100.processes[0].memory_bytes) == (4242, 9124708352)
    assert (rtx3060.pcie_generation, rtx3060.pcie_generation_max, rtx3060.pcie_width_max) == (1, 4, 16)


def test_a_card_that_fell_off_the_bus_keeps_its_last_numbers_and_says_so_until_it_is_back() -> None:
    library = ReplayedNvml("p100", "rtx3060")
    read = inventory_of(library)
    host_services.record_probe("here", read.host, read.gpus, read.unreadable)
    library.lost = {0}
    read = inventory_of(library)
    host_services.record_probe("here", read.host, read.gpus, read.unreadable)
    fallen, other = Gpu.objects.filter(kind="cuda").order_by("index")
    assert "fallen off the bus" in fallen.problem
    assert (fallen.memory_used_bytes, other.problem) == (9126805504, "")
    assert fallen.last_seen_at < other.last_seen_at
    library.lost = set()
    read = inventory_of(library)
    host_services.record_probe("here", read.host, read.gpus, read.unreadable)
    assert set(Gpu.objects.values_list("problem", flat=True)) == {""}


def test_a_driver_that_went_away_is_the_problem_of_all_its_cards() -> None:
    read = inventory_of(ReplayedNvml("p100"))
    host_services.record_probe("here", read.host, read.gpus)
    ailing = dataclasses.replace(HOST, problem="NVIDIA's driver is not loaded", problem_hint="Load it.")
    host_services.record_probe("here", ailing, [CPU])
    card = Gpu.objects.get(kind="cuda")
    assert (card.problem, card.problem_hint) == (ailing.problem, "Load it.")
    host_services.record_probe("here", HOST, [CPU])
    card.refresh_from_db()
    assert card.problem == host_services.GONE_PROBLEM


def test_a_pulse_keeps_a_host_up_and_brings_none_back() -> None:
    host_services.record_probe("here", HOST, [CPU])
    assert not host_services.record_beat("nobody", Inventory(HOST, (CPU,)))
    silence("here", host_services.LOST_AFTER_S + 1)
    assert host_services.record_beat("here", Inventory(HOST, (CPU,)))
    assert host_services.mark_lost_hosts() == []
    silence("here", host_services.LOST_AFTER_S + 1)
    assert host_services.mark_lost_hosts() == ["here"]
    host_services.record_beat("here", Inventory(HOST, (CPU,)))
    assert host_services.lost_host_names() == ["here"], "its engines were not looked at yet"
    host = Host.objects.get()
    assert host.version == this_release().version
    assert host.clock_offset_s is not None and abs(host.clock_offset_s) < 5


def test_after_a_pause_of_the_sweep_nobody_is_lost_for_having_been_unheard() -> None:
    host_services.record_probe("here", HOST, [CPU])
    silence("here", 600)
    tasks._clock._swept_at = float("-inf")
    tasks.sweep_hosts()
    assert host_services.lost_host_names() == []
    tasks.sweep_hosts()
    assert host_services.lost_host_names() == ["here"]


def test_another_release_is_seen() -> None:
    host_services.record_probe("here", HOST, [CPU])
    host_services.join_host("here", "10.0.0.7")
    (host,) = host_services.host_views()
    assert (host.address, host.version_differs, host.schema_differs) == ("10.0.0.7", False, False)
    other = Release("0.0.9+000000000000", "000000000000")
    Host.objects.update(version=other.version, schema=other.schema)
    (host,) = host_services.host_views()
    assert (host.version_differs, host.schema_differs) == (True, True)


def test_seconds_become_minutes_once_and_only_a_day_of_them_is_kept() -> None:
    host_services.record_probe("here", HOST, [CPU])
    temperatures = iter(range(1000))

    def read() -> Inventory:
        gpu = dataclasses.replace(CPU, temperature_c=float(next(temperatures)), utilization_percent=50.0, power_w=None)
        return Inventory(HOST, (gpu,))

    beating = Pulse("here", read)
    began = datetime(2026, 1, 1, 12, 0, tzinfo=UTC)
    for second in range(125):
        beating.sample(began + timedelta(seconds=second))
    assert len(beating.ring) == pulse.RING_S
    beating.beat()
    beating.beat()
    cpu = Gpu.objects.get()
    second, first = GpuMinute.objects.filter(gpu=cpu).order_by("-began_at")
    assert (first.began_at, first.samples, first.temperature_max_c, first.utilization_mean_percent) == (
        began,
        60,
        59.0,
        50.0,
    )
    assert (second.samples, second.temperature_max_c, second.power_mean_w) == (60, 119.0, None)
    assert beating.latest() is None, "these samples are old"
    assert gpu_minutes.sweep_minutes() == 2
    assert not GpuMinute.objects.exists()


def test_a_reading_that_fails_does_not_end_the_pulse() -> None:
    """A thread that ended would make the host look lost while it works."""
    readings = threading.Semaphore(0)
    read: list[int] = []

    def failing() -> Inventory:
        read.append(1)
        readings.release()
        raise RuntimeError("a driver's own idea")

    beating = Pulse("here", failing)
    beating.beat()  # nothing was read yet
    beating.start()
    assert readings.acquire(timeout=10) and readings.acquire(timeout=10), "it goes on after the first"
    beating.stop()
    beating.join(10)
    assert len(read) >= 2


def test_a_minute_without_an_answer_has_no_number() -> None:
    silent = dataclasses.replace(CPU, utilization_percent=None, memory_used_bytes=None)
    minute = gpu_minutes.summed_up(datetime.now(UTC), [silent, silent])
    told = (minute.utilization_mean_percent, minute.memory_used_max_bytes, minute.temperature_max_c, minute.power_max_w)
    assert told == (None,) * 4


def test_how_busy_a_processor_is_is_not_known_at_the_first_question() -> None:
    meter = _CpuMeter()
    assert meter.percent() is None
    assert read_inventory().gpus[0].kind == "cpu"
