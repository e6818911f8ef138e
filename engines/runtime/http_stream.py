"""How pieces of a request's generations become an answer: server-sent events as they come, or all of them at the end.

Knows no dialect: a `StreamedAnswer` turns pieces into frames. In silence a ping goes out, which is also how a client that
went away is noticed.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from aiohttp import web

from engines.errors import GenerationMoved
from engines.runtime.answers import event
from engines.runtime.generation import Generation, Piece, Stats
from engines.runtime.http_follow import move_event

PING_S = 10.0
# A client that takes nothing for so long is gone; what it holds here would stay for ever.
STALL_S = 120.0
COMMENT_PING = b": ping\n\n"
SSE_HEADERS = {
    "Content-Type": "text/event-stream; charset=utf-8",
    "Cache-Control": "no-cache",
    "X-Accel-Buffering": "no",
}


class StreamedAnswer(Protocol):
    """A dialect's frames, each a whole server-sent event with its empty line."""

    @property
    def ping(self) -> bytes: ...

    def opening(self, generations: Sequence[Generation]) -> bytes:
        """What goes out at once, before any token is there."""

    def frames(self, piece: Piece, generation: Generation) -> list[bytes]:
        """A piece's frames. A piece with an error gives the dialect's error frame, after which the stream ends."""

    def closing(self, all_stats: Sequence[Stats]) -> bytes:
        """The end, after every choice has had its last piece."""


async def stream(
    request: web.Request, generations: Sequence[Generation], answer: StreamedAnswer, ping_s: float = PING_S
) -> web.StreamResponse:
    """Writes the answer while it is made. All generations share one mailbox and have their index in it as `choice`."""
    response = web.StreamResponse(headers=SSE_HEADERS)
    await response.prepare(request)
    await _write(request, response, _begun(answer, generations))
    loop = asyncio.get_running_loop()
    written_at = loop.time()
    mailbox = generations[0].mailbox
    last: dict[int, Piece] = {}
    while len(last) < len(generations):
        frames: list[bytes] = []
        for piece in await mailbox.take(ping_s):
            if piece.moving or piece.finish_reason == "moved":
                await _write(request, response, b"".join(frames) + _move(piece, generations))
                frames, written_at = [], loop.time()
                if piece.told is not None:
                    piece.told.set()
                if piece.moving:
                    continue
                await response.write_eof()
                return response
            frames += answer.frames(piece, generations[piece.choice])
            if piece.error is not None:
                # An error ends the whole stream; the handler's exit cancels the other choices.
                await _write(request, response, b"".join(frames))
                await response.write_eof()
                return response
            if piece.is_last:
                last[piece.choice] = piece
        if frames:
            await _write(request, response, b"".join(frames))
            written_at = loop.time()
        elif loop.time() - written_at >= ping_s:
            # What a dialect holds back (an unfinished tool call) is silence too.
            await _write(request, response, answer.ping)
            written_at = loop.time()
    await _write(request, response, answer.closing(in_order(last)))
    await response.write_eof()
    return response


def _begun(answer: StreamedAnswer, generations: Sequence[Generation]) -> bytes:
    """The opening; of an answer that began at another engine it was sent there, as its text so far was."""
    opening, (first, *_) = answer.opening(generations), generations
    if first.continued is None:
        return opening
    answer.frames(Piece(first.choice, first.continued), first)
    return b""


def _move(piece: Piece, generations: Sequence[Generation]) -> bytes:
    if piece.moving:
        return move_event("moving", piece.moving)
    return move_event("moved", generations[piece.choice].handoff)


async def _write(request: web.Request, response: web.StreamResponse, data: bytes) -> None:
    """Raises ConnectionResetError, and closes the connection, when the client has stopped reading for STALL_S."""
    try:
        async with asyncio.timeout(STALL_S):
            await response.write(data)
    except TimeoutError as error:
        if request.transport is not None:
            request.transport.abort()
        raise ConnectionResetError("the client has stopped reading") from error


async def collect(generations: Sequence[Generation]) -> dict[int, list[Piece]]:
    """All pieces of each choice. Raises the first error that one of them brings, and GenerationMoved."""
    pieces: dict[int, list[Piece]] = {
        generation.choice: [] if generation.continued is None else [Piece(generation.choice, generation.continued)]
        for generation in generations
    }
    unfinished = set(pieces)
    while unfinished:
        for piece in await generations[0].mailbox.take(PING_S):
            if piece.moving:
                if piece.told is not None:
                    piece.told.set()
                continue
            pieces[piece.choice].append(piece)
            if piece.error is not None:
                raise piece.error
            if piece.finish_reason == "moved":
                handoff = generations[piece.choice].handoff
                raise GenerationMoved("The request goes on at another engine.", param=handoff)
            if piece.is_last:
                unfinished.discard(piece.choice)
    return pieces


def in_order(last: dict[int, Piece]) -> list[Stats]:
    """The stats of each choice's last piece, by choice."""
    return [piece.stats for _, piece in sorted(last.items()) if piece.stats is not None]


def named_event(name: str, value: Mapping[str, Any]) -> bytes:
    """A frame with an event's name, for dialects whose clients go by it."""
    return b"event: " + name.encode() + b"\n" + event(value)


def prompt_progress(piece: Piece, generation: Generation) -> dict[str, Any]:
    """llama.cpp's `prompt_progress`: tokens of the prompt that are done, those that were cached included."""
    started = generation.started_at or generation.queued_at
    return {
        "total": len(generation.prompt),
        "cache": generation.cached_tokens,
        "processed": piece.prompt_done_tokens,
        "time_ms": round((time.monotonic() - started) * 1000),
    }
