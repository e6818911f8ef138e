"""What a killed run leaves: processes without a supervisor, and records of them. Both are cleared before anything
starts.

Engines and the host's store are the exception: they hold loaded models and conversations, so a new run's head adopts them.
Only a run that ends takes them along (`end_engines`), the store's memory too.
"""

import contextlib
import os
import signal
from collections.abc import Collection, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil

from engines import store_launch
from engines.process import ProcessRecord, end
from hydra_site.supervisor import postgres
from hydra_site.supervisor.child import HOME_MARK
from hydra_site.supervisor.home import Home

CHILD_GRACE_S = 5.0
ENGINE_GRACE_S = 6.0
_OWN_RECORD = "supervisor"
_SERVERS = ("valkey", "postgres", "initdb")
_THREADS = 16


def clear(home: Home) -> list[str]:
    """End every child that a dead supervisor of this home left running, servers last, and remove the records. Returns
    the names of those ended.

    The caller holds the home's lock.
    """
    records = {
        path: record for path in sorted(home.run_dir.glob("*.json")) if (record := ProcessRecord.from_file(path))
    }
    records = {path: record for path, record in records.items() if record.name != _OWN_RECORD}
    alive = [record for record in records.values() if record.is_alive()]
    _end_all([record for record in alive if record.name not in _SERVERS], CHILD_GRACE_S)
    # An engine without a record cannot be adopted, so it is a stray like any other.
    adoptable = {record.pid for path in _outliving(home) if (record := ProcessRecord.from_file(path))}
    servers = {record.pid for record in alive if record.name in _SERVERS}
    strays = [record for record in _marked(home) if record.pid not in adoptable | servers]
    _end_all(strays, CHILD_GRACE_S)
    for record in alive:
        if record.name == "postgres":
            postgres.end_server(record)
        else:
            end(record, signal.SIGTERM, CHILD_GRACE_S)
    postgres.end_orphans(home.postgres_dir)
    for path in (*records, home.run_dir / "services.json"):
        if path.name != f"{_OWN_RECORD}.json":
            path.unlink(missing_ok=True)
    return [record.name for record in (*alive, *strays)]


def end_engines(home: Home, spared: Collection[int] = ()) -> None:
    """End every engine of this home, recorded or not, all at once, then the store that they save to, and remove their records.

    Marked processes whose pid is in `spared` stay: the servers, which are ended later.
    """
    store = ProcessRecord.from_file(home.store_dir / "run.json")
    spared = {*spared, *([store.pid] if store else [])}
    files = list(home.engines_dir.glob("*/run.json"))
    recorded = [record for path in files if (record := ProcessRecord.from_file(path))]
    _end_all(recorded, ENGINE_GRACE_S)
    _end_all([record for record in _marked(home) if record.pid not in spared], ENGINE_GRACE_S)
    for path in files:
        path.unlink(missing_ok=True)
    if home.store_dir.is_dir():
        store_launch.end_store(home.store_dir)
        store_launch.forget_memory(home.store_dir)


def _outliving(home: Home) -> Iterator[Path]:
    """The records of processes that outlive a supervisor."""
    yield from home.engines_dir.glob("*/run.json")
    yield home.store_dir / "run.json"


def _end_all(records: Iterable[ProcessRecord], grace_s: float) -> None:
    waiting = list(records)
    if not waiting:
        return
    with ThreadPoolExecutor(_THREADS) as pool:
        # Asking for each result brings an error of a thread to us.
        for result in [pool.submit(end, record, signal.SIGTERM, grace_s) for record in waiting]:
            result.result()


def _marked(home: Home) -> Iterator[ProcessRecord]:
    """Processes that descend from a supervisor of this home, ourselves and our own parents apart.

    PostgreSQL writes its title over its environment; its processes are found by their directory instead.
    """
    spared = {os.getpid(), *(process.pid for process in psutil.Process().parents())}
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, ProcessLookupError):
            if process.pid in spared or process.name() == "postgres":
                continue
            if process.environ().get(HOME_MARK) == str(home.root):
                yield ProcessRecord.of(process.pid, process.name(), process.cmdline())
