"""`manage.py …` as a user's terminal runs it, on a HYDRA_HOME of its own, and what it left behind."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import psutil

ROOT = Path(__file__).resolve().parent.parent
READY_TIMEOUT_S = 180.0
STOP_TIMEOUT_S = 60.0
_LOGS = ("logs/*.log", "engines/*/engine.log", "store/store.log")


class HydraProcess:
    """One long-running command of one home. `start` returns once a line of its output begins with `ready_text`.

    `command` turns an argv into the one that runs it where it shall run.
    """

    def __init__(
        self,
        home: Path,
        ready_text: str,
        arguments: tuple[str, ...],
        environ: Mapping[str, str],
        command: Callable[..., list[str]] = lambda *argv: list(argv),
    ) -> None:
        self.home, self.arguments = home, arguments
        self.lines: list[str] = []
        self.process: subprocess.Popen[str] | None = None
        self._ready_text = ready_text
        self._command = command
        kept = {name: value for name, value in os.environ.items() if not name.startswith(("HYDRA_", "DJANGO_"))}
        for name in ("DATABASE_URL", "BROKER_URL"):
            kept.pop(name, None)
        # Nothing is compiled beside the tests, but where one asks for it.
        self.environ = {**kept, "HYDRA_HOME": str(home), "HYDRA_NATIVE_BUILDS": "off", **environ}

    def start(self) -> float:
        """Returns the seconds until ready. Raises AssertionError with the output when it does not come up."""
        began = time.monotonic()
        self.lines = []
        self.process = subprocess.Popen(
            self._command(sys.executable, "manage.py", *self.arguments),
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
            if self.process.poll() is not None or time.monotonic() - began > READY_TIMEOUT_S:
                self._reader.join(5)
                raise AssertionError(f"{self.arguments} did not become ready:\n" + "\n".join(self.lines) + self.logs())
        return time.monotonic() - began

    def _read(self, process: subprocess.Popen[str], ready: threading.Event) -> None:
        assert process.stdout is not None
        for line in process.stdout:
            self.lines.append(line.rstrip("\n"))
            if line.startswith(self._ready_text):
                ready.set()
        process.stdout.close()

    def wait(self) -> int:
        assert self.process is not None
        code = self.process.wait(STOP_TIMEOUT_S)
        self._reader.join(5)
        return code

    def interrupt(self, number: int = signal.SIGINT) -> int:
        """Ctrl-C, or another signal. Returns the exit code."""
        assert self.process is not None
        self.process.send_signal(number)
        return self.wait()

    def kill_everything(self) -> None:
        """As a power cut does it: kill -9 of every process of this home at once."""
        for process in self.processes():
            process.kill()
        self.wait()
        psutil.wait_procs(self.processes(), timeout=10)

    def close(self) -> None:
        """Ends whatever a failed test left, by pid."""
        if self.process is not None and self.process.poll() is None:
            self.interrupt()
        for process in self.processes():
            process.kill()

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

    def logs(self, last_lines: int = 15) -> str:
        text = ""
        for path in sorted(path for pattern in _LOGS for path in self.home.glob(pattern)):
            lines = path.read_text(errors="replace").splitlines()[-last_lines:]
            text += f"\n--- {path.name}\n" + "\n".join(re.sub(r"(:[^:@/]+)@", ":***@", line) for line in lines)
        return text
