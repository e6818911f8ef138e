"""Homes of their own for the supervisor's tests, and supervisors run as real processes."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from hydra_site.env import PROJECT_DIR
from hydra_site.supervisor import leftovers
from hydra_site.supervisor.child import HOME_MARK
from hydra_site.supervisor.embedded import embedded_servers
from hydra_site.supervisor.home import Home
from tests import engine_process

WAIT_S = 60.0


@pytest.fixture(scope="session")
def made_home(tmp_path_factory: pytest.TempPathFactory) -> Home:
    """A home in which the database has been made and stopped. Only to be copied."""
    place = Home(tmp_path_factory.mktemp("made") / "home")
    with embedded_servers(place.root):
        pass
    return place


@pytest.fixture
def home(new_home: Home, made_home: Home) -> Home:
    """Like `new_home`, with a database in it already, which saves making one for every test."""
    subprocess.run(["cp", "-a", str(made_home.root), str(new_home.root)], check=True)
    return new_home


@pytest.fixture
def new_home(tmp_path: Path) -> Iterator[Home]:
    """A home below a directory that is closed to others; whatever a failed test leaves running there is ended."""
    closed = tmp_path / "closed"
    closed.mkdir(mode=0o700)
    place = Home(closed / "home")
    yield place
    if place.root.exists():
        place.create()
        leftovers.clear(place)
        leftovers.end_engines(place)


@pytest.fixture
def free_port() -> int:
    """A port on which nothing listens."""
    return engine_process.free_port()


class RunningSupervisor:
    """`python -m tests.supervisor.stand_in` on a home: the real supervisor and servers around small children."""

    def __init__(self, home: Home, port: int, **environment: str) -> None:
        self.home = home
        self.port = port
        self.output = home.root.with_name(f"output-{time.monotonic_ns()}.txt")
        variables = {**os.environ, "HYDRA_HOME": str(home.root), "HYDRA_PORT": str(port), **environment}
        with self.output.open("wb") as file:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "tests.supervisor.stand_in"],
                cwd=PROJECT_DIR,
                env=variables,
                stdout=file,
                stderr=subprocess.STDOUT,
            )

    def said(self) -> str:
        """Everything printed so far."""
        return self.output.read_text()

    def wait_for(self, text: str) -> None:
        """Wait until `text` is printed."""
        wait_until(lambda: text in self.said() or self.process.poll() is not None)
        assert text in self.said(), self.said()

    def wait_until_ready(self) -> None:
        """Wait for the line that says it serves."""
        self.wait_for(f"Hydra is ready: http://127.0.0.1:{self.port}\n")

    def interrupt(self) -> int:
        """End it as Ctrl-C does; returns the exit code."""
        self.process.send_signal(signal.SIGINT)
        return self.process.wait(WAIT_S)

    def kill(self) -> None:
        """End it as kill -9 does."""
        self.process.kill()
        self.process.wait(WAIT_S)


@pytest.fixture
def start_supervisor(new_home: Home, free_port: int) -> Iterator[Callable[..., RunningSupervisor]]:
    """Starts supervisors on the test's home; those that still run after the test are ended."""
    started: list[RunningSupervisor] = []

    def start(**environment: str) -> RunningSupervisor:
        started.append(RunningSupervisor(new_home, free_port, **environment))
        return started[-1]

    yield start
    for supervisor in started:
        if supervisor.process.poll() is None:
            supervisor.kill()


def wait_until(holds: Callable[[], bool]) -> None:
    """Wait, a minute at most, until `holds()`."""
    deadline = time.monotonic() + WAIT_S
    while not holds():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.05)


def processes_of(home: Home) -> list[psutil.Process]:
    """Every process that belongs to a run on `home`."""
    found = []
    for process in psutil.process_iter():
        try:
            is_marked = process.environ().get(HOME_MARK) == str(home.root)
            if is_marked or process.cwd().startswith(str(home.root)):
                found.append(process)
        except psutil.Error:
            continue
    return found
