"""A sequence's state on its way to host memory, block by block. On the core's thread.

It stands for the sequence as it was when it began to leave: as soon as that is another one, what had left is dropped.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Generator

import numpy as np

from engines.runtime.cells import Sequence
from engines.runtime.checkpoint_order import Checkpoint
from engines.runtime.host_cache import TOKEN_BYTES, HostEntry
from engines.runtime.host_state import HostState
from engines.runtime.prefix import PrefixCache
from engines.runtime.state_codec import StateCodec
from engines.runtime.state_layout import Bytes

log = logging.getLogger("hydra.engine.host")

Slices = Generator[None, None, None]


class Leaving:
    """See the module. `slices` takes it one piece further at a time; whoever cannot wait runs through what is left of them."""

    def __init__(
        self,
        cache: PrefixCache,
        codec: StateCodec | None,
        block_tokens: int,
        sequence: Sequence,
        out: dict[int, tuple[int, int]],
    ) -> None:
        """`out` is told when it has left."""
        self._host = cache.host
        self._codec = codec
        self._block_tokens = block_tokens
        self._sequence = sequence
        self._mark = sequence.life, len(sequence)
        self._out = out
        # Where it stepped aside for another content of its slot.
        self.place: Checkpoint | None = None
        # For whoever wants to know that it is over.
        self.then: Callable[[], object] | None = None
        self.slices = self._leave()

    def follow(self, place: Checkpoint) -> None:
        """From now on it leaves out of another sequence, which holds the same."""
        self.place, self._sequence = place, place.sequence
        self._mark = place.sequence.life, len(place.sequence)

    def is_of(self, sequence: Sequence) -> bool:
        """Whether it is that sequence, as it is now."""
        return sequence is self._sequence and self._is_there

    @property
    def _is_there(self) -> bool:
        return (self._sequence.life, len(self._sequence)) == self._mark

    @property
    def size_bytes(self) -> int:
        """What host memory counts for it."""
        sequence, codec = self._sequence, self._codec
        if codec is None:
            return sequence.llama.state_bytes(sequence.index) + len(sequence) * TOKEN_BYTES
        full, rest = divmod(len(sequence), self._block_tokens)
        rows_bytes = full * codec.layout.block_bytes(self._block_tokens)
        rows_bytes += codec.layout.block_bytes(rest) if rest else 0
        return rows_bytes + codec.part_bytes(sequence) + len(sequence) * TOKEN_BYTES

    def _leave(self) -> Slices:
        if not self._is_there or not self._is_wanted():
            return
        basis = self._host.beginning_of(self._sequence) if self._codec else None
        common = self._common(basis)
        reserved_bytes, kept = self.size_bytes - sum(block.nbytes for block in common), False
        if not self._host.reserve(reserved_bytes, basis):
            self._out[self._sequence.index] = self._mark
            return
        try:
            state = yield from self._state(basis, common)
            if state is not None:
                sequence = self._sequence
                entry = HostEntry(list(sequence.tokens), state, sequence.spans, sequence.origin, time.monotonic())
                self._host.keep(entry, reserved_bytes)
                kept = True
                self._left()
        except Exception:
            # It goes without: whoever waits for its place must not wait for ever.
            log.exception("a conversation of %d tokens could not be put into host memory", len(self._sequence))
            self._out[self._sequence.index] = self._mark
        finally:
            if not kept:
                self._host.release(reserved_bytes)

    def _is_wanted(self) -> bool:
        return self._host.wants(self._sequence)

    def _left(self) -> None:
        self._out[self._sequence.index] = self._mark

    def _common(self, basis: HostEntry | None) -> tuple[Bytes, ...]:
        """Full blocks that host memory has already."""
        if basis is None or basis.state.block_tokens != self._block_tokens:
            return ()
        return basis.state.blocks[: len(basis.tokens) // self._block_tokens]

    def _state(self, basis: HostEntry | None, common: tuple[Bytes, ...]) -> Generator[None, None, HostState | None]:
        """None where the sequence, or what it has in common with an entry, changed meanwhile."""
        codec, size = self._codec, self._block_tokens
        if codec is None:
            return HostState(whole=self._sequence.llama.export_state(self._sequence.index))
        blocks, count = list(common), len(self._sequence)
        for start in range(len(common) * size, count, size):
            if start > len(common) * size:
                yield
            if not self._is_there or (basis is not None and not self._host.holds(basis)):
                return None
            blocks.append(self._block(codec, start, min(start + size, count)))
        if not codec.layout.has_part:
            return HostState(tuple(blocks), size)
        yield
        if not self._is_there:
            return None
        part = np.empty(codec.part_bytes(self._sequence), dtype=np.uint8)
        return HostState(tuple(blocks), size, codec.export_part(self._sequence, part))

    def _block(self, codec: StateCodec, start: int, end: int) -> Bytes:
        block = codec.export_block(self._sequence, start, end, np.empty(codec.capacity_bytes(end - start), np.uint8))
        # Where windows were written too the buffer is larger than what is kept of it, and counted.
        return block if block.nbytes == codec.capacity_bytes(end - start) else block.copy()


class LeavingCut(Leaving):
    """A checkpoint's recurrent state without its attention rows: one slice."""

    _codec: StateCodec

    @property
    def size_bytes(self) -> int:
        return self._codec.part_bytes(self._sequence) + len(self._sequence) * TOKEN_BYTES

    def _is_wanted(self) -> bool:
        return self._host.wants_cut(self._sequence)

    def _left(self) -> None:
        """Its rows may still come to be its own, and must leave then."""

    def _state(self, basis: HostEntry | None, common: tuple[Bytes, ...]) -> Generator[None, None, HostState | None]:
        yield from ()
        codec, sequence = self._codec, self._sequence
        buffer = np.empty(codec.part_bytes(sequence), dtype=np.uint8)
        taken = buffer[: codec.take_part(sequence, buffer)]
        return HostState(part=codec.finished_part(taken, sequence.next_position))
