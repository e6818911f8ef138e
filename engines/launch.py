"""Engine processes as the head handles them: starting one, finding it again, asking it how it is, reading its log.

An engine runs in a session of its own, so that it outlives the worker that started it. Everything about it lies in one
directory: config.json (what it was told), run.json (which process it is), engine.log. Knows nothing of the database.
"""

import contextlib
import http.client
import json
import os
import shutil
import socket
import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path

import psutil

from engines.config import ConfigInvalid, EngineConfig
from engines.errors import LaunchError
from engines.process import ProcessRecord, end, write_private

HEALTH_TIMEOUT_S = 2.0
STOP_GRACE_S = 8.0
MAX_LOG_BYTES = 8 << 20
LOG_TAIL_BYTES = 32 << 10
LAST_LINES = 8
MAX_HEALTH_BYTES = 1 << 16

_PROJECT_DIR = Path(__file__).resolve().parent.parent
_children: dict[int, subprocess.Popen[bytes]] = {}
_children_lock = threading.Lock()


def launch(config: EngineConfig, directory: Path) -> tuple[ProcessRecord, int]:
    """Start an engine process on a free loopback port and return its record and port; it loads its model meanwhile.

    Whatever ran out of `directory` before is ended first. Raises LaunchError when no process could be made.
    """
    end_engine(directory)
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    port = _free_port()
    config_file = directory / "config.json"
    argv = (sys.executable, "-m", "engines.runtime", "--config", str(config_file))
    try:
        write_private(config_file, replace(config, port=port).to_json())
        _rotate_log(directory / "engine.log")
        with (directory / "engine.log").open("ab") as log:
            child = subprocess.Popen(
                argv, stdin=subprocess.DEVNULL, stdout=log, stderr=log, cwd=_PROJECT_DIR, start_new_session=True
            )
        record = ProcessRecord.of(child.pid, f"engine-{config.engine_id}", argv)
        record.to_file(directory / "run.json")
    except OSError as error:
        raise LaunchError(f"the engine's process could not be started: {error}") from error
    with _children_lock:
        _children[child.pid] = child
    return record, port


def reap() -> None:
    """Collect the exit status of engines that this process started and that have ended, so that no zombie stays."""
    with _children_lock:
        for pid in [pid for pid, child in _children.items() if child.poll() is not None]:
            del _children[pid]


def find(directory: Path) -> ProcessRecord | None:
    """The living engine process of this directory, by its run.json or else by its command line; None when none runs.

    The second way finds a process whose starter died before it could write the record.
    """
    record = ProcessRecord.from_file(directory / "run.json")
    if record is not None and record.is_alive():
        return record
    config_file = str(directory / "config.json")
    for process in psutil.process_iter(["cmdline"]):
        argv = process.info["cmdline"] or []
        if argv[1:3] == ["-m", "engines.runtime"] and config_file in argv:
            with contextlib.suppress(ProcessLookupError):
                found = ProcessRecord.of(process.pid, f"engine-{directory.name}", argv)
                found.to_file(directory / "run.json")
                return found
    return None


def end_engine(directory: Path) -> None:
    """End the engine process of this directory, if one runs: SIGTERM, STOP_GRACE_S of patience, SIGKILL."""
    record = find(directory)
    if record is not None:
        end(record, grace_s=STOP_GRACE_S)
    (directory / "run.json").unlink(missing_ok=True)
    reap()


def read_config(directory: Path) -> EngineConfig | None:
    """What the engine of this directory was told last, or None when that cannot be read any more."""
    try:
        return EngineConfig.from_json((directory / "config.json").read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, ConfigInvalid):
        return None


def health(port: int) -> str | None:
    """What the engine on this loopback port says of itself ("ok", "loading", "stopping"); None when it does not answer."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=HEALTH_TIMEOUT_S)
    try:
        connection.request("GET", "/health")
        values = json.loads(connection.getresponse().read(MAX_HEALTH_BYTES))
    except (OSError, http.client.HTTPException, ValueError):
        return None
    finally:
        connection.close()
    status = values.get("status") if isinstance(values, dict) else None
    return status if isinstance(status, str) else None


def last_words(directory: Path) -> str:
    """The last lines of the engine's log, for the row of an engine that died."""
    try:
        with (directory / "engine.log").open("rb") as log:
            log.seek(max(0, os.fstat(log.fileno()).st_size - LOG_TAIL_BYTES))
            text = log.read(LOG_TAIL_BYTES).decode(errors="replace")
    except FileNotFoundError:
        return ""
    lines = [line for line in text.splitlines() if line.strip()]
    # Behind a failed assertion of llama.cpp a debugger may write pages of stack; the assertion is what tells.
    asserted = [line for line in lines if "GGML_ASSERT" in line or "GGML_ABORT" in line]
    return "\n".join(asserted[-1:] or lines[-LAST_LINES:])


def trim_log(directory: Path) -> None:
    """Keep a running engine's log below twice MAX_LOG_BYTES: what is over moves to engine.log.1, which is overwritten."""
    log = directory / "engine.log"
    try:
        if log.stat().st_size <= MAX_LOG_BYTES:
            return
        shutil.copyfile(log, directory / "engine.log.1")
        # The engine appends, so its next line begins at the new end; a line written meanwhile may be lost.
        os.truncate(log, 0)
    except FileNotFoundError:
        return


def _rotate_log(log: Path) -> None:
    if log.exists() and log.stat().st_size > 0:
        log.replace(log.with_name("engine.log.1"))


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
