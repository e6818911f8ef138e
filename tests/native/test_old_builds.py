"""What is removed behind a build, and what stays: what runs, what is newest, and what is fallen back on."""

from __future__ import annotations

import fcntl
import os
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path

import pytest

from engines import native_library
from engines.build_trust import Fault, blame
from engines.native_library import LIBRARY_VARIABLE, builds, cpu_digest
from native import old_builds
from native.old_builds import remove_old
from tests.engines.test_native_library import CPUINFO, PACKAGE, put

SOURCE = "5" * 64


def put_row(home: Path, *keys: str, archs: tuple[str, ...] = ("cpu",)) -> None:
    """Builds, each a day newer than the one before."""
    for day, key in enumerate(keys, 1):
        put(home, key, archs, f"2026-11-{day:02}T00:00:00+00:00")


def give_up(home: Path, key: str) -> None:
    for number in (1, 2):
        at = datetime.now(UTC).isoformat(timespec="seconds")
        blame(home / "native" / key, Fault(at, "SIGILL", "1", "model", str(number)))


def left(home: Path) -> set[str]:
    return {build.folder.name for build in builds(home)}


def test_of_each_architecture_the_newest_two_stay(tmp_path: Path) -> None:
    put_row(tmp_path, "a", "b", "c", "d")
    put_row(tmp_path, "e", "f", "g", archs=("sm_86",))
    put(tmp_path, "fat", ("sm_86", "sm_90"), "2026-10-01T00:00:00+00:00")
    assert set(remove_old(tmp_path, {PACKAGE}, SOURCE)) == {"a", "b", "e"}
    assert left(tmp_path) == {"c", "d", "f", "g", "fat"}, "fat is the only one for sm_90"
    assert not (tmp_path / "native" / "a").exists()


def test_what_crashed_engines_is_nothing_to_fall_back_on(tmp_path: Path) -> None:
    put_row(tmp_path, "a", "b", "c", "d", "e")
    give_up(tmp_path, "c")
    give_up(tmp_path, "e")
    remove_old(tmp_path, {PACKAGE}, SOURCE)
    assert left(tmp_path) == {"b", "d", "e"}


def test_builds_for_other_bindings_or_another_processor_go(tmp_path: Path) -> None:
    put(tmp_path, "bindings", ("cpu",), "2026-11-02T00:00:00+00:00", package="llama-cpp-python==0.3.35")
    put(tmp_path, "moved", ("cpu",), "2026-11-02T00:00:00+00:00", cpu_sha256=cpu_digest(CPUINFO))
    put_row(tmp_path, "own")
    remove_old(tmp_path, {PACKAGE, "llama-cpp-python==0.3.35"}, SOURCE)
    assert left(tmp_path) == {"bindings", "own"}
    remove_old(tmp_path, {PACKAGE}, SOURCE)
    assert left(tmp_path) == {"own"}


def test_what_a_process_was_told_to_load_stays_until_it_has_ended(tmp_path: Path) -> None:
    put_row(tmp_path, "a", "b", "c", "d")
    environment = {**os.environ, LIBRARY_VARIABLE: str(tmp_path / "native" / "a" / "lib")}
    command = [sys.executable, "-c", "print(flush=True); input()"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment) as engine:
        assert engine.stdout is not None and engine.stdout.readline()
        assert remove_old(tmp_path, {PACKAGE}, SOURCE) == ["b"]
        engine.communicate(b"\n")
    assert remove_old(tmp_path, {PACKAGE}, SOURCE) == ["a"]


def test_nothing_goes_while_an_engine_is_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(native_library, "LOCK_WAIT_S", 0.2)
    put_row(tmp_path, "a", "b", "c")
    with native_library.starting(tmp_path):
        assert remove_old(tmp_path, {PACKAGE}, SOURCE) == []
    assert left(tmp_path) == {"a", "b", "c"}
    lock = tmp_path / "native" / native_library.LOCK
    assert f"could not be removed: {lock} has been locked by others" in capfd.readouterr().err
    assert remove_old(tmp_path, {PACKAGE}, SOURCE) == ["a"]


def test_what_cannot_be_removed_is_told_and_keeps_nothing_else(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    put_row(tmp_path, "a", "b", "c", "d")
    (tmp_path / "native" / ".a.lock").mkdir()
    assert set(remove_old(tmp_path, {PACKAGE}, SOURCE)) == {"a", "b"}
    assert left(tmp_path) == {"c", "d"}, "it is no build any more"
    assert (tmp_path / "native" / "a").exists() and not (tmp_path / "native" / "b").exists()
    assert f"{tmp_path / 'native' / 'a'} is not needed any more and could not be removed" in capfd.readouterr().err


def test_object_files_of_another_source_go_unless_they_are_being_made(tmp_path: Path) -> None:
    native = tmp_path / "native"
    keys = {name: f"{number:016x}" for number, name in enumerate(("now", "earlier", "unsaid", "made", "kernels"))}
    for name, key in keys.items():
        folder = native / f".{'kernels' if name == 'kernels' else 'work'}-{key}"
        folder.mkdir(parents=True)
        if name != "unsaid":
            (folder / old_builds.SOURCE_NAME).write_text(SOURCE if name == "now" else "6" * 64)
    (native / "0123456789abcdef" / "lib").mkdir(parents=True)  # a removal that broke off
    put_row(tmp_path, "a")
    assert remove_old(tmp_path, {PACKAGE}, None) == []
    with (native / f".{keys['made']}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        remove_old(tmp_path, {PACKAGE}, SOURCE)
    folders = {path.name for path in native.iterdir() if path.is_dir()}
    assert folders == {"a", f".work-{keys['now']}", f".work-{keys['made']}"}
