"""Images inside a prompt: what a model reads instead of tokens, where it stands, and how a sequence with such spans counts.

A span takes a cell per embedding, and in the token list an id per cell: negative, drawn from the image's digest, so that
comparing token lists compares images. It is never cut: its tokens may share positions (M-RoPE: a grid at one time), and then
a sequence has fewer positions than cells.
"""

from __future__ import annotations

import hashlib
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
from numpy.typing import NDArray


def span_ids(digest: bytes, part: int, count: int) -> list[int]:
    """`count` ids below 0 for the embeddings of an image's `part`-th span.

    Many bits each, since equal ids mean reuse: an image must not be made so that it meets another's.
    """
    raw = hashlib.shake_128(digest + part.to_bytes(4, "little")).digest(4 * count)
    below: list[int] = (-1 - (np.frombuffer(raw, dtype="<u4") & 0x7FFF_FFFF).astype(np.int64)).tolist()
    return below


@dataclass(frozen=True, eq=False)
class MediaSpan:
    """One run of embeddings that is decoded as a whole.

    `embeddings` has shape (tokens, width), float32. `offsets` and `moves`, shape (axes, tokens), int32, give the positions that
    a span beginning at p takes: offsets + p · moves, where moves is 1 or 0. Axis 0 is the one that memory goes by.
    `positions` is by how much the next token's position lies behind p. `sees_itself`: its tokens attend to each other in both
    directions, so they must be computed in one micro-batch.
    """

    ids: tuple[int, ...]
    embeddings: NDArray[np.float32]
    offsets: NDArray[np.int32]
    moves: NDArray[np.int32]
    positions: int
    sees_itself: bool

    def __len__(self) -> int:
        return len(self.ids)

    @cached_property
    def outline(self) -> MediaSpan:
        """The same without what only computing it needs: for those that hold its cells, which may be long and many."""
        none = np.empty((0, 0), dtype=np.int32)
        return replace(self, embeddings=np.empty((0, 0), dtype=np.float32), offsets=none, moves=none)

    def positions_at(self, start: int) -> NDArray[np.int32]:
        """Shape (axes, tokens): the positions of a span that begins at position `start`."""
        return self.offsets + np.int32(start) * self.moves


@dataclass(frozen=True)
class PlacedSpan:
    """A span whose first id stands at index `start` of a token list."""

    start: int
    span: MediaSpan

    @property
    def end(self) -> int:
        return self.start + len(self.span)


class SpanMap:
    """The spans of one token list, in order; between indices of the list and positions of the model. Immutable."""

    def __init__(self, placed: Sequence[PlacedSpan] = ()) -> None:
        self.placed = tuple(placed)
        self._starts = [entry.start for entry in self.placed]
        # How many cells more than positions there are once the spans up to each one have passed.
        self._surplus = [0]
        end = 0
        for entry in self.placed:
            if entry.start < end:
                raise ValueError(f"a span begins at {entry.start}, inside the one before")
            end = entry.end
            self._surplus.append(self._surplus[-1] + len(entry.span) - entry.span.positions)

    def __len__(self) -> int:
        return len(self.placed)

    @property
    def size_bytes(self) -> int:
        """Memory of all embeddings."""
        return sum(entry.span.embeddings.nbytes for entry in self.placed)

    def position(self, index: int) -> int:
        """The position of what stands at `index`, which must not lie inside a span; at a list's end, of what comes next."""
        before = bisect_right(self._starts, index - 1)
        if before and index < self.placed[before - 1].end:
            raise ValueError(f"index {index} lies inside a span")
        return index - self._surplus[before]

    def covering(self, index: int) -> PlacedSpan | None:
        """The span whose ids include `index`."""
        before = bisect_right(self._starts, index)
        return self.placed[before - 1] if before and index < self.placed[before - 1].end else None

    def whole(self, length: int) -> int:
        """The longest prefix of at most `length` entries that cuts no span."""
        inside = self.covering(length - 1) if length else None
        return inside.start if inside is not None and length < inside.end else length

    def until_span(self, index: int) -> int | None:
        """How many entries from `index` on are plain tokens before the next span begins; None if none follows."""
        following = bisect_right(self._starts, index - 1)
        return self.placed[following].start - index if following < len(self.placed) else None

    def first(self, length: int) -> SpanMap:
        """The map of the first `length` entries, a length that cuts no span."""
        return SpanMap([entry for entry in self.placed if entry.end <= length])

    def begun(self, length: int) -> SpanMap:
        """For a holder of the first `length` entries, of which the last may be a part of a span: the map of all spans that it
        has something of, as outlines."""
        return SpanMap([PlacedSpan(entry.start, entry.span.outline) for entry in self.placed if entry.start < length])


NO_SPANS = SpanMap()
