"""What a draft context holds of one sequence, and what it must still be fed before it can draft.

The draft head's row of position p takes the token at p and the target's hidden row of position p - 1. Rows are fed late, all
at once, when somebody wants a draft: a head that is switched off then costs a copy of a few kilobytes a token and no more.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from engines.runtime.draft_model import DraftModel


class DraftRows:
    """Follows one sequence of the target. `fed` positions from `start` on are in the draft context under the same index."""

    def __init__(self, index: int, model: DraftModel) -> None:
        self.index = index
        self.start = self.fed = 0
        self._model = model
        self._epoch = model.epoch
        # Hidden rows of positions [first, first + count), shape (capacity, embedding); the last one is the pending one.
        self._first = self._count = 0
        self._rows: NDArray[np.float32] = np.empty((0, model.embedding_length), dtype=np.float32)

    @property
    def end(self) -> int:
        """The position behind the last hidden row: everything before it and at it can be fed."""
        return self._first + self._count

    @property
    def kept(self) -> int:
        """Hidden rows that wait here."""
        return self._count

    def note(self, position: int, rows: NDArray[np.float32]) -> None:
        """Takes over the hidden rows of freshly decoded positions from `position` on, shape (count, embedding)."""
        if position != self.end:
            self._lose(position)
        wanted = self._count + rows.shape[0]
        if wanted > self._rows.shape[0]:
            grown = np.empty((max(wanted, 2 * self._rows.shape[0], 8), rows.shape[1]), dtype=np.float32)
            grown[: self._count] = self._rows[: self._count]
            self._rows = grown
        self._rows[self._count : wanted] = rows
        self._count = wanted

    def feed_from(self) -> int:
        """The first position to feed next. Where hidden rows before it are lost the draft context starts over behind the gap."""
        if self._epoch != self._model.epoch:
            self._epoch, self.start, self.fed = self._model.epoch, 0, 0
        if self._first > self.fed or (self._first > 0 and self.fed == 0):
            self._model.forget(self.index, 0)
            self.start = self.fed = self._first + 1
        return self.fed

    def hidden_before(self, position: int) -> NDArray[np.float32] | None:
        """The hidden row that position's draft row takes. None, which stands for zeros, before the very first and where a
        shared prefix was left."""
        index = position - 1 - self._first
        return self._rows[index] if index >= 0 else None

    def was_fed(self, end: int) -> None:
        """Positions up to `end` are in the draft context now; of their hidden rows only the last can still be asked for."""
        self.fed = end
        drop = min(max(end - 1 - self._first, 0), self._count)
        if drop:
            self._rows[: self._count - drop] = self._rows[drop : self._count].copy()
            self._first, self._count = self._first + drop, self._count - drop

    def cut(self, length: int) -> None:
        """The sequence was cut to its first `length` positions."""
        if length < self.fed:
            self._model.forget(self.index, length)
            self.fed = length
            if length <= self.start:
                self.start = self.fed = 0
        if length < self.end:
            self._count = max(0, length - self._first)
            if not self._count:
                self._first = length

    def clear(self) -> None:
        if self.fed or self._count or self._first:
            self._model.forget(self.index, 0)
            self.start = self.fed = self._first = self._count = 0
        self._rows = np.empty((0, self._model.embedding_length), dtype=np.float32)

    def share(self, source: DraftRows, length: int) -> None:
        """Takes over what `source` has of its first `length` positions. This one must be clear."""
        source.feed_from()
        self._epoch, self.start, self.fed = source._epoch, source.start, min(source.fed, length)
        if self.fed <= self.start:
            self.start = self.fed = 0
        else:
            self._model.share(source.index, self.index, self.fed)
        self._first = min(source._first, length)
        self._count = max(0, min(source.end, length) - source._first)
        self._rows = source._rows[: self._count].copy()

    def _lose(self, position: int) -> None:
        """Hidden rows before `position` were never seen (a state that came from elsewhere)."""
        if self.fed > position:
            self.cut(position)
        self._first, self._count = position, 0
