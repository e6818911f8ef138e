"""Requests for the router's simulator: from a trace file, or made up with shared prefixes and unlike lengths."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from bench.errors import BenchError

BLOCK_TOKENS = 512
# Blocks that so many requests begin with belong to a system prompt, not to a conversation.
SHARED_BY = 20


@dataclass(frozen=True)
class TraceRequest:
    """One request. `blocks` name the beginnings of its prompt, a block of tokens each: equal names, equal tokens so far."""

    at_s: float
    session: int
    prompt_tokens: int
    output_tokens: int
    blocks: tuple[int, ...]


def read_trace(path: Path) -> list[TraceRequest]:
    """A trace of one JSON object a line: timestamp (ms), input_length, output_length, hash_ids. Raises BenchError."""
    try:
        with path.open() as lines:
            rows = [json.loads(line) for line in lines if line.strip()]
        seen: dict[int, int] = {}
        for row in rows:
            for block in row["hash_ids"]:
                seen[block] = seen.get(block, 0) + 1
        known: dict[int, int] = {}
        requests = []
        for number, row in enumerate(rows):
            # A conversation's next turn begins with what the one before ended with; the deepest known block tells.
            blocks = tuple(int(block) for block in row["hash_ids"])
            own = [block for block in blocks if seen[block] < SHARED_BY]
            session = next((known[block] for block in reversed(own) if block in known), number)
            known.update(dict.fromkeys(own, session))
            requests.append(
                TraceRequest(
                    row["timestamp"] / 1000, session, row["input_length"], max(1, row["output_length"]), blocks
                )
            )
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise BenchError(f"{path} cannot be read as a trace: {error}") from error
    if not requests:
        raise BenchError(f"{path} holds no request")
    return requests


def at_rate(requests: Sequence[TraceRequest], factor: float) -> list[TraceRequest]:
    """The same requests, `factor` times as far apart."""
    return [
        TraceRequest(
            request.at_s * factor, request.session, request.prompt_tokens, request.output_tokens, request.blocks
        )
        for request in requests
    ]


class _Names:
    """Names of blocks: the same beginning has the same name."""

    def __init__(self) -> None:
        self._names: dict[tuple[int, ...], int] = {}

    def of(self, texts: Sequence[int]) -> tuple[int, ...]:
        """`texts` is a number for each block's own tokens."""
        return tuple(self._names.setdefault(tuple(texts[: i + 1]), len(self._names)) for i in range(len(texts)))


def conversations(count: int, seed: int, *, system_blocks: int, systems: int, turns: int, think_s: float,
                  turn_blocks: int, output_tokens: int) -> list[TraceRequest]:  # fmt: skip
    """Conversations that begin over time, each a few turns with pauses between; several share a system prompt."""
    rng, names, requests = random.Random(seed), _Names(), []
    at_s, fresh = 0.0, 1_000_000
    for session in range(count):
        at_s += rng.expovariate(1.0)
        texts = [rng.randrange(systems) * 1000 + i for i in range(system_blocks)]
        turn_s = at_s
        for _ in range(1 + int(rng.expovariate(1 / turns))):
            added = 1 + int(rng.expovariate(1 / turn_blocks))
            texts += range(fresh, fresh + added)
            fresh += added
            prompt = len(texts) * BLOCK_TOKENS - rng.randrange(BLOCK_TOKENS)
            output = 1 + int(rng.expovariate(1 / output_tokens))
            requests.append(TraceRequest(turn_s, session, prompt, output, names.of(texts)))
            turn_s += rng.expovariate(1 / think_s)
    return sorted(requests, key=lambda request: request.at_s)


def long_and_short(count: int, seed: int) -> list[TraceRequest]:
    """Single requests: seven of eight are short questions, one is a long document."""
    rng, names, requests, at_s = random.Random(seed), _Names(), [], 0.0
    for number in range(count):
        at_s += rng.expovariate(1.0)
        prompt = rng.randrange(10_000, 60_000) if rng.random() < 0.125 else rng.randrange(50, 1_500)
        texts = [number * 1000 + i for i in range(-(-prompt // BLOCK_TOKENS))]
        output = 1 + int(rng.expovariate(1 / 250))
        requests.append(TraceRequest(at_s, number, prompt, output, names.of(texts)))
    return requests


def synthetic(seed: int) -> dict[str, list[TraceRequest]]:
    """The traces that stand in where no file is given, by name."""
    return {
        "chats": conversations(250, seed, system_blocks=1, systems=4, turns=5, think_s=30, turn_blocks=1,
                               output_tokens=300),
        "agents, shared prefixes": conversations(150, seed, system_blocks=16, systems=3, turns=8, think_s=4,
                                                 turn_blocks=2, output_tokens=120),
        "long and short prompts": long_and_short(1200, seed),
    }  # fmt: skip
