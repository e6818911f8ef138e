"""What a draft context holds of one sequence, and what it must still be fed before it can draft.

The draft head's row of position p takes the token at p and the target's hidden row of position p - 1. Rows are fed late, all
at once, when somebody wants a draft: a head that is switched off then costs a copy of a few kilobytes a token and no more.
"""

from __future__ import annotations

from collections import deque
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
        # Hidden rows of positions [first, first + count) in pieces of shape (n, embedding), views of what a step left; the last
        # row is the pending one.
        self._first = self._count = 0
        self._pieces: deque[NDArray[np.float32]] = deque()

    @property
    def end(self) -> int:
        """The position behind the last hidden row: everything before it and at it can be fed."""
        return self._first + self._count

    @property
    def kept(self) -> int:
        """Hidden rows that wait here."""
        return self._count

    @property
    def model(self) -> DraftModel:
        return self._model

    def hidden(self) -> NDArray[np.float32]:
        """The hidden rows that wait here, in order, shape (kept, embedding)."""
        return np.concatenate(self._pieces)

    def resume(self, start: int, fed: int, first: int, hidden: NDArray[np.float32]) -> None:
        """Goes on where another engine's rows stood: positions [start, fed) are in the draft context already, `hidden` are
        the rows of `first` and on. This one must be clear."""
        self._epoch, self.start, self.fed = self._model.epoch, start, fed
        self._first, self._count = first, len(hidden)
        self._pieces.append(hidden)

    def note(self, position: int, rows: NDArray[np.float32]) -> None:
        """Takes over the hidden rows of freshly decoded positions from `position` on, shape (count, embedding), which nobody
        may write to any more."""
        if position != self._first + self._count:
            self._lose(position)
        self._pieces.append(rows)
        self._count += len(rows)

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
        if index < 0:
            return None
        row: NDArray[np.float32]
        if index == self._count - 1:
            row = self._pieces[-1][-1]
            return row
        row = self._joined()[index]
        return row

    def hidden_before_each(self, begin: int, end: int) -> NDArray[np.float32]:
        """The hidden rows that the draft rows of positions [begin, end) take, shape (end - begin, embedding)."""
        first = begin - 1 - self._first
        known = self._joined()[max(first, 0) : end - 1 - self._first]
        missing = end - begin - len(known)
        return np.concatenate([np.zeros((missing, known.shape[1]), dtype=np.float32), known]) if missing else known

    def _joined(self) -> NDArray[np.float32]:
        if len(self._pieces) > 1:
            joined = np.concatenate(self._pieces)
            self._pieces.clear()
            self._pieces.append(joined)
        return self._pieces[0]

    def was_fed(self, end: int) -> None:
        """Positions up to `end` are in the draft context now; of their hidden rows only the last can still be asked for."""
        self.fed = end
        drop = min(max(end - 1 - self._first, 0), self._count)
        self._first, self._count = self._first + drop, self._count - drop
        while drop:
            piece = self._pieces.popleft()
            if drop < len(piece):
                self._pieces.appendleft(piece[drop:])
            drop -= min(drop, len(piece))
        if self._count == 1:
            # Not to keep a whole prompt's rows for the sake of the last one.
            self._pieces = deque([self._pieces[0].copy()])

    def cut(self, length: int) -> None:
        """The sequence was cut to its first `length` positions."""
        if length < self.fed:
            self._model.forget(self.index, length)
            self.fed = length
            if length <= self.start:
                self.start = self.fed = 0
        if length < self.end:
            self._keep(max(0, length - self._first))
            if not self._count:
                self._first = length

    def clear(self) -> None:
        if self.fed or self._count or self._first:
            self._model.forget(self.index, 0)
            self.start = self.fed = self._first = self._count = 0
        self._pieces.clear()

    def share(self, source: DraftRows, length: int, tokens: list[int]) -> None:
        """Takes over what `source`, which has these tokens, has of its first `length` positions. This one must be clear."""
        self._model.make_shareable(source, tokens, length)
        source.feed_from()
        self._epoch, self.start, self.fed = source._epoch, source.start, min(source.fed, length)
        if self.fed <= self.start:
            self.start = self.fed = 0
        else:
            self._model.share(source.index, self.index, self.fed)
        self._first = min(source._first, length)
        self._pieces = source._pieces.copy()
        self._count = source._count
        self._keep(max(0, min(source.end, length) - source._first))

    def _lose(self, position: int) -> None:
        """Hidden rows before `position` were never seen (a state that came from elsewhere)."""
        if self.fed > position:
            self.cut(position)
        self._first, self._count = position, 0
        self._pieces.clear()

    def _keep(self, count: int) -> None:
        """Drops the last hidden rows, so that `count` are left."""
        drop = self._count - count
        self._count = count
        while drop:
            piece = self._pieces.pop()
            if drop < len(piece):
                self._pieces.append(piece[:-drop])
            drop -= min(drop, len(piece))
