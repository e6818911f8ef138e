"""OpenAI's answer shapes, with llama.cpp's `timings` beside them. Pure: pieces in, JSON-ready dicts out."""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from engines.runtime.generation import Piece, Stats
from engines.runtime.llama import Vocabulary
from engines.runtime.sampler import TokenLogprob

# Stands for a delta's text while its frame is serialised; no key or fixed value contains it.
_MARK = "\x00text\x00"


def usage(all_stats: Sequence[Stats]) -> dict[str, Any]:
    """Of one answer or of `n` choices, whose prompt counts once."""
    prompt, completion = all_stats[0].prompt_tokens, sum(stats.completion_tokens for stats in all_stats)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": all_stats[0].cached_tokens},
    }


def timings(stats: Stats) -> dict[str, Any]:
    """llama.cpp's names; `prompt_n` counts computed prompt tokens only. `queue_ms` is ours."""
    prompt_n = stats.prompt_tokens - stats.cached_tokens
    # The first token falls out of the prompt's last step, so the decode time belongs to the others.
    steps = max(stats.completion_tokens - 1, 0)
    return {
        "queue_ms": round(stats.queue_s * 1000, 3),
        "cache_n": stats.cached_tokens,
        "prompt_n": prompt_n,
        "prompt_ms": round(stats.prompt_s * 1000, 3),
        "prompt_per_token_ms": _per(stats.prompt_s * 1000, prompt_n),
        "prompt_per_second": _per(prompt_n, stats.prompt_s),
        "predicted_n": stats.completion_tokens,
        "predicted_ms": round(stats.decode_s * 1000, 3),
        "predicted_per_token_ms": _per(stats.decode_s * 1000, steps),
        "predicted_per_second": _per(steps, stats.decode_s),
    }


def _per(amount: float, unit: float) -> float:
    return round(amount / unit, 3) if unit else 0.0


class ChatAnswer:
    """Builds the objects of one answer: chunks of a stream, or the whole completion."""

    def __init__(self, request_id: str, model_name: str, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary
        self._head = {
            "id": f"chatcmpl-{request_id}",
            "created": int(time.time()),
            "model": model_name,
            "system_fingerprint": "hydra",
        }
        self._text_frames: dict[int, tuple[bytes, bytes]] = {}

    def _chunk(self, index: int, delta: dict[str, Any], **fields: Any) -> dict[str, Any]:
        choice = {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}
        return {**self._head, "object": "chat.completion.chunk", "choices": [choice], **fields}

    def opening(self, index: int) -> dict[str, Any]:
        return self._chunk(index, {"role": "assistant", "content": ""})

    def delta(self, piece: Piece) -> dict[str, Any]:
        chunk = self._chunk(piece.choice, {"content": piece.text})
        chunk["choices"][0]["logprobs"] = self.logprobs(piece.logprobs)
        return chunk

    def text_event(self, piece: Piece) -> bytes:
        """The frame of a plain delta. Most frames are this one, so only its text is serialised anew."""
        frame = self._text_frames.get(piece.choice)
        if frame is None:
            whole = json.dumps(self._chunk(piece.choice, {"content": _MARK}), ensure_ascii=False, separators=(",", ":"))
            before, after = whole.split(json.dumps(_MARK))
            frame = self._text_frames[piece.choice] = (b"data: " + before.encode(), after.encode() + b"\n\n")
        return frame[0] + json.dumps(piece.text, ensure_ascii=False).encode() + frame[1]

    def progress(self, stats: dict[str, Any]) -> dict[str, Any]:
        return self._chunk(0, {}, prompt_progress=stats)

    def closing(self, index: int, reason: str, stats: Stats) -> dict[str, Any]:
        chunk = self._chunk(index, {}, timings=timings(stats))
        chunk["choices"][0]["finish_reason"] = reason
        return chunk

    def usage_chunk(self, all_stats: Sequence[Stats]) -> dict[str, Any]:
        return {**self._head, "object": "chat.completion.chunk", "choices": [], "usage": usage(all_stats)}

    def whole(self, pieces: Mapping[int, Sequence[Piece]], *, with_logprobs: bool) -> dict[str, Any]:
        """The completion object from all pieces of each choice, the last of which carries reason and stats."""
        choices = []
        for index, parts in sorted(pieces.items()):
            entries = [entry for part in parts for entry in part.logprobs]
            choices.append(
                {
                    "index": index,
                    "message": {"role": "assistant", "content": "".join(part.text for part in parts)},
                    "logprobs": self.logprobs(entries) if with_logprobs else None,
                    "finish_reason": parts[-1].finish_reason,
                }
            )
        stats = [parts[-1].stats for _, parts in sorted(pieces.items()) if parts[-1].stats is not None]
        return {
            **self._head,
            "object": "chat.completion",
            "choices": choices,
            "usage": usage(stats),
            "timings": timings(stats[0]),
        }

    def logprobs(self, entries: Iterable[TokenLogprob]) -> dict[str, Any]:
        return {
            "content": [
                {
                    **self._token(entry.token, entry.logprob),
                    "top_logprobs": [self._token(token, logprob) for token, logprob in entry.top],
                }
                for entry in entries
            ],
            "refusal": None,
        }

    def _token(self, token: int, logprob: float) -> dict[str, Any]:
        raw = self._vocabulary.pieces[token]
        return {"token": raw.decode("utf-8", "replace"), "logprob": max(logprob, -9999.0), "bytes": list(raw)}
