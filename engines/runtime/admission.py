"""Who gets a slot: the order of the line, the cells that there are, a prefix worth waiting for; and who gives one back."""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass

from engines.config import EngineConfig
from engines.errors import DeadlineExceeded, DecodeFailed
from engines.runtime.generation import Generation
from engines.runtime.landing import Landing
from engines.runtime.llama import Llama
from engines.runtime.metrics import EngineMetrics
from engines.runtime.outbox import Outbox
from engines.runtime.prefix import PrefixCache
from engines.runtime.prefix_search import Source
from engines.runtime.rates import Rates
from engines.runtime.sampler import Sampler
from engines.runtime.slots import Slot
from engines.runtime.waiting import Turns, WaitingLine

log = logging.getLogger("hydra.engine.core")

RETURN_CELLS = 32
# When fewer cells are free than all slots need for so many steps, but no more than this part of the cache, more are made ready.
SPARE_STEPS, LEAST_SPARE_SHARE = 64, 16


@dataclass(frozen=True)
class Look:
    """What a generation of the line found: the cells that it `needed`, and the `source` of its prefix; None where it waits for a
    longer one, which the slot's generation computes until it has `fork` tokens, or which lands (no slot)."""

    needed: int
    around: object
    source: Source | None
    slot: Slot | None = None
    fork: int = 0

    def holds(self, around: object) -> bool:
        """Whether it would find the same again: it waits, and nothing but the leader's prompt has gone on meanwhile."""
        if self.source is not None or around != self.around:
            return False
        return self.slot is None or len(self.slot.sequence) < self.fork


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
        # Of those who wait for a prefix: they are looked at anew once that can make a difference.
        self._looks: dict[Generation, Look] = {}
        self._spare_cells = min(SPARE_STEPS * len(cache.slots), config.cells // LEAST_SPARE_SHARE)

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
        looks, self._looks = self._looks, {}
        if not len(self._waiting):
            return
        turns = self._waiting.turns(slot.generation for slot in self._cache.slots if slot.generation)
        around, promised, open_kinds = self._around(), self._cache.promised_cells(), self._open_kinds()
        for generation in self._waiting.in_order(turns):
            raw_logits = self.wants_raw_logits(generation)
            if raw_logits not in open_kinds:
                self._metrics.wait_steps.labels("slot").inc()
                continue
            look = looks.get(generation)
            if look is None or not look.holds(around):
                look = self._look(generation, around)
            if look.source is None:
                self._looks[generation] = look
            if promised + look.needed > self._config.cells:
                # Nobody overtakes here, or a long prompt would never find the cache empty enough.
                self._metrics.wait_steps.labels("cells").inc()
                return
            if look.source is None:
                self._metrics.wait_steps.labels("prefix").inc()
                continue
            slot = self._cache.best_slot(look.source, raw_logits=raw_logits, session=generation.session)
            if slot is not None:
                self._begin(generation, slot, look.source, turns)
                promised, open_kinds = self._cache.promised_cells(), self._open_kinds()

    def _open_kinds(self) -> set[bool]:
        """Of which kinds of slots, with raw logits or without, there is one that may begin a generation."""
        return {slot.has_raw_logits for slot in self._cache.slots if slot.idle} if self._cache.free_slots else set()

    def _around(self) -> object:
        """Differs from an earlier one when somebody began, ended or wrote a first token, or a prefix came or went: all that
        counts but how far prompts are computed."""
        cache = self._cache
        slots = tuple((slot.generation, slot.decoding, slot.transfer) for slot in cache.slots)
        checkpoints = tuple(len(checkpoint.sequence) for checkpoint in cache.checkpoints)
        return cache.glance(), slots, checkpoints, frozenset(self._landing.coming())

    def _look(self, generation: Generation, around: object) -> Look:
        """Where its prefix is, which takes a comparison with all that is held, and whether it comes longer soon."""
        # Who had to give way comes back with some room to spare, or it would have to give way again at once.
        needed = len(generation.tokens) + 1 + RETURN_CELLS * generation.preemptions
        source = Source()
        if generation.reuse_prefix:
            source = self._cache.search.best_source(
                generation.tokens, generation.spans, generation.tenant, generation.session
            )
        needed = min(needed, self._config.context_tokens) - self._cache.shared_with_running(source)
        if not generation.reuse_prefix:
            return Look(needed, around, source)
        leader = self._cache.search.leader(generation, source.length)
        if leader is not None:
            return Look(needed, around, None, *leader)
        return Look(needed, around, None if self._landing.leads(generation, source.length) else source)

    def _begin(self, generation: Generation, slot: Slot, source: Source, turns: Turns) -> None:
        if not self._cache.may_take(slot, source):
            self._metrics.wait_steps.labels("leaving").inc()
            return
        turns.began(generation)
        if not self._landing.takes(generation, slot, source) and not self._returns(generation, slot, source):
            self._start(generation, slot, source)

    def _returns(self, generation: Generation, slot: Slot, source: Source) -> bool:
        """Whether it waits until its prefix is back from host memory."""
        if source.sequence is not None:
            return self._cache.moves.joins(generation, slot, source)
        entry = self._cache.entry_of(source)
        return entry is not None and self._cache.moves.returns(generation, slot, entry, source.length)

    def wants_raw_logits(self, generation: Generation) -> bool:
        """Which kind of slot it needs."""
        return not self._config.samples_on_device or generation.needs_raw_logits(self._config.device_candidates)

    def _start(self, generation: Generation, slot: Slot, source: Source) -> None:
        self._waiting.begin(generation)
        generation.cuts = [cut for cut in generation.cuts if cut >= self._cache.checkpoint_min_tokens]
        if generation.reuse_prefix:
            self._cache.search.cut_at_fork(generation, source.length)
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
        that is of the wrong kind, or as many run as may, it waits for another one, as if it had given way."""
        if slot.has_raw_logits != self.wants_raw_logits(generation) or not self._cache.free_slots:
            self._waiting.put_back(generation)
            return
        slot.begin(generation)
        generation.prompts_before_s = self._rates.prompts_s

    def yield_cells(self) -> None:
        """When the cache is too full for a token each, the youngest generation gives way and starts over later."""
        free, slots = self._cache.ledger.free, len(self._cache.slots)
        if free >= slots:
            if free < self._spare_cells:
                # Idle content is in host memory before anybody's next token needs its cells.
                self._cache.foresee(self._spare_cells)
            return
        while not self._cache.make_room(sum(slot.decoding for slot in self._cache.busy), at_once=True):
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
