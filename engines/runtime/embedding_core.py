"""The core of an engine that embeds or ranks: one thread that owns the context and computes inputs of all requests together.

Others call `submit`, `cancel`, `views` and `stop`; everything else runs on the core's thread. A step is: drop the ended,
plan, compute, read. Nothing is kept in the context from one input to the next.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time

from engines.config import EngineConfig, SlotView
from engines.errors import (
    DeadlineExceeded,
    DecodeFailed,
    EngineError,
    EngineLoading,
    EngineStopping,
    ModelLoadFailed,
    QueueFull,
)
from engines.runtime import memory
from engines.runtime.embedding_job import EmbeddingJob, settle
from engines.runtime.embedding_llama import PoolingLlama
from engines.runtime.embedding_metrics import EmbeddingMetrics
from engines.runtime.embedding_planner import Part, PoolingPlanner

log = logging.getLogger("hydra.engine.embedding")

IDLE_WAIT_S = 1.0
MAX_FAILED_STEPS = 3
WARM_UP_TOKENS = (16, 64)
# How much the last step says about the next one's speed.
RATE_WEIGHT = 0.3


class EmbeddingCore(threading.Thread):
    """Serves one model. `state` goes loading → ready → stopping, or to failed with `failure` set."""

    def __init__(
        self, config: EngineConfig, threads: int, loop: asyncio.AbstractEventLoop, metrics: EmbeddingMetrics
    ) -> None:
        super().__init__(name="embedding-core")
        self.config = config
        self.metrics = metrics
        self.state = "loading"
        self.load_share = 0.0
        self.failure: BaseException | None = None
        self.changed = asyncio.Event()
        self.llama: PoolingLlama | None = None
        self._threads = threads
        self._loop = loop
        self._wake = threading.Condition()
        self._jobs: list[EmbeddingJob] = []
        self._ended: list[tuple[EmbeddingJob, EngineError | None]] = []

    # --- called from any thread -----------------------------------------------------------------

    def submit(self, job: EmbeddingJob) -> None:
        """Queues a request. Raises EngineLoading, EngineStopping, or QueueFull when the waiting line is at its bound."""
        with self._wake:
            if self.state == "loading":
                raise EngineLoading("The model is being loaded.")
            if self.state != "ready":
                raise EngineStopping("The engine is shutting down.")
            waiting = self.waiting
            # With nothing at work, the next step takes the first in line at once.
            if waiting >= self.config.queue_limit + (waiting == len(self._jobs)):
                raise QueueFull(f"{waiting} requests wait already; the limit is {self.config.queue_limit}.")
            self._jobs.append(job)
            self._wake.notify()

    def cancel(self, job: EmbeddingJob) -> None:
        """Ends a request at the next step; harmless when it has ended. Its future is left as it is."""
        job.cancelled = True
        with self._wake:
            self._wake.notify()

    @property
    def waiting(self) -> int:
        """Requests of which no step has taken an input yet."""
        with self._wake:
            return sum(job.started_at is None for job in self._jobs)

    @property
    def running(self) -> int:
        with self._wake:
            return sum(job.started_at is not None for job in self._jobs)

    def views(self) -> list[SlotView]:
        """The engine as one slot: requests share its steps, none has a place of its own."""
        if self.llama is None:
            return []
        with self._wake:
            jobs = list(self._jobs)
        return [
            SlotView(
                id=0,
                state="prefill" if jobs else "idle",
                is_processing=bool(jobs),
                request_id=jobs[0].request_id if jobs else None,
                prompt_tokens=sum(job.prompt_tokens for job in jobs),
                prompt_done_tokens=sum(job.computed_tokens for job in jobs),
                decoded_tokens=0,
                cached_tokens=0,
                context_tokens=self.llama.input_limit_tokens,
                tokens_per_s=0.0,
            )
        ]

    def stop(self) -> None:
        with self._wake:
            if self.state in ("loading", "ready"):
                self.state = "stopping"
            self._wake.notify()

    # --- the core's thread ----------------------------------------------------------------------

    def run(self) -> None:
        llama: PoolingLlama | None = None
        try:
            llama = self._load()
            self._serve()
        except Exception as error:
            log.error("the engine's core ended: %s", error, exc_info=not isinstance(error, ModelLoadFailed))
            self.failure, self.state = error, "failed"
        finally:
            self._end_all(EngineStopping("The engine is shutting down."))
            if llama is not None:
                llama.close()
            self._on_loop(self.changed.set)

    def _load(self) -> PoolingLlama:
        started = time.monotonic()
        llama = PoolingLlama(self.config, self._threads, self._on_load_progress)
        self._planner = PoolingPlanner(llama, self.config)
        self._warm_up(llama)
        self.metrics.watch(lambda: self.running, lambda: self.waiting)
        memory.export(llama.memory_report, self.metrics.registry)
        with self._wake:
            self.llama = llama
            if self.state == "loading":
                self.state = "ready"
        log.info("%s is ready after %.2f s", self.config.model_name, time.monotonic() - started)
        self._on_loop(self.changed.set)
        return llama

    def _on_load_progress(self, share: float) -> None:
        self.load_share = share

    def _warm_up(self, llama: PoolingLlama) -> None:
        """Computes two small inputs: reads the weights in, and measures how many tokens a step should take."""
        batch = self._planner.batch
        for tokens in (min(tokens, llama.input_limit_tokens, batch.capacity) for tokens in WARM_UP_TOKENS):
            batch.clear()
            batch.add_input(0, 0, [0] * tokens)
            started = time.monotonic()
            status = llama.compute(batch)
            llama.synchronize()
            self._planner.tokens_per_s = tokens / max(time.monotonic() - started, 1e-6)
            llama.clear(0)
            if status != 0:
                log.warning("the warm-up was refused (llama_decode: %d)", status)
                return

    def _serve(self) -> None:
        failed = 0
        while self.state == "ready":
            try:
                worked = self.step()
                failed = 0
            except Exception:
                # A bug of ours must not take every request down for good; three in a row and the process is spent.
                failed += 1
                if failed >= MAX_FAILED_STEPS:
                    raise
                log.exception("a step failed; its requests are ended and the memory is cleared")
                self._fail_all(DecodeFailed("The engine failed inside a step; its log has the cause."))
                worked = True
            self._send()
            if not worked:
                with self._wake:
                    if self.state == "ready" and not self._jobs:
                        self._wake.wait(IDLE_WAIT_S)

    def step(self) -> bool:
        """Takes the requests one step forward. False when there was nothing to do."""
        self._drop_ended()
        with self._wake:
            jobs = list(self._jobs)
        parts = self._planner.plan(jobs)
        if not parts:
            return False
        self._begin(parts)
        if self._compute(parts):
            for part in parts:
                self._advance(part)
        else:
            self._refused(parts)
        return True

    def _drop_ended(self) -> None:
        now = time.monotonic()
        with self._wake:
            ended = [job for job in self._jobs if job.cancelled or now > job.deadline_at]
        for job in ended:
            self._end(job, None if job.cancelled else _late(job))

    def _begin(self, parts: list[Part]) -> None:
        now = time.monotonic()
        for part in parts:
            if part.job.started_at is None:
                part.job.started_at = now
                self.metrics.queue_seconds.observe(now - part.job.queued_at)

    def _compute(self, parts: list[Part]) -> bool:
        """True when the whole batch was computed."""
        started = time.monotonic()
        status = self.loaded.compute(self._planner.batch)
        self.loaded.synchronize()
        elapsed_s = max(time.monotonic() - started, 1e-6)
        self.metrics.decode_calls.inc()
        self.metrics.step_seconds.observe(elapsed_s)
        self.metrics.step_inputs.observe(len(parts))
        if status != 0:
            log.warning(
                "llama.cpp answered %d for %d inputs (%d tokens)", status, len(parts), self._planner.batch.count
            )
            return False
        rate = self._planner.batch.count / elapsed_s
        self._planner.tokens_per_s += RATE_WEIGHT * (rate - self._planner.tokens_per_s)
        return True

    def _advance(self, part: Part) -> None:
        """Takes note of a computed part; reads the input's values after its last one."""
        job = part.job
        job.computed_tokens += part.count
        self.metrics.prompt_tokens.inc(part.count)
        if not part.ends:
            return
        self._planner.done(part)
        try:
            values = self.loaded.pooled(part.seq)
        except ValueError as error:
            self._end(job, DecodeFailed(f"The model gave no usable result for input {part.index}: {error}."))
            return
        finally:
            self.loaded.clear(part.seq)
        self.metrics.inputs.inc()
        if job.fill(part.index, values):
            self._end(job, None)

    def _refused(self, parts: list[Part]) -> None:
        for part in parts:
            self.loaded.clear(part.seq)
        if len(parts) > 1:
            self._planner.refused(parts)
        else:
            self._fail(parts[0])

    def _fail(self, part: Part) -> None:
        self._end(part.job, DecodeFailed(f"llama.cpp refused the tokens of input {part.index}."))

    # --- ends -----------------------------------------------------------------------------------

    def _end(self, job: EmbeddingJob, error: EngineError | None) -> None:
        """The one exit of every request: counts it, and answers unless it was cancelled."""
        if job.ended:
            return
        job.ended = True
        with self._wake:
            self._jobs.remove(job)
        self._planner.forget(job)
        self.metrics.requests.labels("cancelled" if job.cancelled else error.code if error else "stop").inc()
        if error is None and not job.cancelled:
            self.metrics.request_seconds.observe(time.monotonic() - job.queued_at)
        if not job.cancelled:
            self._ended.append((job, error))

    def _fail_all(self, error: EngineError) -> None:
        with self._wake:
            jobs = list(self._jobs)
        for job in jobs:
            self._end(job, error)
        self._planner.reset()

    def _end_all(self, error: EngineError) -> None:
        """Nobody may wait for an answer that will not come."""
        with self._wake:
            jobs = list(self._jobs)
        for job in jobs:
            self._end(job, error)
        self._send()

    def _send(self) -> None:
        if self._ended:
            ended, self._ended = self._ended, []
            self._on_loop(settle, ended)

    def _on_loop(self, callback: object, *args: object) -> None:
        try:
            self._loop.call_soon_threadsafe(callback, *args)  # type: ignore[arg-type]
        except RuntimeError:
            # The loop has closed: the process is ending and nobody is left to hear it.
            log.debug("the event loop is closed")

    @property
    def loaded(self) -> PoolingLlama:
        assert self.llama is not None
        return self.llama


def _late(job: EmbeddingJob) -> DeadlineExceeded:
    what = "waited" if job.started_at is None else "ran"
    return DeadlineExceeded(f"The request {what} until its deadline.", hint="Send fewer inputs, or add engines.")
