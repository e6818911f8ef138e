"""A chat message as a row of parts, each opened, written to and closed in turn: what typed event streams are made of.

Pure: deltas in, changes out. Knows no dialect.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from engines.runtime.chat_output import ChatDelta, ToolCallDelta

Kind = Literal["reasoning", "text", "tool_call"]


class Part:
    """One part as far as it is written. `index` is its place among all parts; a tool call's `text` are its arguments."""

    def __init__(self, index: int, kind: Kind, call_id: str = "", name: str = "") -> None:
        self.index, self.kind, self.call_id, self.name = index, kind, call_id, name
        self._written: list[str] = []

    @property
    def text(self) -> str:
        if len(self._written) > 1:
            self._written = ["".join(self._written)]
        return self._written[0] if self._written else ""

    def write(self, text: str) -> None:
        self._written.append(text)


@dataclass(frozen=True)
class Change:
    """One step of a part's life. `text` is what was added."""

    kind: Literal["open", "write", "close"]
    part: Part
    text: str = ""


class AnswerParts:
    """All parts of one message so far. At most one is open, the last."""

    def __init__(self) -> None:
        self.parts: list[Part] = []
        self._open: Part | None = None
        self._calls: dict[int, Part] = {}

    def take(self, delta: ChatDelta) -> Iterator[Change]:
        """Applies `delta` while its changes are read: take them all.

        A delta does not tell the order of its parts: what goes on with the open call comes first, new calls come last.
        """
        going_on = [call for call in delta.tool_calls if call.index in self._calls]
        for call in going_on:
            yield from self._go_on(call)
        if delta.reasoning:
            yield from self._write("reasoning", delta.reasoning)
        if delta.content:
            yield from self._write("text", delta.content)
        for call in delta.tool_calls:
            if call not in going_on:
                yield from self._call(call)

    def grow(self, kind: Kind, text: str) -> bool:
        """Writes to the open part where that would be the only change; False, and nothing done, where it is not of this kind."""
        if self._open is None or self._open.kind != kind:
            return False
        self._open.write(text)
        return True

    def close(self) -> Iterator[Change]:
        """Closes the open part, if there is one."""
        if self._open is not None:
            part, self._open = self._open, None
            yield Change("close", part)

    def _write(self, kind: Kind, text: str) -> Iterator[Change]:
        if self._open is None or self._open.kind != kind:
            yield from self._begin(Part(len(self.parts), kind))
        yield from self._add(text)

    def _call(self, call: ToolCallDelta) -> Iterator[Change]:
        part = Part(len(self.parts), "tool_call", call_id=call.id or "", name=call.name or "")
        self._calls[call.index] = part
        yield from self._begin(part)
        yield from self._go_on(call)

    def _go_on(self, call: ToolCallDelta) -> Iterator[Change]:
        if call.arguments:
            assert self._open is self._calls[call.index]
            yield from self._add(call.arguments)

    def _begin(self, part: Part) -> Iterator[Change]:
        yield from self.close()
        self.parts.append(part)
        self._open = part
        yield Change("open", part)

    def _add(self, text: str) -> Iterator[Change]:
        assert self._open is not None
        self._open.write(text)
        yield Change("write", self._open, text)
