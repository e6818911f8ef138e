"""An engine whose model file is not on its host: it is fetched from where it came from, and the engine waits."""

from __future__ import annotations

from pathlib import Path

from django.conf import settings

from engines import engine_rows
from engines.engine_rows import EngineTask
from engines.models import Engine
from pools import jobs
from pools.choices import OPEN_JOBS, JobKind, JobState


def waits_for_file(task: EngineTask) -> bool:
    """Whether the engine has no file to start with. Then its row says what is done about that, and the start is over.

    A fetch that failed or that somebody cancelled is not tried again by itself: a person asks again, in the admin.
    """
    if Path(task.config.model_path).exists():
        return False
    row = Engine.objects.filter(pk=task.engine_id).values_list("variant__source", "variant__model__name").first()
    if row is None or not row[0]:
        return False  # the engine itself tells that there is no such file
    source, name = row
    last = jobs.newest(settings.HYDRA_HOST_NAME, JobKind.DOWNLOAD, source)
    if last is None or last.state == JobState.DONE or last.state in OPEN_JOBS:
        job_id = jobs.enqueue(settings.HYDRA_HOST_NAME, JobKind.DOWNLOAD, source, name)
        engine_rows.hold(task.engine_id, task.epoch, f"its model is being fetched to this host (job {job_id})")
    else:
        said = last.message or last.state
        engine_rows.mark_failed(
            task.engine_id, task.epoch, f"its model is not on this host, and fetching it (job {last.id}) ended: {said}"
        )
    return True
