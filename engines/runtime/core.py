"""The engine's core: one thread that owns the context and takes all generations forward, step by step.

Others call `submit`, `cancel`, `views` and `stop`; everything else runs on the core's thread. A step is: admit, plan the
batch, decode, sample, send. Prefill goes in chunks of at most `batch_tokens`; dense models take decode rows and a chunk in
one batch, models with recurrent state alternate, since llama.cpp splits unequal sequences into several graphs there.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections import deque
from dataclasses import dataclass

from engines.errors import DeadlineExceeded, DecodeFailed, EngineError, EngineLoading, EngineStopping, QueueFull
from engines.runtime.generation import Generation, Mailbox, Piece, deliver
from engines.runtime.llama import Batch, Llama
from engines.runtime.metrics import EngineMetrics
from engines.runtime.sampler import Sampler
from engines.runtime.slots import Slot, SlotTable
from engines.wire import EngineConfig, SlotView

log = logging.getLogger("hydra.engine.core")

IDLE_WAIT_S = 1.0
MAX_FAILED_STEPS = 3
RETURN_CELLS = 32


@dataclass(frozen=True)
class Row:
    """A slot's part of a batch: `count` tokens, the last of them in batch row `last`, drawing a token if `draws`."""

    slot: Slot
    count: int
    last: int
    draws: bool


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
        self._wake = threading.Condition()
        self._waiting: deque[Generation] = deque()
        self._outbox: list[tuple[Mailbox, Piece]] = []
        self._table: SlotTable | None = None
        self._chunk_was_last = False

    # --- called from any thread -----------------------------------------------------------------

    def submit(self, generation: Generation) -> None:
        """Queues a generation. Raises EngineLoading, EngineStopping, or QueueFull when the waiting line is at its bound."""
        with self._wake:
            if self._table is None:
                raise EngineLoading("The model is being loaded.")
            if self.state != "ready":
                raise EngineStopping("The engine is shutting down.")
            # A slot that falls idle in this moment takes the first in line, so idle slots add to the bound.
            if len(self._waiting) >= self.config.queue_limit + len(self._table.idle):
                raise QueueFull(f"{len(self._waiting)} requests wait already; the limit is {self.config.queue_limit}.")
            self._waiting.append(generation)
            self._wake.notify()

    def cancel(self, generation: Generation) -> None:
        """Ends a generation at the next step; harmless when it has ended. Nothing more is sent for it."""
        generation.cancelled = True
        with self._wake:
            self._wake.notify()

    def views(self) -> list[SlotView]:
        return [slot.view(self.config.context_tokens) for slot in self._table.slots] if self._table else []

    @property
    def queue_length(self) -> int:
        return len(self._waiting)

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
        self._batch = Batch(max(self.config.batch_tokens, self.config.slots))
        self._table = SlotTable(self.llama, self.config.slots, self.config.cells)
        self.metrics.watch(self._table, self._waiting)
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
            if not worked:
                with self._wake:
                    if self.state == "ready" and not self._waiting:
                        self._wake.wait(IDLE_WAIT_S)

    def step(self) -> bool:
        """Takes every runnable generation one step forward. False when there was nothing to do."""
        self._drop_ended()
        self._admit()
        rows = self._plan()
        if not rows:
            return False
        if self._decode(rows):
            self._sample(rows)
        return True

    # --- admit ----------------------------------------------------------------------------------

    def _drop_ended(self) -> None:
        """Takes out whoever cancelled or ran into its deadline, waiting or running."""
        now = time.monotonic()
        with self._wake:
            waiting = [g for g in self._waiting if g.cancelled or now > g.deadline_at]
            for generation in waiting:
                self._waiting.remove(generation)
        for generation in waiting:
            self._end(generation, error=None if generation.cancelled else _late(generation))
        for slot in self.slots.busy:
            running = slot.generation
            if running and (running.cancelled or now > running.deadline_at):
                slot.release()
                self._end(running, error=None if running.cancelled else _late(running))

    def _admit(self) -> None:
        """Gives idle slots to the first in line, as long as the cells they need can be had."""
        while self._waiting:
            generation = self._waiting[0]
            slot = self.slots.best_for(generation)
            # Who had to give way comes back with some room to spare, or it would have to give way again at once.
            needed = len(generation.tokens) + 1 + RETURN_CELLS * generation.preemptions
            needed = min(needed, self.config.context_tokens)
            if slot is None or self.slots.promised_cells() + needed > self.slots.cells:
                return
            with self._wake:
                self._waiting.popleft()
            slot.begin(generation)
            self.slots.make_room(slot.todo_tokens + 1)
            if generation.started_at is None:
                generation.started_at = time.monotonic()
                self.metrics.queue_seconds.observe(generation.started_at - generation.queued_at)
            if generation.sampler is None:
                generation.sampler = Sampler(generation.params, self.loaded)
                generation.sampler.see_prompt(generation.prompt)

    # --- plan -----------------------------------------------------------------------------------

    def _plan(self) -> list[Row]:
        self._yield_cells()
        decoding = [slot for slot in self.slots.busy if slot.decoding]
        # The longest-served slot goes last, so that short prompts pass a long one chunk by chunk.
        filling = sorted((s for s in self.slots.busy if not s.decoding), key=lambda slot: slot.used_at)
        if self.loaded.has_recurrent_state:
            # One kind a step, one prompt a chunk: llama.cpp would split the batch by unequal lengths anyway.
            filling = filling[:1]
            if filling and decoding:
                decoding, filling = (decoding, []) if self._chunk_was_last else ([], filling)
        self._batch.clear()
        rows = [self._add(slot, 1) for slot in decoding]
        for slot in filling:
            count = min(slot.todo_tokens, self._batch.room)
            if count and self.slots.make_room(self._batch.count + count):
                rows.append(self._add(slot, count))
                slot.used_at = time.monotonic()
        self._chunk_was_last = bool(filling)
        return rows

    def _yield_cells(self) -> None:
        """When the cache is too full for a token each, the youngest generation gives way and starts over later."""
        while not self.slots.make_room(sum(slot.decoding for slot in self.slots.busy)):
            busy = [(slot.generation.queued_at, slot) for slot in self.slots.busy if slot.generation]
            self._preempt(max(busy, key=lambda entry: entry[0])[1])

    def _add(self, slot: Slot, count: int) -> Row:
        assert slot.generation is not None
        start = len(slot.tokens)
        draws = count == slot.todo_tokens
        last = self._batch.add(slot.index, start, slot.generation.tokens[start : start + count], output_last=draws)
        return Row(slot, count, last, draws)

    def _preempt(self, slot: Slot) -> None:
        """Puts a running generation back to the head of the line. Its tokens are the truth, so its text goes on unbroken."""
        generation = slot.generation
        assert generation is not None
        generation.preemptions += 1
        self.metrics.preemptions.inc()
        slot.release()
        slot.clear()
        with self._wake:
            self._waiting.appendleft(generation)

    # --- decode ---------------------------------------------------------------------------------

    def _decode(self, rows: list[Row]) -> bool:
        """True when the whole batch was computed. After a refusal each row is tried alone, so that only the faulty one ends."""
        started = time.monotonic()
        status = self.loaded.decode(self._batch)
        self.metrics.decode_calls.inc()
        self.metrics.step_seconds.observe(time.monotonic() - started)
        if status == 0:
            for row in rows:
                self._advance(row)
            return True
        log.warning("llama_decode answered %d for a batch of %d rows", status, self._batch.count)
        for row in rows:
            self._restore(row.slot)
        if len(rows) == 1:
            self._fail(rows[0].slot, status)
            return False
        for row in rows:
            if row.slot.generation is not None:
                self._decode_alone(row)
        return False

    def _decode_alone(self, row: Row) -> None:
        self._batch.clear()
        alone = [self._add(row.slot, min(row.slot.todo_tokens, self._batch.capacity))]
        if self._decode(alone):
            self._sample(alone)

    def _advance(self, row: Row) -> None:
        slot = row.slot
        assert slot.generation is not None
        start = len(slot.tokens)
        slot.tokens += slot.generation.tokens[start : start + row.count]
        if slot.generation.new_tokens == 0:
            self.metrics.prompt_tokens.inc(row.count)
            if slot.generation.wants_progress:
                self._post(slot.generation, Piece(prompt_done_tokens=len(slot.tokens)))

    def _restore(self, slot: Slot) -> None:
        """Makes memory and bookkeeping agree again after a batch that may have been computed in part."""
        if self.loaded.last_position(slot.index) >= len(slot.tokens) and not self.loaded.keep_prefix(
            slot.index, len(slot.tokens)
        ):
            slot.clear()

    def _fail(self, slot: Slot, status: int) -> None:
        generation = slot.generation
        assert generation is not None
        slot.release()
        slot.clear()
        self._end(generation, error=DecodeFailed(f"llama.cpp refused the request's tokens (llama_decode: {status})."))

    # --- sample ---------------------------------------------------------------------------------

    def _sample(self, rows: list[Row]) -> None:
        for row in rows:
            if row.draws:
                self._take_token(row)

    def _take_token(self, row: Row) -> None:
        generation = row.slot.generation
        assert generation is not None and generation.sampler is not None
        token, logprob = generation.sampler.draw(row.last)
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
                self._post(generation, Piece(released.text, released.logprobs))
            return
        row.slot.release()
        self._end(generation, Piece(released.text, released.logprobs, finish_reason=reason))

    # --- send -----------------------------------------------------------------------------------

    def _post(self, generation: Generation, piece: Piece) -> None:
        self._outbox.append((generation.mailbox, piece))

    def _end(self, generation: Generation, last: Piece | None = None, *, error: EngineError | None = None) -> None:
        """The one exit of every generation: frees its sampler, counts it, and posts its last piece unless it cancelled."""
        if generation.sampler:
            generation.sampler.close()
        now = time.monotonic()
        stats = generation.stats(now)
        outcome = "cancelled" if generation.cancelled else error.code if error else str(last and last.finish_reason)
        self.metrics.ended(outcome, stats)
        if generation.cancelled:
            return
        last = last or Piece(error=error)
        self._post(generation, Piece(last.text, last.logprobs, None, last.finish_reason, error, stats))

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
        for slot in self.slots.slots:
            generation = slot.generation
            slot.release()
            slot.clear()
            if generation:
                self._end(generation, error=error)

    def _end_all(self, error: EngineError) -> None:
        """Nobody may wait for an answer that will not come."""
        with self._wake:
            waiting = list(self._waiting)
            self._waiting.clear()
        if self._table:
            for slot in self._table.busy:
                if slot.generation:
                    waiting.append(slot.generation)
                slot.release()
        for generation in waiting:
            self._end(generation, error=error)
        self._send()

    @property
    def loaded(self) -> Llama:
        assert self.llama is not None
        return self.llama

    @property
    def slots(self) -> SlotTable:
        assert self._table is not None
        return self._table


def _late(generation: Generation) -> DeadlineExceeded:
    what = "waited" if generation.started_at is None else "ran"
    return DeadlineExceeded(f"The request {what} until its deadline.", hint="Ask for fewer tokens, or add engines.")
