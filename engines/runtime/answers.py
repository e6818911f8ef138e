"""OpenAI's answer shapes, with llama.cpp's `timings` beside them. Pure: pieces in, JSON-ready dicts out."""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from engines.runtime.chat_output import ChatDelta, ChatFormat, ChatOutput, ToolCallDelta
from engines.runtime.generation import Generation, Piece, Stats
from engines.runtime.llama import Vocabulary
from engines.runtime.sampler import TokenLogprob

# Stands for a delta's text while its frame is serialised; no key or fixed value contains it.
_MARK = "\x00text\x00"
NOTHING_SAID = ChatDelta()


def usage(all_stats: Sequence[Stats], reasoning_tokens: int = 0) -> dict[str, Any]:
    """Of one answer or of `n` choices, whose prompt counts once. `reasoning_tokens` are a part of the completion's."""
    prompt, completion = all_stats[0].prompt_tokens, sum(stats.completion_tokens for stats in all_stats)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": all_stats[0].cached_tokens},
        "completion_tokens_details": {"reasoning_tokens": reasoning_tokens},
    }


def reasoning_tokens(output: ChatOutput, generation: Generation, vocabulary: Vocabulary) -> int:
    """How many of the tokens made so far are reasoning: those whose text begins before its end, markers included."""
    count, left_bytes = 0, output.reasoning_bytes
    new_tokens = generation.tokens[len(generation.prompt) :] if left_bytes else []
    while left_bytes > 0 and count < len(new_tokens):
        left_bytes -= len(vocabulary.pieces[new_tokens[count]])
        count += 1
    return count


def timings(stats: Stats) -> dict[str, Any]:
    """llama.cpp's names; `prompt_n` counts computed prompt tokens only. `queue_ms`, `restore_ms`, `prompt_wait_ms`,
    `draft_length` (drafted tokens of a draft) and `draft_gain` (tokens of a step) are ours."""
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
        **({"restore_ms": round(stats.restore_s * 1000, 3)} if stats.restore_s else {}),
        **({"prompt_wait_ms": round(stats.prompt_wait_s * 1000, 3)} if stats.prompt_wait_s > 0 else {}),
        **(_drafts(stats, steps) if stats.drafts else {}),
    }


def _drafts(stats: Stats, steps: int) -> dict[str, Any]:
    return {
        "draft_n": stats.drafted_tokens,
        "draft_n_accepted": stats.accepted_tokens,
        "draft_length": _per(stats.drafted_tokens, stats.drafts),
        "draft_gain": _per(steps, steps - stats.accepted_tokens),
    }


def _per(amount: float, unit: float) -> float:
    return round(amount / unit, 3) if unit else 0.0


def event(value: Mapping[str, Any]) -> bytes:
    """A frame of a server-sent event stream."""
    return b"data: " + json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode() + b"\n\n"


class ChatAnswer:
    """Builds the objects of one answer: chunks of a stream, or the whole completion. `form` says how its text is read."""

    def __init__(
        self, request_id: str, model_name: str, vocabulary: Vocabulary, form: ChatFormat, created: int | None = None
    ) -> None:
        self._form = form
        self._vocabulary = vocabulary
        self._head = {
            "id": f"chatcmpl-{request_id}",
            "created": int(time.time()) if created is None else created,
            "model": model_name,
            "system_fingerprint": "hydra",
        }
        self._text_frames: dict[tuple[int, str], tuple[bytes, bytes]] = {}
        self._outputs: dict[int, ChatOutput] = {}
        self._logprobs: dict[int, list[TokenLogprob]] = {}
        self._reasoning_tokens = 0

    def _chunk(self, index: int, delta: Mapping[str, Any], **fields: Any) -> dict[str, Any]:
        choice = {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}
        return {**self._head, "object": "chat.completion.chunk", "choices": [choice], **fields}

    def opening(self, index: int) -> dict[str, Any]:
        return self._chunk(index, {"role": "assistant", "content": ""})

    def frames(self, piece: Piece, generation: Generation) -> list[bytes]:
        """The events that a piece of a stream becomes."""
        output = self._outputs.get(piece.choice)
        if output is None:
            output = self._outputs[piece.choice] = ChatOutput(self._form, piece.choice)
        frames = []
        if piece.prompt_done_tokens is not None:
            frames.append(event(self._progress(piece.prompt_done_tokens, generation)))
        if output.plain and not piece.logprobs:
            if piece.text:
                frames.append(self._text_event(piece.choice, "content", piece.text))
        else:
            delta = output.feed(piece.text) if piece.text else NOTHING_SAID
            frames += self._delta_events(piece.choice, delta, piece.logprobs)
        if piece.error is not None:
            frames.append(event(piece.error.body()))
        elif piece.finish_reason is not None and piece.stats is not None:
            frames += self._delta_events(piece.choice, output.finish(), (), is_last=True)
            self._reasoning_tokens += reasoning_tokens(output, generation, self._vocabulary)
            frames.append(event(self._closing(piece.choice, output.finish_reason(piece.finish_reason), piece.stats)))
        return frames

    def _delta_events(
        self, index: int, delta: ChatDelta, logprobs: Sequence[TokenLogprob], *, is_last: bool = False
    ) -> list[bytes]:
        """A frame for each part of a message that goes on. Log probabilities go with the first of them, or wait for one."""
        if logprobs:
            self._logprobs.setdefault(index, []).extend(logprobs)
        parts: list[tuple[str, Any]] = []
        if delta.reasoning:
            parts.append((self._form.reasoning_field, delta.reasoning))
        if delta.content:
            parts.append(("content", delta.content))
        if delta.tool_calls:
            parts.append(("tool_calls", [_call_delta(call) for call in delta.tool_calls]))
        waiting = self._logprobs
        if not parts and is_last and waiting.get(index):
            parts.append(("content", ""))
        frames = []
        for key, value in parts:
            if index in waiting or key == "tool_calls":
                chunk = self._chunk(index, {key: value})
                if index in waiting:
                    chunk["choices"][0]["logprobs"] = self.logprobs(waiting.pop(index))
                frames.append(event(chunk))
            else:
                frames.append(self._text_event(index, key, value))
        return frames

    def _text_event(self, index: int, key: str, text: str) -> bytes:
        """The frame of a plain delta. Most frames are this one, so only its text is serialised anew."""
        frame = self._text_frames.get((index, key))
        if frame is None:
            whole = json.dumps(self._chunk(index, {key: _MARK}), ensure_ascii=False, separators=(",", ":"))
            before, after = whole.split(json.dumps(_MARK))
            frame = self._text_frames[index, key] = (b"data: " + before.encode(), after.encode() + b"\n\n")
        return frame[0] + json.dumps(text, ensure_ascii=False).encode() + frame[1]

    def _progress(self, processed_tokens: int, generation: Generation) -> dict[str, Any]:
        started = generation.started_at or generation.queued_at
        progress = {
            "total": len(generation.prompt),
            "cache": generation.cached_tokens,
            "processed": processed_tokens,
            "time_ms": round((time.monotonic() - started) * 1000),
        }
        return self._chunk(0, {}, prompt_progress=progress)

    def _closing(self, index: int, reason: str, stats: Stats) -> dict[str, Any]:
        chunk = self._chunk(index, {}, timings=timings(stats))
        chunk["choices"][0]["finish_reason"] = reason
        return chunk

    def usage_chunk(self, all_stats: Sequence[Stats]) -> dict[str, Any]:
        """The last chunk of a stream, after every choice's last piece."""
        counts = usage(all_stats, self._reasoning_tokens)
        return {**self._head, "object": "chat.completion.chunk", "choices": [], "usage": counts}

    def whole(
        self, pieces: Mapping[int, Sequence[Piece]], generations: Sequence[Generation], *, with_logprobs: bool
    ) -> dict[str, Any]:
        """The completion object from all pieces of each choice, the last of which carries reason and stats."""
        choices, stats, reasoned = [], [], 0
        for index, parts in sorted(pieces.items()):
            output = ChatOutput(self._form, index)
            message = _message([output.feed("".join(part.text for part in parts)), output.finish()], self._form)
            reasoned += reasoning_tokens(output, generations[index], self._vocabulary)
            entries = [entry for part in parts for entry in part.logprobs]
            choices.append(
                {
                    "index": index,
                    "message": message,
                    "logprobs": self.logprobs(entries) if with_logprobs else None,
                    "finish_reason": output.finish_reason(parts[-1].finish_reason or "stop"),
                }
            )
            stats += [part.stats for part in parts[-1:] if part.stats is not None]
        return {
            **self._head,
            "object": "chat.completion",
            "choices": choices,
            "usage": usage(stats, reasoned),
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


def _call_delta(call: ToolCallDelta) -> dict[str, Any]:
    if call.id is None:
        return {"index": call.index, "function": {"arguments": call.arguments}}
    function = {"name": call.name, "arguments": call.arguments}
    return {"index": call.index, "id": call.id, "type": "function", "function": function}


def _message(deltas: Iterable[ChatDelta], form: ChatFormat) -> dict[str, Any]:
    """The message that `deltas` add up to. OpenAI's clients expect a content of null where there are only calls."""
    deltas = list(deltas)
    content = "".join(delta.content for delta in deltas)
    reasoning = "".join(delta.reasoning for delta in deltas)
    calls: dict[int, dict[str, Any]] = {}
    for call in (call for delta in deltas for call in delta.tool_calls):
        if call.id is not None:
            calls[call.index] = {
                "id": call.id,
                "type": "function",
                "function": {"name": call.name, "arguments": call.arguments},
            }
        else:
            calls[call.index]["function"]["arguments"] += call.arguments
    message: dict[str, Any] = {"role": "assistant", "content": content or (None if calls else "")}
    if reasoning:
        message[form.reasoning_field] = reasoning
    if calls:
        message["tool_calls"] = list(calls.values())
    return message
