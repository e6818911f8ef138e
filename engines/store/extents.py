"""Free room of one slab: ranges of whole pages, joined with their neighbours when they come back."""

from __future__ import annotations

from bisect import bisect_left

PAGE_BYTES = 4096


def pages(size_bytes: int) -> int:
    """The room that an object of that size takes: whole pages, at least one."""
    return max(1, -(-size_bytes // PAGE_BYTES)) * PAGE_BYTES


class FreeRanges:
    """Offsets [0, `size_bytes`), all free at first. Best fit; small objects from the end, so that they do not cut up the rest."""

    def __init__(self, size_bytes: int) -> None:
        self.free_bytes = size_bytes
        self._starts = [0] if size_bytes else []
        self._sizes = [size_bytes] if size_bytes else []

    @property
    def largest(self) -> int:
        return max(self._sizes, default=0)

    def take(self, size: int, *, from_end: bool = False) -> int | None:
        """The offset of `size` bytes that are no longer free; None where no range is that long."""
        fitting = [index for index, free in enumerate(self._sizes) if free >= size]
        if not fitting:
            return None
        best = fitting[-1] if from_end else min(fitting, key=self._sizes.__getitem__)
        start, free = self._starts[best], self._sizes[best]
        self.free_bytes -= size
        if free == size:
            del self._starts[best], self._sizes[best]
            return start
        self._sizes[best] = free - size
        if from_end:
            return start + free - size
        self._starts[best] = start + size
        return start

    def take_at(self, start: int, size: int) -> bool:
        """Takes just that range. False where some of it is not free."""
        index = bisect_left(self._starts, start + 1) - 1
        if index < 0 or size <= 0:
            return False
        begin, free = self._starts[index], self._sizes[index]
        if start + size > begin + free:
            return False
        parts = [(begin, start - begin), (start + size, begin + free - start - size)]
        kept = [part for part in parts if part[1]]
        self._starts[index : index + 1] = [part[0] for part in kept]
        self._sizes[index : index + 1] = [part[1] for part in kept]
        self.free_bytes -= size
        return True

    def give(self, start: int, size: int) -> None:
        index = bisect_left(self._starts, start)
        self.free_bytes += size
        if index < len(self._starts) and start + size == self._starts[index]:
            size += self._sizes[index]
            del self._starts[index], self._sizes[index]
        if index and self._starts[index - 1] + self._sizes[index - 1] == start:
            self._sizes[index - 1] += size
            return
        self._starts.insert(index, start)
        self._sizes.insert(index, size)
