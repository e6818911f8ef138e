"""What a round of kills may leave behind, measured: leases, tmpfs, memory; and the table of all rounds' outcomes."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

import psutil

from engines.runtime.arena import FOLDER, PREFIX
from pools.db import in_db
from sessions.models import SlotLease
from tests.fault_table import FaultTable
from tests.sessions.kill_pool import KillPool

BASELINE_S = 30.0
MOST_GROWTH_BYTES = 96 << 20
# A store keeps what it was given of the conversations; they are the same ones before and after.
MOST_STORE_GROWTH_BYTES = 16 << 20
TABLE = FaultTable(
    "kill -9 under streams",
    "streams",
    "whole",
    "broken",
    "two owners",
    "moves",
    "moved",
    "live",
    "leases left",
    "tmpfs left",
)


async def leases_left() -> int:
    until = time.monotonic() + BASELINE_S
    while (left := await in_db(SlotLease.objects.count)) and time.monotonic() < until:  # noqa: ASYNC110
        await asyncio.sleep(0.1)
    return left


def arenas(pids: Iterable[int]) -> list[Path]:
    return [path for pid in pids for path in FOLDER.glob(f"{PREFIX}{pid}-*")]


def on_tmpfs(pool: KillPool) -> int:
    """Bytes that the store has taken there."""
    found = 0
    for path in pool.folder.rglob("*"):
        with suppress(FileNotFoundError):
            found += path.lstat().st_blocks * 512
    return found


async def tmpfs_left(pool: KillPool, before: int) -> list[str]:
    """What is on tmpfs and should not be, once it had time to go: arenas of engines that were killed, a second one of an engine
    that runs, and what the store has more than the conversations explain."""

    def look() -> list[str]:
        live = [arenas([engine.process.pid]) for engine in pool.engines.values()]
        found = [str(path) for path in arenas(pool.killed)]
        found += [str(path) for one in live for path in one[1:]]
        growth = on_tmpfs(pool) - before
        return found + ([f"store: {growth} bytes"] if growth > MOST_STORE_GROWTH_BYTES else [])

    until = time.monotonic() + BASELINE_S
    while (left := await asyncio.to_thread(look)) and time.monotonic() < until:  # noqa: ASYNC110 -- nothing tells of it
        await asyncio.sleep(0.1)
    return left


def memory(pool: KillPool) -> list[int]:
    """Bytes that each engine has, its share of tmpfs included, and the store."""
    processes = [*(engine.process for engine in pool.engines.values()), pool.store.process]
    return [psutil.Process(process.pid).memory_info().rss for process in processes]


async def memory_grown(pool: KillPool, before: list[int]) -> int:
    """By how many bytes the largest process is larger than the largest was, once it had time to shrink."""
    until = time.monotonic() + BASELINE_S
    while (grown := max(await asyncio.to_thread(memory, pool)) - max(before)) > MOST_GROWTH_BYTES:
        if time.monotonic() > until:
            break
        await asyncio.sleep(0.1)
    return grown
