"""The socket between the two processes of `python -m bench kv`, as the first one sees it."""

from __future__ import annotations

import asyncio
import json
import socket
import struct
import subprocess
import sys
from typing import Any

from bench.errors import BenchError
from bench.vocabulary import ROOT
from engines.config import EngineConfig

UNSEEN_BLOCKS = 1
# One block on the channel: where it lies, how long it is, its proof. A size of 0 ends the list.
PLACE = struct.Struct("<QQ32s")
_READY_TIMEOUT_S = 120.0


class OtherProcess:
    """`python -m bench.kv_peer` at the other end of a socket."""

    def __init__(self, config: EngineConfig, proof: str) -> None:
        self._sent = self._seen = 0
        self._socket, theirs = socket.socketpair()
        command = [sys.executable, "-m", "bench.kv_peer", str(theirs.fileno()), proof]
        self._process = subprocess.Popen(command, pass_fds=(theirs.fileno(),), cwd=ROOT, stdin=subprocess.PIPE)
        theirs.close()
        assert self._process.stdin is not None
        self._process.stdin.write(config.to_json().encode())
        self._process.stdin.close()

    def __enter__(self) -> OtherProcess:
        self._socket.settimeout(_READY_TIMEOUT_S)
        if self._socket.recv(1) != b"R":
            self.__exit__()
            raise BenchError("the other process did not get ready")
        return self

    def __exit__(self, *_: object) -> None:
        self._socket.close()
        try:
            self._process.wait(20)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def begin(self, command: bytes, order: dict[str, Any]) -> None:
        raw = json.dumps(order).encode()
        self._socket.setblocking(True)
        self._socket.sendall(command + len(raw).to_bytes(8, "little") + raw)
        self._socket.setblocking(command != b"V")
        self._sent = self._seen = 0

    def ask(self, command: bytes, order: dict[str, Any]) -> dict[str, Any]:
        self.begin(command, order)
        length = int.from_bytes(self._socket.recv(8, socket.MSG_WAITALL), "little")
        return dict(json.loads(self._socket.recv(length, socket.MSG_WAITALL)))

    def send(self, place: bytes) -> None:
        self._socket.sendall(place)
        self._sent += 1

    async def seen(self) -> int:
        """How many more blocks the other process has seen; waits for one when several are on their way."""
        return await self._count() if self._sent - self._seen > UNSEEN_BLOCKS else 0

    async def all_seen(self) -> None:
        while self._seen < self._sent - 1:
            await self._count()

    async def _count(self) -> int:
        answers = await asyncio.get_running_loop().sock_recv(self._socket, 64)
        if not answers or answers.strip(b"+"):
            raise BenchError("the other process found a damaged block, or ended")
        self._seen += len(answers)
        return len(answers)
