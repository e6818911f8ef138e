"""What a client reads of one answer, and the errors that an answer or its peer's silence become."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from engines.errors import (
    EngineUnreachable,
    InvalidRequest,
    NotAuthenticated,
    ProtocolBroken,
    RpcBadRequest,
    RpcBusy,
    RpcFailed,
    RpcNotFound,
    RpcNotServed,
    RpcRefused,
    RpcTimeout,
)
from engines.rpc_stream import ByteStream
from engines.wire import FrameDecoder, ResponseDecoder, ResponseHead, Status
from engines.wire_json import ErrorMeta, read_json

PIECE_BYTES = 1 << 22

_REFUSALS: dict[Status, type[RpcRefused]] = {
    Status.NOT_FOUND: RpcNotFound,
    Status.ERROR: RpcFailed,
    Status.BUSY: RpcBusy,
    Status.BAD_REQUEST: RpcBadRequest,
    Status.NOT_IMPLEMENTED: RpcNotServed,
}


def refusal_of(head: ResponseHead) -> RpcRefused | NotAuthenticated:
    """What an answer other than OK and PARTIAL raises at the client."""
    try:
        meta = read_json(ErrorMeta, head.meta, "an error's meta")
    except InvalidRequest as error:
        raise ProtocolBroken(f"The peer answered {head.status.name} without saying why: {error}") from error
    if meta.code == NotAuthenticated.code:
        return NotAuthenticated(meta.error)
    return _REFUSALS[head.status](meta.error, peer_code=meta.code, hint=meta.hint, param=meta.param)


@asynccontextmanager
async def within(timeout_s: float) -> AsyncIterator[None]:
    """A wait for the peer: its silence and its going as errors of ours."""
    try:
        async with asyncio.timeout(timeout_s):
            yield
    except TimeoutError as error:
        raise RpcTimeout(f"The peer was silent for {timeout_s:g} s.") from error
    except OSError as error:
        raise EngineUnreachable(f"The connection broke: {error}") from error


class Answer:
    """What is being read of one answer. `complete` when nothing of it is left on the connection."""

    def __init__(self, stream: ByteStream) -> None:
        self.complete = False
        self.unread_bytes = 0
        self._streamed = False
        self._stream = stream

    async def head(self, timeout_s: float) -> ResponseHead:
        decoder = ResponseDecoder()
        async with within(timeout_s):
            while decoder.head is None:
                self._stream.consume(decoder.feed(await self._stream.peek()))
        head = decoder.head
        self._streamed = head.is_streamed
        self.unread_bytes = 0 if self._streamed else head.payload_bytes
        self.complete = head.payload_bytes == 0
        return head

    async def accepted(self, timeout_s: float) -> ResponseHead:
        """The head of an OK or PARTIAL answer; any other status raises."""
        head = await self.head(timeout_s)
        if head.status not in (Status.OK, Status.PARTIAL):
            raise refusal_of(head)
        return head

    async def some(self, timeout_s: float) -> bytes:
        async with within(timeout_s):
            part = bytes((await self._stream.peek())[: self.unread_bytes])
        self._stream.consume(len(part))
        self._read(len(part))
        return part

    async def rest_into(self, target: memoryview, timeout_s: float) -> None:
        if len(target) != self.unread_bytes:
            raise ProtocolBroken(f"{self.unread_bytes} bytes are to come; the buffer has {len(target)}.")
        await self.part_into(target, timeout_s)

    async def part_into(self, target: memoryview, timeout_s: float) -> None:
        """Fills `target` with the payload's next bytes. Raises ProtocolBroken where so many are not left."""
        if len(target) > self.unread_bytes:
            raise ProtocolBroken(f"{self.unread_bytes} bytes are to come; {len(target)} are wanted.")
        for start in range(0, len(target), PIECE_BYTES):
            piece = target[start : start + PIECE_BYTES]
            async with within(timeout_s):
                await self._stream.read_into(piece)
            self._read(len(piece))

    async def frames(self, silence_s: float) -> AsyncIterator[bytes]:
        if not self._streamed:
            raise ProtocolBroken("An answer that should come in frames does not.")
        decoder = FrameDecoder()
        while not decoder.ended:
            async with within(silence_s):
                self._stream.consume(decoder.feed(await self._stream.peek()))
            self.complete = decoder.ended
            for frame in decoder.take():
                yield frame

    def _read(self, count: int) -> None:
        self.unread_bytes -= count
        self.complete = self.unread_bytes == 0


class IncomingState:
    """A state on its way in: iterate over it once, or read all of it into a buffer of `total_bytes`."""

    def __init__(self, answer: Answer, stall_s: float) -> None:
        self.total_bytes = answer.unread_bytes
        self._answer = answer
        self._stall_s = stall_s

    async def __aiter__(self) -> AsyncIterator[bytes]:
        while self._answer.unread_bytes:
            yield await self._answer.some(self._stall_s)

    async def read_into(self, target: memoryview) -> None:
        """Fills `target`, which must be as long as what is left of the state."""
        await self._answer.rest_into(target, self._stall_s)
