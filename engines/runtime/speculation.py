"""Speculative decoding: drafts of a few tokens that one step of the target verifies.

The next token is drawn from the target at every row as without a draft; a drafted token counts only if it is the one drawn.
So greedy text is the same, and sampled text has the same distribution. After each step a sequence is rolled back to what
counts. The draft head and its lengths are in modules of their own.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from statistics import fmean
from typing import TYPE_CHECKING, Protocol

import llama_cpp
import numpy as np
from numpy.typing import NDArray

from engines.config import EngineConfig
from engines.errors import ModelLoadFailed
from engines.runtime.draft_length import DraftLength
from engines.runtime.draft_model import DraftModel
from engines.runtime.draft_rows import DraftRows
from engines.runtime.generation import Generation
from engines.runtime.llama import Batch, Llama
from engines.runtime.prefix import PrefixCache
from engines.runtime.prompt_lookup import PromptLookup
from engines.runtime.slots import Slot

if TYPE_CHECKING:
    from engines.runtime.planner import Row

log = logging.getLogger("hydra.engine.speculation")

# Sizes of steps that are timed beside those of one sequence, as long as there is time: kernels change with them, and a
# step of nine rows may take twice as long as one of eight.
WARM_UP_ROWS = (8, 9, 16, 24, 32, 48, 64, 96, 128)
WARM_UP_S = 1.5
WARM_UP_REPEATS = 4
TOKEN_STRIDE = 7919


class Drafter(Protocol):
    """Makes drafts; `count` tokens for each slot, or fewer where it knows no more."""

    def propose(self, slots: list[Slot], count: int) -> dict[Slot, tuple[int, ...]]: ...


class Speculation:
    """One engine's drafts: who makes them, how long they are, what became of them. Used by the core's thread."""

    def __init__(self, llama: Llama, cache: PrefixCache, config: EngineConfig, threads: int) -> None:
        """Raises ModelLoadFailed when the configuration asks for a draft head that the model does not have."""
        has_head = llama_cpp.llama_model_n_layer_nextn(llama.model) > 0
        if config.speculation == "mtp" and not has_head:
            raise ModelLoadFailed("the model has no draft head (NextN); use speculation lookup, auto or none")
        self.length = DraftLength(config.longest_draft)
        self._llama = llama
        self._sequences = config.decoding_sequences
        self._rows = config.outputs
        self._drafting_s: float | None = None
        # Drafted tokens that no step verifies, with the place in their generation's text where they would stand.
        self._peeks: list[tuple[Generation, int, int]] = []
        self._cache = cache
        self._equal_lengths = llama.has_recurrent_state
        self.head: DraftModel | None = None
        self._drafter: Drafter = PromptLookup()
        if has_head and config.wants_draft_head:
            self.head = self._drafter = DraftModel(llama, config, threads)
            sequences = [slot.sequence for slot in cache.slots]
            for sequence in (*sequences, *(checkpoint.sequence for checkpoint in cache.checkpoints)):
                sequence.draft = DraftRows(sequence.index, self.head)
        log.info("drafts of up to %d tokens by %s", self.length.longest, "the model's head" if self.head else "lookup")

    def warm_up(self, batch: Batch) -> None:
        """Times steps of few and of many rows, and the head: the first choices of a length rest on these."""
        ends_at = time.monotonic() + WARM_UP_S
        for rows in [*range(1, 2 + self.length.longest), *WARM_UP_ROWS]:
            if rows <= min(self._rows, batch.capacity) and time.monotonic() < ends_at:
                self._time_step(batch, rows)
        if self.head is not None:
            for sequences in sorted({1, min(4, self._sequences)}):
                self.length.drafting.saw(sequences, 1, self.head.time_draft(sequences))

    def _time_step(self, batch: Batch, rows: int) -> None:
        """The last of a few alike counts: a device prepares kernels, buffers and graphs for each size.

        Rows beyond one draft's lie in sequences of their own, as a step's do: one each while there are enough.
        """
        each = 1 if self.length.longest + 1 < rows <= self._sequences else min(rows, self.length.longest + 1)
        seconds = 0.0
        for _ in range(WARM_UP_REPEATS):
            batch.clear()
            for seq in range(rows // each):
                # Tokens of all kinds, since equal ones would wake the same few experts.
                tokens = [(seq * each + row) * TOKEN_STRIDE % self._llama.vocabulary.size for row in range(each)]
                batch.add(seq, 0, tokens, outputs=each)
            started = time.monotonic()
            status = self._llama.decode(batch)
            self._llama.synchronize()
            seconds = time.monotonic() - started
            for seq in range(rows // each):
                self._llama.clear(seq)
            if status != 0:
                log.warning("a step of %d rows was refused in the warm-up (llama_decode: %d)", batch.count, status)
                return
        self.length.steps.expect(batch.count, seconds)

    def close(self) -> None:
        if self.head is not None:
            self.head.close()

    # --- before a step --------------------------------------------------------------------------

    def propose(self, decoding: list[Slot]) -> dict[Slot, tuple[int, ...]]:
        """Drafts for the next step, by slot; empty for a step without. There must be a free cell per slot beforehand."""
        # Of a step that failed, which nobody was told of.
        self._drafting_s, self._peeks = None, []
        generations = [slot.generation for slot in decoding if slot.generation is not None]
        room = self._cache.ledger.free // max(len(decoding), 1) - 1
        longest = min([room, self.length.longest, *(generation.longest_draft for generation in generations)])
        if longest <= 0:
            return {}
        asked = max(generation.draft_min for generation in generations)
        made_tokens = fmean(generation.new_tokens for generation in generations)
        chosen = self.length.choose([generation.acceptance for generation in generations], longest, made_tokens)
        count = max(chosen, min(asked, longest))
        if count == 0:
            if self.length.peeks:
                drafts = self._draft(decoding, 1)
                self._peeks = [
                    (slot.generation, len(slot.generation.tokens), draft[0])
                    for slot, draft in drafts.items()
                    if slot.generation is not None and draft
                ]
            return {}
        drafts = self._draft(decoding, count)
        return _filled(drafts, decoding) if self._equal_lengths else drafts

    def _draft(self, decoding: list[Slot], count: int) -> dict[Slot, tuple[int, ...]]:
        started = time.monotonic()
        drafts = self._drafter.propose(decoding, count)
        if drafts and not (self.head and self.head.fed_backlog):
            self._drafting_s = time.monotonic() - started
        return drafts

    # --- after a step ---------------------------------------------------------------------------

    def hidden_rows(self, count: int) -> NDArray[np.float32] | None:
        """Those of the step's `count` batch rows, None where no head wants them. Waits until the step is computed."""
        return self.head.target_rows(count) if self.head is not None else None

    def stepped(self, rows: Sequence[Row], seconds: float) -> None:
        """A step took so long; feeds what has piled up for the head meanwhile."""
        if all(row.draws and row.count == 1 + len(row.draft) for row in rows):
            self.length.stepped(len(rows), sum(row.count for row in rows), seconds, self._drafting_s)
        else:
            self.length.interrupted()
        for generation, place, token in self._peeks:
            if len(generation.tokens) > place:
                self.length.saw(generation.acceptance, 1, int(generation.tokens[place] == token))
        self._drafting_s, self._peeks = None, []
        if self.head is not None:
            self.head.feed_backlog([row.slot for row in rows])

    def judged(self, generation: Generation, offered: int, accepted: int) -> None:
        """What became of a draft of `offered` tokens."""
        generation.drafts += 1
        generation.drafted_tokens += offered
        generation.accepted_tokens += accepted
        self.length.saw(generation.acceptance, offered, accepted)


def _filled(drafts: dict[Slot, tuple[int, ...]], decoding: list[Slot]) -> dict[Slot, tuple[int, ...]]:
    """Drafts of one length for all, as a step of unequal rows would fall into several graphs: the shorter ones repeat."""
    longest = max((len(draft) for draft in drafts.values()), default=0)
    if not longest:
        return {}
    filled = {}
    for slot in decoding:
        draft = drafts.get(slot, ())
        assert slot.generation is not None
        last = draft[-1] if draft else slot.generation.tokens[-1]
        filled[slot] = draft + (last,) * (longest - len(draft))
    return filled
