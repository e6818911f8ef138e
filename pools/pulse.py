"""A host's pulse: its devices sampled every second, its row written every BEAT_S, its minutes every minute.

A thread of the head's fast worker, so that a host is heard of as long as that lives, however many tasks wait in its queue. The
samples stay in a ring of RING_S seconds; what the database gets is the latest of them, and one row a minute and device.
"""

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from datetime import UTC, datetime, timedelta

from django.db import Error as DatabaseError
from django.db import connection

from pools import gpu_minutes, host_services
from pools.gpu_minutes import MinuteView
from pools.probe import read_inventory
from pools.readings import GpuReading, Inventory

SAMPLE_S = 1.0
BEAT_S = 2.0
RING_S = 120
# While the database is away; older minutes are given up.
MAX_WAITING_MINUTES = 64 * 10
LOG_EVERY_S = 60.0

logger = logging.getLogger(__name__)


class Pulse(threading.Thread):
    """Runs until `stop`. `read` reads the machine; tests give their own."""

    def __init__(self, host_name: str, read: Callable[[], Inventory] = read_inventory) -> None:
        super().__init__(name="pulse", daemon=True)
        self.ring: deque[tuple[datetime, Inventory]] = deque(maxlen=int(RING_S / SAMPLE_S))
        self._host_name = host_name
        self._read = read
        self._stopped = threading.Event()
        self._waiting: deque[tuple[str, MinuteView]] = deque(maxlen=MAX_WAITING_MINUTES)
        self._minute: datetime | None = None
        self._told_at = float("-inf")

    def run(self) -> None:
        due = time.monotonic()
        beat_due = due
        try:
            while not self._stopped.wait(max(0.0, due - time.monotonic())):
                try:
                    self.sample(datetime.now(UTC))
                    if time.monotonic() >= beat_due:
                        beat_due = time.monotonic() + BEAT_S - SAMPLE_S / 2
                        self.beat()
                except Exception as error:  # noqa: BLE001 a reading that nobody foresaw must not make the host look lost
                    self._tell("a beat of the host's pulse failed", error, exc_info=error)
                # After a long stall the lost seconds are left out, not made up for.
                due = max(due + SAMPLE_S, time.monotonic())
        finally:
            connection.close()

    def stop(self) -> None:
        """End after the sample under way."""
        self._stopped.set()

    def latest(self, max_age_s: float = 2 * BEAT_S) -> Inventory | None:
        """The last sample, unless it is older than that."""
        if not self.ring:
            return None
        at, inventory = self.ring[-1]
        return inventory if datetime.now(UTC) - at < timedelta(seconds=max_age_s) else None

    def sample(self, at: datetime) -> None:
        """Read the devices once; the first sample of a minute sums the one before it up."""
        minute = at.replace(second=0, microsecond=0)
        if self._minute is not None and minute > self._minute:
            self._waiting.extend(
                _minutes(self._minute, [taken for taken_at, taken in self.ring if _in(taken_at, self._minute)])
            )
        self._minute = minute
        self.ring.append((at, self._read()))

    def beat(self) -> None:
        """Write the latest sample and the minutes that wait. A database that is away is told of once a minute."""
        if not self.ring:
            return
        try:
            host_services.record_beat(self._host_name, self.ring[-1][1])
            minutes = list(self._waiting)
            gpu_minutes.record_minutes(self._host_name, minutes)
            for _ in minutes:
                self._waiting.popleft()
        except DatabaseError as error:
            connection.close()
            self._tell("the host's pulse cannot be written, the database does not answer", error)

    def _tell(self, words: str, error: Exception, exc_info: Exception | None = None) -> None:
        if time.monotonic() - self._told_at > LOG_EVERY_S:
            self._told_at = time.monotonic()
            logger.warning("%s: %s", words, error, exc_info=exc_info)


_pulse: Pulse | None = None


def start(host_name: str) -> None:
    """Begin this process's pulse."""
    global _pulse
    if _pulse is None:
        _pulse = Pulse(host_name)
        _pulse.start()


def stop() -> None:
    """End this process's pulse, if it has one."""
    global _pulse
    if _pulse is not None:
        _pulse.stop()
        _pulse = None


def current_inventory() -> Inventory:
    """The machine as the pulse has just read it, or as it is read now where no pulse runs."""
    return (_pulse.latest() if _pulse is not None else None) or read_inventory()


def _in(at: datetime, minute: datetime) -> bool:
    return minute <= at < minute + timedelta(minutes=1)


def _minutes(began_at: datetime, samples: list[Inventory]) -> list[tuple[str, MinuteView]]:
    by_uuid: dict[str, list[GpuReading]] = {}
    for inventory in samples:
        for gpu in inventory.gpus:
            by_uuid.setdefault(gpu.uuid, []).append(gpu)
    return [(uuid, gpu_minutes.summed_up(began_at, readings)) for uuid, readings in by_uuid.items()]
