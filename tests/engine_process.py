"""Starts real engine processes for tests and ends them by pid."""

from __future__ import annotations

import itertools
import json
import os
import random
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from engines.config import EngineConfig

START_TIMEOUT_S, ANSWER_TIMEOUT_S, IDLE_TIMEOUT_S = 120.0, 30.0, 60.0
# Below the ports that the kernel hands out to whoever asks for any.
FIRST_PORT, PORTS_PER_WORKER, WORKERS = 10_000, 2_500, 9


def _ports_of_this_worker() -> Iterator[int]:
    """Endlessly the ports that only this pytest worker takes, from anywhere among them, as another run may go on too."""
    worker = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw")) % WORKERS
    first = FIRST_PORT + worker * PORTS_PER_WORKER
    offset = random.randrange(PORTS_PER_WORKER)
    return (first + (offset + step) % PORTS_PER_WORKER for step in itertools.count())


_ports = _ports_of_this_worker()


def free_port() -> int:
    """A port on which nothing listens, and that nothing else of this run takes before its user does."""
    for port in itertools.islice(_ports, PORTS_PER_WORKER):
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # a closed connection's rest is no listener
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
        return port
    raise AssertionError("no port is free")


class EngineProcess:
    """`python -m engines.runtime` with one compute thread on a free port. Use as a context manager.

    `module` is what runs instead, with its own arguments before the engine's (`tests.slow_card`).
    """

    def __init__(
        self, folder: Path, model_path: Path, *, module: Sequence[str] = ("engines.runtime",), **settings: Any
    ) -> None:
        self._module = module
        values: dict[str, Any] = {"slots": 4, "context_tokens": 1024, "threads": 1, "port": free_port()}
        self.config = EngineConfig(model_path=str(model_path), model_name="test-model", **{**values, **settings})
        self.base_url = f"http://127.0.0.1:{self.config.port}"
        self._config_path = folder / f"engine-{self.config.port}.json"
        self._config_path.write_text(self.config.to_json())
        self.log_path = folder / f"engine-{self.config.port}.log"

    def __enter__(self) -> EngineProcess:
        with self.log_path.open("wb") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", *self._module, "--config", str(self._config_path)],
                stdout=log,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
                cwd=Path(__file__).resolve().parent.parent,
            )
        deadline = time.monotonic() + START_TIMEOUT_S
        while self.health() != "ok":
            ended_with = self.process.poll()
            if ended_with is not None or time.monotonic() > deadline:
                self.stop()
                why = "was not ready in time" if ended_with is None else f"ended with {ended_with} before it was ready"
                raise AssertionError(f"the engine {why}:\n{self.log_path.read_text()}")
            time.sleep(0.05)
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def stop(self) -> int:
        if self.process.poll() is None:
            self.process.terminate()
            try:
                self.process.wait(10)
            except subprocess.TimeoutExpired:
                self.process.kill()
        return self.process.wait(10)

    def health(self) -> str | None:
        try:
            return str(self.get("/health")["status"])
        except OSError:  # it does not listen yet, or is too busy with its start to answer
            return None

    def get(self, path: str) -> Any:
        try:
            with urllib.request.urlopen(self.base_url + path, timeout=ANSWER_TIMEOUT_S) as answer:
                return json.load(answer)
        except urllib.error.HTTPError as error:
            with error:
                return json.load(error)

    def text(self, path: str) -> str:
        with urllib.request.urlopen(self.base_url + path, timeout=ANSWER_TIMEOUT_S) as answer:
            return str(answer.read().decode())

    def wait_idle(self, timeout_s: float = IDLE_TIMEOUT_S) -> list[dict[str, Any]]:
        """Waits until no slot works, which is how a leaked one would show. Returns the slots."""
        deadline = time.monotonic() + timeout_s
        while True:
            slots: list[dict[str, Any]] = self.get("/slots")
            if not any(slot["is_processing"] for slot in slots):
                return slots
            if time.monotonic() > deadline:
                raise AssertionError(f"a slot did not become idle: {slots}")
            time.sleep(0.05)
