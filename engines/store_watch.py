"""Keeps a host's store: looks at its process, starts it when there is none, and writes what it sees.

Each look is a whole one, so a lost or doubled look does no harm. Unlike an engine a store waits for no command: a host has
one as long as its settings give it room.
"""

import logging
from dataclasses import replace
from pathlib import Path

from django.conf import settings

from engines import detached, store_calls, store_launch, store_rows
from engines.choices import STORE_LIVE, StoreState
from engines.errors import EngineError, LaunchError
from engines.process import START_TIME_TOLERANCE_S, ProcessRecord
from engines.reconcile import LAUNCH_DEADLINE_S, UNHEALTHY_DEADLINE_S, backoff_s
from engines.store.config import StoreConfig
from engines.store_rows import Figures, StoreRow

# Reading a large memory again after a crash takes some seconds.
START_DEADLINE_S = 60.0

logger = logging.getLogger(__name__)


def look_at_store(host_name: str, directory: Path, *, after_restart: bool = False) -> None:
    """Look at the host's store once, and bring it nearer to what is wanted: running, unless it has no room.

    `after_restart` says that the whole stack has just come up: a store that was told other settings is then replaced (its
    memory stays), and one that did not survive is no failure. What the machine refuses is logged, and tried again: a host works
    without its store.
    """
    try:
        _look(host_name, directory, after_restart=after_restart)
    except OSError as error:
        logger.error("the store of %s could not be looked after: %s", host_name, error)


def _look(host_name: str, directory: Path, *, after_restart: bool) -> None:
    detached.reap()
    row = store_rows.ensure_store(host_name)
    if row is None:
        return
    wanted = _wanted(host_name, row, directory)
    process = store_launch.find(directory)
    if wanted is None:
        store_launch.end_store(directory)
        if row.state != StoreState.OFF:
            store_launch.forget_memory(directory)
            store_rows.mark_off(row.store_id)
        return
    if process is not None and after_restart and not _fits(directory, wanted):
        logger.info("the store is started anew with other settings")
        store_launch.end_store(directory)
        process = None
    if process is None:
        _without_process(row, directory, after_restart=after_restart)
        _start_if_due(host_name, wanted, directory)
        return
    told = store_launch.read_config(directory)
    if told is None:
        store_launch.end_store(directory)
        store_rows.mark_failed(row.store_id, "its configuration is gone")
        return
    if not _is_of(process, row):
        _record(row.store_id, process, told)
    store_launch.trim_log(directory)
    _check_health(row, process, told, directory)


def _wanted(host_name: str, row: StoreRow, directory: Path) -> StoreConfig | None:
    if not settings.HYDRA_STORE_BYTES:
        return None
    return store_launch.wanted_config(
        directory,
        host_name,
        row.host_address,
        capacity_bytes=settings.HYDRA_STORE_BYTES,
        disk_bytes=settings.HYDRA_STORE_DISK_BYTES,
        log_level=settings.HYDRA_LOG_LEVEL,
        secret=row.pool_secret,
    )


def _fits(directory: Path, wanted: StoreConfig) -> bool:
    told = store_launch.read_config(directory)
    return told is not None and store_launch.fits(told, wanted)


def _is_of(process: ProcessRecord, row: StoreRow) -> bool:
    if row.pid != process.pid or row.pid_start_time is None:
        return False
    return abs(row.pid_start_time - process.start_time) <= START_TIME_TOLERANCE_S


def _without_process(row: StoreRow, directory: Path, *, after_restart: bool) -> None:
    if row.state not in STORE_LIVE:
        return
    if after_restart:
        store_rows.mark_off(row.store_id)
    elif row.pid is not None or row.state_age_s > LAUNCH_DEADLINE_S:
        # Starting without a process yet: another look is between its claim and its launch.
        words = store_launch.last_words(directory)
        store_rows.mark_failed(row.store_id, f"its process ended\n{words}" if words else "its process ended")


def _start_if_due(host_name: str, wanted: StoreConfig, directory: Path) -> None:
    row = store_rows.ensure_store(host_name)
    if row is None or row.state in STORE_LIVE:
        return
    if row.state == StoreState.FAILED and row.state_age_s < backoff_s(row.restarts):
        return
    if not store_rows.claim_start(row.store_id):
        return
    try:
        secret = store_rows.settle_secret(row.store_id, store_launch.proposed_secret(directory))
        process, told = store_launch.launch(replace(wanted, secret=secret), directory)
    except LaunchError as error:
        store_rows.mark_failed(row.store_id, str(error))
        return
    _record(row.store_id, process, told)


def _record(store_id: int, process: ProcessRecord, told: StoreConfig) -> None:
    store_rows.record_process(
        store_id,
        process.pid,
        process.start_time,
        place={
            "instance": told.instance,
            "address": told.host,
            "port": told.port,
            "http_port": told.http_port or None,
            "secret": told.secret,
        },
        capacity_bytes=told.capacity_bytes,
    )


def _check_health(row: StoreRow, process: ProcessRecord, told: StoreConfig, directory: Path) -> None:
    answer = store_calls.look(told.host, told.port, told.secret)
    if not isinstance(answer, EngineError):
        store_rows.mark_seen(row.store_id, process.pid, Figures.of(answer))
        return
    patience_s = START_DEADLINE_S if row.state == StoreState.STARTING else UNHEALTHY_DEADLINE_S
    if row.state in (StoreState.STARTING, StoreState.UNHEALTHY) and row.state_age_s > patience_s:
        store_launch.end_store(directory)
        store_rows.mark_failed(row.store_id, f"it did not answer: {answer.message}")
    else:
        store_rows.mark_unhealthy(
            row.store_id, process.pid, f"the process {process.pid} does not answer: {answer.message}"
        )
