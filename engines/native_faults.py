"""Engines that faults of native code ended, and the builds of llama.cpp that those speak against.

A build that crashed engines is not taken again (engines/build_trust.py says when): their next start takes the build before it, or
on a CPU the bindings' own library. An engine on a card without another build waits for a person to have it built anew.
"""

from __future__ import annotations

import logging
from datetime import UTC, datetime, timedelta
from pathlib import Path
from signal import Signals

from django.conf import settings

from engines import build_trust, launch
from engines.build_trust import Fault
from engines.ending import FATAL
from engines.engine_rows import EngineTask
from engines.launch import LoadedBuild
from engines.native_library import CPU, Build, builds, fitting
from pools import jobs
from pools.db import database_now

# One that served for longer and then crashed did so by what it was asked.
SOON_S = 600.0

logger = logging.getLogger(__name__)


def note_ready(task: EngineTask, pid: int) -> None:
    """An engine came up: that speaks for its build."""
    loaded = launch.loaded_build(task.directory, pid)
    build = _build_of(loaded)
    if loaded is None or build is None:
        return
    try:
        build_trust.prove(build.folder, loaded.model)
    except OSError as error:
        logger.error("engine %d came up, which could not be noted beside its llama.cpp: %s", task.engine_id, error)


def note_end(task: EngineTask) -> str:
    """An engine's process ended: what it speaks against is noted, once for each process. Returns what the row is to say of that;
    "" for nothing."""
    loaded = None if task.pid is None else launch.loaded_build(task.directory, task.pid)
    if loaded is None or not _is_soon(task):
        return ""
    signal = launch.native_fault(task.directory, loaded)
    if signal is None:
        return ""
    try:
        return _blamed(task, loaded, signal)
    except OSError as error:
        logger.error("engine %d: its fault could not be noted beside its llama.cpp: %s", task.engine_id, error)
        return ""


def refusal(home: Path, arch: str) -> str:
    """Why there is no llama.cpp for a card's engine although there are builds for it, and what to do; "" where there are none."""
    crashed = [build for build in fitting(home, arch, launch.installed_package()) if build.trust.faults]
    if not crashed:
        return ""
    last = crashed[0]
    return (
        f"llama.cpp as it was built for its card, which is {arch}, crashes (build {last.manifest.key}: {last.trust.told()}), and"
        f" there is no other. {_remedy(last)}"
    )


def tell_of_builds(host_name: str) -> None:
    """Have the jobs of this host's builds say which of them are not used any more, and why. Only of those that would be."""
    home, package = Path(settings.HYDRA_HOME).resolve(), launch.installed_package()
    marked = [build for build in builds(home) if build.trust.is_marked]
    told = {}
    for build in marked:
        if any(fitting(home, arch, package)[:1] == [build] for arch in build.manifest.archs):
            told[str(build.library_path)] = (build.manifest.archs, _told(build), _remedy(build))
    jobs.tell_of_builds(host_name, told)


def _is_soon(task: EngineTask) -> bool:
    return task.ready_at is None or database_now() - task.ready_at <= timedelta(seconds=SOON_S)


def _build_of(loaded: LoadedBuild | None) -> Build | None:
    """The build as the process had it; None where it was built anew since, and for the bindings' own library."""
    if loaded is None or not loaded.key:
        return None
    return next((build for build in builds(Path(settings.HYDRA_HOME)) if loaded.is_of(build)), None)


def _blamed(task: EngineTask, loaded: LoadedBuild, signal: Signals) -> str:
    home = Path(settings.HYDRA_HOME)
    build = _build_of(loaded)
    if loaded.key and build is None:
        return ""
    others = [other for other in builds(home) if build is None or other.folder != build.folder]
    is_elsewhere = any(fault.model == loaded.model for other in others for fault in other.trust.faults)
    for other in others:
        build_trust.excuse(other.folder, loaded.model)
    if build is None:
        return ""  # of the bindings' own: there is nothing behind it
    words = launch.last_words(task.directory).splitlines()
    fault = Fault(
        at=datetime.now(UTC).isoformat(timespec="seconds"),
        signal=signal.name,
        engine=str(task.engine_id),
        model=loaded.model,
        process=f"{loaded.pid} {loaded.start_time}",
        said=words[-1] if words and FATAL not in words[-1] else "",
        elsewhere=is_elsewhere,
    )
    trust = build_trust.blame(build.folder, fault)
    if trust.serves(loaded.model):
        return ""
    arch = task.config.card_arch
    following = launch.build_for(home, arch, loaded.model)
    if following is not None and following.folder == build.folder:
        return ""  # a card's only one, which had its second fault with another model
    if following is not None:
        then = f"its next start takes build {following.manifest.key}"
    elif arch:
        then = f"there is no other for its card. {_remedy(build)}"
    else:
        then = "its next start takes the bindings' own library"
    said = f"llama.cpp as it was built here (build {build.manifest.key}) is not used for it any more: {trust.told()}; {then}"
    logger.error("engine %d: %s", task.engine_id, said)
    return said


def _told(build: Build) -> str:
    trust = build.trust
    models = ", ".join(sorted(Path(model).name for model in trust.given_up_for))
    whom = "is not used any more" if trust.is_distrusted or not models else f"is not used any more for {models}"
    return f"{whom}: {trust.told()} (build {build.manifest.key})"


def _remedy(build: Build) -> str:
    asked = " ".join(f"--arch {arch}" for arch in build.manifest.archs or (CPU,))
    return f"Build it again on this host: manage.py build-native {asked}"
