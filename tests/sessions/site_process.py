"""The site as its own process, on the database of the tests."""

from __future__ import annotations

import http.client
import os
import subprocess
import sys
import time
import urllib.request
from pathlib import Path
from typing import Any

from django.db import connection

from hydra_site.supervisor.home import Services
from tests.engine_process import free_port

ROOT = Path(__file__).resolve().parent.parent.parent
LIMIT_BYTES = 100_000
PATIENCE_S = 60.0


class Site:
    """`python -m hydra_site.serve` on the test database."""

    def __init__(self, home: Path, running: Services, **environ: str) -> None:
        self.port = free_port()
        self.log = home / "site.log"
        url, _, _ = running.database_url.rpartition("/")
        self.environ = {
            **os.environ,
            "HYDRA_HOME": str(home),
            "HYDRA_PORT": str(self.port),
            "HYDRA_MAX_BODY_BYTES": str(LIMIT_BYTES),
            "DATABASE_URL": f"{url}/{connection.settings_dict['NAME']}",
            "BROKER_URL": str(running.broker_url),
            **environ,
        }

    def start(self) -> None:
        with self.log.open("wb") as log:
            argv = [sys.executable, "-m", "hydra_site.serve"]
            self.process = subprocess.Popen(argv, cwd=ROOT, env=self.environ, stdout=log, stderr=log)

    def wait_up(self) -> None:
        deadline = time.monotonic() + PATIENCE_S
        while True:
            try:
                with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/healthz", timeout=PATIENCE_S):
                    return
            except OSError:
                assert self.process.poll() is None, self.log.read_text()
                assert time.monotonic() < deadline, self.log.read_text()
                time.sleep(0.05)

    def post(self, body: Any, headers: dict[str, str] | None = None) -> http.client.HTTPResponse:
        self.connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=PATIENCE_S)
        self.connection.request("POST", "/v1/chat/completions", body, headers or {})
        return self.connection.getresponse()

    def stop(self) -> int:
        self.process.terminate()
        return self.process.wait(PATIENCE_S)
