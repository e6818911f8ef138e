"""Looks at a host's engine processes and writes what it sees: ready, unhealthy, failed, adopted; ends those that nobody wants.

Each look is a whole one, so a lost or doubled look does no harm. It never starts an engine: that takes a command.
"""

import logging
from pathlib import Path

from engines import engine_rows, launch, native_faults
from engines.choices import LIVE, TERMINAL, EngineState, Wanted
from engines.engine_rows import EngineTask
from engines.process import START_TIME_TOLERANCE_S, ProcessRecord
from engines.runtime.arena import remove_abandoned

logger = logging.getLogger(__name__)


def look_at_host(host_name: str, engines_dir: Path, *, after_restart: bool = False) -> None:
    """Look at every engine of the host once, and end the processes of engines that no row names.

    `after_restart` says that the whole stack has just come up: an engine that did not survive is stopped, not failed.
    """
    launch.reap()
    tasks = engine_rows.engine_tasks(host_name)
    for task in tasks:
        look_at(task, after_restart=after_restart)
    _end_strays(engines_dir, {task.directory.name for task in tasks})
    # What a killed engine leaves in memory would stay until another one of the host makes an arena.
    if removed := remove_abandoned():
        logger.info("%d arenas of engines that are gone were removed", removed)


def look_at(task: EngineTask, *, after_restart: bool = False) -> None:
    """Compare one row with the process of its directory, and write what follows from that."""
    process = launch.find(task.directory)
    if process is None:
        _without_process(task, after_restart=after_restart)
    elif not _is_of(process, task):
        _unknown_process(task, process)
    elif after_restart and not _fits(task):
        _replace(task)
    else:
        launch.trim_log(task.directory)
        _check_health(task, process)


def _is_of(process: ProcessRecord, task: EngineTask) -> bool:
    if task.pid != process.pid or task.pid_start_time is None:
        return False
    return abs(task.pid_start_time - process.start_time) <= START_TIME_TOLERANCE_S


def _fits(task: EngineTask) -> bool:
    """Whether the running process was told what the row says now; what a newer release adds does not count."""
    told = launch.read_config(task.directory)
    return told is not None and launch.fits(told, task.config)


def _without_process(task: EngineTask, *, after_restart: bool) -> None:
    if task.state == EngineState.STOPPING or (after_restart and task.state in LIVE):
        engine_rows.mark_stopped(task.engine_id, [task.state])
    elif task.state in LIVE and task.pid is not None:
        # Noted before anybody may start it again, which is once it is failed.
        said = ("its process ended", launch.last_words(task.directory), native_faults.note_end(task))
        engine_rows.mark_failed(task.engine_id, task.epoch, "\n".join(filter(None, said)))
    # Starting without a process yet: the start task is between its claim and its launch; reconcile bounds that.


def _unknown_process(task: EngineTask, process: ProcessRecord) -> None:
    """A process of this engine runs that the row does not know: adopted if it is what is wanted, else ended."""
    if task.state == EngineState.STOPPING:
        return
    told = launch.read_config(task.directory)
    if task.wanted == Wanted.RUNNING and told is not None and _fits(task):
        answer = launch.health(told.port, told.host)
        # One that was given up comes back only if it really recovered.
        worth_it = answer == "ok" or (answer == "loading" and task.state != EngineState.FAILED)
        if worth_it and engine_rows.adopt(task, process.pid, process.start_time, told):
            logger.info("engine %d: adopted its running process %d", task.engine_id, process.pid)
            adopted = engine_rows.engine_task(task.engine_id)
            if adopted is not None:
                _check_health(adopted, process)
        # Not answering yet: it may have been started this moment. A start command ends it if it never does.
    elif task.state in TERMINAL or told is None or not _fits(task):
        _replace(task)


def _replace(task: EngineTask) -> None:
    now = engine_rows.engine_task(task.engine_id)
    if now is not None and (now.epoch, now.state) != (task.epoch, task.state):
        return  # A command came in since the row was read; the next look sees what it made of it.
    logger.info("engine %d: its running process is not what is wanted and is ended", task.engine_id)
    launch.end_engine(task.directory)
    engine_rows.mark_stopped(task.engine_id, LIVE)


def _check_health(task: EngineTask, process: ProcessRecord) -> None:
    if task.http_port is None or task.state == EngineState.STOPPING:
        return
    answer = launch.health(task.http_port, task.config.host)
    if answer == "ok":
        if engine_rows.mark_ready(task.engine_id, process.pid):
            native_faults.note_ready(task, process.pid)
    elif answer == "loading" and task.state == EngineState.STARTING:
        share = launch.loaded_share(task.http_port, task.config.host)
        if share is not None:
            engine_rows.record_progress(task.engine_id, process.pid, share)
    elif answer != "loading":
        said = "does not answer its health check" if answer is None else f"says of itself: {answer}"
        engine_rows.mark_unhealthy(task.engine_id, process.pid, f"the process {process.pid} {said}")


def _end_strays(engines_dir: Path, known: set[str]) -> None:
    """End processes whose row was deleted. Their directory stays: its log may be the only trace of why."""
    if not engines_dir.is_dir():
        return
    for directory in engines_dir.iterdir():
        if directory.name not in known and (directory / "run.json").exists():
            launch.end_engine(directory)
