"""What a task leaves behind in its worker, which runs thousands of them."""

from __future__ import annotations

import json
import threading
import uuid
from collections.abc import Callable, Iterator
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from engines import client
from sessions import services, tasks
from sessions.identity import Identity, Owner
from sessions.services import TurnStart
from tests.rows import add_engine, add_model, set_ready
from tests.synthetic_gguf import SyntheticModel

pytestmark = pytest.mark.django_db(transaction=True)
TIMES = 5


class Holding(BaseHTTPRequestHandler):
    """An engine that has nothing to tell, and keeps connections open."""

    protocol_version = "HTTP/1.1"
    asked = 0

    def do_GET(self) -> None:
        type(self).asked += 1
        body = json.dumps({}).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *args: object) -> None:
        pass


@pytest.fixture
def port() -> Iterator[int]:
    with ThreadingHTTPServer(("127.0.0.1", 0), Holding) as server:
        server.daemon_threads = True
        serving = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        serving.start()
        yield server.server_address[1]
        server.shutdown()
        serving.join()


def test_a_session_that_ends_leaves_no_connection_open(
    port: int, tiny_model: Callable[..., SyntheticModel], tmp_path: Path
) -> None:
    engine = add_engine(add_model(tiny_model("llama").path, tmp_path))
    set_ready(engine, port)
    start = TurnStart(uuid.uuid4(), Identity(Owner(), "a" * 64), "api", "", "tiny", engine.pk)
    turn_id = services.begin_turn(start)
    before, others = own_sockets(port), set(client._sessions.values())
    for _ in range(TIMES):
        tasks.end_session(turn_id)
    assert Holding.asked >= TIMES
    assert own_sockets(port) == before
    assert all(session.closed for session in set(client._sessions.values()) - others)


def own_sockets(port: int) -> int:
    """Connections of this process to the port, by the kernel."""
    inodes = set()
    for open_file in Path("/proc/self/fd").iterdir():
        with suppress(FileNotFoundError):  # what looked for them is closed by now
            inodes.add(str(open_file.readlink()).removeprefix("socket:[").rstrip("]"))
    rows = [line.split() for line in Path("/proc/self/net/tcp").read_text().splitlines()[1:]]
    return sum(row[9] in inodes and row[2].endswith(f":{port:04X}") for row in rows)
