"""A stand-in for the llama.cpp of a card: states are moved by the real library, but what a call queues is there late."""

from __future__ import annotations

import asyncio
import ctypes
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import llama_cpp
import numpy as np
import pytest

from engines.runtime.core import EngineCore
from engines.runtime.state_layout import Bytes

QUEUED = 4
# What of a state is copied last: rows, behind all that says what they are.
LATE_BYTES = 64
PATIENCE_S = 20.0


@dataclass(frozen=True)
class _Copy:
    """The last bytes of a state. Out: `memory` gets them when it lands; in: they are read from it then."""

    memory: Bytes
    wanted: Bytes
    comes_in: bool


class LateCopies:
    """Copies that cores queue, by their contexts. They land, as on a card, in the next call that moves state of the same context,
    or in its synchronize; the calls of another context, as a draft head's, do not wait for them."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *cores: EngineCore) -> None:
        self.landed = self.torn = 0
        """Copies that landed, and those of them that read other bytes than they should have."""
        self._under_way: dict[int, list[_Copy]] = {}
        self._loop = asyncio.get_running_loop()
        for name, comes_in in (("get", False), ("set", True)):
            self._patch(
                monkeypatch, f"llama_state_seq_{name}_data_ext", lambda real, way=comes_in: self._moved(real, way)
            )
            self._patch(monkeypatch, f"llama_state_seq_{name}_data", self._settled)
        self._patch(monkeypatch, "llama_synchronize", self._settled)
        for core in cores:
            assert core.llama is not None
            assert core.codec is not None
            core.llama.queues_states = True
            core.codec.ranges = False  # calls of our own builds, which are not looked at here

    @property
    def under_way(self) -> int:
        return sum(len(copies) for copies in self._under_way.values())

    @staticmethod
    def _patch(monkeypatch: pytest.MonkeyPatch, name: str, made: Callable[[Any], Any]) -> None:
        monkeypatch.setattr(llama_cpp, name, made(getattr(llama_cpp, name)))

    def _settled(self, real: Any) -> Any:
        def call(context: Any, *rest: Any) -> Any:
            self._land(context)
            return real(context, *rest)

        return call

    def _moved(self, real: Any, comes_in: bool) -> Any:
        def call(context: Any, pointer: Any, size: int, seq: int, flags: int) -> int:
            self._land(context)
            moved = int(real(context, pointer, size, seq, flags & ~QUEUED))
            if flags & QUEUED and moved > LATE_BYTES:
                memory = np.ctypeslib.as_array(pointer, shape=(moved,))[-LATE_BYTES:]
                self._under_way.setdefault(_address(context), []).append(_Copy(memory, memory.copy(), comes_in))
                if not comes_in:
                    memory[:] = ~memory
            return moved

        return call

    def _land(self, context: Any) -> None:
        """On the core's thread."""
        copies = self._under_way.get(_address(context), [])
        if copies:
            # Whoever was told that a copy is done has heard of it by now.
            asyncio.run_coroutine_threadsafe(_turns(), self._loop).result(PATIENCE_S)
        while copies:
            copy = copies.pop()
            self.landed += 1
            if not copy.comes_in:
                copy.memory[:] = copy.wanted
            elif not np.array_equal(copy.memory, copy.wanted):
                self.torn += 1


async def _turns() -> None:
    for _ in range(20):
        await asyncio.sleep(0)


def _address(context: Any) -> int:
    return context if isinstance(context, int) else int(ctypes.cast(context, ctypes.c_void_p).value or 0)
