"""PostgreSQL and Valkey as an operator of many hosts runs them: beyond loopback, with passwords, by hand.

The binaries are those of the embedded servers, the configuration is what docs/many-hosts.md asks for.
"""

from __future__ import annotations

import os
import subprocess
import time
from pathlib import Path

from hydra_site.supervisor import postgres, valkey
from hydra_site.supervisor.home import Home

SITE_ROLE, SITE_PASSWORD = "site", "the site's own password"
BROKER_PASSWORD = "the broker's own password"
START_TIMEOUT_S = 60.0


class OutsideServers:
    """Both servers on `address`, each command run through `prefix` (a namespace, or nothing). Use as a context manager."""

    def __init__(self, folder: Path, address: str, network: str, prefix: list[str]) -> None:
        self._folder, self.address, self._network, self._prefix = folder, address, network, prefix
        self.postgres_port, self.valkey_port = 5432, 6379
        self.psql = postgres._binary("psql")
        self._processes: dict[str, subprocess.Popen[bytes]] = {}

    @property
    def database_url(self) -> str:
        return f"postgresql://{SITE_ROLE}:{SITE_PASSWORD.replace(' ', '%20')}@{self.address}:{self.postgres_port}/hydra"

    @property
    def broker_url(self) -> str:
        return f"redis://:{BROKER_PASSWORD.replace(' ', '%20')}@{self.address}:{self.valkey_port}/0"

    def __enter__(self) -> OutsideServers:
        try:
            self._start_postgres()
            self._start_valkey()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        for name in list(self._processes):
            self.stop(name)

    def stop(self, name: str) -> None:
        process = self._processes.pop(name)
        process.terminate()
        try:
            process.wait(15)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait(5)

    def restart_broker(self) -> None:
        """Without an ACL file it forgets the users that were made."""
        self.stop("valkey")
        self._start_valkey()

    def _start_valkey(self) -> None:
        conf = self._folder / "valkey.conf"
        lines = [
            f"bind {self.address}",
            f"port {self.valkey_port}",
            f'requirepass "{BROKER_PASSWORD}"',
            f"dir {self._folder}",
            'save ""',
        ]
        conf.write_text("\n".join(lines) + "\n")
        self._run("valkey", [str(valkey._binary()), str(conf)], None)

    def _start_postgres(self) -> None:
        home = Home(self._folder / "database")
        home.create()
        (initdb, server) = postgres.specs(home, "the superuser's password", self.postgres_port)
        assert initdb.prepare and initdb.finish and server.prepare
        initdb.prepare()
        subprocess.run(initdb.argv, env=initdb.env, check=True, capture_output=True)
        initdb.finish()
        server.prepare()
        settings = home.postgres_dir / "postgresql.conf"
        text = settings.read_text().replace("listen_addresses = '127.0.0.1'", f"listen_addresses = '{self.address}'")
        _rewrite(settings, text)
        _rewrite(home.postgres_dir / "pg_hba.conf", f"host all all {self._network} scram-sha-256\n")
        self._run("postgres", list(server.argv), server.env)
        superuser = [
            *self._prefix,
            str(self.psql),
            f"postgresql://{postgres.USER}:the%20superuser's%20password@{self.address}:{self.postgres_port}/postgres",
        ]
        deadline = time.monotonic() + START_TIMEOUT_S
        while subprocess.run([*superuser, "-c", "SELECT 1"], capture_output=True, check=False).returncode:
            if time.monotonic() > deadline:
                raise AssertionError("PostgreSQL did not come up: " + (self._folder / "postgres.log").read_text())
            time.sleep(0.1)
        # As docs/many-hosts.md has it: the site's role is no superuser, it owns its database and may make roles.
        for statement in (
            f"CREATE ROLE site LOGIN CREATEROLE PASSWORD '{SITE_PASSWORD.replace(chr(39), chr(39) * 2)}'",
            "CREATE DATABASE hydra OWNER site",
        ):
            subprocess.run([*superuser, "-v", "ON_ERROR_STOP=1", "-c", statement], check=True, capture_output=True)

    def _run(self, name: str, argv: list[str], environ: object) -> None:
        with (self._folder / f"{name}.log").open("ab") as log:
            self._processes[name] = subprocess.Popen(
                [*self._prefix, *argv],
                env=dict(environ) if isinstance(environ, dict) else dict(os.environ),
                stdout=log,
                stderr=log,
                stdin=subprocess.DEVNULL,
                start_new_session=True,
            )


def _rewrite(path: Path, text: str) -> None:
    """In place, so that the file keeps its owner."""
    with path.open("w") as file:
        file.write(text)
