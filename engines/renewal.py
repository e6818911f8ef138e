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

from engines import draining, engine_rows, launch, native_faults, services
from engines.choices import EngineState, Wanted
from engines.engine_rows import EngineTask
from engines.models import Engine
from engines.native_library import builds
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
    """Whether a start would give it a newer library than its process has. Not where that one crashed engines, and not an older
    one: what it runs with serves it well."""
    home = Path(settings.HYDRA_HOME)
    wanted = launch.build_for(home, task.config.card_arch, task.config.model_path)
    process = launch.find(task.directory)
    if wanted is None or process is None:
        return False
    loaded = launch.library_of(process)
    if loaded is None or loaded == str(wanted.library_path):
        return False
    of_loaded = next((build for build in builds(home) if loaded == str(build.library_path)), None)
    return of_loaded is None or of_loaded.manifest.built_at < wanted.manifest.built_at


def waits_for_library(task: EngineTask) -> bool:
    """Whether the engine's card cannot be used before its llama.cpp is built, or built again. Then its row says how that stands,
    and the start is over; it is tried again by itself.

    False too where nobody asked for a build: the engine then tells what to do.
    """
    arch = task.config.card_arch
    home = Path(settings.HYDRA_HOME)
    if not arch or launch.has_library(home, arch, task.config.model_path):
        return False
    job = jobs.newest_build(settings.HYDRA_HOST_NAME, arch)
    crashed = native_faults.refusal(home, arch)
    said = crashed
    if job is not None and job.state in OPEN_JOBS:
        said = f"llama.cpp is being built for its card, which is {arch} (job {job.id})"
    elif job is not None and job.state != JobState.DONE:
        why = f"building one (job {job.id}) ended: {f'{job.message or job.state} {job.hint}'.strip()}"
        said = f"{crashed}; {why}" if crashed else f"there is no llama.cpp for its card, which is {arch}, and {why}"
    if said:
        engine_rows.hold(task.engine_id, task.epoch, said)
    return bool(said)


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
