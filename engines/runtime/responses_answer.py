"""The Responses API's answer shapes: a response, or the typed events that build it. Pure: pieces in, frames and dicts out."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from engines.api_responses import Reasoning, ResponsesRequest, TextFormat, TextOptions
from engines.errors import EngineError
from engines.runtime.answer_parts import AnswerParts, Change
from engines.runtime.answers import reasoning_tokens, timings
from engines.runtime.chat_output import ChatFormat, ChatOutput
from engines.runtime.generation import Generation, Piece, Stats
from engines.runtime.http_stream import COMMENT_PING, named_event
from engines.runtime.llama import Vocabulary
from engines.runtime.response_items import ResponseItems

Event = dict[str, Any]


class ResponsesAnswer:
    """Builds one response from the pieces of one generation, streamed or whole."""

    ping = COMMENT_PING

    def __init__(
        self,
        identity: str,
        model_name: str,
        vocabulary: Vocabulary,
        body: ResponsesRequest,
        form: ChatFormat,
        created: int | None = None,
    ) -> None:
        self._vocabulary = vocabulary
        self._output = ChatOutput(form)
        self._parts = AnswerParts()
        self._items = ResponseItems(identity, as_summary=bool(body.reasoning and body.reasoning.summary))
        self._sequence_number = 0
        self._response = _opened(identity, model_name, body, int(time.time()) if created is None else created)

    # --- a stream -------------------------------------------------------------------------------

    def opening(self, _generations: Sequence[Generation]) -> bytes:
        events = [{"type": f"response.{name}", "response": self._response} for name in ("created", "in_progress")]
        return b"".join(self._numbered(events))

    def frames(self, piece: Piece, generation: Generation) -> list[bytes]:
        if piece.error is not None:
            self._fail(piece.error)
            return list(self._numbered([{"type": "response.failed", "response": self._response}]))
        frames = list(self._numbered(self._events(piece)))
        if piece.stats is not None:
            self._complete(piece, piece.stats, generation)
            ending = {"type": f"response.{self._response['status']}", "response": self._response}
            frames += self._numbered([ending])
        return frames

    def passed(self, piece: Piece, generation: Generation) -> None:
        """Only numbered: there is one for each token that was drawn elsewhere, and nearly all of them are one event."""
        text = piece.text
        if text and not piece.is_last and self._output.passes(text) and self._parts.grow("text", text):
            self._sequence_number += 1
            return
        self._sequence_number += sum(1 for _ in self._events(piece))
        if piece.stats is not None:
            self._complete(piece, piece.stats, generation)
            self._sequence_number += 1

    def closing(self, _all_stats: Sequence[Stats]) -> bytes:
        """The last event has told everything."""
        return b""

    # --- the whole ------------------------------------------------------------------------------

    def whole(self, pieces: Iterable[Piece], generation: Generation) -> dict[str, Any]:
        """The response from all pieces, of which the last carries reason and stats."""
        for piece in pieces:
            for _ in self._events(piece):
                """Each leaves its trace in the items."""
            if piece.stats is not None:
                self._complete(piece, piece.stats, generation)
        return self._response

    # --- both -----------------------------------------------------------------------------------

    def _events(self, piece: Piece) -> Iterator[Event]:
        for change in self._changes(piece):
            yield from self._items.events(change, cut_short=piece.finish_reason == "length")

    def _changes(self, piece: Piece) -> Iterator[Change]:
        yield from self._parts.take(self._output.feed(piece.text))
        if piece.is_last:
            yield from self._parts.take(self._output.finish())
            yield from self._parts.close()

    def _numbered(self, events: Iterable[Event]) -> Iterator[bytes]:
        for event in events:
            yield named_event(event["type"], {**event, "sequence_number": self._sequence_number})
            self._sequence_number += 1

    def _complete(self, piece: Piece, stats: Stats, generation: Generation) -> None:
        incomplete = piece.finish_reason == "length"
        self._response |= {
            "status": "incomplete" if incomplete else "completed",
            "incomplete_details": {"reason": "max_output_tokens"} if incomplete else None,
            "completed_at": None if incomplete else int(time.time()),
            "output": self._items.all,
            "usage": _usage(stats, reasoning_tokens(self._output, generation, self._vocabulary)),
            "timings": timings(stats),
        }

    def _fail(self, error: EngineError) -> None:
        code = "rate_limit_exceeded" if error.http_status == 429 else "server_error"
        failure = {"code": code, "message": error.message}
        self._response |= {"status": "failed", "output": self._items.all, "error": failure}


def _usage(stats: Stats, reasoned: int) -> dict[str, Any]:
    return {
        "input_tokens": stats.prompt_tokens,
        "input_tokens_details": {"cached_tokens": stats.cached_tokens, "cache_write_tokens": 0},
        "output_tokens": stats.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": reasoned},
        "total_tokens": stats.prompt_tokens + stats.completion_tokens,
    }


def _opened(identity: str, model_name: str, body: ResponsesRequest, created: int) -> dict[str, Any]:
    """A response that has just begun; it repeats what was asked for."""
    reasoning = body.reasoning or Reasoning()
    wanted = (body.text or TextOptions()).format or TextFormat(type="text")
    choice = body.tool_choice if isinstance(body.tool_choice, str) else body.tool_choice.model_dump()
    return {
        "id": f"resp_{identity}",
        "object": "response",
        "created_at": created,
        "status": "in_progress",
        "error": None,
        "incomplete_details": None,
        "instructions": body.instructions,
        "max_output_tokens": body.max_output_tokens,
        "model": model_name,
        "output": [],
        "parallel_tool_calls": body.parallel_tool_calls,
        "previous_response_id": None,
        "reasoning": reasoning.model_dump(),
        "store": False,
        "background": False,
        "temperature": body.temperature,
        "text": {"format": wanted.model_dump(by_alias=True, exclude_none=True)},
        "tool_choice": choice,
        "tools": [tool.model_dump() for tool in body.tools],
        "top_p": body.top_p,
        "truncation": "disabled",
        "usage": None,
        "user": body.user,
        "metadata": body.metadata or {},
    }
