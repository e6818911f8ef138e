"""The completion API's answer shapes: whole, or chunk by chunk. Pure: pieces in, JSON-ready dicts out."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from engines.runtime.answers import event, timings, usage
from engines.runtime.generation import Generation, Piece, Stats
from engines.runtime.http_stream import COMMENT_PING, prompt_progress
from engines.runtime.llama import Vocabulary
from engines.runtime.sampler import TokenLogprob

LOWEST_LOGPROB = -9999.0
TOKEN_COUNTS = ("prompt_tokens", "completion_tokens", "total_tokens")


class CompletionAnswer:
    """Builds the objects of one answer. `echoes` is what stands before each choice's text, "" for nothing."""

    ping = COMMENT_PING

    def __init__(
        self,
        identity: str,
        model_name: str,
        vocabulary: Vocabulary,
        echoes: Sequence[str],
        *,
        choices_per_prompt: int,
        with_logprobs: bool,
        with_usage: bool,
        created: int | None = None,
    ) -> None:
        self._vocabulary = vocabulary
        self._echoes = echoes
        self._choices_per_prompt = choices_per_prompt
        self._with_logprobs = with_logprobs
        self._with_usage = with_usage
        self._offsets = [len(echo) for echo in echoes]
        self._head = {
            "id": f"cmpl-{identity}",
            "object": "text_completion",
            "created": int(time.time()) if created is None else created,
            "model": model_name,
            "system_fingerprint": "hydra",
        }

    # --- a stream -------------------------------------------------------------------------------

    def opening(self, generations: Sequence[Generation]) -> bytes:
        """The echoed prompts. Without an echo the first token opens the stream, as in OpenAI's."""
        return b"".join(
            event(self._chunk(g.choice, self._echoes[g.choice])) for g in generations if self._echoes[g.choice]
        )

    def frames(self, piece: Piece, generation: Generation) -> list[bytes]:
        if piece.error is not None:
            return [event(piece.error.body())]
        frames = []
        if piece.prompt_done_tokens is not None:
            frames.append(event({**self._chunk(0, ""), "prompt_progress": prompt_progress(piece, generation)}))
        if piece.text or piece.logprobs:
            frames.append(event(self._chunk(piece.choice, piece.text, piece.logprobs)))
        if piece.finish_reason is not None and piece.stats is not None:
            closing = self._chunk(piece.choice, "", reason=piece.finish_reason)
            frames.append(event({**closing, "timings": timings(piece.stats)}))
        return frames

    def passed(self, piece: Piece, generation: Generation) -> None:
        self.frames(piece, generation)

    def closing(self, all_stats: Sequence[Stats]) -> bytes:
        tail = event({**self._head, "choices": [], "usage": self._usage(all_stats)}) if self._with_usage else b""
        return tail + b"data: [DONE]\n\n"

    def _chunk(
        self, index: int, text: str, logprobs: Sequence[TokenLogprob] = (), reason: str | None = None
    ) -> dict[str, Any]:
        return {**self._head, "choices": [self._choice(index, text, logprobs, reason)]}

    # --- the whole ------------------------------------------------------------------------------

    def whole(self, pieces: Mapping[int, Sequence[Piece]]) -> dict[str, Any]:
        """The completion object from all pieces of each choice, the last of which carries reason and stats."""
        choices = []
        for index, parts in sorted(pieces.items()):
            text = "".join(part.text for part in parts)
            entries = [entry for part in parts for entry in part.logprobs]
            choice = self._choice(index, text, entries, parts[-1].finish_reason)
            choices.append({**choice, "text": self._echoes[index] + text})
        stats = [parts[-1].stats for _, parts in sorted(pieces.items()) if parts[-1].stats is not None]
        return {**self._head, "choices": choices, "usage": self._usage(stats), "timings": timings(stats[0])}

    # --- both -----------------------------------------------------------------------------------

    def _choice(self, index: int, text: str, entries: Sequence[TokenLogprob], reason: str | None) -> dict[str, Any]:
        logprobs = self._logprobs(index, entries) if self._with_logprobs else None
        return {"text": text, "index": index, "logprobs": logprobs, "finish_reason": reason}

    def _logprobs(self, index: int, entries: Iterable[TokenLogprob]) -> dict[str, Any]:
        """The legacy form: parallel lists. Offsets count characters of the choice's text, its echo included."""
        lists: dict[str, list[Any]] = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
        for entry in entries:
            lists["tokens"].append(self._text(entry.token))
            lists["token_logprobs"].append(max(entry.logprob, LOWEST_LOGPROB))
            lists["top_logprobs"].append({self._text(other): max(value, LOWEST_LOGPROB) for other, value in entry.top})
            lists["text_offset"].append(self._offsets[index])
            # A character counts where its first byte stands.
            self._offsets[index] += sum(byte & 0xC0 != 0x80 for byte in self._vocabulary.pieces[entry.token])
        return lists

    def _usage(self, all_stats: Sequence[Stats]) -> dict[str, Any]:
        """Each prompt counts once, however many choices it has."""
        step = self._choices_per_prompt
        each = [usage(all_stats[first : first + step]) for first in range(0, len(all_stats), step)]
        total: dict[str, Any] = {name: sum(one[name] for one in each) for name in TOKEN_COUNTS}
        total["prompt_tokens_details"] = {
            "cached_tokens": sum(one["prompt_tokens_details"]["cached_tokens"] for one in each)
        }
        return total

    def _text(self, token: int) -> str:
        """The token as text; its bytes in OpenAI's notation where it is a part of a character."""
        raw = self._vocabulary.pieces[token]
        try:
            return raw.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)
