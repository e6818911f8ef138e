"""`manage.py …` on a machine of a network, with a HYDRA_HOME of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import psutil

from tests.hosts.network import Machine

ROOT = Path(__file__).resolve().parent.parent.parent
READY_TIMEOUT_S = 180.0
STOP_TIMEOUT_S = 60.0


class HydraProcess:
    """One long-running command of one home. `start` returns once a line of its output begins with `ready_text`."""

    def __init__(self, machine: Machine, home: Path, ready_text: str, *arguments: str, **environ: str) -> None:
        self.machine, self.home, self.arguments = machine, home, arguments
        self.lines: list[str] = []
        self.process: subprocess.Popen[str] | None = None
        self._ready_text = ready_text
        kept = {name: value for name, value in os.environ.items() if not name.startswith(("HYDRA_", "DJANGO_"))}
        for name in ("DATABASE_URL", "BROKER_URL"):
            kept.pop(name, None)
        self.environ = {**kept, "HYDRA_HOME": str(home), "PYTHONUNBUFFERED": "1", **environ}

    def start(self) -> float:
        began = time.monotonic()
        self.lines = []
        self.process = subprocess.Popen(
            self.machine.command(sys.executable, "manage.py", *self.arguments),
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

    def stop(self) -> int:
        assert self.process is not None
        self.process.terminate()
        code = self.process.wait(STOP_TIMEOUT_S)
        self._reader.join(5)
        return code

    def kill_everything(self) -> None:
        """As a power cut does it: every process of this home at once."""
        assert self.process is not None
        for process in self.processes():
            process.kill()
        self.process.wait(STOP_TIMEOUT_S)
        psutil.wait_procs(self.processes(), timeout=10)

    def close(self) -> None:
        """Ends whatever a failed test left, by pid."""
        if self.process is not None and self.process.poll() is None:
            self.stop()
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

    def manage(self, *arguments: str) -> str:
        """The output of a command that ends, on the same machine and home. Raises AssertionError when it fails."""
        done = subprocess.run(
            self.machine.command(sys.executable, "manage.py", *arguments),
            cwd=ROOT,
            env=self.environ,
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        assert done.returncode == 0, f"{arguments}: {done.stdout}\n{done.stderr}"
        return done.stdout

    def logs(self, last_lines: int = 25) -> str:
        text = ""
        for path in sorted((*self.home.glob("logs/*.log"), *self.home.glob("engines/*/engine.log"))):
            text += f"\n--- {path.name}\n" + "\n".join(path.read_text(errors="replace").splitlines()[-last_lines:])
        return text


_ASK = """
import json, sys, urllib.request, urllib.error
url, body, key = json.loads(sys.argv[1])
request = urllib.request.Request(url, json.dumps(body).encode() if body else None, {"Content-Type": "application/json"})
if key:
    request.add_header("Authorization", "Bearer " + key)
opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
try:
    with opener.open(request, timeout=60) as answer:
        print(json.dumps([answer.status, json.load(answer)]))
except urllib.error.HTTPError as error:
    print(json.dumps([error.code, json.loads(error.read() or b"null")]))
except OSError as error:
    print(json.dumps([0, str(error)]))
"""


def ask(machine: Machine, url: str, body: Any = None, key: str = "") -> tuple[int, Any]:
    """Status and JSON of one request sent from `machine`; status 0 where nobody answered."""
    argv = machine.command(sys.executable, "-c", _ASK, json.dumps([url, body, key]))
    done = subprocess.run(argv, capture_output=True, text=True, timeout=90, check=True)
    status, answer = json.loads(done.stdout)
    return status, answer
