"""Runs `manage.py up` on a home of its own, as a user's terminal would, and finds what it left behind."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
from pathlib import Path
from typing import Any

import psutil

from tests.engine_process import free_port
from tests.hydra_process import HydraProcess

ADMIN_PASSWORD = "a password of the tests"
TMPFS = Path("/dev/shm")


class Stack(HydraProcess):
    """One supervisor process and all below it. `start` returns once it printed that Hydra is ready."""

    def __init__(self, home: Path, models: Path | None = None, **environ: str) -> None:
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        if models is not None:
            # Linked, so that the digest record (keyed by inode) still fits.
            shutil.copytree(models, home / "models", copy_function=os.link)
        own = {
            "HYDRA_PORT": str(self.port),
            "HYDRA_ADMIN_PASSWORD": ADMIN_PASSWORD,
            "HYDRA_ENGINE_THREADS": "1",
            "HYDRA_ENGINE_CONTEXT": "2048",
            "HYDRA_STORE_BYTES": str(64 << 20),
        }
        super().__init__(home, "Hydra is ready: ", ("up",), own | environ)

    def kill_supervisor(self) -> None:
        assert self.process is not None
        self.process.kill()
        self.wait()

    def process_of(self, module: str) -> psutil.Process:
        """The one process that runs `python -m <module>` here."""
        (found,) = [process for process in self.processes() if module in process.cmdline()]
        return found

    def leftovers(self) -> dict[str, Any]:
        """What must be empty after a clean stop."""
        return {
            "processes": [" ".join(process.cmdline()) for process in self.processes()],
            "run files": sorted(
                str(path)
                for pattern in ("run/*.json", "engines/*/run.json", "store/run.json")
                for path in self.home.glob(pattern)
            ),
        }

    def shared_memory(self) -> set[str]:
        """What its processes have mapped of tmpfs, by the names under /dev/shm; others of the machine come and go there."""
        found = set()
        for process in self.processes():
            with contextlib.suppress(FileNotFoundError, ProcessLookupError):
                for line in Path(f"/proc/{process.pid}/maps").read_text().splitlines():
                    _, mark, name = line.partition(f"{TMPFS}/")
                    found |= {name.split("/")[0].removesuffix(" (deleted)")} if mark else set()
        return found

    def engine_port(self) -> int:
        (config,) = self.home.glob("engines/*/config.json")
        return int(json.loads(config.read_text())["port"])


def modes_above(path: Path) -> dict[str, int]:
    return {str(parent): parent.stat().st_mode for parent in (path, *path.parents)}
