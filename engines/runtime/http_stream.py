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

from engines.errors import EngineError, GenerationMoved
from engines.runtime.answers import event
from engines.runtime.generation import Generation, Piece, Stats
from engines.runtime.http_follow import begun_at, move_event, resumption_of, wants_journal
from engines.runtime.journal import Head, JournalWriter, begun, failed

PING_S = 10.0
PASSED_AT_ONCE = 256
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

    def passed(self, piece: Piece, generation: Generation) -> None:
        """The same where another engine wrote the frames."""

    def closing(self, all_stats: Sequence[Stats]) -> bytes:
        """The end, after every choice has had its last piece."""


async def stream(
    request: web.Request, generations: Sequence[Generation], answer: StreamedAnswer, ping_s: float = PING_S
) -> web.StreamResponse:
    """Writes the answer while it is made. All generations share one mailbox and have their index in it as `choice`."""
    response = web.StreamResponse(headers=SSE_HEADERS)
    await response.prepare(request)
    way_out = _WayOut(request, response, generations, answer)
    last = await way_out.begin()
    loop = asyncio.get_running_loop()
    written_at = loop.time()
    mailbox, marks = generations[0].mailbox, generations[0].marks
    while len(last) < len(generations):
        for piece in await mailbox.take(ping_s):
            if piece.tells_of_move or piece.finish_reason == "moved":
                await way_out.move(piece)
                written_at = loop.time()
                if piece.tells_of_move:
                    continue
                await response.write_eof()
                return response
            if piece.error is not None:
                # An error ends the whole stream; the handler's exit cancels the other choices.
                await way_out.fail(piece, piece.error)
                await response.write_eof()
                return response
            way_out.take(piece)
            if piece.is_last:
                last[piece.choice] = piece
        if way_out.has_something:
            await way_out.send()
            written_at = loop.time()
            if marks is not None:
                marks.note("frame_out")
                marks = None
        elif loop.time() - written_at >= ping_s:
            # What a dialect holds back (an unfinished tool call) is silence too.
            await way_out.ping()
            written_at = loop.time()
    await way_out.close(last)
    await response.write_eof()
    return response


class _WayOut:
    """One stream's events, and between them what its site keeps of it, where that asked for a journal."""

    def __init__(
        self,
        request: web.Request,
        response: web.StreamResponse,
        generations: Sequence[Generation],
        answer: StreamedAnswer,
    ) -> None:
        self._request, self._response = request, response
        self._generations, self._answer = generations, answer
        self._journal = JournalWriter(generations) if wants_journal(request) else None
        self._frames: list[bytes] = []
        # Events that the client has, of an answer that is written again.
        self._skipped = 0

    async def begin(self) -> dict[int, Piece]:
        """The opening; of an answer that began at another engine the rest of what was written. Returns the choices that have
        ended."""
        answer, (first, *_) = self._answer, self._generations
        opening, resumption = answer.opening(self._generations), resumption_of(self._request)
        if resumption is not None:
            frames = _events(opening)
            for piece in resumption.replayed.pieces:
                if piece is not None:
                    frames += answer.frames(piece, self._generations[piece.choice])
                elif not answer.ping.startswith(b":"):
                    frames.append(answer.ping)
            written = len(frames)
            if resumption.replayed.is_closed:
                written += len(_events(answer.closing(in_order(resumption.replayed.ended))))
            self._skipped = written if resumption.from_event is None else resumption.from_event
            self._add(frames)
        elif first.continued is not None:
            for generation in self._generations:
                for count, piece in enumerate(generation.continued or (), 1):
                    answer.passed(piece, generation)
                    if count % PASSED_AT_ONCE == 0:
                        await asyncio.sleep(0)  # the others' streams go on
            if self._journal is not None:
                self._journal.arrived()
        else:
            if self._journal is not None:
                head = Head(first.params.seed, begun_at(self._request), first.tokenizer)
                self._frames.append(begun(head))
                self._journal.opened()
            self._frames += _events(opening)
        await self.send()
        return dict(resumption.replayed.ended) if resumption is not None else _ended(self._generations)

    @property
    def has_something(self) -> bool:
        return bool(self._frames)

    def take(self, piece: Piece) -> None:
        self._add(self._answer.frames(piece, self._generations[piece.choice]))
        if self._journal is not None:
            self._journal.note(piece)

    def _add(self, frames: list[bytes]) -> None:
        if self._skipped:
            skipped = min(self._skipped, len(frames))
            self._skipped -= skipped
            frames = frames[skipped:]
        self._frames += frames

    async def send(self, more: bytes = b"") -> None:
        frames, self._frames = self._frames, []
        mark = b"" if self._journal is None else self._journal.mark()
        await _write(self._request, self._response, b"".join(frames) + mark + more)

    async def ping(self) -> None:
        """A comment is nothing that anybody counts; a dialect's own event is."""
        if self._answer.ping.startswith(b":"):
            self._frames.append(self._answer.ping)
        else:
            self._add([self._answer.ping])
            if self._journal is not None:
                self._journal.ping()
        await self.send()

    async def move(self, piece: Piece) -> None:
        if piece.finish_reason is not None and self._journal is not None:
            self._journal.note(piece)
        if piece.tells_of_move:
            event_of_it = move_event("moving" if piece.moving else "stays", piece.moving or piece.stays)
        else:
            event_of_it = move_event("moved", self._generations[piece.choice].handoff)
        await self.send(event_of_it)
        if piece.told is not None:
            piece.told.set()

    async def fail(self, piece: Piece, error: EngineError) -> None:
        frames = self._answer.frames(piece, self._generations[piece.choice])
        told = b"" if self._journal is None else failed(error.code)
        await self.send(told + b"".join(frames))

    async def close(self, last: dict[int, Piece]) -> None:
        self._add(_events(self._answer.closing(in_order(last))))
        if self._journal is not None:
            self._journal.closing()
        await self.send()


def _ended(generations: Sequence[Generation]) -> dict[int, Piece]:
    """The last pieces of choices that ended before the others moved here."""
    pieces = [one.continued[-1] for one in generations if one.continued]
    return {piece.choice: piece for piece in pieces if piece.is_last}


def _events(frames: bytes) -> list[bytes]:
    return [frame + b"\n\n" for frame in frames.split(b"\n\n") if frame]


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
    pieces: dict[int, list[Piece]] = {generation.choice: list(generation.continued or ()) for generation in generations}
    unfinished = set(pieces) - set(_ended(generations))
    while unfinished:
        for piece in await generations[0].mailbox.take(PING_S):
            if piece.tells_of_move:
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
