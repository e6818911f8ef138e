"""`kill -9` between any two lines of the store while it puts, replaces, deletes, evicts, reads and recovers.

A forked child does the work on a copy of the memory and is killed at its n-th line (of a few in the normal run, of all under
`make soak`); then the memory is read again, as the next process would. Counted: bytes served that are not those stored, and
published manifests that are lost; both must be none. Leaks count too: after all leases' time every byte is owned or free.
"""

from __future__ import annotations

import os
import shutil
import signal
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

import engines.store
from engines.store.store import Store
from tests.engines.store.objects_made import MB, Clock, check, close_all, content, new_store, put, read, save
from tests.engines.store.store_faults import TABLE

SOURCES = str(Path(engines.store.__file__).parent)
SETTINGS: dict[str, Any] = {"capacity_bytes": 5 * MB, "slab_bytes": 2 * MB}
KEPT = {f"kv/{n}": [content(n, 300_000), content(99, 100_000)] for n in range(4)}


class Killer:
    """Kills the process at the n-th line executed in the store's sources; 0: never, and `lines` says how many there were."""

    def __init__(self, at: int) -> None:
        self.at = at
        self.lines = 0

    def __call__(self, frame: FrameType, event: str, _argument: object) -> Killer | None:
        if not frame.f_code.co_filename.startswith(SOURCES):
            return None
        if event == "line":
            self.lines += 1
            if self.lines == self.at:
                os.kill(os.getpid(), signal.SIGKILL)
        return self

    def run(self, work: Callable[[], object]) -> int:
        sys.settrace(self)
        try:
            work()
        finally:
            sys.settrace(None)
        return self.lines


def build(folder: Path) -> None:
    """The memory before: four manifests that share an object, a reservation, a dead object under a lease, little free room."""
    store = new_store(folder, Clock(), **SETTINGS)
    for name, chunks in KEPT.items():
        save(store, name, chunks)
    save(store, "kv/dead", [content(50, 200_000)])
    store.objects.lease(store.get("kv/dead").objects, 20)
    store.delete("kv/dead")
    store.reserve(150_000, "block").slot.view[:] = b"half" * 37_500
    put(store, content(60, 120_000), "orphan")
    close_all()


def do_put(store: Store) -> None:
    save(store, "kv/new", [content(99, 100_000), content(70, 200_000)])


def do_replace(store: Store) -> None:
    save(store, "kv/1", [content(99, 100_000), content(71, 200_000)])


def do_delete(store: Store) -> None:
    store.delete("kv/2")


def do_evict(store: Store) -> None:
    for number in range(80, 86):
        save(store, f"kv/{number}", [content(number, 900_000)])


def do_read(store: Store) -> None:
    lease = store.objects.lease(store.get("kv/3").objects, 30)
    read(store, "kv/3")
    store.objects.extend(lease.ticket, 60)
    store.objects.release(lease.ticket)


# What each action may leave of which names: contents, or None for absent.
ACTIONS: dict[str, tuple[Callable[[Store], None], dict[str, list[list[bytes] | None]]]] = {
    "put": (do_put, {"kv/new": [None, [content(99, 100_000), content(70, 200_000)]]}),
    "replace": (do_replace, {"kv/1": [KEPT["kv/1"], [content(99, 100_000), content(71, 200_000)]]}),
    "delete": (do_delete, {"kv/2": [None, KEPT["kv/2"]]}),
    "evict": (
        do_evict,
        {name: [None, chunks] for name, chunks in KEPT.items()}
        | {f"kv/{number}": [None, [content(number, 900_000)]] for number in range(80, 86)},
    ),
    "read": (do_read, {}),
    "recover": (lambda store: None, {}),
}


def killed(folder: Path, action: str, at: int) -> bool:
    """Runs the action in a child that dies at that line. False where it came to its end before."""
    child = os.fork()
    if child == 0:
        code = 1
        try:
            killer = Killer(at)
            if action == "recover":
                killer.run(lambda: new_store(folder, Clock(), **SETTINGS))
            else:
                store = new_store(folder, Clock(), **SETTINGS)
                killer.run(lambda: ACTIONS[action][0](store))
            code = 0
        finally:
            os._exit(code)
    _, status = os.waitpid(child, 0)
    assert status in (0, signal.SIGKILL), (action, at, status)
    return status == signal.SIGKILL


def examine(folder: Path, action: str) -> Counter[str]:
    """What the next process finds, against what it may find: how much was read, how much of it was wrong or gone."""
    clock = Clock()
    store = new_store(folder, clock, **SETTINGS)
    check(store)
    allowed: dict[str, list[list[bytes] | None]] = {name: [chunks] for name, chunks in KEPT.items()}
    allowed |= ACTIONS[action][1]
    names = store.manifests.names("")
    assert set(names) <= set(allowed)
    counts: Counter[str] = Counter()
    for name, contents in allowed.items():
        found = read(store, name) if name in names else None
        counts["reads_checked"] += 1
        counts["published_lost"] += found is None and None not in contents
        counts["wrong_bytes"] += found is not None and found not in contents
    clock.now += 1000
    store.sweep()
    assert (store.objects.dying, store.objects.reservations) == (0, {})
    assert all(found.refs for found in store.objects.by_digest.values())
    check(store)
    for name in store.manifests.names(""):
        store.delete(name)
    assert store.slabs.free_bytes == sum(len(slab.data) for slab in store.slabs.slabs)
    close_all()
    return counts


@pytest.mark.parametrize("samples", [10, pytest.param(10_000, marks=[pytest.mark.soak, pytest.mark.timeout(3600)])])
@pytest.mark.parametrize("action", ACTIONS)
def test_a_kill_at_any_line_costs_nothing_that_was_published(memory: Path, action: str, samples: int) -> None:
    build(memory / "before")
    lines = lines_of(memory, action)
    places = range(1, lines + 1, max(1, lines // samples))
    deaths = 0
    counts: Counter[str] = Counter()
    for at in places:
        trial = memory / "trial"
        shutil.copytree(memory / "before", trial)
        deaths += killed(trial, action, at)
        counts += examine(trial, action)
        shutil.rmtree(trial)
    TABLE.add(f"killed at a line of {action}", trials=len(places), faults=deaths, **counts)
    assert deaths == len(places)
    assert (counts["wrong_bytes"], counts["published_lost"]) == (0, 0)


def lines_of(memory: Path, action: str) -> int:
    trial = memory / "counted"
    shutil.copytree(memory / "before", trial)
    if action == "recover":
        lines = Killer(0).run(lambda: new_store(trial, Clock(), **SETTINGS))
    else:
        store = new_store(trial, Clock(), **SETTINGS)
        lines = Killer(0).run(lambda: ACTIONS[action][0](store))
    close_all()
    return lines
