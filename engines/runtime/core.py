"""The engine's core: one thread that owns the context and takes all generations forward, step by step.

Others call `submit`, `cancel`, `views` and `stop`; everything else runs on the core's thread. A step is: admit, plan the
batch, decode, sample, send. Prefill goes in chunks of at most `batch_tokens`, between everybody's next tokens.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections import Counter

from engines.config import EngineConfig, SlotView
from engines.errors import DeadlineExceeded, DecodeFailed, EngineError, EngineLoading, EngineStopping
from engines.runtime import memory
from engines.runtime.candidates import NoLogits
from engines.runtime.generation import Generation, Mailbox, Piece, deliver
from engines.runtime.llama import Llama
from engines.runtime.metrics import EngineMetrics
from engines.runtime.planner import Row, StepPlanner
from engines.runtime.prefix import PrefixCache, Source
from engines.runtime.sampler import Sampler, TokenLogprob
from engines.runtime.slots import Slot
from engines.runtime.text import NOTHING, Released
from engines.runtime.waiting import WaitingLine

log = logging.getLogger("hydra.engine.core")

IDLE_WAIT_S = 1.0
MAX_FAILED_STEPS = 3
RETURN_CELLS = 32


class EngineCore(threading.Thread):
    """Serves one model. `state` goes loading → ready → stopping, or to failed with `failure` set."""

    def __init__(
        self, config: EngineConfig, threads: int, loop: asyncio.AbstractEventLoop, metrics: EngineMetrics
    ) -> None:
        super().__init__(name="engine-core")
        self.config = config
        self.metrics = metrics
        self.state = "loading"
        self.load_share = 0.0
        self.failure: BaseException | None = None
        self.changed = asyncio.Event()
        self.llama: Llama | None = None
        self._threads = threads
        self._loop = loop
        self._waiting = WaitingLine(config.queue_limit)
        self._wake = self._waiting.changed
        self._outbox: list[tuple[Mailbox, Piece]] = []
        self._cache: PrefixCache | None = None

    # --- called from any thread -----------------------------------------------------------------

    def submit(self, *generations: Generation) -> None:
        """Queues all or none. Raises EngineLoading, EngineStopping, or QueueFull when the waiting line is at its bound."""
        with self._wake:
            if self._cache is None:
                raise EngineLoading("The model is being loaded.")
            if self.state != "ready":
                raise EngineStopping("The engine is shutting down.")
            self._waiting.put(list(generations), sum(slot.idle for slot in self._cache.slots))

    def cancel(self, generation: Generation) -> None:
        """Ends a generation at the next step; harmless when it has ended. Nothing more is sent for it."""
        generation.cancelled = True
        with self._wake:
            self._wake.notify()

    def views(self) -> list[SlotView]:
        return [slot.view(self.config.context_tokens) for slot in self._cache.slots] if self._cache else []

    def stop(self) -> None:
        with self._wake:
            if self.state in ("loading", "ready"):
                self.state = "stopping"
            self._wake.notify()

    # --- the core's thread ----------------------------------------------------------------------

    def run(self) -> None:
        try:
            self._load()
            self._serve()
        except Exception as error:
            log.exception("the engine's core ended")
            self.failure, self.state = error, "failed"
        finally:
            self._end_all(EngineStopping("The engine is shutting down."))
            if self.llama:
                self.llama.close()
            self._announce()

    def _load(self) -> None:
        started = time.monotonic()
        self.llama = Llama(self.config, self._threads, self._on_load_progress)
        cache = PrefixCache(self.llama, self.config)
        self._planner = StepPlanner(self.llama, cache, self.config)
        self._planner.warm_up()
        if not cache.cuts_anywhere:
            cache.checkpoint_min_tokens = self._planner.checkpoint_min_tokens
        self._cache = cache
        self.metrics.watch(self._cache, self._waiting)
        memory.export(self.llama.memory_report, self.metrics.registry)
        with self._wake:
            if self.state == "loading":
                self.state = "ready"
        log.info("%s is ready after %.2f s", self.config.model_name, time.monotonic() - started)
        self._announce()

    def _on_load_progress(self, share: float) -> None:
        self.load_share = share

    def _serve(self) -> None:
        failed = 0
        while self.state == "ready":
            try:
                worked = self.step()
                failed = 0
            except Exception:
                # A bug of ours must not take every stream down for good; three in a row and the process is spent.
                failed += 1
                if failed >= MAX_FAILED_STEPS:
                    raise
                log.exception("a step failed; its generations are ended and the memory is cleared")
                self._fail_running(DecodeFailed("The engine failed inside a step; its log has the cause."))
                worked = True
            self._send()
            if not worked and not self.cache.put_away_one():
                with self._wake:
                    if self.state == "ready" and not len(self._waiting):
                        self._wake.wait(IDLE_WAIT_S)

    def step(self) -> bool:
        """Takes every runnable generation one step forward. False when there was nothing to do."""
        self._drop_ended()
        self._admit()
        self._yield_cells()
        rows = self._planner.plan()
        if not rows:
            return False
        if self._decode(rows):
            self._sample(rows)
        return True

    # --- admit ----------------------------------------------------------------------------------

    def _drop_ended(self) -> None:
        """Takes out whoever cancelled or ran into its deadline, waiting or running."""
        now = time.monotonic()
        ended = self._waiting.take_ended(now)
        for slot in self.cache.busy:
            running = slot.generation
            if running and (running.cancelled or now > running.deadline_at):
                slot.release()
                ended.append(running)
        for generation in ended:
            self._end(generation, error=None if generation.cancelled else _late(generation))

    def _admit(self) -> None:
        """Gives idle slots to the line, in its order, as long as the cells that are needed can be had."""
        if not len(self._waiting):
            return
        running = Counter(slot.generation.owner for slot in self.cache.slots if slot.generation)
        for generation in self._waiting.in_order(running):
            raw_logits = not self.config.samples_on_device or generation.params.needs_whole_vocabulary(
                self.config.device_candidates
            )
            if not any(slot.idle and slot.has_raw_logits == raw_logits for slot in self.cache.slots):
                self.metrics.wait_steps.labels("slot").inc()
                continue
            # Who had to give way comes back with some room to spare, or it would have to give way again at once.
            needed = len(generation.tokens) + 1 + RETURN_CELLS * generation.preemptions
            source = self.cache.best_source(generation.tokens) if generation.reuse_prefix else Source()
            needed = min(needed, self.config.context_tokens) - self._shared_with_running(source)
            if self.cache.promised_cells() + needed > self.config.cells:
                # Nobody overtakes here, or a long prompt would never find the cache empty enough.
                self.metrics.wait_steps.labels("cells").inc()
                return
            if generation.reuse_prefix and self.cache.leader(generation, source.length):
                self.metrics.wait_steps.labels("prefix").inc()
                continue
            slot = self.cache.best_slot(source, raw_logits=raw_logits)
            if slot is not None:
                self._start(generation, slot, source)

    def _shared_with_running(self, source: Source) -> int:
        """Cells of the source that are counted already, because a running generation holds them."""
        busy = any(slot.sequence is source.sequence for slot in self.cache.busy)
        return source.length if busy else 0

    def _start(self, generation: Generation, slot: Slot, source: Source) -> None:
        self._waiting.remove(generation)
        generation.cuts = [cut for cut in generation.cuts if cut >= self.cache.checkpoint_min_tokens]
        self.cache.prepare(slot, source)
        slot.begin(generation)
        if generation.started_at is None:
            generation.started_at = time.monotonic()
            self.metrics.queue_seconds.observe(generation.started_at - generation.queued_at)
        if generation.sampler is None:
            generation.sampler = Sampler(generation.params, self.loaded)
            generation.sampler.see_prompt(generation.prompt)

    def _yield_cells(self) -> None:
        """When the cache is too full for a token each, the youngest generation gives way and starts over later."""
        while not self.cache.make_room(sum(slot.decoding for slot in self.cache.busy)):
            busy = [(slot.generation.queued_at, slot) for slot in self.cache.busy if slot.generation]
            self._preempt(max(busy, key=lambda entry: entry[0])[1])

    def _preempt(self, slot: Slot) -> None:
        """Puts a running generation back to the head of the line. Its tokens are the truth, so its text goes on unbroken."""
        generation = slot.generation
        assert generation is not None
        generation.preemptions += 1
        self.metrics.preemptions.inc()
        slot.release()
        slot.sequence.clear()
        self._waiting.put_back(generation)

    # --- decode ---------------------------------------------------------------------------------

    def _decode(self, rows: list[Row]) -> bool:
        """True when the whole batch was computed. After a refusal each row is tried alone, so that only the faulty one ends."""
        started = time.monotonic()
        batch = self._planner.batch
        status = self.loaded.decode(batch)
        self.metrics.decode_calls.inc()
        self.metrics.step_seconds.observe(time.monotonic() - started)
        if status == 0:
            for row in rows:
                self._advance(row)
            return True
        log.warning("llama_decode answered %d for a batch of %d rows", status, batch.count)
        for row in rows:
            self._restore(row.slot)
        if len(rows) == 1:
            message = f"llama.cpp refused the request's tokens (llama_decode: {status})."
            self._fail(rows[0].slot, DecodeFailed(message))
            return False
        for row in rows:
            if row.slot.generation is not None:
                self._decode_alone(row)
        return False

    def _decode_alone(self, row: Row) -> None:
        alone = self._planner.plan_alone(row.slot)
        if self._decode(alone):
            self._sample(alone)

    def _advance(self, row: Row) -> None:
        slot, generation = row.slot, row.slot.generation
        assert generation is not None
        start = len(slot.sequence)
        slot.sequence.append(generation.tokens[start : start + row.count])
        if len(slot.sequence) in generation.cuts:
            self.cache.checkpoint(slot)
        if generation.new_tokens == 0:
            self.metrics.prompt_tokens.inc(row.count)
            if generation.wants_progress:
                self._post(generation, Piece(generation.choice, prompt_done_tokens=len(slot.sequence)))

    def _restore(self, slot: Slot) -> None:
        """Makes memory and bookkeeping agree again after a batch that may have been computed in part."""
        sequence = slot.sequence
        if self.loaded.last_position(sequence.index) >= len(sequence) and not self.loaded.keep_prefix(
            sequence.index, len(sequence)
        ):
            sequence.clear()

    def _fail(self, slot: Slot, error: EngineError) -> None:
        generation = slot.generation
        assert generation is not None
        slot.release()
        slot.sequence.clear()
        self._end(generation, error=error)

    # --- sample ---------------------------------------------------------------------------------

    def _sample(self, rows: list[Row]) -> None:
        for row in rows:
            if row.draws:
                self._take_token(row)

    def _take_token(self, row: Row) -> None:
        generation = row.slot.generation
        assert generation is not None
        try:
            token, logprob = self._draw(row)
        except NoLogits as error:
            self._fail(row.slot, DecodeFailed(f"The model gave no usable result: {error}."))
            return
        generation.tokens.append(token)
        now = time.monotonic()
        if generation.first_token_at is None:
            generation.first_token_at = now
            self.metrics.first_token_seconds.observe(now - generation.queued_at)
        self.metrics.predicted_tokens.inc()
        reason = None
        if token in self.loaded.vocabulary.end_tokens:
            released, reason = generation.text.finish(), "stop"
        else:
            released = generation.text.feed(self.loaded.vocabulary.pieces[token], logprob)
            if generation.text.stopped:
                reason = "stop"
            elif (
                generation.new_tokens >= generation.max_new_tokens
                or len(generation.tokens) >= self.config.context_tokens
            ):
                rest = generation.text.finish()
                released, reason = released.with_more(rest), "length"
        if reason is None:
            if released.text or released.logprobs:
                self._post(generation, Piece(generation.choice, released.text, released.logprobs))
            return
        row.slot.release()
        self._end(generation, released, reason)

    def _draw(self, row: Row) -> tuple[int, TokenLogprob | None]:
        sampler = row.slot.generation.sampler if row.slot.generation else None
        assert sampler is not None
        if row.slot.has_raw_logits:
            return sampler.draw_from_logits(self.loaded.logits(row.last))
        return sampler.draw_from_candidates(*self.loaded.candidates(row.last)), None

    # --- send -----------------------------------------------------------------------------------

    def _post(self, generation: Generation, piece: Piece) -> None:
        self._outbox.append((generation.mailbox, piece))

    def _end(
        self,
        generation: Generation,
        released: Released = NOTHING,
        reason: str | None = None,
        *,
        error: EngineError | None = None,
    ) -> None:
        """The one exit of every generation: frees its sampler, counts it, and posts its last piece unless it cancelled."""
        if generation.sampler:
            generation.sampler.close()
        stats = generation.stats(time.monotonic())
        self.metrics.ended("cancelled" if generation.cancelled else error.code if error else str(reason), stats)
        if not generation.cancelled:
            last = Piece(generation.choice, released.text, released.logprobs, None, reason, error, stats)
            self._post(generation, last)

    def _send(self) -> None:
        if self._outbox:
            outbox, self._outbox = self._outbox, []
            self._on_loop(deliver, outbox)

    def _announce(self) -> None:
        self._on_loop(self.changed.set)

    def _on_loop(self, callback: object, *args: object) -> None:
        try:
            self._loop.call_soon_threadsafe(callback, *args)  # type: ignore[arg-type]
        except RuntimeError:
            # The loop has closed: the process is ending and nobody is left to hear it.
            log.debug("the event loop is closed")

    # --- ends -----------------------------------------------------------------------------------

    def _fail_running(self, error: EngineError) -> None:
        for slot in self.cache.slots:
            if slot.generation is not None:
                self._fail(slot, error)
            else:
                slot.sequence.clear()
        for checkpoint in self.cache.checkpoints:
            checkpoint.sequence.clear()

    def _end_all(self, error: EngineError) -> None:
        """Nobody may wait for an answer that will not come."""
        ending = self._waiting.take_all()
        for slot in self._cache.busy if self._cache else ():
            if slot.generation:
                ending.append(slot.generation)
            slot.release()
        for generation in ending:
            self._end(generation, error=error)
        self._send()

    @property
    def loaded(self) -> Llama:
        assert self.llama is not None
        return self.llama

    @property
    def cache(self) -> PrefixCache:
        assert self._cache is not None
        return self._cache


def _late(generation: Generation) -> DeadlineExceeded:
    what = "waited" if generation.started_at is None else "ran"
    return DeadlineExceeded(f"The request {what} until its deadline.", hint="Ask for fewer tokens, or add engines.")
