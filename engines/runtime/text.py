"""From token bytes to text that may be sent: whole UTF-8 characters only, and never a part of a stop string.

Works on bytes, so that tokens that split a character, stop strings and log probabilities share one measure of position.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from engines.runtime.sampler import TokenLogprob


class StopMatcher:
    """Finds one stop string in a byte stream (Knuth-Morris-Pratt): `held` bytes at the end may begin it."""

    def __init__(self, stop: bytes) -> None:
        self.stop = stop
        self.held = 0
        self._failure = [0] * len(stop)
        length = 0
        for i in range(1, len(stop)):
            while length and stop[i] != stop[length]:
                length = self._failure[length - 1]
            length += stop[i] == stop[length]
            self._failure[i] = length

    def feed(self, byte: int) -> bool:
        """True when this byte completes the stop string."""
        while self.held and (self.held == len(self.stop) or byte != self.stop[self.held]):
            self.held = self._failure[self.held - 1]
        self.held += byte == self.stop[self.held]
        return self.held == len(self.stop)


# A piece's characters, and the log probabilities that went with it.
Said = tuple[int, tuple[TokenLogprob, ...]]
# Stands before the first one: whoever takes the answer over keeps them on.
NOTHING_SAID: Said = (0, ())


@dataclass(frozen=True)
class Released:
    """Text that may be sent now, with the log probabilities of the tokens whose bytes it completes."""

    text: str
    logprobs: tuple[TokenLogprob, ...] = ()

    def with_more(self, more: Released) -> Released:
        return Released(self.text + more.text, self.logprobs + more.logprobs)


NOTHING = Released("")


class TextAssembler:
    """Takes tokens one by one and releases text as soon as it is safe. `stopped` is set once a stop string was met."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._matchers = [StopMatcher(stop.encode()) for stop in stops]
        self._pending = bytearray()
        self._released_bytes = 0
        self._waiting: deque[tuple[int, TokenLogprob]] = deque()
        self.stopped = False
        # Of an answer that may move and whose pieces tell: what was released so far, as they had it.
        self.said: list[Said] | None = None

    def feed(self, piece: bytes, logprob: TokenLogprob | None = None) -> Released:
        """Adds a token's bytes; returns what became safe. After `stopped` nothing more may be fed."""
        start = self._released_bytes + len(self._pending)
        if logprob is not None:
            self._waiting.append((start, logprob))
        if not self._matchers:
            self._pending += piece
            return self._release(whole_characters(self._pending, len(self._pending)))
        for byte in piece:
            self._pending.append(byte)
            met = [matcher for matcher in self._matchers if matcher.feed(byte)]
            if met:
                self.stopped = True
                del self._pending[len(self._pending) - max(len(matcher.stop) for matcher in met) :]
                return self._release(len(self._pending))
        held = max(matcher.held for matcher in self._matchers)
        return self._release(whole_characters(self._pending, len(self._pending) - held))

    def finish(self) -> Released:
        """Releases what was held back: the generation ended without meeting a stop string."""
        return self._release(len(self._pending), last=not self.stopped)

    @property
    def held(self) -> bytes:
        """Bytes that were fed and not released yet."""
        return bytes(self._pending)

    @property
    def sent_bytes(self) -> int:
        return self._released_bytes

    @property
    def held_logprobs(self) -> tuple[tuple[int, TokenLogprob], ...]:
        """Of tokens whose text was not released yet, with the byte of the answer where each begins."""
        return tuple(self._waiting)

    def resume(self, held: bytes, sent_bytes: int, logprobs: Sequence[tuple[int, TokenLogprob]] = ()) -> None:
        """Takes over where another one stood; for one that was fed nothing. What it held holds back the same again."""
        self._released_bytes = sent_bytes
        self._waiting.extend(logprobs)
        for byte in held:
            for matcher in self._matchers:
                matcher.feed(byte)
        self._pending += held

    @property
    def stopped_by(self) -> str | None:
        """The stop string that was met, the longest if several ended with the same byte."""
        met = [matcher.stop for matcher in self._matchers if matcher.held == len(matcher.stop)]
        return max(met, key=len).decode() if met else None

    def _release(self, count: int, *, last: bool = False) -> Released:
        text = bytes(self._pending[:count]).decode("utf-8", "replace")
        del self._pending[:count]
        self._released_bytes += count
        ready = []
        # A token belongs to the text once its first byte is out; tokens without bytes go with their neighbour.
        while self._waiting and (last or self._waiting[0][0] < self._released_bytes):
            ready.append(self._waiting.popleft()[1])
        if self.said is not None and (text or ready):
            self.said.append((len(text), tuple(ready)))
        return Released(text, tuple(ready))


def whole_characters(data: bytearray, end: int) -> int:
    """The largest cut ≤ `end` that does not split a UTF-8 character which could still be completed."""
    for back in range(1, min(3, end) + 1):
        byte = data[end - back]
        if byte & 0xC0 == 0x80:
            continue
        needed = 4 if byte >= 0xF0 else 3 if byte >= 0xE0 else 2 if byte >= 0xC0 else 1
        return end - back if back < needed and byte < 0xF8 else end
    return end
