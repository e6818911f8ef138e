"""Tasks of the pool as a whole. They run on the queue `control`, may be lost or run twice, and do no harm either way.

`run_job` runs on a host's slow queue.
"""

import threading
import time

from celery import shared_task
from django.conf import settings

from pools import gpu_minutes, job_runner, jobs, join_tokens, reservation, services


class _SweepClock:
    """When hosts were last swept in this process. A long pause was no silence of theirs, but of this process or the database."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._swept_at = float("-inf")

    def paused(self) -> bool:
        """Whether the last sweep is too long ago to tell which hosts were silent since; this one counts as done."""
        with self._lock:
            before, self._swept_at = self._swept_at, time.monotonic()
        return self._swept_at - before > services.LOST_AFTER_S


_clock = _SweepClock()


@shared_task(ignore_result=True)
def sweep_hosts() -> None:
    """Mark hosts that have gone silent as lost."""
    services.host_names()  # Raises while the database is away, so that the sweep after its return counts as the first one.
    if not _clock.paused():
        services.mark_lost_hosts()


@shared_task(ignore_result=True)
def sweep_reservations() -> None:
    """Free what has ended and what its owner left."""
    reservation.sweep()


@shared_task(ignore_result=True)
def sweep_minutes() -> None:
    """Keep the devices' history bounded, and forget tokens that nobody can use any more."""
    gpu_minutes.sweep_minutes()
    join_tokens.sweep()


@shared_task(ignore_result=True)
def run_job(job_id: int) -> None:
    """Do a job's work; on the slow queue of the host that the job names."""
    job = jobs.claim(job_id, settings.HYDRA_HOST_NAME)
    if job is not None:
        job_runner.run(job)


@shared_task(ignore_result=True)
def sweep_jobs() -> None:
    """Send jobs again that nobody took, and put back those whose head fell silent."""
    jobs.sweep()
