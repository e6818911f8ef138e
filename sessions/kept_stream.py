"""Streams that outlive their connection: the answer is read to its end and kept for a while, whoever listens.

A position counts server-sent events from 0: frames with data, the closing [DONE] included, comments (pings) not. So a
client that has seen N events goes on with `from=N`, whatever library counted them.

All of this is in the memory of one site process. Another replica can take a stream over (`sessions.stream_shelf`), and is then
the one that reads it; any can stop it, and what came so far stays readable where it was read; lists show what their own replica
reads.
"""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from collections import deque
from collections.abc import AsyncIterator
from itertools import islice
from typing import Literal

from engines.errors import EngineError
from sessions.errors import StreamGap, StreamTaken
from sessions.relay import EngineAnswer

PING_S = 10.0
# An answer of some 40,000 tokens; of a longer one the oldest events go first.
MAX_STREAM_BYTES = 8 << 20
MAX_BLOCK_EVENTS = 256
EVENT_OVERHEAD_BYTES = 64

State = Literal["opening", "running", "done", "failed", "stopped", "taken"]

logger = logging.getLogger(__name__)


class KeptStream:
    """One answer, read by a task of its own into a bounded buffer that any number of readers follow."""

    def __init__(
        self, request_id: uuid.UUID, scope: str, conversation_id: str, path: str, *, is_rewritten: bool = False
    ) -> None:
        self.request_id = request_id
        self.scope = scope
        self.conversation_id = conversation_id
        self.path = path
        # Its events come once more, up to those that the client has had from another replica.
        self.is_rewritten = is_rewritten
        # Which request it answers: a retry under the same key reads it too.
        self.idempotency, self.body_hash = "", ""
        self.created_at = time.time()
        self.state: State = "opening"
        self.answer: EngineAnswer | None = None
        self.first_event = 0
        self.size_bytes = 0
        self.readers = 0
        self.unread_since_s = time.monotonic()
        self._events: deque[bytes] = deque()
        self._news = asyncio.Event()
        self.opened: asyncio.Future[EngineAnswer] = asyncio.get_running_loop().create_future()

    @property
    def next_event(self) -> int:
        """The position behind the last event that came."""
        return self.first_event + len(self._events)

    @property
    def is_over(self) -> bool:
        return self.state not in ("opening", "running")

    def begin(self, answer: EngineAnswer) -> None:
        """The engine took the request."""
        self.answer, self.state = answer, "running"
        if not self.opened.done():
            self.opened.set_result(answer)

    def fail(self, error: BaseException) -> None:
        """No more will come; if nothing came at all, whoever waits for the answer is told why."""
        if not self.is_over:
            self.state = "failed"
        if not self.opened.done():
            self.opened.set_exception(error)
            self.opened.exception()  # Taken here: perhaps nobody waits.
        self._tell()

    def add(self, frames: bytes) -> None:
        """Keep whole frames, as the engine wrote them. Comments wake nobody: who reads has pings of his own, in silence."""
        known = self.next_event
        for frame in frames.split(b"\n\n"):
            if frame and not frame.startswith(b":"):
                self._events.append(frame + b"\n\n")
                self.size_bytes += len(frame) + EVENT_OVERHEAD_BYTES
        while self.size_bytes > MAX_STREAM_BYTES and len(self._events) > 1:
            self.drop_oldest()
        if self.next_event > known:
            self._tell()

    def drop_oldest(self) -> None:
        """Make room: whoever has not read this event cannot any more."""
        self.size_bytes -= len(self._events.popleft()) - 2 + EVENT_OVERHEAD_BYTES
        self.first_event += 1

    def end(self, state: State) -> None:
        """No more events will come."""
        if not self.is_over:
            self.state = state
        self._tell()

    async def read(self, position: int) -> AsyncIterator[bytes]:
        """Events from `position` on as they come, pings in silence; ends with the stream."""
        self.readers += 1
        try:
            while True:
                if position < self.first_event:
                    yield self._gap(position)
                    return
                if position < self.next_event:
                    start = position - self.first_event
                    block = list(islice(self._events, start, start + MAX_BLOCK_EVENTS))
                    position += len(block)
                    yield b"".join(block)
                elif self.is_over:
                    if self.state == "taken" and self.answer is not None:
                        yield self.answer.lost_frame(StreamTaken("The stream is read at another replica."))
                    return
                elif not await self._told(PING_S):
                    yield b": ping\n\n"
        finally:
            self.readers -= 1
            self.unread_since_s = time.monotonic()

    def _gap(self, position: int) -> bytes:
        logger.info("stream %s dropped events that a reader still wanted", self.request_id)
        gap: EngineError = StreamGap(
            f"Event {position} is not kept any more; the oldest is {self.first_event}.",
            hint="Read faster, or resume earlier.",
        )
        assert self.answer is not None, "events come only from an answer"
        return self.answer.lost_frame(gap)

    def _tell(self) -> None:
        news, self._news = self._news, asyncio.Event()
        news.set()

    async def _told(self, patience_s: float) -> bool:
        """Whether something happened within the patience."""
        try:
            async with asyncio.timeout(patience_s):
                await self._news.wait()
        except TimeoutError:
            return False
        return True
