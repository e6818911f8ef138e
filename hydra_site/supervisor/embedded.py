"""The embedded PostgreSQL and Valkey by themselves, for tests and for commands that need the database while nothing
runs.
"""

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from hydra_site.supervisor import leftovers, specs
from hydra_site.supervisor.console import Console
from hydra_site.supervisor.home import Home, Services
from hydra_site.supervisor.stack import Stack

START_TIMEOUT_S = 60.0
# By default they end a process without a word to its context managers.
_SIGNALS = (signal.SIGTERM, signal.SIGHUP)


@contextmanager
def embedded_servers(home: Path, *, broker: bool = True, purpose: str = "embedded servers") -> Iterator[Services]:
    """PostgreSQL and (with `broker`) Valkey on `home` for the duration, with their URLs; services.json names them
    meanwhile.

    Takes the home's lock, so it raises HomeInUse while a supervisor runs there; other SupervisorErrors when a server
    does not come up. Nothing stays running afterwards, whatever signal but SIGKILL ends the process. `purpose` is what others
    read who find the home taken.
    """
    place = Home(home.resolve())
    place.create()
    with _ended_by_signals(), place.lock(purpose), Path(os.devnull).open("w", encoding="utf-8") as nowhere:
        leftovers.clear(place)
        services, children = specs.servers(place, broker_url=None if broker else "")
        services = services if broker else Services(services.database_url, None)
        stack = Stack(place, children, Console(nowhere))
        try:
            place.write_services(services)
            stack.run_until_up([spec.name for spec in children], START_TIMEOUT_S)
            yield services
        finally:
            stack.stop(hurry=lambda: False)


@contextmanager
def _ended_by_signals() -> Iterator[None]:
    """SIGTERM and SIGHUP come as Ctrl-C does, where they would have ended the process. Only the main thread can have it so."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.getsignal(number) for number in _SIGNALS}
    deadly = [number for number, handler in before.items() if handler is signal.SIG_DFL]
    for number in deadly:
        signal.signal(number, signal.default_int_handler)
    try:
        yield
    finally:
        for number in deadly:
            signal.signal(number, signal.SIG_DFL)
