"""Anthropic's answer shapes: a message, or the typed events that build it. Pure: pieces in, frames and dicts out.

Beside the usage stand llama.cpp's `timings`, as in the other shapes; Anthropic's own clients keep fields that they do not know.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from typing import Any

from engines.runtime.answer_parts import AnswerParts, Change, Part
from engines.runtime.answers import reasoning_tokens, timings
from engines.runtime.chat_output import ChatFormat, ChatOutput
from engines.runtime.generation import Generation, Piece, Stats
from engines.runtime.http_stream import named_event
from engines.runtime.llama import Vocabulary

_STOP_REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}


class MessagesAnswer:
    """Builds one message from the pieces of one generation, streamed or whole."""

    def __init__(self, identity: str, model_name: str, vocabulary: Vocabulary, form: ChatFormat) -> None:
        self.ping = _event({"type": "ping"})
        self._vocabulary = vocabulary
        self._output = ChatOutput(form)
        self._parts = AnswerParts()
        self._head = {"id": f"msg_{identity}", "type": "message", "role": "assistant", "model": model_name}

    # --- a stream -------------------------------------------------------------------------------

    def opening(self, generations: Sequence[Generation]) -> bytes:
        """How much of the prompt was cached is not known yet; message_delta tells it."""
        usage = {"input_tokens": len(generations[0].prompt), "output_tokens": 0}
        message: dict[str, Any] = {
            **self._head,
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
            "usage": usage,
        }
        return _event({"type": "message_start", "message": message}) + self.ping

    def frames(self, piece: Piece, generation: Generation) -> list[bytes]:
        if piece.error is not None:
            return [named_event("error", piece.error.messages_body())]
        frames = [_event(_block_event(change)) for change in self._changes(piece)]
        if piece.stats is not None:
            delta = self._ending(piece, generation)
            usage = self._usage(piece.stats, generation)
            told = {"usage": usage, "timings": timings(piece.stats)}
            frames.append(_event({"type": "message_delta", "delta": delta, **told}))
        return frames

    def passed(self, piece: Piece, generation: Generation) -> None:
        self.frames(piece, generation)

    def closing(self, _all_stats: Sequence[Stats]) -> bytes:
        return _event({"type": "message_stop"})

    # --- the whole ------------------------------------------------------------------------------

    def whole(self, pieces: Iterable[Piece], generation: Generation) -> dict[str, Any]:
        """The message from all pieces, of which the last carries reason and stats."""
        last = Piece()
        for last in pieces:
            for _ in self._changes(last):
                """Each is in the parts afterwards."""
        assert last.stats is not None
        return {
            **self._head,
            "content": [_whole_block(part) for part in self._parts.parts],
            **self._ending(last, generation),
            "usage": self._usage(last.stats, generation),
            "timings": timings(last.stats),
        }

    # --- both -----------------------------------------------------------------------------------

    def _changes(self, piece: Piece) -> Iterable[Change]:
        yield from self._parts.take(self._output.feed(piece.text))
        if piece.is_last:
            yield from self._parts.take(self._output.finish())
            yield from self._parts.close()

    def _ending(self, piece: Piece, generation: Generation) -> dict[str, Any]:
        reason = _STOP_REASONS[self._output.finish_reason(piece.finish_reason or "stop")]
        met = generation.text.stopped_by if reason == "end_turn" else None
        return {"stop_reason": reason if met is None else "stop_sequence", "stop_sequence": met}

    def _usage(self, stats: Stats, generation: Generation) -> dict[str, Any]:
        """Anthropic counts what was read from a cache apart from the other input."""
        thinking = reasoning_tokens(self._output, generation, self._vocabulary)
        return {
            "input_tokens": stats.prompt_tokens - stats.cached_tokens,
            "cache_read_input_tokens": stats.cached_tokens,
            "cache_creation_input_tokens": 0,
            "output_tokens": stats.completion_tokens,
            "output_tokens_details": {"thinking_tokens": thinking},
        }


def _event(value: dict[str, Any]) -> bytes:
    return named_event(value["type"], value)


def _block_event(change: Change) -> dict[str, Any]:
    part = change.part
    if change.kind == "open":
        return {"type": "content_block_start", "index": part.index, "content_block": _empty_block(part)}
    if change.kind == "close":
        return {"type": "content_block_stop", "index": part.index}
    delta = {
        "reasoning": {"type": "thinking_delta", "thinking": change.text},
        "text": {"type": "text_delta", "text": change.text},
        "tool_call": {"type": "input_json_delta", "partial_json": change.text},
    }[part.kind]
    return {"type": "content_block_delta", "index": part.index, "delta": delta}


def _empty_block(part: Part) -> dict[str, Any]:
    if part.kind == "reasoning":
        return {"type": "thinking", "thinking": "", "signature": ""}
    if part.kind == "text":
        return {"type": "text", "text": ""}
    return {"type": "tool_use", "id": part.call_id, "name": part.name, "input": {}}


def _whole_block(part: Part) -> dict[str, Any]:
    block = _empty_block(part)
    if part.kind == "tool_call":
        return {**block, "input": _arguments(part.text)}
    return {**block, {"reasoning": "thinking", "text": "text"}[part.kind]: part.text}


def _arguments(text: str) -> dict[str, Any]:
    """A call's arguments as an object. Text that a model cut short or garbled is handed over as it is."""
    try:
        value = json.loads(text or "{}")
    except (ValueError, RecursionError):
        return {"arguments": text}
    return value if isinstance(value, dict) else {"arguments": value}
