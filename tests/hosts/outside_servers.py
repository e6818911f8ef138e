"""PostgreSQL and Valkey as an operator of many hosts runs them: beyond loopback, with passwords, by hand.

The binaries are those of the embedded servers, the configuration is what docs/many-hosts.md asks for.
"""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

from hydra_site.supervisor import postgres, valkey
from hydra_site.supervisor.home import Home
from tests.hosts.server_pair import POSTGRES, ServerPair

SITE_ROLE, SITE_PASSWORD = "site", "the site's own password"
BROKER_PASSWORD = "the broker's own password"


class OutsideServers(ServerPair):
    """Both servers on `address`, for whoever asks from `network`."""

    broker = "valkey"

    def __init__(self, folder: Path, address: str, network: str, prefix: list[str]) -> None:
        super().__init__(folder, prefix)
        self.address, self._network = address, network
        self.postgres_port, self.valkey_port = 5432, 6379
        self.psql = postgres._binary("psql")

    @property
    def database_url(self) -> str:
        return f"postgresql://{SITE_ROLE}:{SITE_PASSWORD.replace(' ', '%20')}@{self.address}:{self.postgres_port}/hydra"

    @property
    def broker_url(self) -> str:
        return f"redis://:{BROKER_PASSWORD.replace(' ', '%20')}@{self.address}:{self.valkey_port}/0"

    def _start_broker(self) -> None:
        conf = self._folder / "valkey.conf"
        lines = [
            f"bind {self.address}",
            f"port {self.valkey_port}",
            f'requirepass "{BROKER_PASSWORD}"',
            f"dir {self._folder}",
            'save ""',
        ]
        conf.write_text("\n".join(lines) + "\n")
        self._run(self.broker, [str(valkey._binary()), str(conf)], os.environ)

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
        self._run(POSTGRES, list(server.argv), os.environ if server.env is None else server.env)
        self._wait_for_postgres()
        # As docs/many-hosts.md has it: the site's role is no superuser, it owns its database and may make roles.
        for statement in (
            f"CREATE ROLE site LOGIN CREATEROLE PASSWORD '{SITE_PASSWORD.replace(chr(39), chr(39) * 2)}'",
            "CREATE DATABASE hydra OWNER site",
        ):
            self._ask_as_superuser("-v", "ON_ERROR_STOP=1", "-c", statement).check_returncode()

    def _postgres_answers(self) -> bool:
        return not self._ask_as_superuser("-c", "SELECT 1").returncode

    def _ask_as_superuser(self, *arguments: str) -> subprocess.CompletedProcess[bytes]:
        place = f"{self.address}:{self.postgres_port}/postgres"
        url = f"postgresql://{postgres.USER}:the%20superuser's%20password@{place}"
        return subprocess.run([*self._prefix, str(self.psql), url, *arguments], capture_output=True, check=False)


def _rewrite(path: Path, text: str) -> None:
    """In place, so that the file keeps its owner."""
    with path.open("w") as file:
        file.write(text)
