"""Processes that outlive whoever started them: engines and stores. Starting one, finding it again, ending it, reading its log.

Each runs in a session of its own and has a directory: config.json (what it was told), run.json (which process it is), and
its log. Knows nothing of the database, nor of what the processes do.
"""

import contextlib
import os
import random
import shutil
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import psutil

from engines.ending import FATAL, TELL_FROM_THE_START
from engines.errors import LaunchError
from engines.process import ProcessRecord, end, write_private

MAX_LOG_BYTES = 8 << 20
LOG_TAIL_BYTES = 32 << 10
LAST_LINES = 8
# Below the range from which Linux gives ports to outgoing connections, so that none of those takes a port between our
# look and the process's bind.
LOWEST_PORT = 20_000
HIGHEST_PORT = 32_000
_PORT_ATTEMPTS = 200

KEPT_EXIT_CODES = 256

_PROJECT_DIR = Path(__file__).resolve().parent.parent

# By pid and start time, which no other process shares.
_children: dict[tuple[int, float], subprocess.Popen[bytes]] = {}
_exit_codes: dict[tuple[int, float], int] = {}
_children_lock = threading.Lock()


@dataclass(frozen=True)
class Place:
    """Where one such process lives, and what it runs: `python -m <module> --config <directory>/config.json`."""

    directory: Path
    module: str
    name: str
    log_name: str

    @property
    def config_file(self) -> Path:
        return self.directory / "config.json"

    @property
    def run_file(self) -> Path:
        return self.directory / "run.json"

    @property
    def log_file(self) -> Path:
        return self.directory / self.log_name

    @property
    def former_log_file(self) -> Path:
        return self.directory / f"{self.log_name}.1"


def start(place: Place, config: str, *, grace_s: float, environment: Mapping[str, str] | None = None) -> ProcessRecord:
    """Start the process with `config` (JSON, which may hold secrets: mode 0600) and return its record.

    `environment` is added to ours.

    Whatever ran there before is ended first. Raises LaunchError when no process could be made.
    """
    end_process(place, grace_s=grace_s)
    argv = (sys.executable, "-m", place.module, "--config", str(place.config_file))
    try:
        place.directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        write_private(place.config_file, config)
        _rotate_log(place)
        with place.log_file.open("ab") as log:
            child = subprocess.Popen(
                argv,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                cwd=_PROJECT_DIR,
                env={**os.environ, **TELL_FROM_THE_START, **(environment or {})},
                start_new_session=True,
            )
        record = ProcessRecord.of(child.pid, place.name, argv)
        record.to_file(place.run_file)
    except OSError as error:
        raise LaunchError(f"the process of {place.name} could not be started: {error}") from error
    with _children_lock:
        _children[record.pid, record.start_time] = child
    return record


def reap() -> None:
    """Collect the exit status of those that this process started and that have ended, so that no zombie stays."""
    with _children_lock:
        for key in [key for key, child in _children.items() if child.poll() is not None]:
            _exit_codes[key] = _children.pop(key).returncode
        while len(_exit_codes) > KEPT_EXIT_CODES:
            del _exit_codes[next(iter(_exit_codes))]


def exit_code(pid: int, start_time: float) -> int | None:
    """How a process ended that this one started: minus its signal, or what it said. None for others, and while it runs."""
    reap()
    with _children_lock:
        return _exit_codes.get((pid, start_time))


def find(place: Place) -> ProcessRecord | None:
    """The living process of this directory, by its run.json or else by its command line; None when none runs.

    The second way finds a process whose starter died before it could write the record.
    """
    record = ProcessRecord.from_file(place.run_file)
    if record is not None and record.is_alive():
        return record
    config_file = str(place.config_file)
    for process in psutil.process_iter(["cmdline"]):
        argv = process.info["cmdline"] or []
        if argv[1:3] == ["-m", place.module] and config_file in argv:
            with contextlib.suppress(ProcessLookupError):
                found = ProcessRecord.of(process.pid, place.name, argv)
                found.to_file(place.run_file)
                return found
    return None


def end_process(place: Place, *, grace_s: float) -> None:
    """End the process of this directory, if one runs: SIGTERM, `grace_s` of patience, SIGKILL."""
    record = find(place)
    if record is not None:
        end(record, grace_s=grace_s)
    place.run_file.unlink(missing_ok=True)
    reap()


def log_tail(place: Place) -> str:
    """The end of its log, at most LOG_TAIL_BYTES."""
    try:
        with place.log_file.open("rb") as log:
            log.seek(max(0, os.fstat(log.fileno()).st_size - LOG_TAIL_BYTES))
            return log.read(LOG_TAIL_BYTES).decode(errors="replace")
    except FileNotFoundError:
        return ""


def last_words(place: Place) -> str:
    """The last lines of its log, for the row of a process that died."""
    lines = [line for line in log_tail(place).splitlines() if line.strip()]
    # Behind a failed assertion of llama.cpp, or a fault of native code, there are pages of stack; the first line is what tells.
    for words in (("GGML_ASSERT", "GGML_ABORT"), (FATAL,)):
        if telling := [line for line in lines if any(word in line for word in words)]:
            return telling[-1]
    return "\n".join(lines[-LAST_LINES:])


def trim_log(place: Place) -> None:
    """Keep a running process's log below twice MAX_LOG_BYTES: what is over moves to a second file, which is overwritten."""
    try:
        if place.log_file.stat().st_size <= MAX_LOG_BYTES:
            return
        shutil.copyfile(place.log_file, place.former_log_file)
        # The process appends, so its next line begins at the new end; a line written meanwhile may be lost.
        os.truncate(place.log_file, 0)
    except FileNotFoundError:
        return


def _rotate_log(place: Place) -> None:
    if place.log_file.exists() and place.log_file.stat().st_size > 0:
        place.log_file.replace(place.former_log_file)


def is_free(address: str, port: int) -> bool:
    """Whether a server could listen there now."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        # As servers do: the last one's closed connections are no obstacle.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((address, port))
        except OSError:
            return False
    return True


def free_port(address: str = "127.0.0.1", spared: frozenset[int] = frozenset()) -> int:
    """A TCP port of `address` on which nothing listens, none of `spared`. Raises LaunchError when none is found."""
    for _ in range(_PORT_ATTEMPTS):
        port = random.randint(LOWEST_PORT, HIGHEST_PORT)
        if port not in spared and is_free(address, port):
            return port
    raise LaunchError(f"no free port was found on {address} between {LOWEST_PORT} and {HIGHEST_PORT}")
