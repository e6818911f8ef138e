"""A pool of many hosts in one place: their heads' real work and the site's, on fake engines, PostgreSQL and Valkey.

tests/hosts/test_scale.py runs it and prints what each period's work took; docs/scale.md has the figures. What many machines
do each for themselves in life, one process does here for all of them.
"""

from __future__ import annotations

import asyncio
import dataclasses
import heapq
import json
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from django.conf import settings
from django.db import connection

from engines import services as engines
from engines import watch
from engines.client import close_client_session
from engines.models import Engine
from engines.process import ProcessRecord
from engines.tasks import probe_hosts
from hydra_site.pool_snapshot import PoolSnapshot, take_snapshot
from pools import host_services, reservation
from pools.host_services import LOST_AFTER_S
from pools.nvml import NvmlSession
from pools.pulse import BEAT_S
from pools.readings import GpuReading, Inventory
from pools.services import VariantView
from tests.pools.replayed_nvml import ReplayedNvml
from tests.rows import CPU, HOST

PROBE_S, SWEEP_S = 5.0, 2.0
THREADS = 12
CARDS = ("p100", "rtx3060", "rtx5060ti", "p100")
ROOT = Path(__file__).resolve().parent.parent.parent


@dataclass
class Work:
    """How long one kind of work took, each time, and processor time in all (this process's share of it, not the database's).

    `late` counts those that were not done when the next was due.
    """

    period_s: float
    took_s: list[float] = field(default_factory=list)
    cpu_s: float = 0.0
    late: int = 0

    def line(self, name: str) -> str:
        took = sorted(self.took_s) or [0.0]
        share = [took[min(len(took) - 1, int(len(took) * part))] * 1000 for part in (0.5, 0.95)]
        cpu_ms = self.cpu_s / len(took) * 1000
        return (
            f"{name:24} every {self.period_s:2g} s: {len(self.took_s):4} times, p50 {share[0]:6.1f} ms, "
            f"p95 {share[1]:6.1f} ms, longest {took[-1] * 1000:6.0f} ms, processor {cpu_ms:6.1f} ms, late {self.late}"
        )


@contextmanager
def fake_engines(count: int) -> Iterator[tuple[int, list[int]]]:
    """The pid of a process that is `count` engines, and their ports."""
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.hosts.fake_engines", str(count)],
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdin is not None and process.stdout is not None
    try:
        yield process.pid, json.loads(process.stdout.readline())
    finally:
        process.stdin.close()
        process.wait(20)
        process.stdout.close()


def inventory_of(host_number: int, gpus: int) -> Inventory:
    """A host's answer: its CPU, and cards whose uuids are its own."""
    library = ReplayedNvml(*(CARDS[number % len(CARDS)] for number in range(gpus)))
    for number, card in enumerate(library.cards):
        card["nvmlDeviceGetUUID"] = f"GPU-{host_number:04}-{number:04}"
    cards: tuple[GpuReading, ...] = NvmlSession(library, Path("/nonexistent")).read().gpus
    return Inventory(HOST, (CPU, *(dataclasses.replace(card, problem="", problem_hint="") for card in cards)))


def make_pool(hosts: int, gpus: int, variant: VariantView, pid: int, ports: list[int]) -> dict[str, Inventory]:
    """The rows of a pool in which every card serves; returns what each host reads of itself."""
    process = ProcessRecord.of(pid, "engine", ())
    read: dict[str, Inventory] = {}
    for host_number in range(hosts):
        name = f"host-{host_number:03}"
        read[name] = inventory_of(host_number, gpus)
        host_id = host_services.record_probe(name, read[name].host, read[name].gpus)
        host = next(view for view in host_services.host_views() if view.id == host_id)
        for gpu in (gpu for gpu in host.gpus if gpu.kind == "cuda"):
            engine_id = engines.ensure_engine(
                f"{name}-{gpu.index}",
                host_id=host_id,
                gpu_id=gpu.id,
                variant_id=variant.variant_id,
                slots=4,
                context_tokens=256,
                threads=1,
            )
            directory = Path(settings.HYDRA_HOME) / "engines" / str(engine_id)
            directory.mkdir(parents=True, exist_ok=True)
            process.to_file(directory / "run.json")
            Engine.objects.filter(pk=engine_id).update(
                state="ready", pid=pid, pid_start_time=process.start_time, http_port=ports.pop()
            )
    return read


class Watcher:
    """A site's watcher while a page is open: a loop of its own with connections that it keeps, as in hydra_site/pool_watcher.py.

    Use as a context manager.
    """

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="watcher", daemon=True)
        self._snapshot: PoolSnapshot | None = None
        self._counted_s = 0.0

    def __enter__(self) -> Watcher:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        asyncio.run_coroutine_threadsafe(close_client_session(), self._loop).result(10)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10)
        self._loop.close()

    def look(self) -> float:
        """Every row, every engine's slots, and what the page is sent. Returns the processor's seconds of all its threads."""
        asyncio.run_coroutine_threadsafe(self._look(), self._loop).result()
        took_s = self._processor_s() - self._counted_s
        self._counted_s += took_s
        return took_s

    async def _look(self) -> None:
        self._snapshot, _ = await take_snapshot(self._snapshot)
        self._snapshot.text_for(None)

    def _processor_s(self) -> float:
        """Of the loop, and of the threads in which it reads rows, which nobody else uses here."""
        threads = (one for one in threading.enumerate() if one is self._thread or one.name.startswith("database"))
        return sum(time.clock_gettime(time.pthread_getcpuclockid(one.ident)) for one in threads if one.ident)


def probe(name: str, inventory: Inventory) -> None:
    """What `probe_host` does on a host, as if this process were its head."""
    watch.look_at_host(name, Path(settings.HYDRA_HOME) / "no engines of others")
    engines.reconcile(name)
    host_services.record_probe(name, inventory.host, inventory.gpus)


@dataclass(order=True)
class Due:
    """Work that is to begin at a moment, and again each period after it. A float that it returns: computed in other threads."""

    at_s: float
    number: int
    work: Callable[[], object] = field(compare=False)
    measured: Work = field(compare=False)


class Timetable:
    """Does what is due, the earliest first, on THREADS threads with a database connection each, as a pool of that many would."""

    def __init__(self) -> None:
        self._due: list[Due] = []
        self._lock = threading.Lock()
        self._ended = threading.Event()
        self._failures: list[BaseException] = []

    def add(self, work: Callable[[], object], measured: Work, first_s: float = 0.0) -> None:
        heapq.heappush(self._due, Due(time.monotonic() + first_s, len(self._due), work, measured))

    def run(self, seconds: float) -> None:
        """Work for `seconds`. Raises what any of the work raised."""
        threads = [threading.Thread(target=self._work, daemon=True) for _ in range(THREADS)]
        for thread in threads:
            thread.start()
        self._ended.wait(seconds)
        self._ended.set()
        for thread in threads:
            thread.join(60)
        for failure in self._failures:
            raise failure

    def _work(self) -> None:
        try:
            while not self._ended.is_set():
                with self._lock:
                    due = heapq.heappop(self._due) if self._due and self._due[0].at_s <= time.monotonic() else None
                if due is None:
                    self._ended.wait(0.005)
                    continue
                began, cpu_began = time.monotonic(), time.thread_time()
                elsewhere_s = due.work()
                ended = time.monotonic()
                due.measured.cpu_s += time.thread_time() - cpu_began
                due.measured.cpu_s += elsewhere_s if isinstance(elsewhere_s, float) else 0.0
                due.measured.took_s.append(ended - began)
                due.at_s += due.measured.period_s
                if ended > due.at_s:
                    due.measured.late += 1
                    due.at_s = ended
                with self._lock:
                    heapq.heappush(self._due, due)
        except Exception as error:  # noqa: BLE001 told by `run`, which waits for the end
            self._failures.append(error)
            self._ended.set()
        finally:
            connection.close()


def run(hosts: int, gpus: int, seconds: float, variant: VariantView) -> dict[str, Work]:
    """The work of the whole pool for `seconds`. Raises what any of it raised."""
    with fake_engines(hosts * gpus) as (pid, ports), Watcher() as watcher:
        read = make_pool(hosts, gpus, variant, pid, ports)
        measured = {
            "pulse of a host": Work(BEAT_S),
            "probe of a host": Work(PROBE_S),
            "reconcile of the pool": Work(PROBE_S),
            "sending all probes": Work(PROBE_S),
            "sweep of hosts": Work(SWEEP_S),
            "sweep of reservations": Work(10.0),
            "snapshot for the panel": Work(1.0),
        }
        lost: list[str] = []
        table = Timetable()
        table.add(engines.reconcile, measured["reconcile of the pool"])
        table.add(probe_hosts, measured["sending all probes"])
        # The rows were made one after the other, so the first of them have not been heard of since.
        sweep = measured["sweep of hosts"]
        table.add(lambda: lost.extend(host_services.mark_lost_hosts(LOST_AFTER_S)), sweep, min(2 * BEAT_S, seconds / 2))
        table.add(reservation.sweep, measured["sweep of reservations"])
        table.add(watcher.look, measured["snapshot for the panel"])
        for number, (name, inventory) in enumerate(read.items()):
            # In life each host has a head of its own; here they take turns.
            beat, look = measured["pulse of a host"], measured["probe of a host"]
            table.add(lambda n=name, i=inventory: host_services.record_beat(n, i), beat, BEAT_S * number / hosts)
            table.add(lambda n=name, i=inventory: probe(n, i), look, PROBE_S * number / hosts)
        table.run(seconds)
        not_ready = Engine.objects.exclude(state="ready").count()
        if lost or not_ready:
            raise AssertionError(f"hosts were lost: {lost}; {not_ready} engines are not ready")
        return measured
