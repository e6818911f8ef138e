"""Runs `manage.py up` on a home of its own, as a user's terminal would, and finds what it left behind."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import psutil

from tests.engine_process import free_port

ROOT = Path(__file__).resolve().parent.parent
READY_TIMEOUT_S = 180.0
STOP_TIMEOUT_S = 60.0
ADMIN_PASSWORD = "a password of the tests"


class Stack:
    """One supervisor process and all below it. `start` returns once it printed that Hydra is ready."""

    def __init__(self, home: Path, models: Path | None = None, **environ: str) -> None:
        self.home = home
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.lines: list[str] = []
        if models is not None:
            shutil.copytree(models, home / "models", copy_function=os.link)
        kept = {key: value for key, value in os.environ.items() if not key.startswith(("HYDRA_", "DJANGO_"))}
        for name in ("DATABASE_URL", "BROKER_URL"):
            kept.pop(name, None)
        self.environ = {
            **kept,
            "HYDRA_HOME": str(home),
            "HYDRA_PORT": str(self.port),
            "HYDRA_ADMIN_PASSWORD": ADMIN_PASSWORD,
            "HYDRA_ENGINE_THREADS": "1",
            "HYDRA_ENGINE_CONTEXT": "2048",
            "HYDRA_STORE_BYTES": str(64 << 20),
            **environ,
        }
        # An installed copy of a model is linked, so the digest record (keyed by inode) still fits.
        self.process: subprocess.Popen[str] | None = None

    def start(self) -> float:
        """Returns the seconds until ready. Raises AssertionError with the output when it does not come up."""
        started = time.monotonic()
        self.lines = []
        self.process = subprocess.Popen(
            [sys.executable, "manage.py", "up"],
            cwd=ROOT,
            env=self.environ,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        ready = threading.Event()
        self._reader = threading.Thread(target=self._read, args=(self.process, ready), daemon=True)
        self._reader.start()
        while not ready.wait(0.1):
            if self.process.poll() is not None or time.monotonic() - started > READY_TIMEOUT_S:
                self._reader.join(5)
                raise AssertionError("Hydra did not become ready:\n" + "\n".join(self.lines) + self.logs())
        return time.monotonic() - started

    def _read(self, process: subprocess.Popen[str], ready: threading.Event) -> None:
        assert process.stdout is not None
        for line in process.stdout:
            self.lines.append(line.rstrip("\n"))
            if line.startswith("Hydra is ready: "):
                ready.set()
        process.stdout.close()

    def wait(self) -> int:
        assert self.process is not None
        code = self.process.wait(STOP_TIMEOUT_S)
        self._reader.join(5)
        return code

    def interrupt(self) -> int:
        """Ctrl-C: SIGINT to the supervisor. Returns its exit code."""
        assert self.process is not None
        self.process.send_signal(signal.SIGINT)
        return self.wait()

    def kill_supervisor(self) -> None:
        assert self.process is not None
        self.process.kill()
        self.wait()

    def kill_everything(self) -> None:
        """kill -9 of the supervisor and of all that runs for this home, at once."""
        assert self.process is not None
        for process in self.processes():
            process.kill()
        self.wait()
        psutil.wait_procs(self.processes(), timeout=10)

    def processes(self) -> list[psutil.Process]:
        """Every process whose environment or command line names this home."""
        found = []
        for process in psutil.process_iter():
            try:
                if process.status() == psutil.STATUS_ZOMBIE or process.pid == os.getpid():
                    continue
                named = process.environ().get("HYDRA_HOME") == str(self.home)
                if named or any(str(self.home) in part for part in process.cmdline()):
                    found.append(process)
            except (psutil.NoSuchProcess, psutil.AccessDenied):
                continue
        return found

    def process_of(self, module: str) -> psutil.Process:
        """The one process that runs `python -m <module>` here."""
        (found,) = [process for process in self.processes() if module in process.cmdline()]
        return found

    def leftovers(self) -> dict[str, Any]:
        """What must be empty after a clean stop."""
        return {
            "processes": [" ".join(process.cmdline()) for process in self.processes()],
            "run files": sorted(
                str(path)
                for pattern in ("run/*.json", "engines/*/run.json", "store/run.json")
                for path in self.home.glob(pattern)
            ),
        }

    def engine_port(self) -> int:
        (config,) = self.home.glob("engines/*/config.json")
        return int(json.loads(config.read_text())["port"])

    def logs(self, last_lines: int = 15) -> str:
        text = ""
        patterns = ("logs/*.log", "engines/*/engine.log", "store/store.log")
        for path in sorted(path for pattern in patterns for path in self.home.glob(pattern)):
            lines = path.read_text(errors="replace").splitlines()[-last_lines:]
            text += f"\n--- {path.name}\n" + "\n".join(re.sub(r"(:[^:@/]+)@", ":***@", line) for line in lines)
        return text

    def close(self) -> None:
        """Ends whatever a failed test left, by pid."""
        if self.process is not None and self.process.poll() is None:
            self.interrupt()
        for process in self.processes():
            process.kill()


def shared_memory() -> set[str]:
    return {path.name for path in Path("/dev/shm").iterdir()}


def modes_above(path: Path) -> dict[str, int]:
    return {str(parent): parent.stat().st_mode for parent in (path, *path.parents)}
