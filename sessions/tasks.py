"""Tasks about conversations. They may be lost or run twice, and do no harm either way.

Those about one host's store run on `host.<name>.fast`, next to that store; the others on `control`.
"""

import logging
import threading
from collections.abc import Awaitable, Callable
from typing import ParamSpec, TypeVar

from asgiref.sync import async_to_sync
from celery import shared_task
from django.conf import settings

from engines import store_rows
from engines.client import close_client_session
from engines.errors import EngineError
from sessions import drain_moves, drains, handoffs, kv_losses, kv_measuring, leases, lifecycle, services, snapshots
from sessions.errors import SessionUnknown

SWEEP_EXPIRES_S = 12.0
Given = ParamSpec("Given")
Done = TypeVar("Done")

logger = logging.getLogger(__name__)
_sweeping = threading.Lock()


def in_a_loop(act: Callable[Given, Awaitable[Done]], *args: Given.args, **options: Given.kwargs) -> Done:
    """What `act` returns, run in an event loop of its own. Connections to engines belong to their loop, and end with it here."""

    async def closed() -> Done:
        try:
            return await act(*args, **options)
        finally:
            await close_client_session()

    return async_to_sync(closed)()


@shared_task(ignore_result=True)
def sweep_turns() -> None:
    """Close turns that nobody will end any more."""
    services.sweep_turns()


@shared_task(ignore_result=True)
def sweep_leases() -> None:
    """Give places on engines back whose process died."""
    leases.sweep()


@shared_task(ignore_result=True)
def expire_sessions() -> None:
    """Delete conversations that nobody has used for long, and what is kept of requests and moves as old in those that go on."""
    snapshots.expire_chats()
    snapshots.expire_turns()
    handoffs.expire()
    drains.expire()


@shared_task(ignore_result=True)
def sweep_stores() -> None:
    """Have the snapshots of every host's store listed by its head; a sweep that waits longer than the next is dropped."""
    for store in store_rows.endpoints():
        if store.ready:
            sweep_store.apply_async(
                args=[store.host_name], queue=f"host.{store.host_name}.fast", expires=SWEEP_EXPIRES_S
            )


@shared_task(ignore_result=True)
def sweep_store(host_name: str) -> None:
    """Bring the snapshot rows of this host in line with its store."""
    if host_name != settings.HYDRA_HOST_NAME or not _sweeping.acquire(blocking=False):
        # A sweep that is still going on will see as much as a second one.
        return
    try:
        snapshots.sweep(host_name)
    except EngineError as error:
        logger.warning("the store of %s could not be swept: %s", host_name, error.message)
    finally:
        _sweeping.release()


@shared_task(ignore_result=True)
def drop_snapshots(host_name: str, names: list[str]) -> None:
    """Free these snapshots of this host's store, named by their manifests: their rows are gone."""
    if host_name != settings.HYDRA_HOST_NAME:
        return
    try:
        snapshots.drop(host_name, names)
    except EngineError as error:
        # Their rows come back with the next sweep: nothing is lost but the wish.
        logger.warning("%d snapshots stay in the store of %s: %s", len(names), host_name, error.message)


@shared_task(ignore_result=True)
def forget_sessions(host_name: str, session_keys: list[str]) -> None:
    """Free what this host's store holds of deleted sessions, named by their keys: their rows are gone."""
    if host_name != settings.HYDRA_HOST_NAME:
        return
    try:
        snapshots.forget(host_name, session_keys)
    except EngineError as error:
        logger.warning(
            "%d deleted sessions stay in the store of %s until its sweep: %s",
            len(session_keys),
            host_name,
            error.message,
        )


@shared_task(ignore_result=True)
def end_session(turn_id: int) -> None:
    """Free the slot of a conversation whose client said that this turn is its last."""
    try:
        in_a_loop(lifecycle.end, turn_id)
    except EngineError as error:
        # The engine parks it by itself once it was idle for long.
        logger.info("the session of turn %d keeps its place for now: %s", turn_id, error.message)


@shared_task(ignore_result=True)
def run_handoff(handoff_id: int) -> None:
    """Move a conversation from one engine to another, as its row says. Again: learns what came of it."""
    try:
        in_a_loop(handoffs.run, handoff_id)
    except SessionUnknown as error:
        logger.info("handoff %d: %s", handoff_id, error.message)


@shared_task(ignore_result=True)
def sweep_handoffs() -> None:
    """Give up moves that nobody began, and ask after those whose task died."""
    in_a_loop(handoffs.sweep)


@shared_task(ignore_result=True)
def measure_kv_loss() -> None:
    """Measure what is lost between two quants of a family that are served now and were not measured: one pair a time."""
    for pair in kv_losses.due():
        if kv_losses.claim(pair):
            in_a_loop(kv_measuring.measure, pair)
            return


@shared_task(ignore_result=True)
def run_drain(drain_id: int) -> None:
    """Move conversations off what is drained, for a while; whoever comes next goes on."""
    in_a_loop(drain_moves.slice_of, drain_id)


@shared_task(ignore_result=True)
def sweep_drains() -> None:
    """Keep closed what waits to be emptied, and go on with drains whose mover died."""
    drains.keep_closed()
    for drain_id in drains.stuck():
        run_drain.apply_async(args=[drain_id], queue="control", expires=drains.TASK_EXPIRES_S)
