"""An engine that counts as far as it may, and readers of what it says."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from aiohttp import web

from engines.client import close_client_session
from pools.db import in_db
from sessions.dialects import CHAT
from sessions.identity import Identity, Owner
from sessions.kept_stream import KeptStream
from sessions.stream_desk import stream_desk
from sessions.turn import wait_for_writes
from tests.rows import add_engine, add_model, set_ready
from tests.sessions.loopback_engine import ENDING, frame, loopback_engine
from tests.synthetic_gguf import SyntheticModel

PATIENCE_S = 20.0
ME = Identity(Owner(), "c" * 64)
YOU = Identity(Owner(api_key_id=7), "d" * 64)
BODY = {"messages": [{"role": "user", "content": "Count."}], "stream": True}
CALL = CHAT.read(json.dumps(BODY).encode())


class CountingEngine:
    """Says "0 ", "1 ", … as far as `allow` goes, pings between, and ends after `words`."""

    def __init__(self, words: int = 6) -> None:
        self.words = words
        self.allowed = 0
        self.asked = 0
        self.is_mute = False
        self.client_left = asyncio.Event()
        self._more = asyncio.Event()

    def allow(self, words: int) -> None:
        self.allowed = words
        self._more.set()

    async def answer(self, request: web.Request) -> web.StreamResponse:
        self.asked += 1
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        try:
            if self.is_mute:
                await asyncio.Event().wait()
            await response.prepare(request)
            for word in range(self.words):
                while word >= self.allowed:
                    self._more.clear()
                    await self._more.wait()
                await response.write(b": ping\n\n" + frame({"content": f"{word} "}))
        except (asyncio.CancelledError, ConnectionError):
            self.client_left.set()
            raise
        await response.write(ENDING)
        return response


@asynccontextmanager
async def counting_engine(model: SyntheticModel, folder: Path) -> AsyncIterator[CountingEngine]:
    """One that serves; afterwards its streams have ended."""
    paced = CountingEngine()
    async with loopback_engine(paced.answer) as port:
        await in_db(lambda: set_ready(add_engine(add_model(model.path, folder)), port))
        yield paced
        await stream_desk().close()
        await wait_for_writes(10)
        await close_client_session()


async def rest(answer: Any) -> bytes:
    async with asyncio.timeout(PATIENCE_S):
        return b"".join([part async for part in answer.streaming_content])


def words(raw: bytes) -> str:
    chunks = [json.loads(event[6:]) for event in raw.split(b"\n\n") if event.startswith(b"data: {")]
    return "".join(choice["delta"].get("content", "") for chunk in chunks for choice in chunk["choices"])


async def is_over(stream: KeptStream) -> None:
    async with asyncio.timeout(PATIENCE_S):
        # Many events at once push a reader out of a small buffer.
        while not stream.is_over:
            async for _ in stream.read(stream.next_event):
                """Until there is no more."""


async def until(is_so: Callable[[], bool]) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while not is_so():  # noqa: ASYNC110 -- nothing tells of it
            await asyncio.sleep(0)
