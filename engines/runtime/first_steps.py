"""First steps of generations that came from another engine: when they were, for the figures of their moves."""

from __future__ import annotations

import time
from collections.abc import Sequence

from engines.runtime.generation import Generation
from engines.runtime.planner import Row


class FirstSteps:
    """Used by the core's thread only."""

    def __init__(self) -> None:
        self._awaited: list[Generation] = []

    def expect(self, generation: Generation) -> None:
        """It takes no step before this is called."""
        self._awaited.append(generation)

    def among(self, rows: Sequence[Row]) -> list[Generation]:
        """Those that take their first step by these rows."""
        if not self._awaited:
            return []
        running = {row.slot.generation for row in rows}
        first = [generation for generation in self._awaited if generation in running]
        self._awaited = [one for one in self._awaited if one not in running and not one.cancelled]
        return first

    @staticmethod
    def note(first: Sequence[Generation], began_at: float) -> None:
        """Their step, begun then (time.monotonic), is over."""
        ended_at = time.monotonic()
        for generation in first:
            if generation.marks is not None:
                generation.marks.note("step_began", began_at)
                generation.marks.note("step_ended", ended_at)
