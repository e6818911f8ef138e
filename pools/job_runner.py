"""What a head does with a job: the right process, its progress into the row, and at the end what it brought into rows."""

import logging
import sys
from pathlib import Path
from typing import Any

from celery.worker import state as worker_state
from django.conf import settings

from pools import catalogue, job_process, jobs, services
from pools.choices import JobKind
from pools.errors import CatalogueError, ModelUnknown
from pools.fetch import Fetched
from pools.hub_catalogue import lookup_hub
from pools.job_process import Outcome
from pools.jobs import JobView
from pools.model_tags import is_projector, projector_tags

PROJECT_DIR = Path(__file__).resolve().parent.parent
KEPT_LOGS = 50
# Behind everything else on the machine: engines serve meanwhile.
BUILD_NICENESS = 19

logger = logging.getLogger(__name__)


def run(job: JobView) -> None:
    """Does the job's work and writes how it ended. A stopping head puts it back; what is half done is taken up again."""
    home = Path(settings.HYDRA_HOME)
    logs = home / "logs"
    for old in sorted(logs.glob("job-*.log"), key=lambda path: path.stat().st_mtime)[:-KEPT_LOGS]:
        old.unlink(missing_ok=True)
    try:
        outcome = job_process.run(
            command(job, home),
            PROJECT_DIR,
            logs / f"job-{job.id}.log",
            lambda stage, done, total: (
                worker_state.should_stop is None and jobs.progress(job.id, stage, done, total, attempt=job.attempt)
            ),
        )
    except OSError as error:
        jobs.fail(job.id, f"its process could not be started: {error}", attempt=job.attempt)
        return
    if outcome.stopped:
        jobs.put_back(job.id, attempt=job.attempt)  # nothing happens to a row that was cancelled
    elif outcome.code:
        jobs.fail(job.id, *complaint(outcome), attempt=job.attempt)
    elif job.kind == JobKind.BUILD:
        jobs.finish(job.id, outcome.last, attempt=job.attempt)
    else:
        _take_in(job, outcome.last, home / "models")


def command(job: JobView, home: Path) -> list[str]:
    """The process that does it."""
    if job.kind == JobKind.BUILD:
        archs = [argument for arch in job.reference.split() for argument in ("--arch", arch)]
        options = ["--json", "--nice", str(BUILD_NICENESS), "--home", str(home)]
        return [sys.executable, "-m", "native.build_native", *options, *archs]
    return [sys.executable, "-m", "pools.fetch", job.reference, str(home / "models")]


def complaint(outcome: Outcome) -> tuple[str, str]:
    """Message and hint of a process that failed."""
    if "error" in outcome.last:
        return str(outcome.last["error"]), str(outcome.last.get("hint", ""))
    return outcome.errors or f"its process ended with {outcome.code}", ""


def _take_in(job: JobView, last: dict[str, Any], models_dir: Path) -> None:
    """Makes the file that was fetched known to the pool."""
    try:
        fetched = Fetched(**last)
        register(fetched, job.host, job.name, models_dir)
    except TypeError:
        jobs.fail(job.id, f"the download's last word was {last!r}", attempt=job.attempt)
    except CatalogueError as error:
        jobs.fail(job.id, error.message, error.hint, attempt=job.attempt)
    else:
        jobs.finish(job.id, last, attempt=job.attempt)


def register(fetched: Fetched, host_name: str, name: str, models_dir: Path) -> str:
    """Write model, variant and file of what was fetched, or give a model its projector; the model's name.

    Raises CatalogueError for what is neither, or a projector for no model that is here.
    """
    path = Path(fetched.path)
    if is_projector(path):
        return _give_projector(path, name or fetched.name)
    model = catalogue.inspect(path, models_dir)
    name = name or fetched.name or catalogue.own_name(model.header)
    entry = lookup_hub(fetched.name)
    known = next((entry for entry in catalogue.CATALOGUE if entry.name == fetched.name), None)
    described = entry or known
    services.register_gguf(
        name,
        model.header.path,
        header=model.header,
        content_digest=model.sha256,
        display_name=described.display_name if described else "",
        defaults=described.defaults if described else None,
        source=fetched.source,
        is_verified=fetched.verified,
        kv_family=entry.kv_family if entry else "",
        host_name=host_name,
    )
    return name


def _give_projector(path: Path, name: str) -> str:
    projector_tags(path)
    if not name or not services.set_projector(name, path):
        raise ModelUnknown(name, [model.name for model in services.model_views()])
    return name
