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
from engines.runtime.step_clock import StepClock

if TYPE_CHECKING:
    from engines.runtime.planner import Row

log = logging.getLogger("hydra.engine.speculation")

# Sizes of steps that are timed beside those of one sequence and of all, as long as there is time: kernels change with them, and
# a step of nine rows may take twice as long as one of eight.
WARM_UP_ROWS = (8, 9, 16, 24, 32, 48, 64, 96, 128)
WARM_UP_S, WARM_UP_DRAFTS_S = 1.5, 0.5
WARM_UP_REPEATS, WARM_UP_SLOW_S = 4, 0.15
TOKEN_STRIDE = 7919
# After so many steps of single tokens it is looked whether much has piled up for the head.
BACKLOG_STEPS = 32


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
        self.clock = StepClock(apart=config.gpu_layers != 0)
        self._llama = llama
        self._slots, self._sequences = config.slots, config.decoding_sequences
        self._rows = config.outputs
        self._drafting_s: float | None = None
        # Drafted tokens that no step verifies, with the place in their generation's text where they would stand.
        self._peeks: list[tuple[Generation, int, int]] = []
        # What all that decode ask for, so that nobody's own bound is the others'.
        self._asked = 0
        # Whether the step is one of single tokens, whose hidden rows are taken once the tokens are drawn.
        self._is_single = False
        self._unfed_steps = 0
        self._cache = cache
        self._equal_lengths = llama.has_recurrent_state
        self.head: DraftModel | None = None
        self._drafter: Drafter = PromptLookup()
        if has_head and config.wants_draft_head:
            self.head = self._drafter = DraftModel(llama, config, threads)
            sequences = [slot.sequence for slot in cache.slots]
            for sequence in (*sequences, *(checkpoint.sequence for checkpoint in cache.checkpoints)):
                sequence.draft = DraftRows(sequence.index, self.head)
                self.head.holders.append(sequence.draft)
        log.info("drafts of up to %d tokens by %s", self.length.longest, "the model's head" if self.head else "lookup")

    def warm_up(self, batch: Batch) -> None:
        """Times the steps that a choice is between, of one sequence and of as many as there are slots, then others, and the head:
        until a request's own steps tell better, every choice of a length rests on these."""
        ends_at = time.monotonic() + WARM_UP_S
        lengths = range(1 + self.length.longest)
        shapes = [(sequences, 1 + length) for sequences in sorted({1, self._slots}) for length in lengths]
        each = 1 + self.length.longest
        shapes += [(rows, 1) if rows <= self._sequences else (rows // each, each) for rows in WARM_UP_ROWS]
        for sequences, rows in shapes:
            if 0 < sequences * rows <= min(self._rows, batch.capacity) and time.monotonic() < ends_at:
                self._time_step(batch, sequences, rows)
        if self.head is not None:
            self._time_drafts(self.head)

    def _time_drafts(self, head: DraftModel) -> None:
        """What drafts cost, one token of one sequence in any case: without a cost they would look free."""
        ends_at = time.monotonic() + WARM_UP_DRAFTS_S
        lengths = sorted({1, min(2, self.length.longest), self.length.longest})
        for sequences, length in ((sequences, length) for sequences in sorted({1, self._slots}) for length in lengths):
            if (sequences, length) == (1, 1) or time.monotonic() < ends_at:
                seconds = head.time_draft(sequences, length, self.clock)
                if seconds is not None:
                    self.length.drafting.expect(sequences, length, seconds)

    def _time_step(self, batch: Batch, sequences: int, rows: int) -> None:
        """A step of `rows` rows of each sequence. The last of a few alike counts: a device prepares kernels, buffers and graphs
        for each size, and the first may read experts from the disk."""
        seconds = 0.0
        for repeat in range(WARM_UP_REPEATS):
            batch.clear()
            for seq in range(sequences):
                # Tokens of all kinds, since equal ones would wake the same few experts.
                tokens = [(seq * rows + row) * TOKEN_STRIDE % self._llama.vocabulary.size for row in range(rows)]
                batch.add(seq, 0, tokens, outputs=rows)
            started = self.clock()
            status = self._llama.decode(batch)
            self._llama.synchronize()
            seconds = self.clock() - started
            for seq in range(sequences):
                self._llama.clear(seq)
            if status == 0 and repeat and seconds > WARM_UP_SLOW_S:
                break  # where steps take that long nothing is prepared for their shape
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
        self._drafting_s = None
        if self._peeks:
            self._peeks = []
        if not self._asked and self.length.rests(len(decoding)):
            return {}  # most steps where drafts do not pay: nothing else is looked at
        if self.length.is_due(len(decoding)):
            self._decide([slot.generation for slot in decoding if slot.generation is not None])
        count, asked = self.length.next(), self._asked
        if not (count or asked or self.length.peeks):
            return {}
        # No more than anybody may use.
        usable = max(slot.generation.longest_draft for slot in decoding if slot.generation is not None)
        longest = min(usable, self.length.longest, self._cache.ledger.free // len(decoding) - 1)
        if longest <= 0:
            return {}
        count = min(max(count, asked), longest)
        if count == 0:
            self._look(decoding)
            return {}
        drafts = self._draft(decoding, count)
        return _filled(drafts, decoding) if self._equal_lengths else _cut(drafts)

    def _decide(self, generations: list[Generation]) -> None:
        longest = self.length.longest
        bounds = [longest if g.draft_max is None else min(longest, g.draft_max) for g in generations]
        made_tokens = fmean(generation.new_tokens for generation in generations)
        self._asked = min(generation.draft_min for generation in generations)
        self.length.decide([generation.acceptance for generation in generations], made_tokens, bounds)

    def _look(self, decoding: list[Slot]) -> None:
        """Drafts a token each that is not verified but compared with what is drawn."""
        started = self.clock()
        drafts = self._drafter.propose(decoding, 1)
        self.length.looked(self.clock() - started)
        self._peeks = [
            (slot.generation, len(slot.generation.tokens), draft[0])
            for slot, draft in drafts.items()
            if slot.generation is not None and draft
        ]

    def _draft(self, decoding: list[Slot], count: int) -> dict[Slot, tuple[int, ...]]:
        started = self.clock()
        drafts = self._drafter.propose(decoding, count)
        if drafts and not (self.head and self.head.fed_backlog):
            self._drafting_s = self.clock() - started
        return drafts

    # --- after a step ---------------------------------------------------------------------------

    def hidden_rows(self, rows: Sequence[Row], count: int) -> NDArray[np.float32] | None:
        """Those of the step's `count` batch rows, after waiting until it is computed. None where no head wants them, there are
        none (of an image), or `drawn` will note them, so that nobody waits before there is nothing else to do."""
        self._is_single = all(map(_is_next_token, rows))
        if self.head is None or self._is_single or rows[0].span is not None:
            return None
        return self.head.target_rows(count)

    def drawn(self, rows: Sequence[Row]) -> None:
        """The step's tokens are drawn."""
        if self._is_single and self.head is not None:
            self.head.note_single(rows)

    def stepped(self, rows: Sequence[Row], seconds: float) -> None:
        """A step took so long by `clock`; feeds what has piled up for the head meanwhile."""
        if self._is_single:
            self.length.stepped(len(rows), len(rows), seconds, self._drafting_s)
        elif all(row.draws and row.count == 1 + len(row.draft) for row in rows):
            self.length.stepped(len(rows), sum(row.count for row in rows), seconds, self._drafting_s)
        else:
            self.length.interrupted()
        for generation, place, token in self._peeks:
            if len(generation.tokens) > place:
                self.length.saw(generation.acceptance, 1, int(generation.tokens[place] == token))
        if self._peeks:
            self._peeks = []
        self._unfed_steps += 1
        if self.head is not None and (not self._is_single or self._unfed_steps >= BACKLOG_STEPS):
            self._unfed_steps = 0
            self.head.feed_backlog(rows)

    def judged(self, generation: Generation, offered: int, accepted: int) -> None:
        """What became of a draft of `offered` tokens."""
        generation.drafts += 1
        generation.drafted_tokens += offered
        generation.accepted_tokens += accepted
        self.length.saw(generation.acceptance, offered, accepted)


def _is_next_token(row: Row) -> bool:
    """Whether it is the token drawn last, no part of a prompt, with no draft behind it, and draws the next."""
    generation = row.slot.generation
    if row.count != 1 or not row.draws or generation is None or generation.forced:
        return False
    return len(generation.tokens) > len(generation.prompt)


def _cut(drafts: dict[Slot, tuple[int, ...]]) -> dict[Slot, tuple[int, ...]]:
    """Drafts no longer than each may be."""
    return {
        slot: draft[: slot.generation.longest_draft] for slot, draft in drafts.items() if slot.generation is not None
    }


def _filled(drafts: dict[Slot, tuple[int, ...]], decoding: list[Slot]) -> dict[Slot, tuple[int, ...]]:
    """Drafts of one length for all, as a step of unequal rows would fall into several graphs: the shorter ones repeat. Of those
    that are longer than a generation may use, the rest is not looked at."""
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
