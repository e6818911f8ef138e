"""One answer of the playground: reads the relay's chunks, sends the page few and small messages about them.

Text is gathered for some 30 ms before it is sent, and at most WINDOW messages are on their way unseen: when the browser
is slow, reading from the engine stops, and the engine's own buffer bounds what waits.
"""

from __future__ import annotations

import asyncio
import json
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import aclosing
from functools import partial
from typing import Any

from engines.errors import EngineError
from sessions import load_wait
from sessions.dialects import CHAT
from sessions.dispatch import REQUEST_BUDGET_S
from sessions.engine_call import EngineCall
from sessions.identity import Identity
from sessions.relay import EngineAnswer, ask_engine
from sessions.request_timeline import tell_refused

GATHER_S = 0.03
WINDOW = 32
ACK_TIMEOUT_S = 60.0

Send = Callable[[dict[str, Any]], Awaitable[None]]


class PageSilent(Exception):
    """The page stopped acknowledging messages: it hangs or its connection is dead."""


class PlaygroundRun:
    """Answers one chat body. `answer()` runs to the end, to `stop()`, or until its task is cancelled; then the engine is free."""

    def __init__(self, run_id: str, user_id: int, conversation: str, body: dict[str, Any], send: Send) -> None:
        self.id = run_id
        self._identity = Identity.for_user(user_id, conversation)
        self._body = body
        self._send = send
        self._stopped = asyncio.Event()
        self._unseen = 0
        self._seen = asyncio.Event()
        self._held: list[tuple[str, str]] = []
        self._finish: dict[str, Any] = {"finish_reason": None, "usage": None, "timings": None}
        self._started_s = time.monotonic()
        self._first_token_s: float | None = None
        self._last_token_s: float | None = None
        self._chunks = 0

    def stop(self) -> None:
        """Ends the answer at the next chunk boundary; what was said stays said."""
        self._stopped.set()

    def acknowledged(self) -> None:
        """The page drew one more message."""
        self._unseen = max(0, self._unseen - 1)
        self._seen.set()

    async def answer(self) -> None:
        """Streams the answer to the page. Known errors become one `error` message; others, and PageSilent, are raised."""
        stream: EngineAnswer | None = None
        try:
            body = {**self._body, "stream": True, "stream_options": {"include_usage": True}, "return_progress": True}
            stream = await self._open(CHAT.read(json.dumps(body).encode()))
            if stream is None:
                await self._emit_done("stopped")
            else:
                await self._emit("start", engine=stream.engine.name, request_id=str(stream.request_id))
                await self._follow(stream)
        except EngineError as error:
            await self._flush()
            described = {"message": str(error), "code": error.code, "hint": error.hint, "retryable": error.retryable}
            await self._emit("error", error=described)
        finally:
            if stream is not None:
                await stream.aclose()

    async def _open(self, call: EngineCall) -> EngineAnswer | None:
        """The answer as it begins to come, or None when it was stopped before an engine took it."""
        request_id = uuid.uuid4()
        ask = partial(ask_engine, call, self._identity, source="playground", request_id=request_id, may_wait=True)
        ask, deadline_s = partial(ask, since_s=self._started_s), self._started_s + REQUEST_BUDGET_S
        gave_up = partial(tell_refused, call, self._identity, request_id, arrived_s=self._started_s)
        opening = asyncio.create_task(load_wait.answered(call, ask, self._tell_loading, gave_up, deadline_s=deadline_s))
        stopped = asyncio.create_task(self._stopped.wait())
        try:
            await asyncio.wait({opening, stopped}, return_when=asyncio.FIRST_COMPLETED)
            if opening.done():
                return opening.result()
            await self._abandon(opening)
            return None
        except asyncio.CancelledError:
            await self._abandon(opening)
            raise
        finally:
            await _cancelled(stopped)

    async def _tell_loading(self, news: dict[str, object]) -> None:
        await self._emit("loading", loading=news)

    async def _abandon(self, opening: asyncio.Task[EngineAnswer]) -> None:
        """Cancels the opening; an answer that began to come in the same moment is let go."""
        await _cancelled(opening)
        if not opening.cancelled() and opening.exception() is None:
            await opening.result().aclose()

    async def _follow(self, stream: EngineAnswer) -> None:
        """Reads chunks until the end, an error or a stop; then says how it went."""
        reading: Any = aiter(stream)
        async with aclosing(reading) as chunks:
            if not await self._read(chunks):
                return
        await self._flush()
        await self._emit_done(self._finish["finish_reason"])

    async def _emit_done(self, finish_reason: str | None) -> None:
        values = {**self._finish, "finish_reason": finish_reason}
        duration_s = round(time.monotonic() - self._started_s, 3)
        await self._emit(
            "done", **values, first_token_s=self._first_token_s, duration_s=duration_s, tokens_per_s=self._seen_rate()
        )

    def _seen_rate(self) -> float | None:
        """Tokens per second as they came in here, for an answer that was stopped before the engine told its own figure.

        An engine sends a chunk a token, save where a character or a possible stop string is held back.
        """
        if self._first_token_s is None or self._last_token_s is None or self._last_token_s <= self._first_token_s:
            return None
        return round((self._chunks - 1) / (self._last_token_s - self._first_token_s), 3)

    async def _read(self, chunks: AsyncIterator[dict[str, Any]]) -> bool:
        """Takes chunks, flushing the held text when GATHER_S have passed. False after an error chunk."""
        stopped = asyncio.create_task(self._stopped.wait())
        upcoming = asyncio.ensure_future(anext(chunks))
        try:
            flush_at_s = 0.0
            while True:
                wait_s = max(0.0, flush_at_s - time.monotonic()) if self._held else None
                await asyncio.wait({upcoming, stopped}, timeout=wait_s, return_when=asyncio.FIRST_COMPLETED)
                if stopped.done():
                    self._finish["finish_reason"] = "stopped"
                    return True
                if upcoming.done():
                    try:
                        chunk = upcoming.result()
                    except StopAsyncIteration:
                        return True
                    if not await self._take(chunk):
                        return False
                    upcoming = asyncio.ensure_future(anext(chunks))
                if self._held and time.monotonic() >= flush_at_s:
                    await self._flush()
                    flush_at_s = time.monotonic() + GATHER_S
        finally:
            await _cancelled(upcoming, stopped)

    async def _take(self, chunk: dict[str, Any]) -> bool:
        """Sorts one chunk; False when it was an error, which ends the answer."""
        if "error" in chunk:
            await self._flush()
            error = chunk["error"]
            await self._emit("error", error={key: error.get(key) for key in ("message", "code", "hint", "retryable")})
            return False
        if progress := chunk.get("prompt_progress"):
            processed, total, cached = (progress.get(key, 0) for key in ("processed", "total", "cache"))
            await self._emit("progress", processed=processed, total=total, cached=cached)
        for choice in chunk.get("choices") or []:
            delta = choice.get("delta") or {}
            self._hold("reasoning", delta.get("reasoning_content"))
            self._hold("delta", delta.get("content"))
            self._finish["finish_reason"] = choice.get("finish_reason") or self._finish["finish_reason"]
        for key in ("usage", "timings"):
            self._finish[key] = chunk.get(key) or self._finish[key]
        return True

    def _hold(self, kind: str, text: str | None) -> None:
        if not text:
            return
        self._last_token_s = round(time.monotonic() - self._started_s, 3)
        self._chunks += 1
        if self._first_token_s is None:
            self._first_token_s = self._last_token_s
        if self._held and self._held[-1][0] == kind:
            self._held[-1] = (kind, self._held[-1][1] + text)
        else:
            self._held.append((kind, text))

    async def _flush(self) -> None:
        held, self._held = self._held, []
        for kind, text in held:
            await self._emit(kind, text=text)

    async def _emit(self, kind: str, **values: Any) -> None:
        """Sends one message, once the page has seen enough of the earlier ones."""
        while self._unseen >= WINDOW:
            self._seen.clear()
            try:
                async with asyncio.timeout(ACK_TIMEOUT_S):
                    await self._seen.wait()
            except TimeoutError as error:
                raise PageSilent from error
        self._unseen += 1
        await self._send({"type": kind, "id": self.id, **values})


async def _cancelled(*tasks: asyncio.Future[Any]) -> None:
    """Cancels what is not done yet and waits until it is. Results and errors of done ones were the caller's to take."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
