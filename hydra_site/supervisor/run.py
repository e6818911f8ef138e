"""One run of Hydra on one HYDRA_HOME: everything up, one line when it serves, everything down again."""

import contextlib
import errno
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator

from engines.browser_guard import is_loopback
from hydra_site import env
from hydra_site.supervisor import leftovers, ports, specs
from hydra_site.supervisor.child import ChildSpec
from hydra_site.supervisor.console import Console
from hydra_site.supervisor.errors import DiskFull, HomeUnusable, KeysRequired, StartTimeout, SupervisorError
from hydra_site.supervisor.joined import Joined
from hydra_site.supervisor.probe import ReadinessProbe
from hydra_site.supervisor.stack import STEP_S, Stack

START_TIMEOUT_S = 300.0
STEADY_STEP_S = 0.5
# What a pull fetches is told once it has taken a while, and then not more often than this.
PROGRESS_EVERY_S = 2.0
STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
Application = Callable[[specs.Options], Iterable[ChildSpec]]


class Stopped(Exception):
    """A signal asks for the end."""


class Supervisor:
    """Runs the servers and the children that `application` names, until a signal comes or the start fails.

    `start_timeout_s` bounds everything up to the first token.
    """

    def __init__(
        self,
        options: specs.Options,
        console: Console,
        application: Application = specs.application,
        start_timeout_s: float = START_TIMEOUT_S,
    ) -> None:
        self._options = options
        self._console = console
        self._application = application
        self._start_timeout_s = start_timeout_s
        self._signals = 0
        self._wake = threading.Event()
        self._progress_told_at = time.monotonic()

    def run(self) -> None:
        """Start, watch and stop. Returns after a signal and a clean stop; raises a SupervisorError when the run fails."""
        home = self._options.home
        with self._signals_caught():
            home.create()
            with home.lock("Hydra"):
                self._run_locked()

    def _run_locked(self) -> None:
        home = self._options.home
        stack: Stack | None = None
        try:
            for name in leftovers.clear(home):
                self._console.stage(f"ended {name}, which an earlier run left behind")
            self._check()
            home.check_room()
            services, servers = specs.servers(home, self._options.database_url, self._options.broker_url)
            home.write_services(services)
            stack = Stack(home, (*servers, *self._application(self._options)), self._console)
            self._bring_up(stack)
            self._console.line(self._ready_line())
            self._watch(stack)
        except Stopped:
            self._console.stage("stopping")
        finally:
            self._take_down(stack)

    def _check(self) -> None:
        """What must be so before anything starts. Raises a SupervisorError."""
        if joined := Joined.of(self._options.home):
            raise HomeUnusable(
                f"HYDRA_HOME {self._options.home.root} belongs to a host of the pool at {joined.site_url}",
                hint="start it with `manage.py head`, or choose another HYDRA_HOME",
            )
        ports.check_available(self._options.bind, self._options.port)

    def _ready_line(self) -> str:
        return f"Hydra is ready: {self._options.site_url}"

    def _bring_up(self, stack: Stack) -> None:
        """Step until a token has been generated."""
        deadline = time.monotonic() + self._start_timeout_s
        probe: ReadinessProbe | None = None
        bootstrapped = False
        try:
            while probe is None or not probe.is_ready() or stack.waiting_for():
                self._pause(STEP_S)
                try:
                    stack.step()
                finally:
                    # Even if another child fails now: the password that bootstrap made is told nowhere else.
                    if not bootstrapped and not stack.waiting_for(["bootstrap"]):
                        bootstrapped = True
                        self._after_bootstrap(stack)
                self._tell_progress(stack)
                if probe is None and bootstrapped and not stack.waiting_for(["site"]):
                    probe = ReadinessProbe(
                        self._options.site_url, self._options.home.engines_dir, self._start_timeout_s
                    )
                if time.monotonic() > deadline:
                    raise self._timeout(stack, probe)
        finally:
            if probe:
                probe.stop()
        stack.starting = False

    def _watch(self, stack: Stack) -> None:
        while True:
            self._pause(STEADY_STEP_S)
            stack.step()

    def _pause(self, pause_s: float) -> None:
        """Wait `pause_s` seconds, shorter when a signal comes; raises Stopped then."""
        self._wake.wait(pause_s)
        if self._signals:
            raise Stopped

    def _after_bootstrap(self, stack: Stack) -> None:
        """Pass on what bootstrap printed: the first admin's password, once, its notes, and whether there are API keys."""
        child = stack.children.get("bootstrap")
        told = child.last_object() if child else {}
        if child:
            child.discard_output()
        if told.get("admin_created") and told.get("admin_password") and not env.text("HYDRA_ADMIN_PASSWORD"):
            user = told.get("admin_user") or "admin"
            self._console.line(f"First login: user {user}, password {told['admin_password']} (shown only now)")
        notes = told.get("notes")
        for note in notes if isinstance(notes, list) else []:
            self._console.stage(str(note))
        if child and not is_loopback(self._options.bind) and not told.get("api_keys"):
            raise KeysRequired(
                f"HYDRA_BIND={self._options.bind} opens Hydra to other machines, but there is no API key"
            )

    def _tell_progress(self, stack: Stack) -> None:
        pull = stack.children.get("pull")
        if pull is None or pull.up or time.monotonic() - self._progress_told_at < PROGRESS_EVERY_S:
            return
        self._progress_told_at = time.monotonic()
        told = pull.last_object()
        done, total = told.get("done_bytes"), told.get("total_bytes")
        if isinstance(done, int) and isinstance(total, int) and total:
            self._console.stage(
                f"fetching model {self._options.default_model}: {done * 100 // total} % of {total / 1e6:.0f} MB"
            )

    def _timeout(self, stack: Stack, probe: ReadinessProbe | None) -> StartTimeout:
        if stack.waiting_for() or probe is None:
            return stack.timeout(self._start_timeout_s)
        message = f"no token was generated within {self._start_timeout_s:.0f} s, the site's last answer was {probe.last_answer}"
        return StartTimeout(
            message, hint=f"the logs are in {self._options.home.logs_dir} and {self._options.home.engines_dir}"
        )

    def _take_down(self, stack: Stack | None) -> None:
        """End everything, engines between the heads that could start new ones and the servers they talk to."""
        asked = self._signals
        engines_ended = False

        def end_engines_at(rank: int) -> None:
            nonlocal engines_ended
            if not engines_ended and rank > specs.ENGINE_RANK:
                engines_ended = True
                # One that will not end must not keep the servers from a clean stop; the last call below tells of it.
                with contextlib.suppress(TimeoutError):
                    leftovers.end_engines(self._options.home, spared=stack.pids() if stack else frozenset())

        if stack:
            stack.stop(hurry=lambda: self._signals > max(1, asked), between=end_engines_at)
        leftovers.end_engines(self._options.home)

    @contextlib.contextmanager
    def _signals_caught(self) -> Iterator[None]:
        def count(_number: int, _frame: object) -> None:
            self._signals += 1
            self._wake.set()

        # A hangup that is ignored already (nohup) stays ignored.
        caught = [
            number for number in STOP_SIGNALS if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN
        ]
        before = {number: signal.signal(number, count) for number in caught}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)


def main(application: Application = specs.application, start_timeout_s: float = START_TIMEOUT_S) -> int:
    """Run Hydra as the environment says; returns the exit code. Whatever fails is one line on standard error, then the
    log's end if one tells more.
    """
    try:
        Supervisor(specs.Options.from_environment(), Console(), application, start_timeout_s).run()
    except env.SettingError as error:
        return _fail(str(error))
    except SupervisorError as error:
        return _fail(error.line(), error.log_tail)
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            return _fail(DiskFull("no space is left where HYDRA_HOME lies").line())
        return _fail(f"{error.strerror or error}{f' ({error.filename})' if error.filename else ''}")
    return 0


def _fail(line: str, log_tail: str = "") -> int:
    with contextlib.suppress(OSError):
        if log_tail:
            print(log_tail, file=sys.stderr)
        print(f"Hydra stopped: {line}", file=sys.stderr, flush=True)
    return 1
