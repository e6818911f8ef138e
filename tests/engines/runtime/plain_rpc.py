"""A small client of the binary protocol, written from docs/rpc-protocol.md alone: it imports nothing of Hydra's."""

from __future__ import annotations

import hashlib
import hmac
import json
import os
import socket
import struct
from typing import Any

STREAMED = 2**64 - 1


class Answer:
    """`payload` holds the bytes of a plain answer, `frames` the JSON objects of a streamed one."""

    def __init__(self, status: int, meta: dict[str, Any], payload: bytes, frames: list[Any]) -> None:
        self.status, self.meta, self.payload, self.frames = status, meta, payload, frames


class PlainClient:
    """One connection. `hello=False` leaves HELLO to the caller."""

    def __init__(self, port: int, secret: str = "", *, hello: bool = True, timeout_s: float = 30.0) -> None:
        self.socket = socket.create_connection(("127.0.0.1", port), timeout=timeout_s)
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if hello:
            self.hello(secret)

    def __enter__(self) -> PlainClient:
        return self

    def __exit__(self, *_: object) -> None:
        self.socket.close()

    def hello(self, secret: str) -> None:
        nonce = os.urandom(32)
        body = json.dumps({"version": 1, "nonce": nonce.hex(), "client": "plain"}).encode()
        answer = self.ask(0x70, payload=body)
        if answer.status == 0:
            assert answer.meta["auth"] == "none"
            return
        assert answer.status == 3, answer.meta
        challenge = bytes.fromhex(answer.meta["challenge"])
        answer = self.ask(0x70, payload=json.dumps({"answer": proof(secret, "client", nonce, challenge)}).encode())
        assert answer.status == 0, answer.meta
        assert answer.meta["proof"] == proof(secret, "server", nonce, challenge)

    def ask(self, opcode: int, key: str = "", payload: bytes = b"", trace: str = "") -> Answer:
        self.socket.sendall(message(opcode, key, payload, trace))
        return self.answer()

    def answer(self) -> Answer:
        status, meta, size = self.head()
        if size != STREAMED:
            return Answer(status, meta, self.exactly(size), [])
        frames = []
        while data := self.frame():
            frames.append(json.loads(data))
        return Answer(status, meta, b"", frames)

    def head(self) -> tuple[int, dict[str, Any], int]:
        header = self.exactly(12)
        meta = json.loads(self.exactly(int.from_bytes(header[1:4], "little")))
        return header[0], meta, int.from_bytes(header[4:], "little")

    def frame(self) -> bytes:
        return self.exactly(int.from_bytes(self.exactly(4), "little"))

    def exactly(self, count: int) -> bytes:
        """Raises EOFError where the connection ends first."""
        parts = bytearray()
        while len(parts) < count:
            part = self.socket.recv(min(count - len(parts), 1 << 20))
            if not part:
                raise EOFError(f"{len(parts)} of {count} bytes came")
            parts += part
        return bytes(parts)

    def is_closed(self) -> bool:
        """Waits until the other side ends the connection; False when it says something instead."""
        try:
            return self.socket.recv(1) == b""
        except ConnectionResetError:
            return True


def message(opcode: int, key: str = "", payload: bytes = b"", trace: str = "") -> bytes:
    name, by = key.encode(), trace.encode()
    return struct.pack("<HBBHQH", 0x4859, opcode, 0, len(name), len(payload), len(by)) + name + by + payload


def proof(secret: str, side: str, nonce: bytes, challenge: bytes) -> str:
    text = b"hydra-rpc/1 " + side.encode() + b"\0" + nonce + challenge
    return hmac.new(secret.encode(), text, hashlib.sha256).hexdigest()
