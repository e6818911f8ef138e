"""The servers of a home for one management command, whether or not Hydra runs."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from engines.process import ProcessRecord
from hydra_site import env
from hydra_site.supervisor.embedded import embedded_servers
from hydra_site.supervisor.home import Home, Services
from hydra_site.supervisor.joined import Joined


@contextmanager
def services(home: Path) -> Iterator[tuple[str, str | None]]:
    """(database_url, broker_url or None): of the pool that `home` has joined, or of the running Hydra on it if there is
    one, else the outside ones that are set, else PostgreSQL alone, started for the duration.

    Raises HomeInUse when another command has just done the same, other SupervisorErrors when the server does not start.
    """
    running = running_services(home)
    if joined := Joined.of(Home(home.resolve())):
        yield joined.database_url, joined.broker_url
    elif running:
        yield running.database_url, running.broker_url
    elif outside := env.database_url():
        yield outside, env.broker_url()
    else:
        with embedded_servers(home, broker=False, purpose="a management command") as started:
            yield started.database_url, env.broker_url()


def running_services(home: Path) -> Services | None:
    """Where the servers of a running Hydra on `home` are; None when it does not run, or its database does not."""
    place = Home(home.resolve())
    published = place.read_services()
    if published is None or not _is_served(place, "postgres", published.database_url):
        return None
    broker = published.broker_url
    return Services(published.database_url, broker if broker and _is_served(place, "valkey", broker) else None)


def _is_served(place: Home, server: str, url: str) -> bool:
    """Whether `url` may be used: its embedded server lives, or the supervisor that named the outside one does."""
    secrets = place.secrets()
    is_embedded = secrets.postgres_password in url or secrets.valkey_password in url
    record = ProcessRecord.from_file(place.run_file(server if is_embedded else "supervisor"))
    return record is not None and record.is_alive()
