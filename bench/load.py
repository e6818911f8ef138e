"""The client: one asyncio process that drives either server over /v1/chat/completions and records when text arrives."""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections.abc import AsyncIterator, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import aiohttp

from bench.errors import BenchError
from bench.measures import StreamRecord

REQUEST_TIMEOUT_S = 900.0
MODEL_NAME = "bench"
SAMPLING: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "topk": {"temperature": 0.8, "top_k": 40, "top_p": 0.95, "min_p": 0.0},
}
SYSTEM_WORDS = 8
_WORDS_TEXT = (
    "river stone paper window garden summer winter letter market bridge forest silver yellow number people simple"
    " morning evening travel engine memory signal copper island harbor valley meadow circle square corner middle"
    " spring autumn thunder blanket candle pocket ladder hammer basket kitchen mirror pencil button ribbon"
)
WORDS = _WORDS_TEXT.split()


@dataclass(frozen=True)
class Request:
    """One chat request to send, or, with token ids in place of messages, one completion.

    `slot` asks llama-server for a certain slot, other servers choose themselves.
    """

    messages: list[dict[str, str]] | list[int]
    new_tokens: int
    sampling: str = "greedy"
    seed: int = 1
    slot: int | None = None
    extra: Mapping[str, Any] = field(default_factory=dict)
    headers: Mapping[str, str] = field(default_factory=dict)

    @property
    def is_chat(self) -> bool:
        return not (self.messages and isinstance(self.messages[0], int))

    @property
    def path(self) -> str:
        return "/v1/chat/completions" if self.is_chat else "/v1/completions"

    def body(self) -> dict[str, Any]:
        slot = {} if self.slot is None else {"id_slot": self.slot}
        return {
            "model": MODEL_NAME,
            "messages" if self.is_chat else "prompt": self.messages,
            "max_tokens": self.new_tokens,
            "seed": self.seed,
            "stream": True,
            "stream_options": {"include_usage": True},
            "ignore_eos": True,
            "cache_prompt": True,
            **SAMPLING[self.sampling],
            **slot,
            **self.extra,
        }


@dataclass(frozen=True)
class Prompts:
    """Makes prompts of about a wanted number of tokens: `overhead` tokens of template, `tokens_per_word` for the rest."""

    overhead: float = 16.0
    tokens_per_word: float = 1.0
    shared_tokens: int = 0

    def calibrated(self, words: tuple[int, int], tokens: tuple[int, int]) -> Prompts:
        """From two prompts' lengths in words and in tokens."""
        slope = (tokens[1] - tokens[0]) / (words[1] - words[0])
        return Prompts(max(0.0, tokens[0] - slope * words[0]), slope, self.shared_tokens)

    def messages(self, tokens: int, *names: object) -> list[dict[str, str]]:
        """A prompt that no other `names` get; only `shared_tokens` of it, if any, are the same for all.

        It always has a system message, or a template would put the same default one before every prompt.
        """
        words = max(2, round((tokens - self.overhead) / self.tokens_per_word))
        if self.shared_tokens:
            system = text_of_words(min(words - 1, round(self.shared_tokens / self.tokens_per_word)), "shared")
        else:
            system = text_of_words(min(words - 1, SYSTEM_WORDS), "system", *names)
        user = text_of_words(words - len(system.split()), "user", *names)
        return [{"role": "system", "content": system}, {"role": "user", "content": user}]


def text_of_words(count: int, *names: object) -> str:
    """`count` words that follow from `names`."""
    return " ".join(random.Random(repr(names)).choices(WORDS, k=count))


def client_session() -> aiohttp.ClientSession:
    timeout = aiohttp.ClientTimeout(total=REQUEST_TIMEOUT_S, sock_connect=10)
    # llama-server closes kept-alive connections as it likes, so every request of either side opens its own
    return aiohttp.ClientSession(timeout=timeout, connector=aiohttp.TCPConnector(limit=0, force_close=True))


async def drive(session: aiohttp.ClientSession, base_url: str, requests: Iterable[Request]) -> list[StreamRecord]:
    """Sends all requests at once and waits for all answers. Raises BenchError if one fails or is cut short."""
    tasks = [asyncio.create_task(answer(session, base_url, request)) for request in requests]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()


async def answer(session: aiohttp.ClientSession, base_url: str, request: Request) -> StreamRecord:
    """Sends one request and reads its stream to the end."""
    sent_at = time.monotonic()
    arrivals: list[float] = []
    usage: dict[str, Any] = {}
    try:
        async with session.post(base_url + request.path, json=request.body(), headers=request.headers) as response:
            if response.status != 200:
                raise BenchError(f"{base_url} answered {response.status}: {(await response.text())[:400]}")
            pending = b""
            async for data in response.content.iter_any():
                now = time.monotonic()
                *events, pending = (pending + data).split(b"\n\n")
                for event in events:
                    has_text, usage_or_none = _read_event(event)
                    usage = usage_or_none or usage
                    if has_text:
                        arrivals.append(now)
    except (aiohttp.ClientError, TimeoutError) as error:
        raise BenchError(f"{base_url}: {type(error).__name__}: {error}") from error
    return _record(request, sent_at, arrivals, usage)


def _record(request: Request, sent_at: float, arrivals: list[float], usage: dict[str, Any]) -> StreamRecord:
    made = usage.get("completion_tokens", 0)
    if not arrivals or made != request.new_tokens:
        raise BenchError(f"an answer has {made} tokens in {len(arrivals)} chunks; {request.new_tokens} were asked for")
    details = usage.get("prompt_tokens_details") or {}
    return StreamRecord(sent_at, tuple(arrivals), usage["prompt_tokens"], details.get("cached_tokens", 0), made)


def _read_event(event: bytes) -> tuple[bool, dict[str, Any] | None]:
    """Whether the event carries text, and the usage if it is there."""
    if not event.startswith(b"data: ") or event == b"data: [DONE]":
        return False, None
    chunk = json.loads(event[6:])
    if "error" in chunk:
        raise BenchError(f"an answer broke off: {json.dumps(chunk['error'])[:400]}")
    choice = chunk["choices"][0] if chunk.get("choices") else {}
    delta = choice.get("delta") or {}
    has_text = choice.get("text") or delta.get("content") or delta.get("reasoning_content")
    return bool(has_text), chunk.get("usage")


async def events_of(response: aiohttp.ClientResponse) -> AsyncIterator[bytes]:
    """An answer's events as they come, without the empty lines between them."""
    pending = b""
    async for data in response.content.iter_any():
        *events, pending = (pending + data).split(b"\n\n")
        for event in events:
            yield event


async def calibrated(web: aiohttp.ClientSession, base_url: str) -> Prompts:
    """Prompts whose lengths are the server's tokens."""
    words = (100, 300)
    lengths = []
    for count in words:
        request = Request(Prompts(0.0, 1.0).messages(count, "calibration"), 1)
        lengths.append((await answer(web, base_url, request)).prompt_tokens)
    return Prompts().calibrated(words, (lengths[0], lengths[1]))
