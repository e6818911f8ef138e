"""Who gets a slot: the order of the line, the cells that there are, a prefix worth waiting for; and who gives one back."""

from __future__ import annotations

import logging
import time

from engines.config import EngineConfig
from engines.errors import DeadlineExceeded, DecodeFailed
from engines.runtime.generation import Generation
from engines.runtime.landing import Landing
from engines.runtime.llama import Llama
from engines.runtime.metrics import EngineMetrics
from engines.runtime.outbox import Outbox
from engines.runtime.prefix import PrefixCache, Source
from engines.runtime.rates import Rates
from engines.runtime.sampler import Sampler
from engines.runtime.slots import Slot
from engines.runtime.waiting import Turns, WaitingLine

log = logging.getLogger("hydra.engine.core")

RETURN_CELLS = 32


class Admission:
    """Used by the core's thread, at the start of each step."""

    def __init__(
        self,
        llama: Llama,
        config: EngineConfig,
        cache: PrefixCache,
        waiting: WaitingLine,
        landing: Landing,
        outbox: Outbox,
        metrics: EngineMetrics,
        rates: Rates,
    ) -> None:
        self._llama = llama
        self._config = config
        self._cache = cache
        self._waiting = waiting
        self._landing = landing
        self._outbox = outbox
        self._metrics = metrics
        self._rates = rates

    def drop_ended(self) -> None:
        """Takes out whoever cancelled or ran into its deadline, waiting or running."""
        now = time.monotonic()
        ended = self._waiting.take_ended(now) + self._landing.take_ended(now)
        for slot in self._cache.busy:
            running = slot.generation
            if running and (running.cancelled or now > running.deadline_at):
                slot.release()
                ended.append(running)
        for generation in ended:
            self._outbox.end(generation, error=None if generation.cancelled else _late(generation))

    def admit(self) -> None:
        """Gives idle slots to the line, in its order, as long as the cells that are needed can be had."""
        if not len(self._waiting):
            return
        turns = Turns(slot.generation for slot in self._cache.slots if slot.generation)
        for generation in self._waiting.in_order(turns):
            raw_logits = self.wants_raw_logits(generation)
            if not any(slot.idle and slot.has_raw_logits == raw_logits for slot in self._cache.slots):
                self._metrics.wait_steps.labels("slot").inc()
                continue
            # Who had to give way comes back with some room to spare, or it would have to give way again at once.
            needed = len(generation.tokens) + 1 + RETURN_CELLS * generation.preemptions
            source = Source()
            if generation.reuse_prefix:
                source = self._cache.best_source(generation.tokens, generation.spans, generation.tenant)
            needed = min(needed, self._config.context_tokens) - self._cache.shared_with_running(source)
            if self._cache.promised_cells() + needed > self._config.cells:
                # Nobody overtakes here, or a long prompt would never find the cache empty enough.
                self._metrics.wait_steps.labels("cells").inc()
                return
            led = self._cache.leader(generation, source.length) or self._landing.leads(generation, source.length)
            if generation.reuse_prefix and led:
                self._metrics.wait_steps.labels("prefix").inc()
                continue
            slot = self._cache.best_slot(source, raw_logits=raw_logits, session=generation.session)
            if slot is not None:
                turns.began(generation)
                if not self._landing.takes(generation, slot, source):
                    self._start(generation, slot, source)

    def wants_raw_logits(self, generation: Generation) -> bool:
        """Which kind of slot it needs."""
        return not self._config.samples_on_device or generation.needs_raw_logits(self._config.device_candidates)

    def _start(self, generation: Generation, slot: Slot, source: Source) -> None:
        self._waiting.remove(generation)
        generation.cuts = [cut for cut in generation.cuts if cut >= self._cache.checkpoint_min_tokens]
        try:
            self._cache.prepare(slot, source)
        except Exception:
            # It stands in no line and no slot now, so nobody else would end it.
            log.exception("a prefix could not be brought into its slot")
            slot.sequence.clear()
            self._outbox.end(generation, error=DecodeFailed("The engine could not bring the prompt's prefix back."))
            return
        slot.begin(generation)
        if generation.started_at is None:
            generation.started_at = time.monotonic()
            self._metrics.queue_seconds.observe(generation.started_at - generation.queued_at)
        if generation.prompts_before_s is None:
            generation.prompts_before_s = self._rates.prompts_s
        if generation.sampler is None:
            generation.sampler = Sampler(generation.params, self._llama, generation.constraint)
            generation.sampler.see_prompt(generation.seen_by_penalties)
            generation.sampler.skip(generation.draws)

    def begin_moved(self, slot: Slot, generation: Generation) -> None:
        """A generation that came from another engine goes on in the slot that has its state, whoever stands in the line. Where
        that is of the wrong kind it waits for another one, as if it had given way."""
        if slot.has_raw_logits != self.wants_raw_logits(generation):
            self._waiting.put_back(generation)
            return
        slot.begin(generation)
        generation.prompts_before_s = self._rates.prompts_s

    def yield_cells(self) -> None:
        """When the cache is too full for a token each, the youngest generation gives way and starts over later."""
        if self._cache.ledger.free >= len(self._cache.slots):
            return
        while not self._cache.make_room(sum(slot.decoding for slot in self._cache.busy)):
            busy = [(slot.generation.queued_at, slot) for slot in self._cache.busy if slot.generation]
            self._preempt(max(busy, key=lambda entry: entry[0])[1])

    def _preempt(self, slot: Slot) -> None:
        """Puts a running generation back to the head of the line. Its tokens are the truth, so its text goes on unbroken."""
        assert slot.generation is not None
        slot.generation.preemptions += 1
        self._metrics.preemptions.inc()
        self.give_up_slot(slot)
        slot.sequence.clear()

    def give_up_slot(self, slot: Slot) -> None:
        """The generation waits for another slot; what was computed of it can be reused."""
        generation = slot.generation
        assert generation is not None
        slot.release()
        self._waiting.put_back(generation)


def _late(generation: Generation) -> DeadlineExceeded:
    what = "waited" if generation.started_at is None else "ran"
    return DeadlineExceeded(f"The request {what} until its deadline.", hint="Ask for fewer tokens, or add engines.")
