"""A pool under test: a site on one machine of a network, hosts that join it, and how a test looks at them."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from tests.conftest import PulledModel
from tests.hosts.hydra_process import HydraProcess, ask
from tests.hosts.network import Machine

CHAT = {"messages": [{"role": "user", "content": "Say yes."}], "max_tokens": 4, "temperature": 0}


class Servers(Protocol):
    """The pool's PostgreSQL and Valkey, and a `psql` that reaches the first."""

    @property
    def psql(self) -> Path: ...
    @property
    def database_url(self) -> str: ...
    @property
    def broker_url(self) -> str: ...
    def restart_broker(self) -> None: ...


@dataclass
class Pool:
    """The machines, what runs on them, and how the test looks at them."""

    hub: Machine
    servers: Servers
    site: HydraProcess
    second: Machine
    folder: Path
    api_key: str

    def rows(self, query: str) -> list[list[str]]:
        """The answer of one query, as texts."""
        psql = str(self.servers.psql)
        argv = self.hub.command(psql, self.servers.database_url, "-At", "-F", "\t", "-c", query)
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

    def token(self) -> str:
        return self.site.manage("jointoken", "create", "--note", "another").strip().splitlines()[-1]

    def head(self, token: str, home: str = "second", name: str = "second") -> HydraProcess:
        site = f"http://{self.site.machine.address}:9000"
        arguments = ("head", "--join", site, "--token", token, "--name", name)
        return self.head_by(arguments, home, name)

    def head_by(self, arguments: Sequence[str], home: str, name: str) -> HydraProcess:
        """A host by a command line of one's own, with a home of its own."""
        environ = {"HYDRA_ENGINE_THREADS": "1", "HYDRA_STORE_BYTES": str(64 << 20)}
        return HydraProcess(self.second, self.folder / home, f"Host {name} serves the pool", *arguments, **environ)

    def pull(self, file: Path, name: str, host: str) -> None:
        """The model as `name`, over the network from a server of files on the hub."""
        self.site.manage("pull", f"http://{self.hub.address}:8000/{file.name}", "--name", name, "--host", host)
        self.until("SELECT state FROM pools_job ORDER BY id DESC LIMIT 1", "done")


@contextmanager
def running_pool(
    machines: tuple[Machine, Machine, Machine],
    servers: Servers,
    folder: Path,
    pulled: PulledModel,
    environ: Mapping[str, str],
) -> Iterator[Pool]:
    """The machines are the servers', the site's and one that may join. `environ` says how the site reaches and is reached."""
    hub, site, second = machines
    home = folder / "first"
    shutil.copytree(pulled.models_dir, home / "models", copy_function=os.link)
    settings = {
        "HYDRA_HOST_NAME": "first",
        "HYDRA_PORT": "9000",
        "HYDRA_ENGINE_THREADS": "1",
        "HYDRA_ENGINE_CONTEXT": "1024",
        "HYDRA_ADMIN_PASSWORD": "a password of the tests",
        "HYDRA_STORE_BYTES": str(64 << 20),
    }
    process = HydraProcess(site, home, "Hydra is ready", "up", **settings, **environ)
    try:
        key = process.manage("apikey", "create", "test").strip()
        process.start()
        yield Pool(hub, servers, process, second, folder, key)
    finally:
        process.close()


def serve_files(machine: Machine, folder: Path, port: int = 8000) -> subprocess.Popen[bytes]:
    argv = machine.command(sys.executable, "-m", "http.server", str(port), "--bind", machine.address, "-d", str(folder))
    return subprocess.Popen(argv, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


def make_engine(pool: Pool, name: str, model: str, host: str = "second", context_tokens: int = 256) -> None:
    """What a person does in the admin: an engine of this model on a host."""
    pool.site.manage(
        "shell",
        "-c",
        "from engines import services as e; from pools import services as p\n"
        f"host_id, gpu_id = p.cpu_of({host!r}); variant = p.find_variant({model!r})\n"
        f"pk = e.ensure_engine({name!r}, host_id=host_id, gpu_id=gpu_id, variant_id=variant.variant_id, slots=2, "
        f"context_tokens={context_tokens}, threads=1)\n"
        "e.start(pk)",
    )


def tell(pool: Pool, duty: str, host: str = "second") -> None:
    """What a person asks of a host in the admin."""
    lines = (
        "from pools import services as p",
        "from pools.choices import HostDuty",
        f"assert p.change_duty(p.cpu_of({host!r})[0], HostDuty.{duty})",
    )
    pool.site.manage("shell", "-c", "\n".join(lines))


@contextmanager
def served_files(machine: Machine, folder: Path) -> Iterator[None]:
    files = serve_files(machine, folder)
    try:
        yield
    finally:
        files.terminate()
        files.wait(10)
