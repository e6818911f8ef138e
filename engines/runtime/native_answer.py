"""llama.cpp's own answer shape, which editors read: one flat object, whole or in parts. Pure: pieces in, dicts out."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from engines.runtime.answers import event, timings
from engines.runtime.generation import Generation, Piece, Stats
from engines.runtime.http_stream import COMMENT_PING


class NativeAnswer:
    """Builds the answer of one generation."""

    ping = COMMENT_PING

    def __init__(self, model_name: str) -> None:
        self._model_name = model_name

    def opening(self, _generations: Sequence[Generation]) -> bytes:
        return b""

    def frames(self, piece: Piece, generation: Generation) -> list[bytes]:
        if piece.error is not None:
            return [event(piece.error.body())]
        if piece.stats is not None:
            return [event(self._last(piece.text, piece, piece.stats, generation))]
        return [event({"index": 0, "content": piece.text, "stop": False})] if piece.text else []

    def passed(self, piece: Piece, generation: Generation) -> None:
        self.frames(piece, generation)

    def closing(self, _all_stats: Sequence[Stats]) -> bytes:
        """The last part has said `stop`."""
        return b""

    def whole(self, pieces: Sequence[Piece], generation: Generation) -> dict[str, Any]:
        last = pieces[-1]
        assert last.stats is not None
        return self._last("".join(piece.text for piece in pieces), last, last.stats, generation)

    def _last(self, text: str, piece: Piece, stats: Stats, generation: Generation) -> dict[str, Any]:
        word = generation.text.stopped_by
        kind = "limit" if piece.finish_reason == "length" else "eos" if word is None else "word"
        return {
            "index": 0,
            "content": text,
            "stop": True,
            "stop_type": kind,
            "stopping_word": word or "",
            "model": self._model_name,
            "tokens_predicted": stats.completion_tokens,
            "tokens_evaluated": stats.prompt_tokens,
            "tokens_cached": stats.prompt_tokens + stats.completion_tokens,
            "truncated": False,
            "timings": timings(stats),
        }
