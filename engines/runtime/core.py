"""The engine's core: one thread that owns the context and takes all generations forward, step by step.

Others call `submit`, `cancel`, `views` and `stop`; everything else runs on the core's thread. A step is: admit, plan the
batch, decode, sample, send. Prefill goes in chunks of at most `batch_tokens`, between everybody's next tokens.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from typing import Any

import numpy as np
from numpy.typing import NDArray

from engines.config import EngineConfig, SlotView
from engines.errors import DecodeFailed, EngineError, EngineLoading, EngineStopping, ModelLoadFailed
from engines.runtime import memory
from engines.runtime.admission import Admission
from engines.runtime.drawing import Drawing
from engines.runtime.errands import ErrandQueue, Work
from engines.runtime.first_steps import FirstSteps
from engines.runtime.generation import Generation, Piece
from engines.runtime.host_moves import HostMoves
from engines.runtime.landing import Landing
from engines.runtime.llama import Llama
from engines.runtime.media_batch import SpanBatch
from engines.runtime.media_projector import Projector
from engines.runtime.metrics import EngineMetrics
from engines.runtime.outbox import Outbox
from engines.runtime.planner import Row, StepPlanner
from engines.runtime.prefix import PrefixCache
from engines.runtime.rates import Rates, StepWork
from engines.runtime.slots import Slot
from engines.runtime.speculation import Speculation
from engines.runtime.state_codec import StateCodec, probe
from engines.runtime.state_sizes import kept_block_tokens
from engines.runtime.waiting import WaitingLine

log = logging.getLogger("hydra.engine.core")

IDLE_WAIT_S = 1.0
MAX_FAILED_STEPS = 3


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
        self.projector: Projector | None = None
        self._threads = threads
        self._outbox = Outbox(loop, metrics)
        self._waiting = WaitingLine(config.queue_limit)
        self._wake = self._waiting.changed
        self._errands = ErrandQueue(self._wake)
        self._cache: PrefixCache | None = None
        self._first_steps = FirstSteps()
        self.speculation: Speculation | None = None
        # None with a reason where llama.cpp lays out states in an unknown way, so that none may leave or enter.
        self.codec: StateCodec | None = None
        self.sharing_refusal = ""

    # --- called from any thread -----------------------------------------------------------------

    def submit(self, *generations: Generation) -> None:
        """Queues all or none. Raises EngineLoading, EngineStopping, or QueueFull when the waiting line is at its bound."""
        with self._wake:
            cache = self._require_ready()
            self._waiting.put(list(generations), cache.free_slots)

    async def perform(self, work: Work) -> Any:
        """Runs `work` on the core's thread, slice by slice between steps (see errands.py); returns or raises what it does.

        Cancelling closes the generator at its next yield. Raises EngineLoading and EngineStopping.
        """
        with self._wake:
            self._require_ready()
            result = self._errands.put(work)
        return await asyncio.wrap_future(result)

    def _require_ready(self) -> PrefixCache:
        if self._cache is None:
            raise EngineLoading("The model is being loaded.")
        if self.state != "ready":
            raise EngineStopping("The engine is shutting down.")
        return self._cache

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
            # What cannot be loaded says in a line why; where in our code that was is nobody's business.
            log.error("the engine's core ended: %s", error, exc_info=not isinstance(error, ModelLoadFailed))
            self.failure, self.state = error, "failed"
        finally:
            self._end_all(EngineStopping("The engine is shutting down."))
            if self.speculation:
                self.speculation.close()
            if self.projector:
                self.projector.close()
            if self.llama:
                self.llama.close()
            self._outbox.call(self.changed.set)

    def _load(self) -> None:
        started = time.monotonic()
        self.llama = Llama(self.config, self._threads, self._on_load_progress)
        # Where layers are on a card, llama_decode only starts the computing.
        self._computes_apart = self.config.gpu_layers != 0
        cache = PrefixCache(self.llama, self.config)
        self._planner = StepPlanner(self.llama, cache, self.config)
        self._planner.warm_up()
        self.rates = Rates(self._planner.prompt_token_s, self._planner.step_s)
        self.metrics.watch_rates(self.rates)
        if self.config.longest_draft:
            self.speculation = Speculation(self.llama, cache, self.config, self._threads)
            self.speculation.warm_up(self._planner.batch)
            self._planner.speculation = self.speculation
            self.metrics.watch_drafts(self.speculation.length)
        if self.config.sees_images:
            self.projector = Projector(self.config, self.llama.model, self._threads)
            capacity = self.llama.batch_tokens
            self._planner.span_batch = SpanBatch(capacity, self.projector.width, self.projector.axes)
        if not cache.cuts_anywhere:
            cache.checkpoint_min_tokens = self._planner.checkpoint_min_tokens
        self.landing = Landing(cache, self._waiting)
        self._admission = Admission(
            self.llama, self.config, cache, self._waiting, self.landing, self._outbox, self.metrics, self.rates
        )
        self._drawing = Drawing(
            self.llama,
            self.config,
            self._outbox,
            self.metrics,
            self.speculation,
            self._fail,
            self._admission.give_up_slot,
        )
        self.codec, self.sharing_refusal = probe(cache, self.llama)
        block_tokens = kept_block_tokens(self.config, self.codec.layout) if self.codec else 0
        cache.begin(HostMoves(cache, self.codec, block_tokens, self._errands.put, self.landing))
        self._cache = cache
        self.metrics.watch(self._cache, self._waiting)
        memory.export(self.llama.memory_report, self.metrics.registry)
        with self._wake:
            if self.state == "loading":
                self.state = "ready"
        log.info("%s is ready after %.2f s", self.config.model_name, time.monotonic() - started)
        self._outbox.call(self.changed.set)

    def _on_load_progress(self, share: float) -> None:
        self.load_share = share

    def _serve(self) -> None:
        failed = 0
        while self.state == "ready":
            try:
                worked = self._turn()
                failed = 0
            except Exception:
                # A bug of ours must not take every stream down for good; three in a row and the process is spent.
                failed += 1
                if failed >= MAX_FAILED_STEPS:
                    raise
                log.exception("a step failed; its generations are ended and the memory is cleared")
                self._fail_running(DecodeFailed("The engine failed inside a step; its log has the cause."))
                worked = True
            if not worked:
                with self._wake:
                    if self.state == "ready" and not len(self._waiting) and not len(self._errands):
                        self._wake.wait(IDLE_WAIT_S)

    def _turn(self) -> bool:
        """A step, and what has its place between two. False when there was nothing to do."""
        worked = self.step()
        if not worked:
            self._outbox.write()
        self._outbox.send()
        helped = self._errands.advance(self.cache, busy=worked)
        return worked or helped or self.cache.put_away_one()

    def step(self) -> bool:
        """Takes every runnable generation one step forward. False when there was nothing to do."""
        self._admission.drop_ended()
        self._admission.admit()
        self._admission.yield_cells()
        rows = self._planner.plan()
        if not rows:
            return False
        started, work = time.monotonic(), StepWork.of(rows)
        first = self._first_steps.among(rows)
        computing = self.speculation.clock() if self.speculation else 0.0
        if self._decode(rows):
            self._draw(rows)
            if first:
                # Told at once: their clients have waited since they stopped elsewhere, and the next step may begin late.
                self._first_steps.note(first, started)
                self.write_text()
            if work is not None:
                resident_tokens = self.cache.ledger.count - self.cache.ledger.free
                acceptance = self.speculation.length.prior if self.speculation and work.drafted else 0.0
                self.rates.stepped(work, resident_tokens, acceptance, time.monotonic() - started)
            if self.speculation:
                self.speculation.stepped(rows, self.speculation.clock() - computing)
        return True

    def _draw(self, rows: list[Row]) -> None:
        for row in rows:
            if row.draws:
                self._drawing.take_tokens(row)
        if self.speculation:
            self.speculation.drawn(rows)
        self._drawing.count_tokens()
        if not self._computes_apart:
            self._outbox.write()

    # --- decode ---------------------------------------------------------------------------------

    def _decode(self, rows: list[Row]) -> bool:
        """True when the whole batch was computed. After a refusal each row is tried alone, so that only the faulty one ends."""
        started = time.monotonic()
        batch, span = self._planner.batch, rows[0].span
        if span is None:
            status = self.loaded.decode(batch)
        else:
            assert self._planner.span_batch is not None
            status = self.loaded.decode_span(self._planner.span_batch, sees_itself=span.span.sees_itself)
        if self._computes_apart:
            self._outbox.write()
            self._outbox.send()
        self.metrics.decode_calls.inc()
        self.metrics.step_seconds.observe(time.monotonic() - started)
        if status == 0:
            for row in rows:
                _append(row)
            hidden = self.speculation.hidden_rows(rows, batch.count) if self.speculation else None
            for row in rows:
                self._advance(row, hidden)
            return True
        log.warning("llama_decode answered %d for a batch of %d rows", status, sum(row.count for row in rows))
        for row in rows:
            self._restore(row.slot)
        if len(rows) == 1:
            message = f"llama.cpp refused the request's tokens (llama_decode: {status})."
            self._fail(rows[0].slot, DecodeFailed(message))
            return False
        for row in rows:
            # A slot that lost all it had may stand at an image now, which is a step of its own.
            if row.slot.generation is not None and row.slot.span is None:
                self._decode_alone(row)
        return False

    def _decode_alone(self, row: Row) -> None:
        alone = self._planner.plan_alone(row.slot)
        if self._decode(alone):
            self._draw(alone)

    def _advance(self, row: Row, hidden: NDArray[np.float32] | None) -> None:
        """What a computed row means, after its tokens were noted."""
        slot, generation = row.slot, row.slot.generation
        assert generation is not None
        sequence = slot.sequence
        end = len(sequence.tokens)
        if hidden is not None and sequence.draft is not None:
            sequence.draft.note(end - row.count, hidden[row.first : row.last + 1])
        if end in generation.cuts:
            slot.waits_at_cut = not self.cache.checkpoint(slot)
        if generation.new_tokens == 0:
            self.metrics.prompt_tokens.inc(row.count)
            if generation.wants_progress:
                self._outbox.post(generation, Piece(generation.choice, prompt_done_tokens=len(slot.sequence)))

    def _restore(self, slot: Slot) -> None:
        """Makes memory and bookkeeping agree again after a batch that may have been computed in part."""
        sequence = slot.sequence
        # Inside an image positions do not tell how much of it was computed.
        sequence.drop_part_of_span()
        position = sequence.next_position
        if self.loaded.last_position(sequence.index) >= position and (
            # With room for drafts llama.cpp would agree to take a recurrent state back, and be wrong.
            self.loaded.has_recurrent_state or not self.loaded.keep_prefix(sequence.index, position)
        ):
            sequence.clear()

    def _fail(self, slot: Slot, error: EngineError) -> None:
        generation = slot.generation
        assert generation is not None
        slot.release()
        slot.sequence.clear()
        self._outbox.end(generation, error=error)

    # --- a generation that moves to another engine (state_follow.py), on the core's thread ---------

    def write_text(self) -> None:
        """Makes and sends the text of all tokens drawn so far."""
        self._outbox.write()
        self._outbox.send()

    def wants_raw_logits(self, generation: Generation) -> bool:
        """Which kind of slot it needs."""
        return self._admission.wants_raw_logits(generation)

    def stands_in_line(self, generation: Generation) -> bool:
        """Whether it waits for a slot, or for its prefix to come in."""
        return generation in self._waiting or generation in self.landing

    def begin_moved(self, slot: Slot, generation: Generation) -> None:
        """The generation goes on in the idle slot that has its state."""
        self._admission.begin_moved(slot, generation)
        self._first_steps.expect(generation)

    def end_moved(self, generation: Generation, *, is_told: bool) -> None:
        """Ends a generation that goes on elsewhere; it must stand in no slot any more. `is_told`: its reader knows."""
        self._outbox.end(generation, reason="moved", is_told=is_told)
        self._outbox.send()

    # --- ends -----------------------------------------------------------------------------------

    def _fail_running(self, error: EngineError) -> None:
        for slot in self.cache.slots:
            if slot.generation is not None:
                self._fail(slot, error)
            else:
                slot.sequence.clear()
        for checkpoint in (*self.cache.checkpoints, *self.cache.aside):
            checkpoint.sequence.clear()

    def _end_all(self, error: EngineError) -> None:
        """Nobody may wait for an answer that will not come."""
        ending = [*self._waiting.take_all(), *(self.landing.take_all() if self._cache else ())]
        for slot in self._cache.busy if self._cache else ():
            if slot.generation:
                ending.append(slot.generation)
            slot.release()
        for generation in ending:
            self._outbox.end(generation, error=error)
        self._errands.fail_all(error)
        self._outbox.send()

    @property
    def loaded(self) -> Llama:
        assert self.llama is not None
        return self.llama

    @property
    def cache(self) -> PrefixCache:
        assert self._cache is not None
        return self._cache

    @property
    def waiting(self) -> WaitingLine:
        return self._waiting

    @property
    def planner(self) -> StepPlanner:
        return self._planner


def _append(row: Row) -> None:
    """Notes the tokens of a row that is being computed; a card does not wait for that."""
    slot, generation = row.slot, row.slot.generation
    assert generation is not None
    start = len(slot.sequence)
    if row.span is None:
        tokens = generation.tokens[start : start + row.count - len(row.draft)]
        tokens += row.draft
        slot.sequence.append(tokens)
    else:
        slot.sequence.append_part_of_span(generation.tokens[start : start + row.count], generation.spans)
