"""Process records: whose process a pid is, and how it is ended."""

import dataclasses
import os
import signal
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from engines.process import ProcessRecord, end

SLEEPER = (sys.executable, "-c", "import time; print('up', flush=True); time.sleep(600)")
STUBBORN = (
    sys.executable,
    "-c",
    "import signal, time; signal.signal(15, signal.SIG_IGN); print('up', flush=True); time.sleep(600)",
)


def spawn(argv: tuple[str, ...]) -> "subprocess.Popen[bytes]":
    process = subprocess.Popen(argv, stdout=subprocess.PIPE)
    assert process.stdout is not None
    assert process.stdout.readline() == b"up\n"
    process.stdout.close()
    return process


@pytest.fixture
def sleeper() -> Iterator["subprocess.Popen[bytes]"]:
    process = spawn(SLEEPER)
    yield process
    process.kill()
    process.wait()


def test_a_record_survives_its_file(sleeper: "subprocess.Popen[bytes]", tmp_path: Path) -> None:
    record = ProcessRecord.of(sleeper.pid, "sleeper", SLEEPER)
    path = tmp_path / "run.json"
    record.to_file(path)
    assert ProcessRecord.from_file(path) == record
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert [entry.name for entry in tmp_path.iterdir()] == ["run.json"]


def test_it_tells_a_reused_pid_from_ours(sleeper: "subprocess.Popen[bytes]") -> None:
    record = ProcessRecord.of(sleeper.pid, "sleeper", SLEEPER)
    assert record.is_alive()
    reused = dataclasses.replace(record, start_time=record.start_time - 1)
    assert not reused.is_alive()
    end(reused, signal.SIGKILL, 1)
    assert record.is_alive()


def test_a_record_from_before_a_reboot_is_nobody(sleeper: "subprocess.Popen[bytes]") -> None:
    record = ProcessRecord.of(sleeper.pid, "sleeper", SLEEPER)
    assert not dataclasses.replace(record, boot_id="another").is_alive()


def test_a_zombie_is_not_alive() -> None:
    process = spawn(SLEEPER)
    record = ProcessRecord.of(process.pid, "sleeper", SLEEPER)
    process.kill()
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    assert not record.is_alive()
    process.wait()


def test_it_ends_and_reaps_an_own_child() -> None:
    process = spawn(SLEEPER)
    record = ProcessRecord.of(process.pid, "sleeper", SLEEPER)
    end(record, signal.SIGTERM, 10)
    assert not Path(f"/proc/{process.pid}").exists()
    end(record, signal.SIGTERM, 10)
    process.wait()


def test_it_kills_what_ignores_the_first_signal() -> None:
    process = spawn(STUBBORN)
    record = ProcessRecord.of(process.pid, "stubborn", STUBBORN)
    end(record, signal.SIGTERM, 0.2)
    assert not record.is_alive()
    process.wait()


def test_a_process_that_never_was_has_no_record() -> None:
    process = spawn(SLEEPER)
    process.kill()
    process.wait()
    with pytest.raises(ProcessLookupError):
        ProcessRecord.of(process.pid, "gone", SLEEPER)


@pytest.mark.parametrize(
    "content",
    [
        "",
        "{",
        "[]",
        "null",
        '{"pid": "x"}',
        '{"pid": 0, "start_time": 1, "boot_id": "", "name": "", "argv": []}',
        "[" * 9999,
    ],
)
def test_a_file_that_holds_no_record_gives_none(tmp_path: Path, content: str) -> None:
    path = tmp_path / "run.json"
    assert ProcessRecord.from_file(path) is None
    path.write_text(content)
    assert ProcessRecord.from_file(path) is None
