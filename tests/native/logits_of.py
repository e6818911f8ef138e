"""Logits of sequences that come and go in one cache, as a process that may use another llama.cpp: `python -m … MODEL OUT`."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from engines.runtime.llama import Batch
from tests.native.small_engine import BATCH_TOKENS, SEQUENCES, small_llama


def steps() -> Iterator[tuple[str, list[tuple[int, int]]]]:
    """What happens: sequences and how many tokens each goes on by, or those that leave, or take over what another one holds."""
    for seq in range(SEQUENCES):
        yield from [("feed", [(seq, 200)])] * 3
    yield from [("feed", [(seq, 1) for seq in range(SEQUENCES)])] * 20
    # A prompt's chunk beside those that decode, before and behind them, longer than a tile of rows.
    for others in (range(1, SEQUENCES), range(4)):
        yield "feed", [*((seq, 1) for seq in others if seq), (0, 90)]
        yield "feed", [(5, 70), *((seq, 1) for seq in others if seq != 5)]
    # Their places are taken by others, out of order and in pieces.
    yield "clear", [(1, 0), (4, 0)]
    yield from (("feed", [(seq, 300)]) for seq in (4, 1, 4))
    yield from [("feed", [(seq, 1) for seq in range(SEQUENCES) if seq != 2])] * 10
    yield "feed", [(2, 100)]
    yield "feed", [(7, 64), (0, 64)]
    yield "clear", [(seq, 0) for seq in range(4)]
    # What is left lies at the far end.
    yield from [("feed", [(seq, 1) for seq in range(4, SEQUENCES)])] * 10
    # Beginnings that two hold until both go on, together or one after the other.
    yield "share", [(1, 6), (2, 5), (3, 5)]
    yield from [("feed", [(seq, 1) for seq in (1, 6, 2, 7)])] * 3
    yield from [("feed", [(seq, 1) for seq in (5, 3)])] * 3
    yield from [("feed", [(seq, 1) for seq in range(1, SEQUENCES)])] * 5


def logits(model: Path) -> np.ndarray:
    """One row for each sequence of each step, shape (rows, vocabulary)."""
    llama = small_llama(model)
    random = np.random.default_rng(7)
    done = dict.fromkeys(range(SEQUENCES), 0)
    rows: list[np.ndarray] = []
    for kind, parts in steps():
        batch = Batch(BATCH_TOKENS)
        for seq, count in parts:
            if kind == "clear":
                llama.clear(seq)
                done[seq] = 0
            elif kind == "share":
                llama.share(count, seq, done[count])
                done[seq] = done[count]
            else:
                tokens = random.integers(1, llama.vocabulary.size - 1, count)
                batch.add(seq, done[seq], [int(token) for token in tokens], outputs=1)
                done[seq] += count
        if kind == "feed":
            assert llama.decode(batch) == 0
            llama.synchronize()
            ends = np.cumsum([count for _, count in parts]) - 1
            rows += [llama.logits(int(end)).copy() for end in ends]
    llama.close()
    return np.stack(rows)


if __name__ == "__main__":
    np.save(sys.argv[2], logits(Path(sys.argv[1])))
