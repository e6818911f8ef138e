"""Records of running processes: who they are, whether they still live, and how they are ended.

A pid alone names a different process after a while, so a record also holds the process's start time and the machine's
boot id; only a process that matches all three is ours. Nothing here needs Django.
"""

import json
import os
import select
import signal
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

START_TIME_TOLERANCE_S = 0.05
KILL_WAIT_S = 5.0
MAX_RECORD_BYTES = 1 << 20
_START_TIME_FIELD = 19  # Position of `starttime` behind the command name in /proc/<pid>/stat (field 22 of proc(5)).


@dataclass(frozen=True)
class ProcessRecord:
    """One process as it was when it was started. `start_time` counts seconds since boot, so a step of the clock cannot
    change it.
    """

    pid: int
    start_time: float
    boot_id: str
    name: str
    argv: tuple[str, ...]

    @classmethod
    def of(cls, pid: int, name: str, argv: Sequence[str]) -> "ProcessRecord":
        """The record of the living process `pid`. Raises ProcessLookupError when there is none."""
        start_time = _start_time(pid)
        if start_time is None:
            raise ProcessLookupError(f"no process has the pid {pid}")
        return cls(pid, start_time, boot_id(), name, tuple(argv))

    def is_alive(self) -> bool:
        """Whether this very process still runs: pid, start time and boot id all match, and it is no zombie."""
        if self.boot_id != boot_id():
            return False
        start_time = _start_time(self.pid)
        return start_time is not None and abs(start_time - self.start_time) <= START_TIME_TOLERANCE_S

    def to_file(self, path: Path) -> None:
        """Write the record to `path` as JSON, mode 0600, in one step: a reader sees the old file or the whole new one."""
        write_private(path, json.dumps(asdict(self)))

    @classmethod
    def from_file(cls, path: Path) -> "ProcessRecord | None":
        """The record in `path`; None when the file is absent or holds no record."""
        try:
            with path.open("rb") as file:
                fields = json.loads(file.read(MAX_RECORD_BYTES))
            pid = int(fields["pid"])
            if pid <= 0:
                return None
            return cls(
                pid=pid,
                start_time=float(fields["start_time"]),
                boot_id=str(fields["boot_id"]),
                name=str(fields["name"]),
                argv=tuple(str(word) for word in fields["argv"]),
            )
        except (FileNotFoundError, NotADirectoryError, ValueError, KeyError, TypeError, OverflowError, RecursionError):
            return None


def end(record: ProcessRecord, term_signal: int = signal.SIGTERM, grace_s: float = 10.0) -> None:
    """End the recorded process: `term_signal`, at most `grace_s` seconds of patience, then SIGKILL; an own child is
    reaped.

    A process that is gone, or whose pid now belongs to somebody else, is left alone without an error. Raises
    PermissionError for a process of another user, TimeoutError for one that even SIGKILL does not end.
    """
    # The descriptor pins the process, so that the pid cannot pass to a stranger between the check and the signal.
    try:
        pidfd = os.pidfd_open(record.pid)
    except (ProcessLookupError, ValueError, OverflowError):
        return
    try:
        if not record.is_alive():
            _reap(record.pid)
            return
        for number, patience_s in ((term_signal, grace_s), (signal.SIGKILL, KILL_WAIT_S)):
            try:
                signal.pidfd_send_signal(pidfd, number)
            except ProcessLookupError:
                break
            if _exits_within(pidfd, patience_s):
                break
        else:
            raise TimeoutError(f"{record.name} (pid {record.pid}) did not end within {KILL_WAIT_S:g} s of SIGKILL")
        _reap(record.pid)
    finally:
        os.close(pidfd)


def boot_id() -> str:
    """The id the kernel drew at boot: it differs after every restart of the machine."""
    return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()


def write_private(path: Path, content: str) -> None:
    """Write `content` to `path` with mode 0600 in one step (temporary file, fsync, rename)."""
    draft = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        draft.replace(path)
    except BaseException:
        draft.unlink(missing_ok=True)
        raise


def _start_time(pid: int) -> float | None:
    """Seconds from boot to the start of process `pid`; None when there is none, or only a zombie."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except (FileNotFoundError, ProcessLookupError, ValueError):
        return None
    # The command name in parentheses may itself hold blanks and parentheses, so the fields are counted from its end.
    fields = stat.rpartition(")")[2].split()
    if fields[0] in ("Z", "X"):
        return None
    return int(fields[_START_TIME_FIELD]) / os.sysconf("SC_CLK_TCK")


def _exits_within(pidfd: int, patience_s: float) -> bool:
    """Whether the process behind `pidfd` ends within `patience_s`; works for children and strangers alike."""
    poll = select.poll()
    poll.register(pidfd, select.POLLIN)
    return bool(poll.poll(int(patience_s * 1000)))


def _reap(pid: int) -> None:
    """Collect the exit status if `pid` was our child, so that no zombie stays; nothing otherwise."""
    try:
        os.waitpid(pid, os.WNOHANG)
    except ChildProcessError:
        return
