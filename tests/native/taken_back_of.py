"""Logits of steps of a few tokens, parts of which are taken back, as a process that may use another llama.cpp: `… MODEL OUT`."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np

from engines.runtime.llama import Batch
from tests.native.small_engine import BATCH_TOKENS, small_llama

STREAMS, STEPS, LONGEST = 4, 60, 4


def logits(model: Path) -> np.ndarray:
    """One row for each token of each step, shape (rows, vocabulary)."""
    llama = small_llama(model, speculation="auto", draft_tokens=LONGEST)
    random = np.random.default_rng(7)
    done = [0] * STREAMS
    streams: list[int] = []
    rows: list[np.ndarray] = []
    for step in range(STEPS):
        batch = Batch(BATCH_TOKENS)
        # First a prompt for each; then steps of one token between longer ones, of some of the streams, often the same as before.
        count = 20 if step < STREAMS else 1 if step % 5 in (0, 3, 4) else int(random.integers(2, LONGEST + 2))
        if step <= STREAMS or step % 5 in (0, 1):
            streams = [step] if step < STREAMS else sorted(random.permutation(STREAMS)[: step % STREAMS + 1].tolist())
        for seq in streams:
            tokens = random.integers(1, llama.vocabulary.size - 1, count).tolist()
            batch.add(seq, done[seq], tokens, outputs=min(count, LONGEST + 1))
            done[seq] += count
        assert llama.decode(batch) == 0
        llama.synchronize()
        shown = range(batch.count) if count < 20 else range(batch.count - LONGEST - 1, batch.count)
        rows += [llama.logits(row).copy() for row in shown]
        for seq in streams if 1 < count < 20 else ():
            back = int(random.integers(0, count))
            if back:
                done[seq] -= back
                assert llama.keep_prefix(seq, done[seq])
    llama.close()
    return np.stack(rows)


if __name__ == "__main__":
    np.save(sys.argv[2], logits(Path(sys.argv[1])))
