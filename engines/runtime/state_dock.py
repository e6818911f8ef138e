"""What all transfers of an engine share: the way to the core's thread, buffers, and threads for digests."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Generator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from engines.errors import EngineError
from engines.runtime.arena import Arena
from engines.runtime.core import EngineCore
from engines.runtime.prefix import PrefixCache
from engines.runtime.state_codec import StateCodec

T = TypeVar("T")
Work = Callable[[PrefixCache], Generator[None, None, T]]

# What one transfer has under way: enough that nobody waits for anybody, little enough to stay in a processor's caches; but
# always these many pieces, so that one is on the core's thread while others are digested, read or sent.
WINDOW_BYTES = 12 << 20
LEAST_PIECES = 3


class Dock:
    def __init__(self, core: EngineCore, codec: StateCodec, arena: Arena, threads: ThreadPoolExecutor) -> None:
        self.codec = codec
        self.arena = arena
        self._core = core
        self._threads = threads

    def lane(self) -> Lane:
        return Lane(self._core)

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

    An errand per job would leave the core idle for the way to the event loop and back after each.
    """

    def __init__(self, core: EngineCore) -> None:
        self._core = core
        self._loop = asyncio.get_running_loop()
        self._jobs: deque[tuple[Callable[[PrefixCache], Any], asyncio.Future[Any]]] = deque()
        self._runner: asyncio.Task[None] | None = None

    def submit(self, job: Callable[[PrefixCache], T]) -> asyncio.Future[T]:
        """The future of the job's result. Whoever gave the job memory must wait for it (`to_its_end`), also when cancelled."""
        future: asyncio.Future[T] = self._loop.create_future()
        self._jobs.append((job, future))
        if self._runner is None or self._runner.done():
            self._runner = asyncio.ensure_future(self._run())
        return future

    async def _run(self) -> None:
        while self._jobs:
            try:
                await self._core.perform(self._work)
            except EngineError as error:  # the core has ended; what it did not take will not be done
                while self._jobs:
                    _settle(self._jobs.popleft()[1], None, error)

    def _work(self, cache: PrefixCache) -> Generator[None, None, None]:
        while self._jobs:
            job, future = self._jobs.popleft()
            try:
                result, error = job(cache), None
            except Exception as raised:  # noqa: BLE001 - whoever waits for the job gets it
                result, error = None, raised
            self._loop.call_soon_threadsafe(_settle, future, result, error)
            if self._jobs:
                yield


def _settle(future: asyncio.Future[Any], result: Any, error: Exception | None) -> None:
    if not future.done():
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
