"""The running children of one home: started as soon as what they need is up, restarted when they die, ended in order."""

import itertools
import signal
import time
from collections.abc import Callable, Iterable

from hydra_site.supervisor import logs
from hydra_site.supervisor.child import Child, ChildSpec
from hydra_site.supervisor.console import Console
from hydra_site.supervisor.errors import ChildFailed, DiskFull, StartTimeout, SupervisorError
from hydra_site.supervisor.home import Home

MAX_DEATHS_AT_START = 5
HURRY_PATIENCE_S = 1.0
KILL_PATIENCE_S = 5.0
TRIM_EVERY_S = 30.0
STEP_S = 0.1
NO_SPACE_TEXTS = ("No space left on device", "Disk quota exceeded")


class Stack:
    """Children by name. One thread owns it and calls `step` again and again; it clears `starting` once all serve."""

    def __init__(self, home: Home, specs: Iterable[ChildSpec], console: Console) -> None:
        self.home = home
        self.children = {spec.name: Child(spec, home) for spec in specs}
        self.starting = True
        self._console = console
        self._trimmed_at = time.monotonic()

    def step(self) -> None:
        """Bring every child one step on, without long waits. Raises a SupervisorError when the start cannot succeed."""
        for child in self.children.values():
            if child.process is not None:
                self._watch(child)
            elif self._may_start(child):
                child.start()
        if time.monotonic() - self._trimmed_at >= TRIM_EVERY_S:
            self._trimmed_at = time.monotonic()
            for name in self.children:
                logs.trim(self.home.log_file(name))

    def waiting_for(self, names: Iterable[str] | None = None) -> list[str]:
        """Which of `names` (default: all) are not up or done yet."""
        wanted = self.children if names is None else [name for name in names if name in self.children]
        return [name for name in wanted if not self.children[name].up]

    def pids(self) -> frozenset[int]:
        """The pids of the children that run."""
        return frozenset(child.process.pid for child in self.children.values() if child.process)

    def run_until_up(self, names: Iterable[str], timeout_s: float) -> None:
        """Step until `names` are up. Raises StartTimeout when that takes longer than `timeout_s`."""
        deadline = time.monotonic() + timeout_s
        wanted = list(names)
        while self.waiting_for(wanted):
            if time.monotonic() > deadline:
                raise self.timeout(timeout_s)
            self.step()
            time.sleep(STEP_S / 4)

    def timeout(self, timeout_s: float) -> StartTimeout:
        """The error that names what did not come up within `timeout_s`, with the log of the first of them that has run."""
        waiting = self.waiting_for()
        log_tail = next(filter(None, (self.children[name].log_tail() for name in waiting)), "")
        return StartTimeout(f"{', '.join(waiting)} did not come up within {timeout_s:.0f} s", log_tail=log_tail)

    def stop(self, hurry: Callable[[], bool], between: Callable[[int], None] | None = None) -> None:
        """End all children, those of a lower stop rank first; `between(rank)` runs before each rank.

        Bounded by the children's graces; once `hurry()` is true, patience shrinks to a second each.
        """
        ranked = sorted(self.children.values(), key=lambda child: child.spec.stop_rank)
        for rank, group in itertools.groupby(ranked, key=lambda child: child.spec.stop_rank):
            if between:
                between(rank)
            self._stop_group(list(group), hurry)
        for child in self.children.values():
            child.discard_output()

    def _stop_group(self, group: list[Child], hurry: Callable[[], bool]) -> None:
        longest = max(len(child.spec.stop) for child in group)
        for position in range(longest + 1):
            running = [child for child in group if child.process is not None and child.exit_code() is None]
            if not running:
                return
            patience_s = 0.0
            for child in running:
                ladder = (*child.spec.stop, (signal.SIGKILL, KILL_PATIENCE_S))
                number, grace_s = ladder[min(position, len(ladder) - 1)]
                child.send(number)
                patience_s = max(patience_s, grace_s)
            self._wait_for_exit(running, patience_s, hurry)

    @staticmethod
    def _wait_for_exit(running: list[Child], patience_s: float, hurry: Callable[[], bool]) -> None:
        began = time.monotonic()
        while any(child.process is not None and child.exit_code() is None for child in running):
            waited_s = time.monotonic() - began
            if waited_s > patience_s or (hurry() and waited_s > HURRY_PATIENCE_S):
                return
            time.sleep(0.02)

    def _may_start(self, child: Child) -> bool:
        if child.spec.once and child.up:
            return False
        return time.monotonic() >= child.starts_at and not self.waiting_for(child.spec.needs)

    def _watch(self, child: Child) -> None:
        code = child.exit_code()
        if code is not None:
            self._after_exit(child, code)
        elif not child.up and not child.spec.once:
            if child.spec.accepts is None or child.spec.accepts():
                self._set_up(child)
            elif self._disk_is_full(child):
                raise self._failure(child, "does not come up")

    def _set_up(self, child: Child) -> None:
        child.up = True
        if child.spec.announce and child.deaths == 0:
            self._console.stage(child.spec.announce)
        elif child.deaths:
            self._console.stage(f"{child.spec.name} is up again")

    def _after_exit(self, child: Child, code: int) -> None:
        how = f"ended by {signal.Signals(-code).name}" if code < 0 else f"exited with code {code}"
        if child.spec.once and code == 0:
            if child.spec.finish:
                child.spec.finish()
            self._set_up(child)
            return
        if child.spec.once or (self.starting and child.deaths + 1 >= MAX_DEATHS_AT_START) or self._disk_is_full(child):
            raise self._failure(child, how)
        delay_s = child.schedule_restart()
        self._console.stage(f"{child.spec.name} {how}, starting it again in {delay_s:.0f} s")

    def _disk_is_full(self, child: Child) -> bool:
        return self.starting and any(text in child.log_tail() for text in NO_SPACE_TEXTS)

    def _failure(self, child: Child, how: str) -> SupervisorError:
        log_file = self.home.log_file(child.spec.name)
        log_tail = child.log_tail()
        if any(text in log_tail or text in child.output() for text in NO_SPACE_TEXTS):
            return DiskFull(
                f"no space is left where HYDRA_HOME ({self.home.root}) lies, {child.spec.name} failed on it"
            )
        told = child.last_object().get("error")
        if child.spec.once and isinstance(told, str):
            return ChildFailed(f"{child.spec.name} failed, {told}")
        times = "" if child.spec.once else f" for the {child.deaths + 1}th time"
        return ChildFailed(f"{child.spec.name} {how}{times}", hint=f"its log is {log_file}", log_tail=log_tail)
