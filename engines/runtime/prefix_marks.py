"""What two engines tell each other of a conversation's beginning without sending it: digests of its first tokens at some cuts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import blake3
import numpy as np
from numpy.typing import NDArray

from engines.wire_handoff import PrefixMark

MOST_MARKS = 256

Tokens = Sequence[int] | NDArray[np.int32]


def marks_of(tokens: Tokens, step_tokens: int) -> tuple[PrefixMark, ...]:
    """At every multiple of `step_tokens`, or of as many times it as leave MOST_MARKS; the shortest first."""
    while len(tokens) // step_tokens > MOST_MARKS:
        step_tokens *= 2
    cuts = range(step_tokens, len(tokens) + 1, step_tokens)
    return tuple(PrefixMark(cut, digest) for cut, digest in zip(cuts, _digests(tokens, cuts), strict=True))


def longest_marked(tokens: Tokens, marks: Sequence[PrefixMark]) -> int:
    """How many leading tokens of `tokens` are proved to be the marked ones."""
    cuts = [mark.tokens for mark in marks if mark.tokens <= len(tokens)]
    if any(later <= earlier for earlier, later in zip([0, *cuts], cuts, strict=False)):
        return 0
    held = 0
    for mark, digest in zip(marks, _digests(tokens, cuts), strict=False):
        if digest != mark.digest:
            break
        held = mark.tokens
    return held


def _digests(tokens: Tokens, cuts: Sequence[int]) -> Iterator[str]:
    hasher, at = blake3.blake3(), 0
    raw = memoryview(np.array(tokens[: cuts[-1]], dtype="<i4").tobytes()) if cuts else memoryview(b"")
    for cut in cuts:
        hasher.update(raw[at * 4 : cut * 4])
        at = cut
        yield hasher.hexdigest(16)
