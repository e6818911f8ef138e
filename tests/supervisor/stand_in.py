"""The supervisor around small children: a site that answers, a head that starts one engine, a bootstrap that reports.

Run as `python -m tests.supervisor.stand_in`. PostgreSQL and Valkey are the real ones. STAND_IN_BOOTSTRAP is what
bootstrap prints; STAND_IN_BROKEN names a child that exits at once; STAND_IN_TIMEOUT_S bounds the start.
"""

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from engines.process import ProcessRecord
from hydra_site.supervisor import specs
from hydra_site.supervisor.child import ChildSpec
from hydra_site.supervisor.run import main


class Site(BaseHTTPRequestHandler):
    """Ready at once; any chat gets one word."""

    def do_GET(self) -> None:
        self._answer({"status": "ok"})

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        self._answer({"choices": [{"message": {"role": "assistant", "content": "yes"}}]})

    def _answer(self, body: object) -> None:
        text = json.dumps(body).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)


def serve_site() -> None:
    ThreadingHTTPServer((os.environ["HYDRA_BIND_SEEN"], int(os.environ["HYDRA_PORT"])), Site).serve_forever()


def run_head() -> None:
    """Start one engine in a session of its own unless a living one is on record, as the real head does."""
    directory = Path(os.environ["HYDRA_HOME"], "engines", "e1")
    directory.mkdir(exist_ok=True)
    record = ProcessRecord.from_file(directory / "run.json")
    if record is None or not record.is_alive():
        argv = [sys.executable, "-c", "import time; time.sleep(600)", "engines.runtime"]
        engine = subprocess.Popen(argv, start_new_session=True)
        ProcessRecord.of(engine.pid, "engine", argv).to_file(directory / "run.json")
    time.sleep(600)


def bootstrap() -> None:
    print("some chatter")
    print(os.environ.get("STAND_IN_BOOTSTRAP", '{"admin_created": false, "admin_password": null, "api_keys": 0}'))


ROLES = {"site": serve_site, "head-fast": run_head, "bootstrap": bootstrap}


def application(options: specs.Options) -> Iterable[ChildSpec]:
    environment = {**os.environ, "HYDRA_HOME": str(options.home.root), "HYDRA_BIND_SEEN": options.bind}
    ranks = {"site": specs.SITE_RANK, "head-fast": specs.HEAD_RANK}
    for role in ROLES:
        broken = os.environ.get("STAND_IN_BROKEN") == role
        yield ChildSpec(
            name=role,
            argv=(sys.executable, "-c", "raise SystemExit('broken on purpose')")
            if broken
            else (sys.executable, "-m", "tests.supervisor.stand_in", role),
            needs=frozenset({"postgres", "valkey"} if role == "bootstrap" else {"bootstrap"}),
            once=role == "bootstrap",
            stop_rank=ranks.get(role, 0),
            env=environment,
        )


if __name__ == "__main__":
    if len(sys.argv) > 1:
        ROLES[sys.argv[1]]()
    else:
        raise SystemExit(main(application, float(os.environ.get("STAND_IN_TIMEOUT_S", "60"))))
