"""OpenAI's answer shapes, with llama.cpp's `timings` beside them. Pure: pieces in, JSON-ready dicts out."""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import Any

from engines.runtime.generation import Stats
from engines.runtime.llama import Vocabulary
from engines.runtime.sampler import TokenLogprob


def usage(stats: Stats) -> dict[str, Any]:
    return {
        "prompt_tokens": stats.prompt_tokens,
        "completion_tokens": stats.completion_tokens,
        "total_tokens": stats.prompt_tokens + stats.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": stats.cached_tokens},
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

    def _chunk(self, delta: dict[str, Any] | None, **fields: Any) -> dict[str, Any]:
        choice = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": None}
        choices = [] if delta is None else [choice]
        return {**self._head, "object": "chat.completion.chunk", "choices": choices, **fields}

    def opening(self) -> dict[str, Any]:
        return self._chunk({"role": "assistant", "content": ""})

    def delta(self, text: str, logprobs: tuple[TokenLogprob, ...]) -> dict[str, Any]:
        chunk = self._chunk({"content": text})
        if logprobs:
            chunk["choices"][0]["logprobs"] = self.logprobs(logprobs)
        return chunk

    def progress(self, stats: dict[str, Any]) -> dict[str, Any]:
        return self._chunk({}, prompt_progress=stats)

    def closing(self, reason: str, stats: Stats) -> dict[str, Any]:
        chunk = self._chunk({}, timings=timings(stats))
        chunk["choices"][0]["finish_reason"] = reason
        return chunk

    def usage_chunk(self, stats: Stats) -> dict[str, Any]:
        return self._chunk(None, usage=usage(stats))

    def whole(self, text: str, logprobs: Iterable[TokenLogprob] | None, reason: str, stats: Stats) -> dict[str, Any]:
        choice = {
            "index": 0,
            "message": {"role": "assistant", "content": text},
            "logprobs": self.logprobs(logprobs) if logprobs is not None else None,
            "finish_reason": reason,
        }
        return {
            **self._head,
            "object": "chat.completion",
            "choices": [choice],
            "usage": usage(stats),
            "timings": timings(stats),
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
