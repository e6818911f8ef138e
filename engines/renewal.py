"""Engines and the llama.cpp that is built for their device while they run, or before they can.

One that runs with another library than it would get now is started anew, once nobody has asked it for a while and its
conversations are safe: their next turns take them from the host's store. One on a card waits until there is a library with code
for it.
"""

from __future__ import annotations

import logging
from datetime import timedelta
from pathlib import Path

from django.conf import settings
from django.db.models import Q
from django.db.models.functions import Now

from engines import draining, engine_rows, launch, services
from engines.choices import EngineState, Wanted
from engines.engine_rows import EngineTask
from engines.models import Engine
from pools import jobs
from pools.choices import OPEN_JOBS, JobState

# Whoever reads an answer and writes the next question is not made to wait for it.
IDLE_S = 60.0

logger = logging.getLogger(__name__)


def renew_idle(host_name: str) -> int:
    """Begin to start anew those engines of this host that have a newer library and nothing to do; returns how many."""
    old = Now() - timedelta(seconds=IDLE_S)
    idle = Q(last_used_at__isnull=True) | Q(last_used_at__lt=old)
    due = Engine.objects.filter(
        idle,
        host__name=host_name,
        host__duty="active",
        wanted=Wanted.RUNNING,
        state=EngineState.READY,
        state_since__lt=old,
        takes_new=True,
    ).exclude(held_until__gt=Now())
    renewed = 0
    for engine_id in due.values_list("pk", flat=True):
        task = engine_rows.engine_task(engine_id)
        if task is not None and is_outdated(task) and _loses_nothing(task) and services.renew(engine_id):
            logger.info("engine %d is started anew with the llama.cpp that was built for it", engine_id)
            renewed += 1
    return renewed


def is_outdated(task: EngineTask) -> bool:
    """Whether its process was started with another library than it would be now."""
    wanted = launch.library_environment(Path(settings.HYDRA_HOME), task.config.card_arch)
    process = launch.find(task.directory)
    if not wanted or process is None:
        return False
    loaded = launch.library_of(process)
    return loaded is not None and loaded not in wanted.values()


def waits_for_library(task: EngineTask) -> bool:
    """Whether the engine's card cannot be used before its llama.cpp is built. Then its row says how that stands, and the start is
    over; it is tried again by itself.

    False too where nobody asked for a build: the engine then tells what to do.
    """
    arch = task.config.card_arch
    if not arch or launch.has_library(Path(settings.HYDRA_HOME), arch):
        return False
    job = jobs.newest_build(settings.HYDRA_HOST_NAME, arch)
    if job is None or job.state == JobState.DONE:
        return False
    if job.state in OPEN_JOBS:
        said = f"llama.cpp is being built for its card, which is {arch} (job {job.id})"
    else:
        why = f"{job.message or job.state} {job.hint}".strip()
        said = f"there is no llama.cpp for its card, which is {arch}, and building one (job {job.id}) ended: {why}"
    engine_rows.hold(task.engine_id, task.epoch, said)
    return True


def _loses_nothing(task: EngineTask) -> bool:
    """Whether it runs no request, and what it keeps is in its host's store, too, or is nothing."""
    try:
        slots = draining.slots_of(task.engine_id)
    except ConnectionRefusedError:
        return False  # Its process has ended; the next look says so.
    if slots is None or any(slot["is_processing"] for slot in slots):
        return False
    told = launch.read_config(task.directory)
    is_kept = told is not None and told.store_port > 0 and task.config.store_port > 0
    return is_kept or not any(slot["cached_tokens"] for slot in slots)
