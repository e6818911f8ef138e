"""`manage.py …` on a machine of a network, with a HYDRA_HOME of its own."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

from tests import hydra_process
from tests.hosts.network import Machine
from tests.hydra_process import ROOT


class HydraProcess(hydra_process.HydraProcess):
    """One long-running command of one home, on a machine."""

    def __init__(self, machine: Machine, home: Path, ready_text: str, *arguments: str, **environ: str) -> None:
        self.machine = machine
        super().__init__(home, ready_text, arguments, {"PYTHONUNBUFFERED": "1", **environ}, machine.command)

    def stop(self) -> int:
        return self.interrupt(signal.SIGTERM)

    def manage(self, *arguments: str) -> str:
        """The output of a command that ends, on the same machine and home. Raises AssertionError when it fails."""
        done = subprocess.run(
            self.machine.command(sys.executable, "manage.py", *arguments),
            cwd=ROOT,
            env=self.environ,
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        assert done.returncode == 0, f"{arguments}: {done.stdout}\n{done.stderr}"
        return done.stdout


_ASK = """
import json, sys, urllib.request, urllib.error
url, body, key = json.loads(sys.argv[1])
request = urllib.request.Request(url, json.dumps(body).encode() if body else None, {"Content-Type": "application/json"})
if key:
    request.add_header("Authorization", "Bearer " + key)
opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
try:
    with opener.open(request, timeout=60) as answer:
        print(json.dumps([answer.status, json.load(answer)]))
except urllib.error.HTTPError as error:
    print(json.dumps([error.code, json.loads(error.read() or b"null")]))
except OSError as error:
    print(json.dumps([0, str(error)]))
"""


def ask(machine: Machine, url: str, body: Any = None, key: str = "") -> tuple[int, Any]:
    """Status and JSON of one request sent from `machine`; status 0 where nobody answered."""
    argv = machine.command(sys.executable, "-c", _ASK, json.dumps([url, body, key]))
    done = subprocess.run(argv, capture_output=True, text=True, timeout=90, check=True)
    status, answer = json.loads(done.stdout)
    return status, answer


_KNOCK = """
import sys, psycopg
try:
    psycopg.connect(sys.argv[1], connect_timeout=10).close()
except psycopg.Error as error:
    print(type(error).__name__, error)
"""
_COMMAND = """
import json, sys, redis
url, *command = sys.argv[1:]
try:
    with redis.Redis.from_url(url, socket_timeout=10, socket_connect_timeout=10, decode_responses=True) as broker:
        print(json.dumps([broker.execute_command(*command), ""]))
except redis.RedisError as error:
    print(json.dumps([None, f"{type(error).__name__} {error}"]))
"""


def refusal(machine: Machine, url: str) -> str:
    """What a database or a broker says to who comes from `machine` with this URL, "" when it lets in."""
    if not url.startswith("postgres"):
        return ask_broker(machine, url, "PING")[1]
    argv = machine.command(sys.executable, "-c", _KNOCK, url)
    return subprocess.run(argv, capture_output=True, text=True, timeout=60, check=True).stdout.strip()


def ask_broker(machine: Machine, url: str, *command: str) -> tuple[Any, str]:
    """The answer of one command sent from `machine`, or None and why there is none."""
    argv = machine.command(sys.executable, "-c", _COMMAND, url, *command)
    done = subprocess.run(argv, capture_output=True, text=True, timeout=60, check=True)
    answer, error = json.loads(done.stdout)
    return answer, error
