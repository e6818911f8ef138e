"""The HYDRA_HOME of a run of tests: made, ended with it, and cleared by a later run where it could not end by itself."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import tempfile
from pathlib import Path
from types import FrameType

from engines.process import ProcessRecord
from hydra_site.supervisor import leftovers
from hydra_site.supervisor.home import Home

PREFIX = "hydra-tests-"
_OWNER = "owner.json"
IS_WORKER = "PYTEST_XDIST_WORKER" in os.environ


def make() -> Path:
    """A new home of this process."""
    home = Path(tempfile.mkdtemp(prefix=PREFIX))
    ProcessRecord.of(os.getpid(), "tests", ()).to_file(home / _OWNER)
    return home


def clear_dead() -> None:
    """Ends what runs that were killed left running, and removes their homes. A worker's are left to who started it."""
    if IS_WORKER:
        return
    for home in Path(tempfile.gettempdir()).glob(f"{PREFIX}*"):
        # Another run may do the same right now.
        with contextlib.suppress(FileNotFoundError):
            _clear(home)


def _clear(home: Path) -> None:
    owner = ProcessRecord.from_file(home / _OWNER) if home.stat().st_uid == os.geteuid() else None
    if owner is None or owner.is_alive():
        return
    place = Home(home)
    if place.run_dir.is_dir():
        leftovers.clear(place)
        leftovers.end_engines(place)
    shutil.rmtree(home, ignore_errors=True)


def end_by_signals() -> None:
    """SIGTERM and SIGHUP end a run as Ctrl-C does, and no second one cuts that short.

    xdist sends its workers another SIGINT five seconds after the first.
    """
    numbers = [signal.SIGTERM, signal.SIGHUP, *([signal.SIGINT] if IS_WORKER else [])]

    def end(number: int, frame: FrameType | None) -> None:
        for each in numbers:
            signal.signal(each, signal.SIG_IGN)
        raise KeyboardInterrupt

    for each in numbers:
        signal.signal(each, end)
