"""Clients of streams of all kinds, and what each has shown its user in the end."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from sessions import dialects
from sessions.dialects import CHAT, Dialect
from sessions.identity import Identity, Owner
from sessions.relay import EngineAnswer, ask_engine

SCHEMA = {
    "type": "object",
    "properties": {"words": {"type": "array", "items": {"type": "string"}, "minItems": 9, "maxItems": 12}},
    "required": ["words"],
    "additionalProperties": False,
}
FORM = {"type": "json_schema", "json_schema": {"name": "it", "schema": SCHEMA, "strict": True}}
TOOL = {"type": "function", "function": {"name": "paint", "parameters": SCHEMA}}
SAMPLED = {"temperature": 1.2, "top_k": 40, "seed": 5, "repeat_penalty": 1.1}
LONG = {"max_tokens": 160, "ignore_eos": True}
KINDS: tuple[tuple[Dialect, dict[str, Any]], ...] = (
    (CHAT, {**LONG, "temperature": 0, "stream_options": {"include_usage": True}}),
    (CHAT, {**LONG, **SAMPLED}),
    (CHAT, {**SAMPLED, "max_tokens": 300, "response_format": FORM}),
    (CHAT, {**SAMPLED, "max_tokens": 300, "tools": [TOOL], "tool_choice": "required"}),
    (dialects.COMPLETIONS, {**LONG, "temperature": 0}),
    (dialects.RESPONSES, {"max_output_tokens": 160, "temperature": 0}),
    (dialects.MESSAGES, {"max_tokens": 160, "temperature": 0}),
)


def call_of(number: int, count: int = 0) -> Any:
    dialect, fields = KINDS[number % len(KINDS)]
    if count:
        fields = {**fields, "max_tokens": count}
    text = f"Tell story number {number}. "
    said: dict[str, Any] = {"messages": [{"role": "user", "content": text}]}
    if dialect is dialects.COMPLETIONS:
        said = {"prompt": text}
    elif dialect is dialects.RESPONSES:
        said = {"input": text}
    return dialect.read(json.dumps({**said, **fields, "stream": True}).encode())


def me(number: int) -> Identity:
    return Identity(Owner(), f"{number:064x}")


@dataclass
class Reader:
    """A client of one stream."""

    number: int
    # More than its kind asks for, if not 0.
    most_tokens: int = 0
    text: bytes = b""
    answer: EngineAnswer | None = None
    begun: asyncio.Event = field(default_factory=asyncio.Event)

    def call(self) -> Any:
        return call_of(self.number, self.most_tokens)

    async def run(self) -> Reader:
        self.answer = await ask_engine(self.call(), me(self.number))
        try:
            async for frames in self.answer.raw():
                self.text += b"".join(one + b"\n\n" for one in frames.split(b"\n\n") if one and one[:1] != b":")
                if self.text.count(b"\n\n") > 20:
                    self.begun.set()
        finally:
            self.begun.set()
            await self.answer.aclose()
        return self

    @property
    def said(self) -> list[Any]:
        return said_in([self.text])


def said_in(events: list[bytes]) -> list[Any]:
    """What the client shows its user, and what it is told of the tokens."""
    lines = b"".join(events).split(b"\n")
    return [_plain(json.loads(line.removeprefix(b"data: "))) for line in lines if line.startswith(b"data: {")]


async def until(is_so: Callable[[], bool]) -> None:
    while not is_so():  # noqa: ASYNC110 -- nothing tells of it
        await asyncio.sleep(0.01)


def _plain(value: Any) -> Any:
    """Without ids and clocks."""
    if isinstance(value, dict):
        # How much of a prompt was at hand is another engine's matter too.
        clocks = (
            "cache_read_input_tokens",
            "created",
            "created_at",
            "completed_at",
            "id",
            "item_id",
            "call_id",
            "timings",
            "cached_tokens",
            "input_tokens",
        )
        return {name: _plain(inner) for name, inner in value.items() if name not in clocks}
    return [_plain(inner) for inner in value] if isinstance(value, list) else value
