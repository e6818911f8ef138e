"""The embedded Valkey, and what a management command borrows."""

import socket
import stat
from urllib.parse import urlsplit

import psutil
import pytest

from engines.process import ProcessRecord
from hydra_site.supervisor import borrow, valkey
from hydra_site.supervisor.embedded import embedded_servers
from hydra_site.supervisor.home import Home
from tests.supervisor.conftest import processes_of


def ask(url: str, *commands: str) -> bytes:
    parts = urlsplit(url)
    with socket.create_connection((parts.hostname or "", parts.port or 0), timeout=5) as connection:
        connection.sendall("".join(f"{command}\r\n" for command in (*commands, "QUIT")).encode())
        answer = b""
        while received := connection.recv(4096):
            answer += received
        return answer


def test_it_demands_its_password_and_hides_it(home: Home) -> None:
    with embedded_servers(home.root) as services:
        assert services.broker_url is not None
        password = home.secrets().valkey_password
        assert ask(services.broker_url, "PING").startswith(b"-NOAUTH")
        assert ask(services.broker_url, f"AUTH {password}", "PING").startswith(b"+OK\r\n+PONG")
        assert b"268435456" in ask(services.broker_url, f"AUTH {password}", "CONFIG GET maxmemory")
        record = ProcessRecord.from_file(home.run_file("valkey"))
        assert record is not None
        process = psutil.Process(record.pid)
        assert password not in " ".join(process.cmdline())
        assert {connection.laddr.ip for connection in process.net_connections("inet")} == {"127.0.0.1"}
        assert stat.S_IMODE((home.valkey_dir / "valkey.conf").stat().st_mode) == 0o600
        assert not valkey.accepts("guess", urlsplit(services.broker_url).port or 0)


def test_a_command_uses_the_servers_that_run(home: Home) -> None:
    with embedded_servers(home.root) as running, borrow.services(home.root) as borrowed:
        assert borrowed == (running.database_url, running.broker_url)


def test_a_command_starts_the_database_for_itself_when_nothing_runs(
    home: Home, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("DATABASE_URL", raising=False)
    monkeypatch.delenv("BROKER_URL", raising=False)
    home.create()
    with borrow.services(home.root) as (database_url, broker_url):
        assert database_url.startswith("postgresql://hydra:")
        assert broker_url is None
        assert borrow.running_services(home.root) is not None
    assert borrow.running_services(home.root) is None
    assert processes_of(home) == []


def test_a_command_uses_outside_servers_when_nothing_runs(home: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DATABASE_URL", "postgresql://me:secret@db.example/hydra")
    monkeypatch.delenv("BROKER_URL", raising=False)
    with borrow.services(home.root) as borrowed:
        assert borrowed == ("postgresql://me:secret@db.example/hydra", None)
