"""Starts real store processes for tests and ends them by pid."""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from engines.store.config import StoreConfig
from tests.engine_process import free_port

START_TIMEOUT_S = 30.0
ROOT = Path(__file__).resolve().parents[3]


@contextmanager
def store_on_tmpfs(logs: Path, **settings: Any) -> Iterator[StoreProcess]:
    """A store with room for some small engines, and a folder of its own that goes with it."""
    folder = Path(tempfile.mkdtemp(prefix="test-store-", dir="/dev/shm"))
    try:
        with StoreProcess(folder, logs, **{"capacity_bytes": 64 << 20, "slab_bytes": 8 << 20, **settings}) as store:
            yield store
    finally:
        shutil.rmtree(folder)


class StoreProcess:
    """`python -m engines.store` on a free port. Use as a context manager; `restart` keeps configuration and port."""

    def __init__(self, folder: Path, logs: Path, **settings: Any) -> None:
        values = {"port": free_port(), "directory": str(folder / "hydra-one"), "sweep_s": 0.1}
        self.config = StoreConfig(**{**values, "capacity_bytes": 16 << 20, "slab_bytes": 4 << 20, **settings})
        self._config_path = logs / f"store-{self.config.port}.json"
        self._config_path.write_text(self.config.to_json())
        self.log_path = logs / f"store-{self.config.port}.log"

    def __enter__(self) -> StoreProcess:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def start(self) -> None:
        with self.log_path.open("ab") as log:
            mark = log.tell()
            self.process = subprocess.Popen(
                [sys.executable, "-m", "engines.store", "--config", str(self._config_path)],
                stdout=log,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
                cwd=ROOT,
            )
        deadline = time.monotonic() + START_TIMEOUT_S
        while b"listening on" not in self.log_path.read_bytes()[mark:]:
            if self.process.poll() is not None or time.monotonic() > deadline:
                self.kill()
                raise AssertionError(f"the store did not become ready:\n{self.log_path.read_text()}")
            time.sleep(0.02)

    def kill(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()

    def restart(self) -> None:
        """As after a crash."""
        self.kill()
        self.start()

    def stop(self) -> int:
        if self.process.poll() is None:
            self.process.terminate()
            try:
                self.process.wait(20)
            except subprocess.TimeoutExpired:
                self.kill()
                raise AssertionError("the store did not end within 20 s of SIGTERM") from None
        return self.process.returncode
