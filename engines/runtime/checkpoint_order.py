"""Which checkpoint gives its place to another one, and which ones a conversation can do without.

A conversation's next turn branches off at its last cut, so every conversation keeps that one as long as there are others: first
go those between, and system prompts that only one conversation has. A beginning of several conversations is one checkpoint, and
counts like each of theirs.
"""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass
from itertools import pairwise
from typing import Protocol

from engines.runtime.cells import Sequence


@dataclass(eq=False)
class Checkpoint:
    """A frozen sequence; empty when unused. While its state leaves the engine (`leaving`) it stays."""

    sequence: Sequence
    used_at: float = 0.0
    leaving: bool = False


class Holder(Protocol):
    """Whoever's sequence may hold a conversation."""

    sequence: Sequence
    used_at: float


def stays(holder: Holder) -> tuple[bool, float]:
    """In which order content goes, the least first: that of nobody's session, with which hardly anybody goes on (a title), then
    the longest unused. It only orders: where all content is sessions', theirs goes, so that whoever comes has a place."""
    return bool(holder.sequence.origin.session), holder.used_at


def first_to_go(checkpoints: SequenceOf[Checkpoint]) -> Checkpoint | None:
    """An empty one if there is one; None where there are none at all."""
    empty = next((checkpoint for checkpoint in checkpoints if not len(checkpoint.sequence)), None)
    if empty is not None or not checkpoints:
        return empty

    def order(checkpoint: Checkpoint) -> tuple[bool, bool, float]:
        has_session, used_at = stays(checkpoint)
        return has_session, not _passing(checkpoint, checkpoints), used_at

    return min(checkpoints, key=order)


def spare(checkpoints: SequenceOf[Checkpoint], spacing_tokens: int) -> Checkpoint | None:
    """One that a conversation can do without, the longest unused: between its first and a later one that is near. It serves who
    takes the last turn back, as long as nobody else needs its place."""
    filled = [checkpoint for checkpoint in checkpoints if len(checkpoint.sequence)]
    between = [one for one in filled if any(_continues(one, other) for other in filled)]
    found = (
        one
        for one in between
        if 0 < min((len(tokens) - len(one.sequence) for tokens in _passing(one, filled)), default=0) < spacing_tokens
    )
    return min(found, key=stays, default=None)


def _passing(checkpoint: Checkpoint, checkpoints: SequenceOf[Checkpoint]) -> list[list[int]]:
    """The tokens of later ones, the shortest first, if they are all of one conversation; none if they are of several."""
    behind = [other.sequence.tokens for other in checkpoints if _continues(other, checkpoint)]
    behind.sort(key=len)
    is_one = all(longer[: len(tokens)] == tokens for tokens, longer in pairwise(behind))
    return behind if is_one else []


def _continues(other: Checkpoint, checkpoint: Checkpoint) -> bool:
    tokens, longer = checkpoint.sequence.tokens, other.sequence.tokens
    count = len(tokens)
    if len(longer) <= count or longer[count - 1] != tokens[-1]:
        return False
    return other.sequence.origin.tenant == checkpoint.sequence.origin.tenant and longer[:count] == tokens
