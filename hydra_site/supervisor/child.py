"""One child process: how it is started, and how it is ended with everything it left in its process group."""

import contextlib
import json
import os
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import IO

import psutil

from engines.process import ProcessRecord
from hydra_site.supervisor import logs
from hydra_site.supervisor.home import Home

MAX_STDOUT_BYTES = 64 << 10
FIRST_DELAY_S = 1.0
LONGEST_DELAY_S = 30.0
STEADY_S = 60.0
SWEEP_PATIENCE_S = 2.0
# Every child carries this variable, so that one killed between its start and its record is still found.
HOME_MARK = "HYDRA_SUPERVISED_HOME"


@dataclass(frozen=True)
class ChildSpec:
    """What a child is. The whole stack is a table of these.

    `needs` names the children that must be up (or, for `once` children, done) before this one starts; names outside
    the table count as up. `once` marks a child that does its work and exits 0; its standard output is kept for the
    supervisor instead of going to the log. `stop` holds (signal, seconds of patience) pairs, tried in turn and followed
    by SIGKILL; children of a lower `stop_rank` are ended earlier. `prepare` runs before every start, `accepts` tells
    whether a running child can be used, `finish` runs after a `once` child has succeeded; all three return quickly.
    `announce` is the line said when the child is up or done.
    """

    name: str
    argv: tuple[str, ...]
    needs: frozenset[str] = frozenset()
    once: bool = False
    stop: tuple[tuple[int, float], ...] = ((signal.SIGTERM, 5.0),)
    stop_rank: int = 0
    env: Mapping[str, str] | None = None
    cwd: str | None = None
    prepare: Callable[[], None] | None = None
    accepts: Callable[[], bool] | None = None
    finish: Callable[[], None] | None = None
    announce: str = ""


@dataclass
class Child:
    """The life of one ChildSpec: at most one process at a time, its record in run/, its output in logs/."""

    spec: ChildSpec
    home: Home
    process: subprocess.Popen[bytes] | None = None
    up: bool = False
    deaths: int = 0
    starts_at: float = 0.0
    _delay_s: float = FIRST_DELAY_S
    _started_at: float = 0.0
    _log_start: int = 0
    _stdout: IO[bytes] | None = field(default=None, repr=False)

    def start(self) -> None:
        """Start the process in a session of its own, so that a terminal's Ctrl-C does not reach it, and record it."""
        if self.spec.prepare:
            self.spec.prepare()
        if self.spec.once:
            self.discard_output()
            self._stdout = tempfile.TemporaryFile(dir=self.home.run_dir)  # noqa: SIM115 lives as long as the child's report
        with logs.open_for_append(self.home.log_file(self.spec.name)) as log:
            self._log_start = os.fstat(log.fileno()).st_size
            self.process = subprocess.Popen(
                self.spec.argv,
                stdin=subprocess.DEVNULL,
                stdout=self._stdout or log,
                stderr=log,
                env={**(os.environ if self.spec.env is None else self.spec.env), HOME_MARK: str(self.home.root)},
                cwd=self.spec.cwd,
                start_new_session=True,
            )
        self._started_at = time.monotonic()
        with contextlib.suppress(ProcessLookupError):  # It may be over already; poll() tells.
            record = ProcessRecord.of(self.process.pid, self.spec.name, self.spec.argv)
            record.to_file(self.home.run_file(self.spec.name))

    def exit_code(self) -> int | None:
        """The exit code of a process that ended since the last call; None while it runs, or if none does.

        What the process left in its group is ended first.
        """
        if self.process is None or not self._has_exited():
            return None
        self._sweep_group()
        code = self.process.wait()
        self.process = None
        self.home.run_file(self.spec.name).unlink(missing_ok=True)
        return code

    def schedule_restart(self) -> float:
        """Count a death and set when the next start is due; returns the seconds until then (1, 2, 4 … 30)."""
        if time.monotonic() - self._started_at >= STEADY_S:
            self._delay_s = FIRST_DELAY_S
        delay_s = self._delay_s
        self.deaths += 1
        self.up = False
        self.starts_at = time.monotonic() + delay_s
        self._delay_s = min(LONGEST_DELAY_S, delay_s * 2)
        return delay_s

    def output(self) -> str:
        """The end of what a `once` child has written to its standard output so far."""
        if self._stdout is None:
            return ""
        size_bytes = os.fstat(self._stdout.fileno()).st_size
        start = max(0, size_bytes - MAX_STDOUT_BYTES)
        # pread leaves the file position alone, which the child shares with us and writes at.
        return os.pread(self._stdout.fileno(), MAX_STDOUT_BYTES, start).decode("utf-8", errors="replace")

    def last_object(self) -> dict[str, object]:
        """The last line of `output` that is a JSON object; {} when there is none."""
        for line in reversed(self.output().splitlines()):
            with contextlib.suppress(ValueError, RecursionError):
                found = json.loads(line)
                if isinstance(found, dict):
                    return found
        return {}

    def log_tail(self) -> str:
        """The last lines that the latest process wrote to its log."""
        return logs.tail(self.home.log_file(self.spec.name), self._log_start)

    def discard_output(self) -> None:
        """Forget the kept standard output."""
        if self._stdout is not None:
            self._stdout.close()
            self._stdout = None

    def send(self, number: int) -> None:
        """Send a signal to the child, if it still runs. It is ours and not yet reaped, so its pid cannot be another's."""
        if self.process is not None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.process.pid, number)

    def _has_exited(self) -> bool:
        assert self.process is not None
        # WNOWAIT leaves the zombie, which keeps the pid and with it the name of the process group.
        try:
            return os.waitid(os.P_PID, self.process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None
        except ChildProcessError:  # Somebody else in this process collected it.
            return True

    def _sweep_group(self) -> None:
        """End what the process has left in its group. SIGTERM comes first: a killed PostgreSQL leaves shared memory."""
        assert self.process is not None
        group = self.process.pid
        left = [
            process for process in psutil.process_iter() if process.pid != group and _group_of(process.pid) == group
        ]
        if not left:
            return
        for number in (signal.SIGTERM, signal.SIGKILL):
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(group, number)
            _, left = psutil.wait_procs(left, timeout=SWEEP_PATIENCE_S)
            if not left:
                return


def _group_of(pid: int) -> int | None:
    try:
        return os.getpgid(pid)
    except ProcessLookupError:
        return None
