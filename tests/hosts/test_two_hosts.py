"""Two machines that share nothing but an outside PostgreSQL and Valkey: one is the site, the other joins with one command."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from hydra_site.supervisor import postgres
from tests.conftest import PulledModel
from tests.hosts import network
from tests.hosts.hydra_process import HydraProcess, ask
from tests.hosts.network import Machine, Network
from tests.hosts.outside_servers import OutsideServers
from tests.synthetic_gguf import SyntheticModel

pytestmark = [pytest.mark.soak, pytest.mark.timeout(900)]

CHAT = {"messages": [{"role": "user", "content": "Say yes."}], "max_tokens": 4, "temperature": 0}


@dataclass
class Pool:
    """The machines, what runs on them, and how the test looks at them."""

    hub: Machine
    servers: OutsideServers
    site: HydraProcess
    second: Machine
    folder: Path
    api_key: str

    def rows(self, query: str) -> list[list[str]]:
        """The answer of one query, as texts."""
        argv = self.hub.command(
            str(postgres._binary("psql")), self.servers.database_url, "-At", "-F", "\t", "-c", query
        )
        done = subprocess.run(argv, capture_output=True, text=True, check=True, timeout=30)
        return [line.split("\t") for line in done.stdout.splitlines()]

    def value(self, query: str) -> str:
        rows = self.rows(query)
        return rows[0][0] if rows else ""

    def until(self, query: str, wanted: str, limit_s: float = 90.0) -> float:
        """Seconds until the query's only value is `wanted`."""
        began = time.monotonic()
        while (found := self.value(query)) != wanted:
            if time.monotonic() - began > limit_s:
                raise AssertionError(f"{query}\nis {found!r} and not {wanted!r}{self.site.logs()}")
            time.sleep(0.2)
        return time.monotonic() - began

    def ask(self, path: str, body: Any = None, key: str | None = None) -> tuple[int, Any]:
        url = f"http://{self.site.machine.address}:9000{path}"
        return ask(self.second, url, body, self.api_key if key is None else key)

    def head(self, token: str, home: str = "second") -> HydraProcess:
        site = f"http://{self.site.machine.address}:9000"
        arguments = ("head", "--join", site, "--token", token, "--name", "second")
        environ = {"HYDRA_ENGINE_THREADS": "1", "HYDRA_STORE_BYTES": str(64 << 20)}
        return HydraProcess(self.second, self.folder / home, "Host second serves the pool", *arguments, **environ)


@pytest.fixture(scope="module")
def pool(tmp_path_factory: pytest.TempPathFactory, pulled_smollm2: PulledModel) -> Iterator[Pool]:
    if reason := network.missing():
        pytest.skip(reason)
    folder = tmp_path_factory.mktemp("two-hosts")
    with (
        Network("hub", "site", "second") as (hub, site, second),
        OutsideServers(folder, hub.address, "10.213.77.0/24", hub.command()) as servers,
    ):
        home = folder / "first"
        shutil.copytree(pulled_smollm2.models_dir, home / "models", copy_function=os.link)
        process = HydraProcess(
            site,
            home,
            "Hydra is ready",
            "up",
            HYDRA_BIND=site.address,
            HYDRA_ENGINE_HOST=site.address,
            HYDRA_HOST_NAME="first",
            HYDRA_PORT="9000",
            HYDRA_ENGINE_THREADS="1",
            HYDRA_ENGINE_CONTEXT="1024",
            HYDRA_ADMIN_PASSWORD="a password of the tests",
            HYDRA_STORE_BYTES=str(64 << 20),
            DATABASE_URL=servers.database_url,
            BROKER_URL=servers.broker_url,
        )
        try:
            key = process.manage("apikey", "create", "test").strip()
            process.start()
            yield Pool(hub, servers, process, second, folder, key)
        finally:
            process.close()


def serve_files(machine: Machine, folder: Path, port: int = 8000) -> subprocess.Popen[bytes]:
    argv = machine.command(sys.executable, "-m", "http.server", str(port), "--bind", machine.address, "-d", str(folder))
    return subprocess.Popen(argv, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


def make_engine(pool: Pool, name: str, model: str) -> None:
    """What a person does in the admin: an engine of this model on the second host."""
    pool.site.manage(
        "shell",
        "-c",
        "from engines import services as e; from pools import services as p\n"
        f"host_id, gpu_id = p.cpu_of('second'); variant = p.find_variant({model!r})\n"
        f"pk = e.ensure_engine({name!r}, host_id=host_id, gpu_id=gpu_id, variant_id=variant.variant_id, slots=2, "
        "context_tokens=256, threads=1)\n"
        "e.start(pk)",
    )


def tell(pool: Pool, duty: str) -> None:
    """What a person asks of the second host in the admin."""
    lines = (
        "from pools import services as p",
        "from pools.choices import HostDuty",
        f"assert p.change_duty(p.cpu_of('second')[0], HostDuty.{duty})",
    )
    pool.site.manage("shell", "-c", "\n".join(lines))


def test_a_second_machine_joins_serves_is_lost_and_returns(
    pool: Pool, tiny_model: Callable[..., SyntheticModel]
) -> None:
    token = pool.site.manage("jointoken", "create", "--note", "the second").strip().splitlines()[-1]
    head = pool.head(token)
    files = serve_files(pool.hub, tiny_model("llama").path.parent)
    state = "SELECT state FROM pools_host WHERE name = 'second'"
    engine = "SELECT state FROM engines_engine WHERE name = 'second-0'"
    try:
        print(f"joined and served after {head.start():.1f} s")
        pool.until(state, "up")
        assert pool.value("SELECT address FROM pools_host WHERE name = 'second'") == pool.second.address
        assert (
            pool.value("SELECT count(*) FROM pools_gpu g JOIN pools_host h ON h.id = host_id WHERE h.name = 'second'")
            == "1"
        )
        assert pool.head(token, "thief").environ  # the same token lets nobody else in:
        with pytest.raises(AssertionError, match="token cannot be used"):
            pool.head(token, "thief").start()

        # It gets a model that the site never had, over the network, and serves it.
        url = f"http://{pool.hub.address}:8000/{tiny_model('llama').path.name}"
        pool.site.manage("pull", url, "--name", "tiny", "--host", "second")
        pool.until("SELECT state FROM pools_job ORDER BY id DESC LIMIT 1", "done")
        make_engine(pool, "second-0", "tiny")
        print(f"its engine serves after {pool.until(engine, 'ready'):.1f} s")
        status, answer = pool.ask("/v1/chat/completions", {**CHAT, "model": "tiny"})
        assert (status, answer["model"]) == (200, "tiny"), answer

        # Beyond loopback an engine answers nobody but its own site and head.
        port = pool.value("SELECT http_port FROM engines_engine WHERE name = 'second-0'")
        engine_url = f"http://{pool.second.address}:{port}"
        assert ask(pool.hub, f"{engine_url}/health")[0] == 200
        assert ask(pool.hub, f"{engine_url}/v1/chat/completions", {**CHAT, "model": "tiny"})[0] == 401

        # A broker that forgot its users gives them back.
        pool.servers.stop("valkey")
        pool.servers.start_valkey()

        before = pool.value("SELECT agent_epoch FROM pools_host WHERE name = 'second'")
        time.sleep(20)
        head.kill_everything()
        print(f"seen lost {pool.until(state, 'lost'):.1f} s after kill -9")
        pool.until(engine, "unhealthy")
        assert pool.ask("/v1/chat/completions", {**CHAT, "model": "tiny"})[0] == 503
        assert pool.ask("/v1/chat/completions", CHAT)[0] == 200, "the first host's engine goes on"

        # The very same command brings it back, though its token is used up.
        print(f"back after {head.start():.1f} s")
        pool.until(state, "up")
        print(f"its engine serves again after {pool.until(engine, 'ready'):.1f} s")
        assert pool.value("SELECT agent_epoch FROM pools_host WHERE name = 'second'") == str(int(before) + 1)
        assert pool.ask("/v1/chat/completions", {**CHAT, "model": "tiny"})[0] == 200

        # Draining: nothing new, then its engine ends; and it takes up its work again.
        tell(pool, "DRAINING")
        print(f"drained after {pool.until(engine, 'stopped'):.1f} s")
        assert pool.ask("/v1/chat/completions", {**CHAT, "model": "tiny"})[0] == 503
        tell(pool, "ACTIVE")
        pool.until(engine, "ready")

        # Retiring: it leaves, and its role and user with it.
        tell(pool, "RETIRING")
        print(f"left after {pool.until('SELECT duty FROM pools_host WHERE name = ' + repr('second'), 'retired'):.1f} s")
        assert pool.value("SELECT count(*) FROM pg_roles WHERE rolname LIKE 'hydra_host_second%'") == "0"
    except AssertionError as error:
        raise AssertionError(f"{error}{head.logs()}") from error
    finally:
        head.close()
        files.terminate()
        files.wait(10)
