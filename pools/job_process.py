"""The process that does a job's work: started, listened to, and ended with all that it started. Knows nothing of the database.

It prints one JSON object a line: {"stage", "done", "total"} on the way, anything else as its last word.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

TICK_S = 1.0
END_GRACE_S = 10.0
MAX_LINE_BYTES = 1 << 20
TAIL_BYTES = 4000

Tick = Callable[[str, int, int], bool]  # (stage, done, total) → whether to go on


@dataclass(frozen=True)
class Outcome:
    """How it ended: its exit code and last word, or `stopped` by the caller. `errors` is the end of what it wrote to stderr."""

    code: int
    last: dict[str, Any]
    stopped: bool
    errors: str


def run(argv: Sequence[str], folder: Path, log_file: Path, tick: Tick) -> Outcome:
    """Runs `argv` in `folder` until it ends, or until `tick` says no; `tick` is called about once a second, whatever happens.

    Raises OSError when it cannot be started.
    """
    log_file.parent.mkdir(parents=True, exist_ok=True)
    with log_file.open("wb") as errors:
        process = subprocess.Popen(
            argv,
            cwd=folder,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=errors,
            env={**os.environ, "PYTHONUNBUFFERED": "1"},
            start_new_session=True,
        )
        try:
            last, stopped = _listen(process, tick)
            if not stopped:
                process.wait()
        finally:
            _end(process)
    return Outcome(process.returncode, last, stopped, _tail(log_file))


def _listen(process: subprocess.Popen[bytes], tick: Tick) -> tuple[dict[str, Any], bool]:
    """Its last word, and whether the caller stopped it."""
    assert process.stdout is not None
    output = process.stdout.fileno()
    buffer, told = b"", ("starting", 0, 0)
    last: dict[str, Any] = {}
    ticked_at = 0.0
    while True:
        if time.monotonic() - ticked_at >= TICK_S:
            ticked_at = time.monotonic()
            if not tick(*told):
                return last, True
        readable, _, _ = select.select([output], [], [], TICK_S)
        if not readable:
            continue
        chunk = os.read(output, 65536)
        if not chunk:
            tick(*told)
            return last, False
        *lines, buffer = (buffer + chunk).split(b"\n")
        if len(buffer) > MAX_LINE_BYTES:
            buffer = b""
        for line in lines:
            values = _object(line)
            if {"stage", "done", "total"} <= values.keys():
                told = (str(values["stage"]), int(values["done"]), int(values["total"]))
            elif values:
                last = values


def _object(line: bytes) -> dict[str, Any]:
    try:
        values = json.loads(line)
    except ValueError:
        return {}
    return values if isinstance(values, dict) else {}


def _end(process: subprocess.Popen[bytes]) -> None:
    """Ends it and its group; what it started in groups of their own it ends itself when it gets SIGTERM."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        if process.poll() is not None:
            break
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, number)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(END_GRACE_S)
    if process.stdout is not None:
        process.stdout.close()


def _tail(log_file: Path) -> str:
    with log_file.open("rb") as file:
        file.seek(max(0, log_file.stat().st_size - TAIL_BYTES))
        return file.read().decode(errors="replace").strip()
