"""What steps and drafts cost, as measured: by a warm-up at an engine's start, then by its own steps. Pure arithmetic."""

from __future__ import annotations

import math
from bisect import bisect_left, insort

# A cost is the mean of its measurements until so many; later ones weigh as much as then.
COST_MEMORY = 40
# A measurement that lies this far beyond the estimate is a graph that was rebuilt, not the price of a step.
OUTLIER_RATIO = 1.5


class Line:
    """Values at some places; between and beyond those, along straight lines that never fall."""

    def __init__(self) -> None:
        self.values: dict[int, float] = {}
        self.places: list[int] = []

    def put(self, place: int, value: float) -> None:
        if place not in self.values:
            insort(self.places, place)
        self.values[place] = value

    def at(self, place: int) -> float:
        """0 as long as no value is known."""
        known = self.places
        if place in self.values or not known:
            return self.values.get(place, 0.0)
        if len(known) == 1:
            return self.values[known[0]] * math.sqrt(max(1.0, place / known[0]))
        index = min(max(bisect_left(known, place), 1), len(known) - 1)
        low, high = known[index - 1], known[index]
        slope = max(0.0, (self.values[high] - self.values[low]) / (high - low))
        return max(0.0, self.values[low] + slope * (place - low))


class StepCosts:
    """Seconds of a step by its number of rows: as measured, or else as a warm-up's steps let expect. Those tell how costs grow
    but not how high they are, so that the nearest measurements say how far off they were."""

    def __init__(self) -> None:
        self._expected = Line()
        self._seen = Line()
        self._times: dict[int, int] = {}

    def __len__(self) -> int:
        return len(self._seen.places)

    def knows(self, rows: int) -> bool:
        """Whether just such steps were measured, by a warm-up at least."""
        return rows in self._seen.values or rows in self._expected.values

    @property
    def only(self) -> int | None:
        """The one number of rows of which anything is known, None if there are more or none."""
        known = {*self._seen.places, *self._expected.places}
        return known.pop() if len(known) == 1 else None

    def expect(self, rows: int, seconds: float) -> None:
        self._expected.put(rows, seconds)

    def saw(self, rows: int, seconds: float) -> None:
        known = self._seen.values.get(rows)
        times = self._times[rows] = min(self._times.get(rows, 0) + 1, COST_MEMORY)
        if known is None:
            expected = self.seconds(rows)
            self._seen.put(rows, min(seconds, expected * OUTLIER_RATIO) if expected else seconds)
        else:
            self._seen.put(rows, known + (min(seconds, known * OUTLIER_RATIO) - known) / times)

    def seconds(self, rows: int) -> float:
        """0 as long as nothing is known."""
        expected, seen = self._expected.at(rows), self._seen
        if rows in seen.values or not expected:
            return seen.at(rows)
        if not seen.places:
            return expected
        index = bisect_left(seen.places, rows)
        low, high = seen.places[max(index - 1, 0)], seen.places[min(index, len(seen.places) - 1)]
        share = (rows - low) / (high - low) if low < rows < high else float(rows >= high)
        return expected * ((1 - share) * self._error(low) + share * self._error(high))

    def _error(self, rows: int) -> float:
        return self._seen.values[rows] / self._expected.at(rows)


class DraftingCosts:
    """Seconds of drafting so many tokens for so many sequences at once."""

    def __init__(self) -> None:
        self._by_count: dict[int, StepCosts] = {}

    def expect(self, count: int, length: int, seconds: float) -> None:
        """As a warm-up measured it."""
        self._by_count.setdefault(count, StepCosts()).expect(length, seconds)

    def saw(self, count: int, length: int, seconds: float) -> None:
        self._by_count.setdefault(count, StepCosts()).saw(length, seconds)

    def knows(self, count: int, length: int) -> bool:
        return count in self._by_count and self._by_count[count].knows(length)

    def seconds(self, count: int, length: int) -> float:
        """By what was measured with as many sequences if possible, else along lines between more and fewer; 0 for no token, or
        as long as nothing was measured."""
        if not length or not self._by_count:
            return 0.0
        costs = self._by_count.get(count)
        if costs is not None:
            return _of_length(costs, length)
        by_count = Line()
        for known, costs in self._by_count.items():
            by_count.put(known, _of_length(costs, length))
        return by_count.at(count)


def _of_length(costs: StepCosts, length: int) -> float:
    """Of one measured length nothing but its tokens' share tells what others take."""
    only = costs.only
    return costs.seconds(length) if only is None else costs.seconds(only) * length / only
