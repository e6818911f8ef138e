"""Which engine answers."""

from __future__ import annotations

import pytest

from engines.services import EngineEndpoint
from sessions.dispatch import InFlight, choose


def endpoint(engine_id: int, slots: int = 4) -> EngineEndpoint:
    return EngineEndpoint(engine_id, f"cpu-{engine_id}", "http://127.0.0.1:1", "m", 1, slots, 1024)


def test_it_chooses_the_engine_with_the_least_work_for_its_slots() -> None:
    small, large = endpoint(1, slots=2), endpoint(2, slots=8)
    assert choose([small, large], {}) is small
    assert choose([small, large], {1: 1}) is large
    assert choose([small, large], {1: 1, 2: 5}) is small


def test_requests_count_while_they_run_and_not_after_an_error() -> None:
    in_flight = InFlight()
    with in_flight.on(1), in_flight.on(1):
        assert in_flight.counts == {1: 2}
    with pytest.raises(RuntimeError), in_flight.on(2):
        raise RuntimeError
    assert in_flight.counts == {}
