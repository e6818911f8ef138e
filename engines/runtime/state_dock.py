"""What all transfers of an engine share: the way to the core's thread, buffers, and threads for digests."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Awaitable, Callable, Generator
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

from engines.errors import EngineError, EngineStopping
from engines.runtime.arena import Arena
from engines.runtime.core import EngineCore
from engines.runtime.prefix import PrefixCache
from engines.runtime.state_codec import StateCodec

T = TypeVar("T")
Work = Callable[[PrefixCache], Generator[None, None, T]]

# What one transfer has under way: enough that nobody waits for anybody, little enough to stay in a processor's caches; but
# always these many pieces, so that one is on the core's thread while others are digested, read or sent. A card, which copies
# while the core's thread is at the next piece already, has more.
WINDOW_BYTES = 12 << 20
LEAST_PIECES, LEAST_QUEUED_PIECES = 3, 6
# Jobs that the core's thread still has when it tells which ones are done.
LEAST_AHEAD = 2
# While nothing decodes, a slice has as many pieces as come into this time: whoever asks for a token then waits no longer.
IDLE_SLICE_S = 0.003


class Dock:
    def __init__(
        self,
        core: EngineCore,
        codec: StateCodec,
        arena: Arena,
        threads: ThreadPoolExecutor,
        provers: ThreadPoolExecutor,
        *,
        proves_apart: bool = True,
    ) -> None:
        """`proves_apart` False: a checksum is made by the core's thread, beside which there is no core to spare for it."""
        self.codec = codec
        self.arena = arena
        self._core = core
        self._threads = threads
        self._provers = provers
        self._proves_apart = proves_apart

    def lane(self, *, paired: bool = False) -> Lane:
        """`paired`: another engine of this machine takes the pieces in meanwhile, or gives them."""
        return Lane(self._core, self.codec, self._provers, proves_apart=self._proves_apart, tells_each=paired)

    def has_room(self, under_way: int, size_bytes: int, *, coming_in: bool = False) -> bool:
        """Whether a transfer may have one more piece under way beside so many, together of `size_bytes`."""
        # What waits to be proved by the core's thread need not be in any cache yet.
        many = self.codec.queues or (coming_in and not self._proves_apart)
        least = LEAST_QUEUED_PIECES if many else LEAST_PIECES
        return under_way < least or size_bytes <= WINDOW_BYTES

    async def perform(self, work: Work[T]) -> T:
        """Runs an errand to its end, also when the caller is cancelled meanwhile."""
        return await to_its_end(self._core.perform(work))

    async def take(self, work: Work[T], give_back: Callable[[T], Work[None]]) -> T:
        """`perform` for an errand that takes something, which is given back when the caller is cancelled."""
        task = asyncio.ensure_future(self._core.perform(work))
        try:
            return await to_its_end(task)
        except asyncio.CancelledError:
            if not task.cancelled() and task.exception() is None:
                await self.perform(give_back(task.result()))
            raise

    async def in_thread(self, function: Callable[..., T], *args: object) -> T:
        """As `perform`: what the thread reads or writes is not reused before it has ended."""
        return await to_its_end(asyncio.get_running_loop().run_in_executor(self._threads, function, *args))


class Lane:
    """One transfer's jobs for the core's thread: a slice each, in order, as one errand for as long as there are some.

    An errand per job would leave the core idle for the way to the event loop and back after each. What a job needs before it
    (`first`), while it goes on (`beside`) or after it (`then`) runs on a thread beside it. One that fails takes those behind it
    along; those behind a `beside` that fails are only held up where they are `closing`. Where the codec
    queues, a job counts as done once a call of the next one has waited for its copies, and else once they were waited for. Where
    nothing is proved apart, what a quick job needs is done by the core's thread itself: its bytes are then in the caches of the
    core that copies them. `tells_each`: another engine waits for each job's end, which is told at once.
    """

    def __init__(
        self,
        core: EngineCore,
        codec: StateCodec,
        threads: ThreadPoolExecutor,
        *,
        proves_apart: bool = True,
        tells_each: bool = False,
    ) -> None:
        self._core = core
        self._codec = codec
        self._threads = threads
        self._proves_apart = proves_apart
        self._tells_each = tells_each
        # Jobs whose copies may still be under way, with their results.
        self._queued: list[tuple[_Job, Any]] = []
        self._untold: list[tuple[asyncio.Future[Any], Any, BaseException | None]] = []
        self._loop = asyncio.get_running_loop()
        self._jobs: deque[_Job] = deque()
        # What jobs have beside them, by the order of the jobs; used on the event loop.
        self._proofs: list[Future[object]] = []
        self._runner: asyncio.Task[None] | None = None
        self._failure: BaseException | None = None

    def submit(
        self,
        job: Callable[[PrefixCache], Any],
        *,
        first: Callable[[], object] | None = None,
        beside: Callable[[], object] | None = None,
        then: Callable[[Any], Any] | None = None,
        quick: bool = False,
        closing: bool = False,
    ) -> asyncio.Future[Any]:
        """The future of what `then`, given the job's result, gives; of the job's result without it. `quick`: all of them go
        through the job's bytes about as fast as memory gives them. `beside`, where it is quick and there is a thread for it, may
        end after the job, and else comes before `first`; the future waits for it. A `closing` job waits for its own and all
        earlier ones.

        Whoever gave the job memory must wait for the future (`to_its_end`), also when cancelled.
        """
        future: asyncio.Future[Any] = self._loop.create_future()
        at_once = quick and not self._proves_apart
        proof: Future[object] | None = None
        if beside is not None and (at_once or closing or not quick):
            first = partial(_in_turn, beside, first)
        elif beside is not None:
            proof = self._threads.submit(beside)
        awaited: list[Future[object]] = []
        if closing:
            awaited += self._proofs
            self._proofs = []
        if first is not None and not at_once and proof is None:
            awaited.append(self._threads.submit(first))
            first = None
        if proof is not None:
            self._proofs.append(proof)
        self._jobs.append(_Job(job, future, tuple(awaited), first, then, at_once, proof))
        if self._runner is None or self._runner.done():
            self._runner = asyncio.ensure_future(self._run())
        return future

    async def _run(self) -> None:
        while self._jobs:
            if not self._codec.queues:
                await self._head_is_ready()
            head = self._jobs[0]
            try:
                await self._core.perform(self._work)
            except EngineError as error:  # the core has ended; what it did not take will not be done
                while self._jobs:
                    self._fail(self._jobs.popleft(), error)
                self._tell()
            if self._jobs and self._jobs[0] is head:
                await self._head_is_ready()

    async def _head_is_ready(self) -> None:
        for awaited in self._jobs[0].awaited:
            if not awaited.done():
                coming = asyncio.wrap_future(awaited)
                await asyncio.wait((coming,))
                if not coming.cancelled():
                    coming.exception()  # looked at: the job raises it

    def _work(self, cache: PrefixCache) -> Generator[None, None, None]:
        began_at = time.monotonic()
        try:
            while self._jobs and (self._jobs[0].is_ready or self._gets_ready(cache, began_at)):
                self._advance(self._jobs.popleft(), cache)
                busy = bool(cache.busy)
                if busy:
                    self._settle_queued()
                if self._proves_apart or self._tells_each or len(self._jobs) < LEAST_AHEAD:
                    self._tell()
                if busy or time.monotonic() - began_at > IDLE_SLICE_S:
                    self._tell()
                    yield
                    began_at = time.monotonic()
        finally:
            self._settle_queued()
            self._tell()

    def _gets_ready(self, cache: PrefixCache, began_at: float) -> bool:
        """Waits for what the next job needs, where the codec queues, while nothing decodes and the slice lasts: an errand that
        ends waits for what is queued, and the next one begins two threads later."""
        until, job = began_at + IDLE_SLICE_S, self._jobs[0]
        if not self._codec.queues or cache.busy or time.monotonic() >= until:
            return False
        self._tell()
        for awaited in job.awaited:
            with suppress(TimeoutError, CancelledError):
                awaited.exception(max(0.0, until - time.monotonic()))
        return job.is_ready

    def _advance(self, job: _Job, cache: PrefixCache) -> None:
        calls = self._codec.calls
        try:
            if self._failure is not None:
                raise self._failure
            for awaited in job.awaited:
                awaited.result()
            if job.first is not None:
                job.first()
            result = job.work(cache)
        except (Exception, CancelledError) as error:  # noqa: BLE001 - whoever waits for the job gets it
            # What it had queued before it failed would still go on in memory that is another's then.
            self._settle_queued(also_unnoted=True)
            self._failure = error
            self._fail(job, error)
            return
        self._queued.append((job, result))
        if self._codec.queues and self._codec.calls != calls:
            before, self._queued = self._queued[:-1], self._queued[-1:]
            self._are_there(before)
        else:
            # A draft head's rows come out of a context of its own, hidden rows out of none: no call waited for what is queued.
            self._settle_queued()

    def _settle_queued(self, *, also_unnoted: bool = False) -> None:
        if self._codec.queues and (self._queued or also_unnoted):
            self._codec.settle()
        before, self._queued = self._queued, []
        self._are_there(before)

    def _are_there(self, jobs: list[tuple[_Job, Any]]) -> None:
        for job, result in jobs:
            self._worked(job, result)

    def _worked(self, job: _Job, result: Any) -> None:
        if job.proof is not None:
            self._proved(job, result, job.proof)
            return
        if job.then is None:
            self._settle(job, result, None)
            return
        if job.at_once:
            try:
                self._settle(job, job.then(result), None)
            except Exception as error:  # noqa: BLE001 - whoever waits for the job gets it
                self._settle(job, None, error)
            return
        try:
            self._threads.submit(job.then, result).add_done_callback(partial(self._after, job))
        except RuntimeError:  # the threads were ended
            self._settle(job, None, CancelledError())

    def _proved(self, job: _Job, result: Any, proof: Future[object]) -> None:
        """The job counts as done when its proof is."""
        if not proof.done():
            proof.add_done_callback(partial(self._proved_late, job, result))
            return
        self._settle(job, result, CancelledError() if proof.cancelled() else proof.exception())

    def _proved_late(self, job: _Job, result: Any, proof: Future[object]) -> None:
        """On the thread that did it."""
        error = CancelledError() if proof.cancelled() else proof.exception()
        self._loop.call_soon_threadsafe(_settle, job.future, result, error)

    def _fail(self, job: _Job, error: BaseException) -> None:
        """What it has beside it still reads its memory until it ends, and knows better what was wrong: damage may look like
        anything."""
        if job.proof is None:
            self._settle(job, None, error)
        else:
            job.proof.add_done_callback(partial(self._proved_after, job, error))

    def _proved_after(self, job: _Job, error: BaseException, proof: Future[object]) -> None:
        cause = None if proof.cancelled() else proof.exception()
        self._loop.call_soon_threadsafe(_settle, job.future, None, cause or error)

    def _after(self, job: _Job, done: Future[Any]) -> None:
        """On the thread that did it."""
        error = CancelledError() if done.cancelled() else done.exception()
        self._loop.call_soon_threadsafe(_settle, job.future, None if error else done.result(), error)

    def _settle(self, job: _Job, result: Any, error: BaseException | None) -> None:
        self._untold.append((job.future, result, error))

    def _tell(self) -> None:
        """The event loop hears of several jobs at once where there is no core for it either: waking it is not free."""
        if self._untold:
            told, self._untold = self._untold, []
            self._loop.call_soon_threadsafe(_settle_all, told)


@dataclass(frozen=True, eq=False)
class _Job:
    work: Callable[[PrefixCache], Any]
    future: asyncio.Future[Any]
    awaited: tuple[Future[object], ...]
    first: Callable[[], object] | None
    """What the core's thread does before it."""
    then: Callable[[Any], Any] | None
    at_once: bool
    proof: Future[object] | None
    """What goes on beside it."""

    @property
    def is_ready(self) -> bool:
        return all(awaited.done() for awaited in self.awaited)


def _in_turn(one: Callable[[], object], other: Callable[[], object] | None) -> None:
    one()
    if other is not None:
        other()


def _settle_all(told: list[tuple[asyncio.Future[Any], Any, BaseException | None]]) -> None:
    for future, result, error in told:
        _settle(future, result, error)


def _settle(future: asyncio.Future[Any], result: Any, error: BaseException | None) -> None:
    if future.done():
        return
    if isinstance(error, CancelledError):
        error = EngineStopping("The engine is shutting down.")
    if error is None:
        future.set_result(result)
    else:
        future.set_exception(error)


async def to_its_end(awaitable: Awaitable[T]) -> T:
    """The result of `awaitable`; a cancel of the caller waits until it has ended, and is raised then."""
    task = asyncio.ensure_future(awaitable)
    cancelled = False
    while not task.done():
        try:
            await asyncio.wait((task,))
        except asyncio.CancelledError:
            cancelled = True
    if cancelled:
        if not task.cancelled():
            task.exception()  # looked at: the cancel is what counts
        raise asyncio.CancelledError
    return task.result()
