"""Where requests have their images computed: one at a time, on a thread of its own, each image once.

Decoding goes on meanwhile. Runs on the event loop; what takes long happens on the thread.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

from engines.config import EngineConfig
from engines.errors import QueueFull
from engines.runtime.media_image import ImageFile, pixels
from engines.runtime.media_projector import Part, Projector
from engines.runtime.media_span import MediaSpan, SpanMap

# Embeddings of images that were seen lately: a conversation sends all of its images again with every turn.
CACHE_BYTES = 256 << 20
# Embeddings of the requests that run or wait to; one request alone may have more.
HELD_BYTES = 1 << 30


class MediaDesk:
    """Images to parts of prompts."""

    def __init__(self, config: EngineConfig, projector: Projector, cache_bytes: int = CACHE_BYTES) -> None:
        self._projector = projector
        self._limit_tokens = config.context_tokens - 1
        self._queue_limit = config.queue_limit + 1
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="media")
        self._computing: dict[bytes, asyncio.Task[list[Part]]] = {}
        self._cache: OrderedDict[bytes, list[Part]] = OrderedDict()
        self._cache_bytes = cache_bytes
        self._used_bytes = 0
        self._held_bytes = 0
        self.computed = 0

    def close(self) -> None:
        """Nobody may ask any more. Does not wait for the image that is being computed; the projector's `close` does."""
        self._thread.shutdown(wait=False, cancel_futures=True)

    @contextmanager
    def holding(self, spans: SpanMap, limit_bytes: int = HELD_BYTES) -> Iterator[None]:
        """For as long as a request keeps its images. Raises QueueFull where those of all together would take too much memory."""
        size_bytes = spans.size_bytes
        if self._held_bytes and self._held_bytes + size_bytes > limit_bytes:
            raise QueueFull(f"Images of other requests take {self._held_bytes >> 20} MiB already.")
        self._held_bytes += size_bytes
        try:
            yield
        finally:
            self._held_bytes -= size_bytes

    async def parts(self, files: Sequence[ImageFile], params: Sequence[str]) -> list[list[Part]]:
        """What stands in the prompt for each image. Raises InvalidRequest, QueueFull and DecodeFailed.

        `params` name the images' fields in errors. Whoever is cancelled stops waiting; an image under way is finished.
        """
        return [await self._one(file, param) for file, param in zip(files, params, strict=True)]

    async def _one(self, file: ImageFile, param: str) -> list[Part]:
        known = self._cache.get(file.digest)
        if known is not None:
            self._cache.move_to_end(file.digest)
            return known
        task = self._computing.get(file.digest)
        if task is None:
            if len(self._computing) >= self._queue_limit:
                raise QueueFull(f"{len(self._computing)} images wait already.")
            task = asyncio.create_task(self._compute(file, param))
            self._computing[file.digest] = task
            task.add_done_callback(_look_at_failure)
        return await asyncio.shield(task)

    async def _compute(self, file: ImageFile, param: str) -> list[Part]:
        loop = asyncio.get_running_loop()
        try:
            found = await loop.run_in_executor(self._thread, self._read, file, param)
        finally:
            del self._computing[file.digest]
        self.computed += 1
        self._keep(file.digest, found)
        return found

    def _read(self, file: ImageFile, param: str) -> list[Part]:
        return self._projector.parts(pixels(file, param), file.digest, self._limit_tokens, param)

    def _keep(self, digest: bytes, parts: list[Part]) -> None:
        self._cache[digest] = parts
        self._used_bytes += _size_bytes(parts)
        while self._used_bytes > self._cache_bytes:
            _, dropped = self._cache.popitem(last=False)
            self._used_bytes -= _size_bytes(dropped)


def _size_bytes(parts: Sequence[Part]) -> int:
    return sum(part.embeddings.nbytes for part in parts if isinstance(part, MediaSpan))


def _look_at_failure(task: asyncio.Task[list[Part]]) -> None:
    """Everybody who waited may have left; the failure is then nobody's news."""
    if not task.cancelled():
        task.exception()
