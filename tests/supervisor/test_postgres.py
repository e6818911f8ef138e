"""The embedded PostgreSQL: how it starts, what it leaves alone, and how it comes back after a crash."""

import os
import signal
import stat
import subprocess
import sys
from pathlib import Path

import psutil
import psycopg
import pytest

from engines.process import ProcessRecord
from hydra_site.supervisor import postgres
from hydra_site.supervisor.embedded import embedded_servers
from hydra_site.supervisor.errors import DiskFull, HomeInUse, HomeUnusable
from hydra_site.supervisor.home import Home
from tests.supervisor.conftest import processes_of, wait_until

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root has PostgreSQL run as somebody else")


def read(url: str, query: str) -> object:
    with psycopg.connect(url) as connection:
        row = connection.execute(query).fetchone()
        return row[0] if row else None


def modes(*paths: Path) -> list[str]:
    return [f"{path} {stat.filemode(path.stat().st_mode)} {path.stat().st_uid}" for path in paths]


def server_record(home: Home) -> ProcessRecord:
    record = ProcessRecord.from_file(home.run_file("postgres"))
    assert record is not None
    return record


def crash(home: Home, *, server_too: bool = True) -> ProcessRecord:
    """Start the servers in a process of its own and kill that, and the postmaster, with SIGKILL; the server's record."""
    program = (
        "import sys, time; from pathlib import Path\n"
        "from hydra_site.supervisor.embedded import embedded_servers\n"
        "with embedded_servers(Path(sys.argv[1]), broker=False) as services:\n"
        "    print(services.database_url, flush=True); time.sleep(600)\n"
    )
    with subprocess.Popen([sys.executable, "-c", program, str(home.root)], stdout=subprocess.PIPE, text=True) as owner:
        assert owner.stdout is not None
        url = owner.stdout.readline().strip()
        with psycopg.connect(url, autocommit=True) as connection:
            connection.execute("CREATE TABLE kept AS SELECT 7 AS value")
        record = server_record(home)
        owner.kill()
        if server_too:
            os.kill(record.pid, signal.SIGKILL)
    return record


def shared_memory() -> set[str]:
    return {path.name for path in Path("/dev/shm").glob("PostgreSQL.*")}


def test_it_starts_and_stops_in_a_closed_home_and_leaves_no_trace(new_home: Home) -> None:
    parents = (new_home.root.parent, new_home.root.parent.parent)
    before = modes(*parents)
    found_before = shared_memory()
    with embedded_servers(new_home.root) as services:
        assert str(read(services.database_url, "SHOW server_version")).startswith("18.")
        assert read(services.database_url, "SHOW fsync") == "on"
        # `initdb` has some for a moment, another worker's too; a server would keep it.
        wait_until(lambda: shared_memory() <= found_before)
    assert modes(*parents) == before
    assert stat.S_IMODE(new_home.root.stat().st_mode) == 0o700
    wait_until(lambda: shared_memory() <= found_before)
    assert processes_of(new_home) == []
    assert list(new_home.run_dir.iterdir()) == []


def test_it_demands_its_password(home: Home) -> None:
    with embedded_servers(home.root, broker=False) as services:
        wrong = services.database_url.replace(home.secrets().postgres_password, "guess")
        with pytest.raises(psycopg.OperationalError, match="password"):
            psycopg.connect(wrong)
        assert home.secrets().postgres_password not in " ".join(psutil.Process(server_record(home).pid).cmdline())


@needs_root
def test_as_root_it_runs_as_somebody_else_who_owns_only_the_data(home: Home) -> None:
    with embedded_servers(home.root, broker=False):
        uid = psutil.Process(server_record(home).pid).uids().real
        assert uid != 0
        assert home.postgres_dir.stat().st_uid == uid
        assert {path.stat().st_uid for path in home.root.iterdir() if path != home.postgres_dir} == {0}


@needs_root
def test_a_database_that_root_copied_is_given_back_to_its_user(home: Home) -> None:
    with embedded_servers(home.root, broker=False):
        pass
    for path in (home.postgres_dir, *home.postgres_dir.rglob("*")):
        os.chown(path, 0, 0)
    with embedded_servers(home.root, broker=False) as services:
        assert read(services.database_url, "SELECT 1") == 1


def test_what_was_committed_survives_a_kill_of_supervisor_and_server(home: Home) -> None:
    crash(home)
    with embedded_servers(home.root, broker=False) as services:
        assert read(services.database_url, "SELECT value FROM kept") == 7
    assert processes_of(home) == []


def test_a_living_stranger_in_postmaster_pid_stops_nothing(home: Home) -> None:
    crash(home)
    wait_until(lambda: not processes_of(home))
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"]) as stranger:
        lines = (home.postgres_dir / "postmaster.pid").read_text().splitlines()
        (home.postgres_dir / "postmaster.pid").write_text("\n".join([str(stranger.pid), *lines[1:]]) + "\n")
        record = ProcessRecord.of(stranger.pid, "postgres", ())
        # The record, too, names the stranger's pid, but the start time of the dead server.
        ProcessRecord(record.pid, record.start_time - 5, record.boot_id, "postgres", ()).to_file(
            home.run_file("postgres")
        )
        with embedded_servers(home.root, broker=False) as services:
            assert read(services.database_url, "SELECT value FROM kept") == 7
            assert stranger.poll() is None
        stranger.kill()


def test_an_orphan_server_is_ended_and_its_data_taken_over(home: Home) -> None:
    orphan = crash(home, server_too=False)
    assert orphan.is_alive()
    with embedded_servers(home.root, broker=False) as services:
        assert read(services.database_url, "SELECT value FROM kept") == 7
        assert not orphan.is_alive()


def test_an_orphan_server_without_a_record_is_found_by_its_directory(home: Home) -> None:
    orphan = crash(home, server_too=False)
    home.run_file("postgres").unlink()
    with embedded_servers(home.root, broker=False) as services:
        assert read(services.database_url, "SELECT value FROM kept") == 7
        assert not orphan.is_alive()


def test_an_initdb_that_was_cut_short_is_done_again(new_home: Home) -> None:
    new_home.create()
    draft = new_home.root / "pg.new"
    draft.mkdir(mode=0o700)
    (draft / "PG_VERSION").write_text("18\n")
    with embedded_servers(new_home.root, broker=False) as services:
        assert read(services.database_url, "SELECT 1") == 1
    assert not draft.exists()


def test_a_database_without_its_password_file_is_told_at_once(new_home: Home) -> None:
    new_home.create()
    new_home.postgres_dir.mkdir()
    (new_home.postgres_dir / "PG_VERSION").write_text("18\n")
    with pytest.raises(HomeUnusable, match=r"secrets\.json is gone"), embedded_servers(new_home.root, broker=False):
        pass


def test_a_home_in_use_is_refused_with_the_holders_pid(home: Home) -> None:
    with (
        embedded_servers(home.root, broker=False, purpose="a test"),
        pytest.raises(HomeInUse, match=rf"in use by a test \(pid {os.getpid()}\)"),
        embedded_servers(home.root, broker=False),
    ):
        pass


@needs_root
def test_a_full_disk_while_the_database_is_made_is_one_clear_error(tmp_path: Path) -> None:
    small = tmp_path / "small"
    small.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=16m", "tmpfs", str(small)], capture_output=True, check=False
    )
    if mounted.returncode:
        pytest.skip("mounting a small disk is not permitted here")
    try:
        with pytest.raises(DiskFull, match="no space is left"), embedded_servers(small / "home"):
            pass
        assert processes_of(Home(small / "home")) == []
    finally:
        subprocess.run(["umount", str(small)], check=True)


def test_processes_in_other_directories_are_no_orphans(home: Home) -> None:
    with embedded_servers(home.root, broker=False) as services:
        postgres.end_orphans(home.root / "elsewhere")
        assert read(services.database_url, "SELECT 1") == 1
