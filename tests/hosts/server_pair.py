"""PostgreSQL and a broker in processes of their own: started, stopped and waited for, whoever made their binaries and files."""

from __future__ import annotations

import signal
import subprocess
import time
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import ClassVar, Self

START_TIMEOUT_S, STOP_TIMEOUT_S, KILL_TIMEOUT_S = 60.0, 15.0, 5.0
POSTGRES = "postgres"


class ServerPair(ABC):
    """Both servers, each command run through `prefix` (a namespace, or nothing), their logs in `folder`.

    Use as a context manager. `broker` names the other one's process.
    """

    broker: ClassVar[str]
    stop_signal: ClassVar[signal.Signals] = signal.SIGTERM
    psql: Path

    def __init__(self, folder: Path, prefix: Sequence[str]) -> None:
        self._folder, self._prefix = folder, list(prefix)
        self._processes: dict[str, subprocess.Popen[bytes]] = {}

    @abstractmethod
    def _start_postgres(self) -> None:
        """Returns once it answers and has its roles."""

    @abstractmethod
    def _start_broker(self) -> None:
        """Starts it anew with the files that it had."""

    @abstractmethod
    def _postgres_answers(self) -> bool:
        """Whether a superuser is answered."""

    def _start(self) -> None:
        self._start_postgres()
        self._start_broker()

    def __enter__(self) -> Self:
        try:
            self._start()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        for name in list(self._processes):
            self.stop(name)

    def stop(self, name: str) -> None:
        """POSTGRES, or the name of the broker."""
        process = self._processes.pop(name)
        process.send_signal(self.stop_signal)
        try:
            process.wait(STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait(KILL_TIMEOUT_S)

    def restart_broker(self) -> None:
        """Its files know of no host, so it forgets the users that were made."""
        self.stop(self.broker)
        self._start_broker()

    def _wait_for_postgres(self) -> None:
        deadline = time.monotonic() + START_TIMEOUT_S
        while not self._postgres_answers():
            if time.monotonic() > deadline:
                raise AssertionError("PostgreSQL did not come up: " + self._log(POSTGRES).read_text())
            time.sleep(0.1)

    def _run(self, name: str, argv: Sequence[str], environ: Mapping[str, str]) -> None:
        with self._log(name).open("ab") as log:
            self._processes[name] = subprocess.Popen(
                [*self._prefix, *argv],
                env=dict(environ),
                stdout=log,
                stderr=log,
                stdin=subprocess.DEVNULL,
                start_new_session=True,
            )

    def _log(self, name: str) -> Path:
        return self._folder / f"{name}.log"
