"""The table of children that make up a whole Hydra on one host."""

import os
import signal
import sys
from dataclasses import dataclass, replace
from pathlib import Path

from engines.browser_guard import is_loopback
from hydra_site import env
from hydra_site.supervisor import ports, postgres, valkey
from hydra_site.supervisor.child import ChildSpec
from hydra_site.supervisor.home import Home, Services

SITE_RANK, BEAT_RANK, HEAD_RANK, ENGINE_RANK = 10, 20, 30, 40
SITE_GRACE_S, BEAT_GRACE_S, HEAD_GRACE_S = 8.0, 5.0, 10.0


@dataclass(frozen=True)
class Options:
    """What a run is made of, read once from the environment."""

    home: Home
    bind: str
    port: int
    database_url: str | None
    broker_url: str | None
    default_model: str
    host_name: str
    log_level: str

    @classmethod
    def from_environment(cls) -> "Options":
        """Raises env.SettingError for the first setting that cannot be used."""
        env.check_all()
        return cls(
            home=Home(env.path("HYDRA_HOME")),
            bind=env.address("HYDRA_BIND"),
            port=env.port("HYDRA_PORT"),
            database_url=env.database_url(),
            broker_url=env.broker_url(),
            default_model=env.text("HYDRA_DEFAULT_MODEL"),
            host_name=env.host_name(),
            log_level=env.log_level(),
        )

    @property
    def reachable_address(self) -> str:
        """The address at which this machine reaches the site."""
        return {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(self.bind, self.bind)

    @property
    def site_url(self) -> str:
        """The URL at which this machine reaches the site."""
        address = f"[{self.reachable_address}]" if ":" in self.reachable_address else self.reachable_address
        return f"http://{address}:{self.port}"


def servers(
    home: Home, database_url: str | None = None, broker_url: str | None = None
) -> tuple[Services, tuple[ChildSpec, ...]]:
    """The embedded servers in place of the URLs that are None: where they will be reached, and their children."""
    secrets = home.secrets()
    specs: tuple[ChildSpec, ...] = ()
    if database_url is None:
        port = ports.free_port()
        database_url = postgres.url(secrets.postgres_password, port)
        specs += postgres.specs(home, secrets.postgres_password, port)
    if broker_url is None:
        port = ports.free_port()
        broker_url = valkey.url(secrets.valkey_password, port)
        specs += (valkey.spec(home, secrets.valkey_password, port),)
    return Services(database_url, broker_url), specs


def application(options: Options) -> tuple[ChildSpec, ...]:
    """The children that are Hydra itself. Each imports for seconds, so it starts as early as its first need allows."""
    common = ChildSpec("", (), env=environment(options), cwd=str(env.PROJECT_DIR))
    head = replace(common, stop=term(HEAD_GRACE_S), stop_rank=HEAD_RANK)
    schedule = str(options.home.run_dir / "beat-schedule")
    return (
        replace(
            common,
            name="pull",
            argv=_module("hydra_site.supervisor.pull", options.default_model, str(options.home.models_dir)),
            once=True,
            announce=f"model {options.default_model} is here",
        ),
        replace(
            common,
            name="bootstrap",
            argv=(sys.executable, str(env.PROJECT_DIR / "manage.py"), "bootstrap"),
            needs=frozenset({"postgres", "valkey", "pull"}),
            once=True,
            announce="database is up to date",
        ),
        replace(head, name="head-fast", argv=worker(options, "fast", 4, ",control"), needs=frozenset({"valkey"})),
        replace(
            common,
            name="site",
            argv=_module("hydra_site.serve"),
            # Beyond loopback the site must not listen before bootstrap has told that there is an API key.
            needs=frozenset() if is_loopback(options.bind) else frozenset({"bootstrap"}),
            stop=term(SITE_GRACE_S),
            stop_rank=SITE_RANK,
            accepts=lambda: ports.listens(options.reachable_address, options.port),
            announce="site listens",
        ),
        replace(head, name="head-slow", argv=worker(options, "slow", 2, ""), needs=frozenset({"bootstrap"})),
        replace(
            common,
            name="beat",
            argv=_celery("beat", "-s", schedule, "--pidfile=", f"--loglevel={options.log_level}"),
            needs=frozenset({"bootstrap"}),
            stop=term(BEAT_GRACE_S),
            stop_rank=BEAT_RANK,
        ),
    )


def term(grace_s: float) -> tuple[tuple[int, float], ...]:
    return ((signal.SIGTERM, grace_s),)


def _module(name: str, *arguments: str) -> tuple[str, ...]:
    return (sys.executable, "-m", name, *arguments)


def _celery(*arguments: str) -> tuple[str, ...]:
    return _module("celery", "-A", "hydra_site.celery", *arguments)


def worker(options: Options, speed: str, concurrency: int, more_queues: str) -> tuple[str, ...]:
    """A Celery worker for one of this host's queues. Threads, since a fork would take open sockets and locks along."""
    name = f"{speed}@{options.host_name}"
    queues = f"host.{options.host_name}.{speed}{more_queues}"
    quiet = ("--without-mingle", "--without-gossip", f"--loglevel={options.log_level}")
    return _celery("worker", "-n", name, "--pool=threads", f"--concurrency={concurrency}", "-Q", queues, *quiet)


def environment(options: Options) -> dict[str, str]:
    """What the children see: the user's environment and the home as an absolute path; addresses are in services.json."""
    # A PGSERVICE or PGSSLMODE of the user's shell would turn our children away from the embedded server.
    kept = {name: value for name, value in os.environ.items() if options.database_url or not name.startswith("PG")}
    path = os.pathsep.join(filter(None, (str(Path(sys.executable).parent), kept.get("PATH"))))
    own = {
        "HYDRA_HOME": str(options.home.root),
        "DJANGO_SETTINGS_MODULE": "hydra_site.settings",
        "PYTHONUNBUFFERED": "1",
        "PATH": path,
    }
    return kept | own
