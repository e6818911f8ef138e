"""The only writer of jobs: work that takes minutes or hours on one host. And what other apps may ask about them.

A job's message may be lost, come late or come twice: the row decides, by conditional UPDATEs whose row count is checked, and a
sweep sends again what is due. Times and ages are the database's.
"""

import logging
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from functools import partial
from typing import Any

from celery import current_app
from django.db import IntegrityError, transaction
from django.db.models import F, Q
from django.db.models.functions import Now
from kombu.exceptions import OperationalError as BrokerError

from pools.choices import OPEN_JOBS, JobKind, JobState
from pools.errors import HostUnknown
from pools.events import publish_on_commit
from pools.model_reference import without_query
from pools.models import Host, Job

# A running job tells at least every few seconds; after so long its process is gone.
SILENT_S = 60.0
# A message that has not been taken for so long is dropped and sent again; a slow queue may be busy with other jobs.
RESEND_S = 60.0
MAX_ATTEMPTS = 5
MAX_MESSAGE_CHARS = 4000
SHOWN_JOBS = 100
KEPT_DAYS = 30

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class JobView:
    """A job as pages and its head see it. `done` of `total`: steps of a build, bytes of a download; total 0: not known yet.

    `subject` is what pages show; `reference` is the whole of it, which may be a signed URL. `attempt` is the run that was
    claimed: one that fell silent, was put back and goes on after all must not write into the next.
    """

    id: int
    host: str
    kind: str
    subject: str
    name: str
    state: str
    stage: str
    done: int
    total: int
    message: str
    hint: str
    result: dict[str, Any]
    created_at: datetime
    started_at: datetime | None
    ended_at: datetime | None
    reference: str = field(default="", repr=False)
    attempt: int = 0

    @property
    def percent(self) -> float | None:
        return round(100 * self.done / self.total, 1) if self.total else None


def enqueue(host_name: str, kind: JobKind, subject: str, name: str = "") -> int:
    """Ask a host for the work; the id of the job, which is an open one for the same if there is one.

    Raises HostUnknown.
    """
    host = Host.objects.filter(name=host_name).first()
    if host is None:
        raise HostUnknown(f"no host is called {host_name!r}")
    same = Job.objects.filter(host=host, kind=kind, subject=subject, state__in=OPEN_JOBS)
    for _ in range(2):
        found = same.values_list("pk", flat=True).first()
        if found is not None:
            return int(found)
        try:
            with transaction.atomic():
                job = Job.objects.create(host=host, kind=kind, subject=subject, name=name, sent_at=Now())
                transaction.on_commit(partial(_send, job.pk, host_name), robust=True)
                publish_on_commit("job", job.pk)
            return job.pk
        except IntegrityError:
            continue  # somebody else asked for the same in this very moment
    raise RuntimeError(f"a job for {subject} can neither be made nor found")


def claim(job_id: int, host_name: str) -> JobView | None:
    """Take a queued job of this host: it runs now. None when it is not due, which is a normal answer."""
    due = Job.objects.filter(pk=job_id, host__name=host_name, state=JobState.QUEUED)
    with transaction.atomic():
        changed = due.update(
            state=JobState.RUNNING, started_at=Now(), seen_at=Now(), stage="starting", attempts=F("attempts") + 1
        )
        if not changed:
            return None
        publish_on_commit("job", job_id)
    return _view(Job.objects.select_related("host").get(pk=job_id))


def progress(job_id: int, stage: str, done: int, total: int, *, attempt: int | None = None) -> bool:
    """Write how far it is. False: it does not run any more (of `attempt`: not that run of it); its process must end."""
    with transaction.atomic():
        running = Job.objects.filter(_run(attempt), pk=job_id, state=JobState.RUNNING)
        if not running.update(stage=stage[:40], done=done, total=total, seen_at=Now()):
            return False
        publish_on_commit("job", job_id)
    return True


def finish(job_id: int, result: dict[str, Any], *, attempt: int | None = None) -> bool:
    """It is done."""
    return _end(
        job_id, JobState.DONE, also=_run(attempt), result=result, done=F("total"), stage="", message="", hint=""
    )


def fail(job_id: int, message: str, hint: str = "", *, attempt: int | None = None) -> bool:
    """It cannot be done; a person may ask again."""
    return _end(job_id, JobState.FAILED, also=_run(attempt), message=message[-MAX_MESSAGE_CHARS:], hint=hint[:500])


def cancel(job_id: int) -> bool:
    """Somebody does not want it any more; a running one's process ends within seconds. What it left is taken up by the next."""
    return _end(job_id, JobState.CANCELLED, OPEN_JOBS)


def put_back(job_id: int, *, attempt: int | None = None) -> bool:
    """Its head stops: the job waits for the next one."""
    return _put_back(job_id, _run(attempt))


def _put_back(job_id: int, also: Q) -> bool:
    with transaction.atomic():
        if not Job.objects.filter(also, pk=job_id, state=JobState.RUNNING).update(
            state=JobState.QUEUED, stage="", sent_at=None
        ):
            return False
        publish_on_commit("job", job_id)
    return True


def sweep() -> int:
    """Bring what is stuck a step further: send again what nobody took, put back what fell silent. Returns how many.

    Jobs that ended KEPT_DAYS ago are forgotten.
    """
    Job.objects.filter(ended_at__lt=Now() - timedelta(days=KEPT_DAYS)).delete()
    silent = Q(seen_at__lt=Now() - timedelta(seconds=SILENT_S))
    steps = 0
    for pk, attempts in Job.objects.filter(silent, state=JobState.RUNNING).values_list("pk", "attempts"):
        # Still silent when it is written: it may have told something since.
        if attempts < MAX_ATTEMPTS:
            steps += _put_back(pk, silent)
        else:
            steps += _end(pk, JobState.FAILED, also=silent, message="its head stopped, again and again")
    unsent = Q(sent_at=None) | Q(sent_at__lt=Now() - timedelta(seconds=RESEND_S))
    due = Job.objects.filter(unsent, state=JobState.QUEUED)
    for pk, host_name in due.values_list("pk", "host__name"):
        with transaction.atomic():
            if due.filter(pk=pk).update(sent_at=Now()):
                transaction.on_commit(partial(_send, pk, host_name), robust=True)
                steps += 1
    return steps


def newest(host_name: str, kind: JobKind, subject: str) -> JobView | None:
    """The last job of a host for this, or None."""
    job = Job.objects.select_related("host").filter(host__name=host_name, kind=kind, subject=subject).first()
    return None if job is None else _view(job)


def newest_build(host_name: str, arch: str) -> JobView | None:
    """The last native build of a host that was for this architecture, perhaps with others; None if there was none."""
    builds = Job.objects.select_related("host").filter(host__name=host_name, kind=JobKind.BUILD, subject__contains=arch)
    return next((_view(job) for job in builds[:SHOWN_JOBS] if arch in job.subject.split()), None)


def ended_builds() -> tuple[JobView, ...]:
    """Of each host and each set of architectures the newest native build, if it is done or has failed."""
    builds = Job.objects.select_related("host").filter(kind=JobKind.BUILD)
    newest = builds.order_by("host_id", "subject", "-pk").distinct("host_id", "subject")
    return tuple(_view(job) for job in newest if job.state in (JobState.DONE, JobState.FAILED))


def tell_of_builds(host_name: str, told: Mapping[str, tuple[Collection[str], str, str]]) -> None:
    """Have jobs that built something tell what became of it since: message and hint for each library that is not well, by its
    folder, with the architectures that it is for. All others are well, or were built again."""
    done = Job.objects.filter(host__name=host_name, kind=JobKind.BUILD, state=JobState.DONE)
    done = done if told else done.exclude(message="", hint="")
    for pk, subject, result, *now in done.values_list("pk", "subject", "result", "message", "hint")[:SHOWN_JOBS]:
        # A job with several libraries names its last one.
        own = [
            (message, hint)
            for library, (archs, message, hint) in told.items()
            if library == result.get("library") or set(archs) < set(subject.split())
        ]
        message, hint = own[0] if own else ("", "")
        changed = {"message": message[-MAX_MESSAGE_CHARS:], "hint": hint[:500]}
        if list(changed.values()) != now:
            with transaction.atomic():
                Job.objects.filter(pk=pk, state=JobState.DONE).update(**changed)
                publish_on_commit("job", pk)


def job_views(host_name: str | None = None, *, only_open: bool = False) -> tuple[JobView, ...]:
    """The newest jobs, at most SHOWN_JOBS."""
    jobs = Job.objects.select_related("host")
    if host_name is not None:
        jobs = jobs.filter(host__name=host_name)
    if only_open:
        jobs = jobs.filter(state__in=OPEN_JOBS)
    return tuple(_view(job) for job in jobs[:SHOWN_JOBS])


def _run(attempt: int | None) -> Q:
    return Q() if attempt is None else Q(attempts=attempt)


def _end(
    job_id: int,
    state: JobState,
    of: tuple[JobState, ...] = (JobState.RUNNING,),
    *,
    also: Q | None = None,
    **values: Any,
) -> bool:
    with transaction.atomic():
        if not Job.objects.filter(also or Q(), pk=job_id, state__in=of).update(state=state, ended_at=Now(), **values):
            return False
        publish_on_commit("job", job_id)
    logger.info("job %d: %s", job_id, state.value)
    return True


def _send(job_id: int, host_name: str) -> None:
    try:
        current_app.send_task("pools.tasks.run_job", args=[job_id], queue=f"host.{host_name}.slow", expires=RESEND_S)
    except BrokerError as error:
        logger.warning("job %d was not sent, beat will repeat it: %s", job_id, error)


def _view(job: Job) -> JobView:
    return JobView(
        id=job.pk,
        host=job.host.name,
        kind=job.kind,
        subject=without_query(job.subject),
        name=job.name,
        state=job.state,
        stage=job.stage,
        done=job.done,
        total=job.total,
        message=job.message,
        hint=job.hint,
        result=job.result,
        created_at=job.created_at,
        started_at=job.started_at,
        ended_at=job.ended_at,
        reference=job.subject,
        attempt=job.attempts,
    )
