"""What a decoded step gives: drawn tokens, ends of answers, and generations that cannot go on where they run."""

from __future__ import annotations

import time
from collections.abc import Callable

from engines.config import EngineConfig
from engines.errors import ConstraintFailed, DecodeFailed, EngineError
from engines.runtime.candidates import NoLogits, NoneAllowed
from engines.runtime.generation import Generation
from engines.runtime.llama import Llama
from engines.runtime.metrics import EngineMetrics
from engines.runtime.outbox import Outbox
from engines.runtime.planner import Row
from engines.runtime.sampler import TokenLogprob
from engines.runtime.slots import Slot
from engines.runtime.speculation import Speculation
from engines.runtime.text import NOTHING


class Drawing:
    """Used by the core's thread. `fail` ends a slot's generation with an error; `give_up_slot` puts it back into the line."""

    def __init__(
        self,
        llama: Llama,
        config: EngineConfig,
        outbox: Outbox,
        metrics: EngineMetrics,
        speculation: Speculation | None,
        fail: Callable[[Slot, EngineError], None],
        give_up_slot: Callable[[Slot], None],
    ) -> None:
        self._llama = llama
        self._vocabulary = llama.vocabulary
        self._config = config
        self._outbox = outbox
        self._metrics = metrics
        self._speculation = speculation
        self._fail = fail
        self._give_up_slot = give_up_slot
        self._drawn = 0

    def count_tokens(self) -> None:
        """Adds what was drawn since the last call to the metrics; once a step, since each call takes some microseconds."""
        if self._drawn:
            self._metrics.predicted_tokens.inc(self._drawn)
            self._drawn = 0

    def take_tokens(self, row: Row) -> None:
        """Draws the next token, and behind each token of the draft as long as that is the one that was drawn, and it may have
        a draft that long."""
        slot, generation = row.slot, row.slot.generation
        assert generation is not None
        if not row.draft:
            self._take_token(slot, generation, row.last)
            return
        offered, accepted = min(len(row.draft), generation.longest_draft), 0
        while self._take_token(slot, generation, row.last - len(row.draft) + accepted):
            if accepted == offered or generation.tokens[-1] != row.draft[accepted]:
                break
            accepted += 1
        if self._speculation:
            if offered:
                self._speculation.judged(generation, offered, accepted)
            slot.sequence.take_back(len(generation.tokens) - 1)

    def _take_token(self, slot: Slot, generation: Generation, batch_row: int) -> bool:
        """Draws from a row of the batch. False when the generation does not go on here."""
        try:
            token, logprob = self._draw(slot, generation, batch_row)
        except NoLogits as error:
            self._fail(slot, DecodeFailed(f"The model gave no usable result: {error}."))
            return False
        except NoneAllowed:
            self._move_to_whole_rows(slot, generation)
            return False
        except EngineError as error:
            # The constraint cannot go on: the request's own fault, and its alone.
            self._fail(slot, error)
            return False
        generation.tokens.append(token)
        self._drawn += 1
        if generation.first_token_at is None:
            generation.first_token_at = time.monotonic()
            self._metrics.first_token_seconds.observe(generation.first_token_at - generation.queued_at)
        if self._ends(slot, generation, token, logprob):
            return False
        if not generation.stops:
            self._outbox.token(generation, token, self._vocabulary, logprob)
        return True

    def _draw(self, slot: Slot, generation: Generation, batch_row: int) -> tuple[int, TokenLogprob | None]:
        sampler = generation.sampler
        assert sampler is not None
        if generation.forced:
            token = generation.forced.popleft()
            sampler.take(token)
            return token, None
        if slot.has_raw_logits:
            token, logprob = sampler.draw_from_logits(self._llama.logits(batch_row))
        else:
            token, logprob = sampler.draw_from_candidates(*self._llama.candidates(batch_row)), None
        if generation.thinking_budget is not None:
            generation.forced.extend(generation.thinking_budget.observe(token) or ())
        return token, logprob

    def _move_to_whole_rows(self, slot: Slot, generation: Generation) -> None:
        """None of the device's candidates may come next: the generation goes on where whole rows are, its text unbroken."""
        if not self._config.whole_row_sequences:
            error = ConstraintFailed("The answer's form allows none of the likeliest tokens.")
            error.hint = "Start the engine with whole_vocabulary_slots of at least 1."
            self._fail(slot, error)
            return
        generation.needs_whole_rows = True
        self._give_up_slot(slot)

    def _ends(self, slot: Slot, generation: Generation, token: int, logprob: TokenLogprob | None) -> bool:
        """Ends the generation if this token does. Text decides only where there are stop strings, so only then is it made now."""
        is_end = token in self._vocabulary.end_tokens
        is_full = generation.new_tokens >= generation.max_new_tokens
        is_full |= len(generation.tokens) >= self._config.context_tokens
        if not (is_end or is_full or generation.stops):
            return False
        self._outbox.write()
        text = generation.text
        released = NOTHING if is_end else text.feed(self._vocabulary.pieces[token], logprob)
        if not (is_end or is_full or text.stopped):
            self._outbox.say(generation, released)
            return False
        if not text.stopped:
            released = released.with_more(text.finish())
        slot.release()
        self._outbox.end(generation, released, "stop" if is_end or text.stopped else "length")
        return True
