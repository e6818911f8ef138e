"""Whole runs of the supervisor as a process of its own, with the real servers and small stand-in children."""

import json
import os
import signal
import socket
import subprocess
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from engines.process import ProcessRecord
from hydra_site.supervisor.home import Home
from tests.supervisor.conftest import RunningSupervisor, processes_of, wait_until

Start = Callable[..., RunningSupervisor]


def record_of(path: Path) -> ProcessRecord:
    record = ProcessRecord.from_file(path)
    assert record is not None
    return record


def engine_of(home: Home) -> ProcessRecord:
    path = home.engines_dir / "e1" / "run.json"
    wait_until(path.exists)
    return record_of(path)


def assert_nothing_is_left(home: Home) -> None:
    assert processes_of(home) == []
    assert list(home.run_dir.iterdir()) == []
    assert list(home.engines_dir.glob("*/run.json")) == []


def test_ctrl_c_leaves_nothing(home: Home, start_supervisor: Start) -> None:
    supervisor = start_supervisor()
    supervisor.wait_until_ready()
    engine = engine_of(home)
    assert engine.is_alive()
    assert supervisor.interrupt() == 0
    assert not engine.is_alive()
    assert_nothing_is_left(home)


def test_a_killed_supervisor_is_recovered_from_and_its_engine_adopted(home: Home, start_supervisor: Start) -> None:
    first = start_supervisor()
    first.wait_until_ready()
    engine = engine_of(home)
    orphans = [record_of(home.run_file(name)) for name in ("site", "head-fast", "postgres", "valkey")]
    first.kill()
    assert all(record.is_alive() for record in orphans)
    # As if the kill had come before these records were written.
    home.run_file("site").unlink()
    home.run_file("valkey").unlink()
    second = start_supervisor()
    second.wait_until_ready()
    assert not any(record.is_alive() for record in orphans)
    assert engine_of(home) == engine
    assert engine.is_alive()
    assert second.interrupt() == 0
    assert_nothing_is_left(home)


def test_after_a_kill_of_every_process_the_next_run_serves(home: Home, start_supervisor: Start) -> None:
    first = start_supervisor()
    first.wait_until_ready()
    engine_of(home)
    first.kill()
    for process in processes_of(home):
        process.kill()
    wait_until(lambda: not processes_of(home))
    second = start_supervisor()
    second.wait_until_ready()
    assert second.interrupt() == 0
    assert_nothing_is_left(home)


def test_sigterm_during_the_start_leaves_nothing(new_home: Home, start_supervisor: Start) -> None:
    supervisor = start_supervisor()
    wait_until(lambda: new_home.run_file("initdb").exists() or new_home.run_file("postgres").exists())
    supervisor.process.send_signal(signal.SIGTERM)
    assert supervisor.process.wait(60) == 0
    assert_nothing_is_left(new_home)


def test_a_second_run_on_the_same_home_is_refused(home: Home, start_supervisor: Start) -> None:
    first = start_supervisor()
    first.wait_until_ready()
    second = start_supervisor()
    assert second.process.wait(60) == 1
    assert f"{home.root} is in use by Hydra (pid {first.process.pid})" in second.said()
    assert len(second.said().splitlines()) == 1
    assert first.interrupt() == 0


def test_a_port_in_use_is_one_line_that_names_it(home: Home, start_supervisor: Start, free_port: int) -> None:
    with socket.create_server(("127.0.0.1", free_port)):
        supervisor = start_supervisor()
        assert supervisor.process.wait(60) == 1
    line = f"Hydra stopped: port {free_port} on 127.0.0.1 is in use by pid {os.getpid()}"
    assert supervisor.said().startswith(line)
    assert f"HYDRA_PORT={free_port + 1}" in supervisor.said()
    assert len(supervisor.said().splitlines()) == 1
    assert_nothing_is_left(home)


def test_a_setting_that_cannot_be_used_is_one_line(start_supervisor: Start, new_home: Home) -> None:
    new_home.root.mkdir()
    supervisor = start_supervisor(HYDRA_BIND="nowhere")
    assert supervisor.process.wait(60) == 1
    assert "HYDRA_BIND='nowhere' cannot be used: give an IP address" in supervisor.said()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may mount a small disk")
def test_a_full_disk_is_one_line(new_home: Home, start_supervisor: Start) -> None:
    new_home.root.mkdir(mode=0o700)
    mount = ["mount", "-t", "tmpfs", "-o", "size=64m,mode=700", "tmpfs", str(new_home.root)]
    if subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("mounting a small disk is not permitted here")
    try:
        supervisor = start_supervisor()
        assert supervisor.process.wait(60) == 1
        assert "MB are free where HYDRA_HOME" in supervisor.said()
        assert len(supervisor.said().splitlines()) == 1
        assert_nothing_is_left(new_home)
    finally:
        subprocess.run(["umount", str(new_home.root)], check=True)


def test_the_first_password_and_what_a_start_notes_are_shown_once(home: Home, start_supervisor: Start) -> None:
    told = {"admin_created": True, "admin_password": "four-words", "api_keys": 0, "notes": ["a build", "another"]}
    supervisor = start_supervisor(STAND_IN_BOOTSTRAP=json.dumps(told))
    supervisor.wait_until_ready()
    assert [supervisor.said().count(words) for words in ("four-words", "a build", "another")] == [1, 1, 1]
    assert supervisor.interrupt() == 0
    assert_nothing_is_left(home)


def test_a_bind_for_other_machines_needs_an_api_key(home: Home, start_supervisor: Start) -> None:
    supervisor = start_supervisor(HYDRA_BIND="0.0.0.0")
    assert supervisor.process.wait(60) == 1
    assert "there is no API key: make one with `manage.py apikey create NAME`" in supervisor.said()
    assert_nothing_is_left(home)
    keyed = start_supervisor(HYDRA_BIND="0.0.0.0", STAND_IN_BOOTSTRAP='{"admin_created": false, "api_keys": 1}')
    keyed.wait_until_ready()
    assert keyed.interrupt() == 0


def test_a_child_that_dies_is_started_again(home: Home, start_supervisor: Start) -> None:
    supervisor = start_supervisor()
    supervisor.wait_until_ready()
    for name in ("head-fast", "postgres"):
        died = record_of(home.run_file(name))
        os.kill(died.pid, signal.SIGKILL)
        supervisor.wait_for(f"{name} ended by SIGKILL, starting it again in 1 s")
        supervisor.wait_for(f"{name} is up again")
        assert psutil.pid_exists(record_of(home.run_file(name)).pid)
    assert supervisor.interrupt() == 0
    assert_nothing_is_left(home)


def test_a_bootstrap_that_fails_ends_the_run_with_its_log(home: Home, start_supervisor: Start) -> None:
    supervisor = start_supervisor(STAND_IN_BROKEN="bootstrap")
    assert supervisor.process.wait(60) == 1
    assert "broken on purpose" in supervisor.said()
    assert supervisor.said().splitlines()[-1].startswith("Hydra stopped: bootstrap exited with code 1")
    assert_nothing_is_left(home)


def test_a_start_that_takes_too_long_names_what_is_missing(home: Home, start_supervisor: Start) -> None:
    supervisor = start_supervisor(STAND_IN_BROKEN="site", STAND_IN_TIMEOUT_S="4")
    assert supervisor.process.wait(60) == 1
    last = supervisor.said().splitlines()[-1]
    assert last.startswith("Hydra stopped: ")
    assert "within 4 s" in last
    assert_nothing_is_left(home)
