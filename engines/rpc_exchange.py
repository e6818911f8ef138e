"""One request of the binary protocol and its answer, as the serving side sees them.

The payload is read and the answer written in pieces, each within its deadline; a peer that stalls or leaves raises OSError,
and the connection ends with it.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable
from typing import Any, BinaryIO

from engines.errors import EngineError, InvalidRequest, ProtocolBroken
from engines.rpc_stream import Buffer, ByteStream
from engines.wire import END_OF_FRAMES, STREAMED, RequestHead, ResponseHead, Status, frame
from engines.wire_json import ErrorMeta, write_json

# Below this a sender counts as stalled, however regularly its bytes drip.
MIN_BYTES_PER_S = 1 << 18
DEFAULT_CHUNK_BYTES = 1 << 21
# A call of sendfile pauses and resumes the connection's reading: seldom enough to cost nothing.
FILE_CHUNK_BYTES = 1 << 24

_STATUS_OF = {
    404: Status.NOT_FOUND,
    409: Status.BUSY,
    429: Status.BUSY,
    501: Status.NOT_IMPLEMENTED,
    503: Status.BUSY,
}


def status_of(error: EngineError) -> Status:
    """A failure's status by its HTTP status: 409, 429 and 503 are BUSY, the other 4xx the request's own fault."""
    own_fault = Status.BAD_REQUEST if 400 <= error.http_status < 500 else Status.ERROR
    return _STATUS_OF.get(error.http_status, own_fault)


class Exchange:
    """`begun` once the answer's head is out, `complete` once its last byte was handed over; `unread_bytes` of the payload
    are still to come. Used by one task."""

    def __init__(self, stream: ByteStream, head: RequestHead, stall_s: float) -> None:
        self.head = head
        self.unread_bytes = head.payload_bytes
        self.chunk_bytes = DEFAULT_CHUNK_BYTES
        self.begun = self.complete = False
        self.status: Status | None = None
        self._stream = stream
        self._stall_s = stall_s
        self._body_until = asyncio.get_running_loop().time() + stall_s + head.payload_bytes / MIN_BYTES_PER_S
        self._unsent_bytes = 0

    @property
    def peer_gone(self) -> asyncio.Event:
        """Set when the connection has ended."""
        return self._stream.gone

    # --- the request's payload ------------------------------------------------------------------

    @property
    def waiting_bytes(self) -> int:
        """Of the payload's next bytes so many have come."""
        return min(self._stream.waiting_bytes, self.unread_bytes)

    async def body(self) -> bytes:
        """The whole payload. Kept memory grows with what has come, not with what was announced."""
        parts = bytearray()
        async for part in self.chunks():
            parts += part
        return bytes(parts)

    async def chunks(self) -> AsyncIterator[bytes]:
        """The payload as it comes, in pieces of at most the connection's buffer."""
        while self.unread_bytes:
            part = bytes((await self._arrived())[: self.unread_bytes])
            self._take(len(part))
            yield part

    async def read_into(self, target: memoryview) -> None:
        """Fills `target` with the payload's next bytes, straight from the socket. Raises InvalidRequest where fewer are left."""
        if len(target) > self.unread_bytes:
            raise InvalidRequest(f"The payload ends {len(target) - self.unread_bytes} bytes early.")
        for start in range(0, len(target), self.chunk_bytes):
            part = target[start : start + self.chunk_bytes]
            try:
                async with asyncio.timeout(self._stall_s):
                    await self._stream.read_into(part)
            except TimeoutError as error:
                raise ConnectionAbortedError("The peer stalled inside a request.") from error
            self.unread_bytes -= len(part)

    async def drop_rest(self) -> None:
        """Reads what the handler left, so that the next request stands at its place."""
        while self.unread_bytes:
            self._take(min(len(await self._arrived()), self.unread_bytes))

    def _take(self, count: int) -> None:
        self._stream.consume(count)
        self.unread_bytes -= count

    async def _arrived(self) -> memoryview:
        if self._stream.waiting_bytes:
            return await self._stream.peek()
        until = min(asyncio.get_running_loop().time() + self._stall_s, self._body_until)
        try:
            async with asyncio.timeout_at(until):
                return await self._stream.peek()
        except TimeoutError as error:
            raise ConnectionAbortedError("The peer stalled inside a request.") from error

    # --- the answer -----------------------------------------------------------------------------

    async def answer(self, status: Status, message: Any) -> None:
        """The whole answer at once: a dataclass of wire_json, no payload."""
        head = self._head(status, message, 0)
        self.complete = True
        await self._write(head)

    async def refuse(self, error: EngineError) -> None:
        meta = ErrorMeta(error.message, error.code, error.hint, error.param, error.retry_after_s)
        await self.answer(status_of(error), meta)

    async def begin(self, status: Status, message: Any, payload_bytes: int) -> None:
        """Announces a payload, which `send` must then fill exactly."""
        head = self._head(status, message, payload_bytes)
        self._unsent_bytes = payload_bytes
        self.complete = payload_bytes == 0
        await self._write(head)

    async def send(self, data: Buffer) -> None:
        """A part of the payload, which may be overwritten as soon as this returns. Raises ProtocolBroken beyond its length."""
        if len(data) > self._unsent_bytes:
            raise ProtocolBroken(f"{len(data)} bytes more than announced; {self._unsent_bytes} were left.")
        view = memoryview(data)
        for start in range(0, len(view), self.chunk_bytes):
            part = view[start : start + self.chunk_bytes]
            self._unsent_bytes -= len(part)
            self.complete = self._unsent_bytes == 0
            await self._write(part)

    async def send_file(self, file: BinaryIO, offset: int, count: int) -> None:
        """A part of the payload out of a file, without a copy through this process. Raises ProtocolBroken beyond its length."""
        if count > self._unsent_bytes:
            raise ProtocolBroken(f"{count} bytes more than announced; {self._unsent_bytes} were left.")
        for start in range(0, count, FILE_CHUNK_BYTES):
            size = min(FILE_CHUNK_BYTES, count - start)
            self._unsent_bytes -= size
            self.complete = self._unsent_bytes == 0
            try:
                async with asyncio.timeout(self._stall_s + size / MIN_BYTES_PER_S):
                    await self._stream.send_file(file, offset + start, size)
            except TimeoutError as error:
                raise ConnectionAbortedError("The peer does not take its answer.") from error

    async def begin_frames(self, message: Any) -> None:
        """Announces a streamed answer: `send_frames` as often as wanted, then `end_frames`."""
        await self._write(self._head(Status.OK, message, STREAMED))

    async def send_frames(self, frames: Iterable[bytes]) -> None:
        await self._write(b"".join(frame(data) for data in frames))

    async def end_frames(self) -> None:
        self.complete = True
        await self._write(END_OF_FRAMES)

    def _head(self, status: Status, message: Any, payload_bytes: int) -> bytes:
        if self.begun:
            raise ProtocolBroken("An exchange was answered twice.")
        head = ResponseHead(status, write_json(message), payload_bytes).encode()
        self.begun, self.status = True, status
        return head

    async def _write(self, data: Buffer) -> None:
        try:
            async with asyncio.timeout(self._stall_s):
                await self._stream.write(data)
        except TimeoutError as error:
            raise ConnectionAbortedError("The peer does not take its answer.") from error
