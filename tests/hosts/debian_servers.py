"""PostgreSQL and Redis (or Valkey) of the distribution, set up by nothing but what docs/many-hosts.md says.

The servers of the wheels have no TLS, Debian's have. They are looked for where its packages put them; below
TEST_SERVERS_ROOT, a folder that packages were unpacked into (`dpkg -x`), first.
"""

from __future__ import annotations

import os
import pwd
import shlex
import shutil
import signal
import subprocess
from dataclasses import dataclass
from pathlib import Path

from hydra_site.supervisor.account import Account
from tests.hosts.many_hosts_page import ManyHostsPage
from tests.hosts.server_pair import POSTGRES, ServerPair

ROOT_VARIABLE = "TEST_SERVERS_ROOT"


@dataclass(frozen=True)
class Binaries:
    """Where the servers lie, and what their libraries need in the environment."""

    postgres: Path
    initdb: Path
    psql: Path
    redis: Path
    environ: dict[str, str]

    def versions(self) -> str:
        """Both servers in their own words."""
        told = [_output([str(path), "--version"], self.environ).strip() for path in (self.postgres, self.redis)]
        return "; ".join(told)


def missing() -> str | None:
    """Why the servers cannot be run here, or None."""
    if os.geteuid() != 0:
        return "PostgreSQL's peer logins need root to become its user"
    if _account("postgres") is None:
        return "there is no user postgres (Debian's postgresql makes it)"
    if shutil.which("openssl") is None:
        return "the certificates need openssl"
    for what, path in (
        ("PostgreSQL", _of_postgres("postgres")),
        ("psql", _of_postgres("psql")),
        ("redis-server or valkey-server", _redis()),
    ):
        if path is None:
            return f"no {what} of the system was found; see {ROOT_VARIABLE} in tests/hosts/debian_servers.py"
    for path in (_of_postgres("postgres"), _redis()):
        if path and b"libssl.so" not in path.read_bytes():
            return f"{path} was built without TLS"
    return None


def find() -> Binaries:
    """Call it only where nothing is `missing`."""
    postgres, psql, redis = _of_postgres("postgres"), _of_postgres("psql"), _redis()
    assert postgres and psql and redis
    return Binaries(postgres, postgres.with_name("initdb"), psql, redis, _environ())


class DebianServers(ServerPair):
    """Both servers on the first machine of a network.

    `page` has this network's addresses and the folders of `places(folder)` in it.
    """

    broker = "redis"
    # PostgreSQL's fast shutdown, and the same to Redis.
    stop_signal = signal.SIGINT

    def __init__(
        self, folder: Path, page: ManyHostsPage, database_url: str, broker_url: str, prefix: list[str]
    ) -> None:
        super().__init__(folder, prefix)
        self.binaries = find()
        self.psql = self.binaries.psql
        self.database_url, self.broker_url = database_url, broker_url
        self._page = page
        postgres = _account("postgres")
        redis = _account("redis") or _account("valkey") or _account("nobody")
        assert postgres and redis
        self._postgres_account, self._redis_account = postgres, redis

    @staticmethod
    def places(folder: Path) -> dict[str, str]:
        """The page's folders, and those of this test that stand for them."""
        return {
            "/etc/postgresql/tls": str(folder / "postgresql" / "tls"),
            "/etc/redis": str(folder / "redis"),
            "/etc/hydra": str(folder / "hydra"),
        }

    def _start(self) -> None:
        self._install_certificates()
        self._write_redis_files()
        super()._start()

    def _start_broker(self) -> None:
        conf = self._folder / "redis" / "redis.conf"
        argv = self._redis_account.wrap([str(self.binaries.redis), str(conf)], [conf])
        self._run(self.broker, argv, self.binaries.environ)

    def ask_as_superuser(self, query: str) -> list[list[str]]:
        """What PostgreSQL's own user is answered over its Unix socket."""
        out = _output([*self._as_postgres(), str(self.psql), "-At", "-F", "\t", "-c", query], self._socket_environ())
        return [line.split("\t") for line in out.splitlines()]

    def make_certificates(self, folder: Path) -> None:
        """The page's lines for a CA and a certificate, run in a new folder."""
        folder.mkdir(parents=True)
        _sh(self._page.block("A certificate for both", "openssl req -x509"), cwd=folder)

    def _install_certificates(self) -> None:
        made = self._folder / "made"
        self.make_certificates(made)
        script = self._page.block("A certificate for both", "install -D")
        owner = self._redis_account
        _sh(script.replace("-o redis -g redis", f"-o {owner.uid} -g {owner.gid}"), cwd=made)

    def _start_postgres(self) -> None:
        data, sockets, page = self._folder / "postgresql" / "data", self._sockets, self._page
        for path in (data, sockets):
            path.mkdir(mode=0o700)
            self._postgres_account.own(path)
        # As Debian's pg_createcluster does it.
        argv = [str(self.binaries.initdb), "-D", str(data), "--auth-local=peer", "--auth-host=scram-sha-256"]
        subprocess.run(
            [*self._as_postgres(), *argv, "--encoding=UTF8", "--locale=C.UTF-8", "--no-sync"],
            env=self._socket_environ(),
            check=True,
            capture_output=True,
        )
        for name, text in (
            ("postgresql.conf", page.block("PostgreSQL", "listen_addresses")),
            ("pg_hba.conf", page.block("PostgreSQL", "hostssl")),
        ):
            with (data / name).open("a") as file:
                file.write("\n" + text)
        argv = [str(self.binaries.postgres), "-D", str(data), "-c", f"unix_socket_directories={sockets}"]
        self._run(POSTGRES, [*self._as_postgres(), *argv], self.binaries.environ)
        self._wait_for_postgres()
        psql = shlex.join([*self._as_postgres(), str(self.psql), "-v", "ON_ERROR_STOP=1"])
        script = page.block("PostgreSQL", "sudo -u postgres psql").replace("sudo -u postgres psql", psql)
        _sh(script, env=self._socket_environ())

    def _postgres_answers(self) -> bool:
        return bool(self.ask_as_superuser("SELECT 1"))

    def _write_redis_files(self) -> None:
        folder = self._folder / "redis"
        state = folder / "state"
        state.mkdir()
        self._redis_account.own(state)
        text = self._page.block("Redis or Valkey", "tls-port")
        (folder / "redis.conf").write_text(text + f"dir {state}\n")
        (folder / "users.acl").write_text(self._page.block("Redis or Valkey", "user default"))

    @property
    def _sockets(self) -> Path:
        return self._folder / "postgresql" / "run"

    def _as_postgres(self) -> tuple[str, ...]:
        return self._postgres_account.wrap([], [self._sockets])

    def _socket_environ(self) -> dict[str, str]:
        return {**self.binaries.environ, "PGHOST": str(self._sockets)}


def _sh(script: str, *, cwd: Path | None = None, env: dict[str, str] | None = None) -> None:
    """Lines of the page. Raises AssertionError with what they said when one fails."""
    done = subprocess.run(["sh", "-e", "-c", script], cwd=cwd, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{script}\n{done.stderr}"


def _of_postgres(name: str) -> Path | None:
    """A program of the newest PostgreSQL, of the first place that has it."""
    for root in _roots():
        found = root.glob(f"usr/lib/postgresql/*/bin/{name}")
        if newest := max(found, key=lambda path: int(path.parts[-3]), default=None):
            return newest
    return None


def _redis() -> Path | None:
    path = os.pathsep.join([*(str(root / "usr/bin") for root in _roots()), os.environ.get("PATH", "")])
    found = shutil.which("redis-server", path=path) or shutil.which("valkey-server", path=path)
    return Path(found) if found else None


def _roots() -> list[Path]:
    unpacked = os.environ.get(ROOT_VARIABLE)
    return [*([Path(unpacked)] if unpacked else []), Path("/")]


def _environ() -> dict[str, str]:
    libraries = [str(path) for root in _roots()[:-1] for path in root.glob("usr/lib/*-linux-gnu")]
    return {**os.environ, "LD_LIBRARY_PATH": os.pathsep.join(libraries)} if libraries else dict(os.environ)


def _account(name: str) -> Account | None:
    try:
        entry = pwd.getpwnam(name)
    except KeyError:
        return None
    return Account(entry.pw_uid, entry.pw_gid)


def _output(argv: list[str], environ: dict[str, str]) -> str:
    """What it prints, "" when it fails."""
    done = subprocess.run(argv, env=environ, capture_output=True, text=True, timeout=30, check=False)
    return done.stdout if done.returncode == 0 else ""
