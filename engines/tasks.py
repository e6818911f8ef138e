"""The head's tasks. Each may be lost, run late or run twice: epochs and conditional UPDATEs make that harmless.

`start_engine`, `stop_engine`, `await_ready` and `probe_host` run on `host.<name>.fast`, the others on `control`.
"""

import threading
import time
from pathlib import Path

from celery import shared_task
from celery.worker import state as worker_state
from django.conf import settings

from engines import (
    draining,
    engine_rows,
    launch,
    leaving,
    loading,
    loading_exact,
    missing_files,
    native_faults,
    renewal,
    services,
    store_rows,
    store_watch,
    watch,
)
from engines.errors import LaunchError
from engines.reconcile import COMMAND_EXPIRES_S
from pools import pulse
from pools import services as pools

READY_WAIT_S = 20.0
READY_POLL_S = 0.1
PROBE_EXPIRES_S = 5.0

_probing = threading.Lock()


@shared_task(ignore_result=True)
def start_engine(engine_id: int, epoch: int) -> None:
    """Start the engine's process and return while it loads; `await_ready` waits for it."""
    if store_rows.endpoint(settings.HYDRA_HOST_NAME) is None:
        # An engine learns of its host's store only now.
        store_watch.look_at_store(settings.HYDRA_HOST_NAME, Path(settings.HYDRA_HOME) / "store")
    task = engine_rows.claim_start(engine_id, epoch)
    if task is None or missing_files.waits_for_file(task):
        return
    if task.refusal:
        engine_rows.give_up(engine_id, epoch, task.refusal)
        return
    if renewal.waits_for_library(task):
        return
    task = loading_exact.refitted(task)
    if task is None:
        return
    try:
        launched = launch.launch(task.config, task.directory, task.card_uuid)
    except LaunchError as error:
        engine_rows.mark_failed(engine_id, epoch, str(error))
        return
    process, told = launched.record, launched.config
    if not engine_rows.record_process(
        engine_id, process.pid, process.start_time, told.port, told.rpc_port, told.rpc_secret, epoch=epoch
    ):
        # A stop came in between; or another start, whose process may have taken this one's place by now.
        if (running := launch.find(task.directory)) is not None and running.pid == process.pid:
            launch.end_engine(task.directory)
        return
    queue = f"host.{settings.HYDRA_HOST_NAME}.fast"
    await_ready.apply_async(args=[engine_id, process.pid], queue=queue, expires=COMMAND_EXPIRES_S)


@shared_task(ignore_result=True)
def await_ready(engine_id: int, pid: int) -> None:
    """Look at a starting engine often, so that it serves the moment its model is loaded; gives up to the probe after 20 s."""
    deadline = time.monotonic() + READY_WAIT_S
    while time.monotonic() < deadline:
        task = engine_rows.engine_task(engine_id)
        if worker_state.should_stop is not None:
            return  # A stopping worker waits for its tasks; the engine does not need this one.
        if task is None or task.pid != pid or task.state != "starting":
            return
        launch.reap()
        watch.look_at(task)
        time.sleep(READY_POLL_S)


@shared_task(ignore_result=True)
def stop_engine(engine_id: int, epoch: int) -> None:
    """End the engine's process and wait until it is gone."""
    task = engine_rows.claim_stop(engine_id, epoch)
    if task is not None:
        launch.end_engine(task.directory)
        engine_rows.mark_stopped(engine_id)
        loading.advance()


@shared_task(ignore_result=True)
def drain_engine(engine_id: int, epoch: int) -> None:
    """Look whether a draining engine has nothing left to do; then stop it, else look again soon."""
    done = draining.may_stop(engine_id, epoch)
    if done:
        stop_engine(engine_id, epoch)
    elif done is False:
        queue = f"host.{settings.HYDRA_HOST_NAME}.fast"
        drain_engine.apply_async(
            args=[engine_id, epoch], queue=queue, countdown=draining.LOOK_EVERY_S, expires=COMMAND_EXPIRES_S
        )


@shared_task(ignore_result=True)
def probe_host(host_name: str) -> None:
    """Read this host and its devices, look at its store and its engines, and write what was seen."""
    if host_name != settings.HYDRA_HOST_NAME or not _probing.acquire(blocking=False):
        # A look that is still going on will tell as much as a second one.
        return
    try:
        # The store before the engines, which are told of it. Both before the host counts as up again: from then on their
        # silence is taken for a failure.
        store_watch.look_at_store(host_name, Path(settings.HYDRA_HOME) / "store")
        watch.look_at_host(host_name, Path(settings.HYDRA_HOME) / "engines")
        services.reconcile(host_name, leaving.idle_engines())
        draining.unload_idle(host_name)
        renewal.renew_idle(host_name)
        native_faults.tell_of_builds(host_name)
        inventory = pulse.current_inventory()
        pools.record_probe(host_name, inventory.host, inventory.gpus, inventory.unreadable)
    finally:
        _probing.release()


@shared_task(ignore_result=True)
def probe_hosts() -> None:
    """Have every host probed by its own head; a probe that waits longer than the next one is due is dropped."""
    for name in pools.host_names():
        probe_host.apply_async(args=[name], queue=f"host.{name}.fast", expires=PROBE_EXPIRES_S)


@shared_task(ignore_result=True)
def reconcile() -> None:
    """Bring every engine one step closer to what is wanted of it."""
    services.reconcile()
    loading.advance()
