"""A connection's bytes, both ways: what the binary protocol's server and client read from and write to.

Large payloads go from the socket straight into the reader's own buffer, small ones through one bounded buffer of the
connection; nothing is read ahead beyond it, so a peer that sends too much only fills the kernel's buffers.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Callable
from typing import BinaryIO, cast

BUFFER_BYTES = 1 << 18
KEEPALIVE_IDLE_S = 30
KEEPALIVE_INTERVAL_S = 10
KEEPALIVE_PROBES = 3

Buffer = bytes | bytearray | memoryview


class ByteStream(asyncio.BufferedProtocol):
    """One reader and one writer at a time. Every wait ends with ConnectionResetError when the peer goes; deadlines are the
    caller's.

    A peer that closes its sending half counts as gone.
    """

    def __init__(self, on_connected: Callable[[ByteStream], None] | None = None) -> None:
        self._on_connected = on_connected
        self._transport: asyncio.Transport | None = None
        self._store = memoryview(bytearray(BUFFER_BYTES))
        self._begin = self._end = 0
        self._target: memoryview | None = None
        self._filled = 0
        self._reader: asyncio.Future[None] | None = None
        self._writer: asyncio.Future[None] | None = None
        self._paused = self._write_paused = False
        self.gone = asyncio.Event()

    # --- called by the event loop ---------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        # A transport keeps references to what it has not sent yet; with this limit `write` returns when there is nothing left.
        self._transport.set_write_buffer_limits(high=0)
        set_options(transport.get_extra_info("socket"))
        if self._on_connected is not None:
            self._on_connected(self)

    def get_buffer(self, sizehint: int) -> memoryview:
        if self._target is not None:
            return self._target[self._filled :]
        if self._end == BUFFER_BYTES and self._begin > 0:
            self._compact()
        return self._store[self._end :]

    def buffer_updated(self, nbytes: int) -> None:
        if self._target is not None:
            self._filled += nbytes
            if self._filled < len(self._target):
                return
            # Whoever waits wakes later; what comes before that belongs into our own buffer.
            self._target = None
        else:
            self._end += nbytes
            if self._end - self._begin == BUFFER_BYTES:
                self._pause()
        _wake(self._reader)

    def eof_received(self) -> bool:
        self._leave()
        return False

    def connection_lost(self, exc: Exception | None) -> None:
        self._leave()

    def pause_writing(self) -> None:
        self._write_paused = True

    def resume_writing(self) -> None:
        self._write_paused = False
        _wake(self._writer)

    # --- reading --------------------------------------------------------------------------------

    @property
    def waiting_bytes(self) -> int:
        """Bytes that have come and nobody has read."""
        return self._end - self._begin

    async def peek(self) -> memoryview:
        """A view of what has come, waiting for the first byte; valid until the next await. `consume` takes from it."""
        while self._begin == self._end:
            await self._wait_for_bytes()
        return self._store[self._begin : self._end]

    async def stirred(self) -> None:
        """Returns when the peer sends something or leaves, without taking anything."""
        with contextlib.suppress(ConnectionResetError):
            await self.peek()

    def consume(self, count: int) -> None:
        self._begin += count
        if self._begin == self._end:
            self._begin = self._end = 0
        if self._paused and self.waiting_bytes < BUFFER_BYTES and self._transport is not None:
            self._compact()
            self._paused = False
            self._transport.resume_reading()

    async def read_into(self, target: memoryview) -> None:
        """Fills `target` wholly. If this is cancelled or raises, the connection has lost its place and must be closed."""
        count = min(len(target), self.waiting_bytes)
        target[:count] = self._store[self._begin : self._begin + count]
        self._target, self._filled = (target[count:], 0) if count < len(target) else (None, 0)
        self.consume(count)
        try:
            while self._target is not None:
                await self._wait_for_bytes()
        finally:
            self._target = None

    async def _wait_for_bytes(self) -> None:
        if self.gone.is_set():
            raise ConnectionResetError("The peer closed the connection.")
        self._reader = asyncio.get_running_loop().create_future()
        try:
            await self._reader
        finally:
            self._reader = None

    def _pause(self) -> None:
        if self._transport is not None and not self._paused:
            self._paused = True
            self._transport.pause_reading()

    def _compact(self) -> None:
        count = self._end - self._begin
        self._store[:count] = self._store[self._begin : self._end]
        self._begin, self._end = 0, count

    # --- writing --------------------------------------------------------------------------------

    async def write(self, data: Buffer) -> None:
        """Sends `data`, which may be changed again as soon as this returns; waits while the peer is slow to take it."""
        if self.gone.is_set() or self._transport is None:
            raise ConnectionResetError("The peer closed the connection.")
        self._transport.write(data)
        while self._write_paused:
            self._writer = asyncio.get_running_loop().create_future()
            try:
                await self._writer
            finally:
                self._writer = None
            if self.gone.is_set():
                raise ConnectionResetError("The peer closed the connection.")

    async def send_file(self, file: BinaryIO, offset: int, count: int) -> None:
        """Sends a part of a file by sendfile, so that its bytes never enter this process. Only on asyncio's own event loop:
        uvloop has no sendfile."""
        if self.gone.is_set() or self._transport is None:
            raise ConnectionResetError("The peer closed the connection.")
        try:
            sent = await asyncio.get_running_loop().sendfile(self._transport, file, offset, count, fallback=False)
        except RuntimeError as error:
            # What a transport that was closed meanwhile says.
            raise ConnectionResetError("The peer closed the connection.") from error
        if sent != count:
            raise ConnectionAbortedError(f"{file.name} ended {count - sent} bytes early.")

    # --- ends -----------------------------------------------------------------------------------

    async def finish(self, linger_s: float) -> None:
        """Closes after what was written has been sent, dropping for at most `linger_s` what still comes: a close upon unread
        bytes would reset the connection and take the last answer with it."""
        if self._transport is None or self.gone.is_set():
            return
        with contextlib.suppress(TimeoutError, OSError):
            if self._transport.can_write_eof():
                self._transport.write_eof()
            async with asyncio.timeout(linger_s):
                while True:
                    self.consume(len(await self.peek()))
        self.abort()

    def close(self) -> None:
        """Closes once what was written has been sent."""
        if self._transport is not None:
            self._transport.close()

    def abort(self) -> None:
        if self._transport is not None:
            self._transport.abort()

    def _leave(self) -> None:
        self.gone.set()
        _wake(self._reader)
        _wake(self._writer)


def set_options(connection: socket.socket | None) -> None:
    """No waiting for fuller packets, and a dead peer is noticed within about a minute."""
    if connection is None or connection.family not in (socket.AF_INET, socket.AF_INET6):
        return
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, KEEPALIVE_IDLE_S)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, KEEPALIVE_INTERVAL_S)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, KEEPALIVE_PROBES)


def _wake(waiter: asyncio.Future[None] | None) -> None:
    if waiter is not None and not waiter.done():
        waiter.set_result(None)
