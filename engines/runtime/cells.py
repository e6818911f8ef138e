"""Sequences of the unified cache and the cells they hold.

llama.cpp keeps one pool of cells; a copied prefix shares its cells, and a cell is free again when its last sequence drops
it. The ledger here counts the same way, because llama.cpp's C interface does not tell, and because a step that finds no
cell fails as a whole.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from collections.abc import Sequence as TokenSequence

import numpy as np
from numpy.typing import NDArray

from engines.runtime.draft_rows import DraftRows
from engines.runtime.llama import Llama
from engines.runtime.media_span import NO_SPANS, SpanMap
from engines.runtime.origin import NOBODY, Origin


def common_prefix(a: TokenSequence[object], b: TokenSequence[object]) -> int:
    """Length of the longest common prefix. Compares slices, which runs in C, and halves the range where they differ."""
    low, high = 0, min(len(a), len(b))
    while low < high:
        middle = (low + high + 1) // 2
        if a[low:middle] == b[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low


class CellLedger:
    """Reference counts of all cells of one context. Which id a cell has here says nothing about its place in memory."""

    def __init__(self, count: int) -> None:
        self.count = count
        self._holders = np.zeros(count, dtype=np.int32)
        self._free = array("i", range(count - 1, -1, -1))

    @property
    def free(self) -> int:
        return len(self._free)

    def take(self, count: int) -> array[int]:
        """Cells for newly decoded tokens. Raises ValueError beyond what is free: the plan of the step was wrong."""
        if count > len(self._free):
            raise ValueError(f"{count} cells wanted, {len(self._free)} are free")
        if count == 1:  # the next token of a stream that decodes, at every step
            self._holders[self._free[-1]] = 1
            return array("i", (self._free.pop(),))
        split = len(self._free) - count
        taken = self._free[split:]
        del self._free[split:]
        self._holders[np.frombuffer(taken, dtype=np.int32) if count else []] = 1
        return taken

    def share(self, cells: NDArray[np.int32]) -> None:
        self._holders[cells] += 1

    def drop(self, cells: NDArray[np.int32]) -> None:
        self._holders[cells] -= 1
        self._free.frombytes(cells[self._holders[cells] == 0].tobytes())

    def held_alone(self, cells: NDArray[np.int32]) -> int:
        """How many of these cells would become free if their one holder dropped them."""
        return int((self._holders[cells] == 1).sum())

    def distinct(self, holdings: Iterable[NDArray[np.int32]]) -> int:
        """How many different cells these sequences hold together."""
        seen = np.zeros(self.count, dtype=bool)
        for cells in holdings:
            seen[cells] = True
        return int(seen.sum())


class Sequence:
    """One sequence id of the context: the tokens whose state it holds, in position order, and their cells.

    Of an image it holds a cell and an id below 0 for each embedding, on fewer positions perhaps; where one ends or begins is in
    `spans`. It is never cut inside one.
    """

    def __init__(self, index: int, llama: Llama, ledger: CellLedger) -> None:
        self.index = index
        self.llama = llama
        self.tokens: list[int] = []
        self.spans: SpanMap = NO_SPANS
        # Whose tokens these are; of an empty sequence it says nothing.
        self.origin: Origin = NOBODY
        # What a draft head holds of it; follows every change.
        self.draft: DraftRows | None = None
        # Another one once something was dropped of it: what was appended since then stands as it was computed.
        self.life = 0
        self._cells = array("i")
        self._ledger = ledger

    @property
    def cells(self) -> NDArray[np.int32]:
        """A view of the cells in position order; valid until the sequence changes."""
        return np.frombuffer(self._cells, dtype=np.int32) if self._cells else np.empty(0, dtype=np.int32)

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def next_position(self) -> int:
        """The position of the token that would come next. Raises ValueError inside a span."""
        return self._position(len(self.tokens))

    def _position(self, length: int) -> int:
        return self.spans.position(length) if self.spans else length

    def append(self, tokens: list[int]) -> None:
        """Notes tokens that llama.cpp has just decoded behind the others."""
        self._cells.extend(self._ledger.take(len(tokens)))
        self.tokens += tokens

    def append_part_of_span(self, ids: list[int], spans: SpanMap) -> None:
        """Notes embeddings of a span, which is one of `spans`. What a draft head held before it is of no more use."""
        self.append(ids)
        self.spans = spans.begun(len(self.tokens))
        if self.draft is not None:
            self.draft.clear()

    def drop_part_of_span(self) -> None:
        """Cuts off a span that is not complete, which nobody could go on from."""
        self.cut(self.spans.whole(len(self.tokens)))

    def cut(self, length: int) -> None:
        """Keeps the first `length` tokens; everything goes where the memory cannot drop a suffix (recurrent state).

        Room for taking drafts back does not change that: outside of a draft llama.cpp would agree and be wrong.
        """
        if length < len(self.tokens):
            self._drop(length, possible=not self.llama.has_recurrent_state)

    def take_back(self, length: int) -> bool:
        """Drops what the last step decoded behind the first `length` tokens, at most a draft. False when that failed and
        everything is gone."""
        if length < len(self.tokens):
            self._drop(length, possible=True)
        return len(self.tokens) == length

    def _drop(self, length: int, *, possible: bool) -> None:
        if length > 0 and possible and self.llama.keep_prefix(self.index, self._position(length)):
            self._ledger.drop(self.cells[length:])
            self._cells = self._cells[:length]
            del self.tokens[length:]
            if self.spans:
                self.spans = self.spans.first(length)
            if self.draft is not None:
                self.draft.cut(length)
            self.life += 1
        else:
            self.clear()

    def clear(self) -> None:
        self.life += 1
        self.llama.clear(self.index)
        self._ledger.drop(self.cells)
        self.tokens, self._cells, self.spans, self.origin = [], array("i"), NO_SPANS, NOBODY
        if self.draft is not None:
            self.draft.clear()

    def share_prefix(self, source: Sequence, length: int) -> None:
        """Takes over the first `length` tokens of `source` without computing or copying. Clears this sequence first.

        With recurrent state `source` must end just there, since its state is the one that is shared.
        """
        self.clear()
        self.llama.share(source.index, self.index, source._position(length))
        self._cells = source._cells[:length]
        self._ledger.share(self.cells)
        self.tokens, self.origin = source.tokens[:length], source.origin
        if source.spans:
            self.spans = source.spans.first(length)
        if self.draft is not None and source.draft is not None:
            self.draft.share(source.draft, length, source.tokens)

    def load(
        self, state: NDArray[np.uint8], tokens: list[int], spans: SpanMap = NO_SPANS, origin: Origin = NOBODY
    ) -> bool:
        """Replaces the content by an exported state of `tokens` with `spans`. False, and empty, when llama.cpp refuses it."""
        self.clear()
        if len(tokens) > self._ledger.free or not self.llama.import_state(self.index, state):
            # After a refused import a hybrid's old recurrent state may survive; only a full removal is safe.
            self.llama.clear(self.index)
            return False
        self._cells = array("i", self._ledger.take(len(tokens)))
        self.tokens, self.spans, self.origin = list(tokens), spans, origin
        return True

    def receive(self, count: int) -> None:
        """Notes cells that an import has filled. Their tokens stay unknown until `received`, so nobody reuses them before."""
        self._cells.extend(self._ledger.take(count))

    def receive_shared(self, source: Sequence, count: int) -> None:
        """As `receive`, of an empty sequence: it holds the first `count` cells of `source` too."""
        self._cells = source._cells[:count]
        self._ledger.share(self.cells)

    def received(self, tokens: list[int]) -> None:
        """Ends an import: the cells received hold the state of `tokens`. Raises ValueError when the counts differ."""
        if len(tokens) != len(self._cells):
            raise ValueError(f"{len(tokens)} tokens for {len(self._cells)} cells")
        self.tokens = list(tokens)

    def cells_alone(self) -> int:
        """Cells that clearing this sequence would free."""
        return self._ledger.held_alone(self.cells)
