"""A host that has joined a pool: its heads without a site, on servers that are elsewhere."""

import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from hydra_site import env
from hydra_site.supervisor import specs
from hydra_site.supervisor.child import ChildSpec
from hydra_site.supervisor.console import Console
from hydra_site.supervisor.home import Home
from hydra_site.supervisor.joined import Joined
from hydra_site.supervisor.run import Supervisor
from hydra_site.supervisor.specs import Options
from hydra_site.supervisor.stack import STEP_S, Stack

START_TIMEOUT_S = 120.0


def options_of(home: Home, joined: Joined) -> Options:
    """The run of this host. Raises env.SettingError for the first setting that cannot be used."""
    env.check_all()
    return Options(
        home=home,
        bind="127.0.0.1",
        port=0,
        database_url=joined.database_url,
        broker_url=joined.broker_url,
        default_model="",
        host_name=joined.host_name,
        log_level=env.log_level(),
    )


def application(options: Options) -> tuple[ChildSpec, ...]:
    """The children of a host: what must be so before it works, then its two workers; they start its store and its engines."""
    kept = {name: value for name, value in specs.environment(options).items() if name not in _NOT_OURS}
    common = ChildSpec("", (), env=kept, cwd=str(env.PROJECT_DIR))
    head = replace(common, stop=specs.term(specs.HEAD_GRACE_S), stop_rank=specs.HEAD_RANK)
    return (
        replace(
            common,
            name="prepare",
            argv=(sys.executable, str(env.PROJECT_DIR / "manage.py"), "head", "--prepare"),
            once=True,
            announce="the pool's servers are reached",
        ),
        *(
            replace(
                head,
                name=f"head-{speed}",
                argv=specs.worker(options, speed, concurrency, ""),
                needs=frozenset({"prepare"}),
                prepare=_forgetting(_ready_file(options.home, speed)),
                accepts=_ready_file(options.home, speed).exists,
                announce=f"the queue host.{options.host_name}.{speed} is served",
            )
            for speed, concurrency in (("fast", 4), ("slow", 2))
        ),
    )


class HeadSupervisor(Supervisor):
    """Runs a joined host until a signal comes. The home is its own, the servers are the pool's."""

    def __init__(self, options: Options, console: Console, joined: Joined) -> None:
        super().__init__(options, console, application, START_TIMEOUT_S)
        self._joined = joined

    def _check(self) -> None:
        """Nothing: no port of this machine is asked for."""

    def _ready_line(self) -> str:
        return f"Host {self._joined.host_name} serves the pool at {self._joined.site_url}"

    def _bring_up(self, stack: Stack) -> None:
        """Step until the workers listen to their queues."""
        deadline = time.monotonic() + self._start_timeout_s
        while stack.waiting_for():
            self._pause(STEP_S)
            stack.step()
            if time.monotonic() > deadline:
                raise stack.timeout(self._start_timeout_s)
        stack.starting = False


# A joined host knows its servers and its name from its home; a user's environment may speak of another pool.
_NOT_OURS = ("DATABASE_URL", "BROKER_URL", "HYDRA_HOST_NAME", "HYDRA_ENGINE_HOST")


def _ready_file(home: Home, speed: str) -> Path:
    """What a worker of Celery writes once it listens (hydra_site/celery.py)."""
    return home.run_dir / f"head-{speed}.ready"


def _forgetting(path: Path) -> Callable[[], None]:
    return lambda: path.unlink(missing_ok=True)
