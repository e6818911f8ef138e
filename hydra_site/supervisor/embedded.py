"""The embedded PostgreSQL and Valkey by themselves, for tests and for commands that need the database while nothing
runs.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from hydra_site.supervisor import leftovers, specs
from hydra_site.supervisor.console import Console
from hydra_site.supervisor.home import Home, Services
from hydra_site.supervisor.stack import Stack

START_TIMEOUT_S = 60.0


@contextmanager
def embedded_servers(home: Path, *, broker: bool = True, purpose: str = "embedded servers") -> Iterator[Services]:
    """PostgreSQL and (with `broker`) Valkey on `home` for the duration, with their URLs; services.json names them
    meanwhile.

    Takes the home's lock, so it raises HomeInUse while a supervisor runs there; other SupervisorErrors when a server
    does not come up. Nothing stays running afterwards. `purpose` is what others read who find the home taken.
    """
    place = Home(home.resolve())
    place.create()
    with place.lock(purpose), Path(os.devnull).open("w", encoding="utf-8") as nowhere:
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
