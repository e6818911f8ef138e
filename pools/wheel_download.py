"""Fetches one wheel through pip, from whatever index pip is set to, with progress in real bytes.

pip runs as a process of its own: its settings, proxies, mirrors and credentials apply without this module knowing them.
It reports no bytes to other programs, so progress is the size that the file has reached on disk.
"""

import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from pools.errors import DownloadFailed

BytesDone = Callable[[int], None]

DOWNLOAD_LIMIT_S = 1800.0
POLL_S = 0.1
END_GRACE_S = 5.0
REPORT_TAIL_BYTES = 8192
REPORT_LINES = 5


def download_wheel(requirement: str, scratch: Path, on_bytes: BytesDone) -> Path:
    """Downloads the wheel of `requirement` (`package==version`, without its dependencies) and returns its path.

    All files, pip's temporary ones included, go into the existing, empty directory `scratch`, which the caller removes.
    `on_bytes` gets the number of bytes on disk, never falling. Raises DownloadFailed with the last lines that pip
    wrote, or after DOWNLOAD_LIMIT_S; pip has ended in every case.
    """
    destination, temporary, report = scratch / "wheel", scratch / "temporary", scratch / "report"
    destination.mkdir()
    temporary.mkdir()
    argv = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary", ":all:"]
    argv += [
        "--disable-pip-version-check",
        "--no-input",
        "--progress-bar",
        "off",
        "--dest",
        str(destination),
        requirement,
    ]
    with report.open("wb") as output:
        process = subprocess.Popen(
            argv,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env={**os.environ, "TMPDIR": str(temporary)},  # pip downloads there first; the default may be a small tmpfs
        )
        try:
            exit_code = _watch(process, scratch, on_bytes)
        finally:
            _end(process)
    if exit_code is None:
        raise DownloadFailed(f"{requirement} did not arrive within {DOWNLOAD_LIMIT_S:.0f} s; pip said: {_tail(report)}")
    if exit_code != 0:
        raise DownloadFailed(f"pip could not download {requirement}: {_tail(report)}")
    wheels = list(destination.glob("*.whl"))
    if len(wheels) != 1:
        raise DownloadFailed(f"pip delivered {len(wheels)} wheels for {requirement}: {_tail(report)}")
    on_bytes(wheels[0].stat().st_size)
    return wheels[0]


def _watch(process: subprocess.Popen[bytes], scratch: Path, on_bytes: BytesDone) -> int | None:
    """Waits for pip while it reports progress; its exit code, or None once the time is over."""
    deadline = time.monotonic() + DOWNLOAD_LIMIT_S
    seen_bytes = 0
    while time.monotonic() < deadline:
        try:
            return process.wait(timeout=POLL_S)
        except subprocess.TimeoutExpired:
            done_bytes = _largest_file_bytes(scratch)
            if done_bytes > seen_bytes:
                seen_bytes = done_bytes
                on_bytes(done_bytes)
    return None


def _largest_file_bytes(directory: Path) -> int:
    """The wheel is by far the largest file; a sum would count it twice while pip copies it into place."""
    largest = 0
    for folder, _, names in os.walk(directory):
        for name in names:
            try:
                largest = max(largest, Path(folder, name).stat().st_size)
            except FileNotFoundError:  # pip moves and removes its files while they are listed
                continue
    return largest


def _end(process: subprocess.Popen[bytes]) -> None:
    if process.poll() is not None:
        return
    process.terminate()
    try:
        process.wait(timeout=END_GRACE_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def _tail(report: Path) -> str:
    with report.open("rb") as stream:
        stream.seek(max(0, report.stat().st_size - REPORT_TAIL_BYTES))
        lines = [line.strip() for line in stream.read().decode(errors="replace").splitlines()]
    return " | ".join([line for line in lines if line][-REPORT_LINES:]) or "nothing"
