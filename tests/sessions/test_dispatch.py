"""Which engine answers."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from engines.errors import ModelNotFound, NoEngineReady
from engines.models import Engine
from engines.services import EngineEndpoint
from pools.db import in_db
from sessions import dispatch
from sessions.dispatch import InFlight, ReadyEngines, choose
from tests.rows import add_engine, add_model, set_ready
from tests.synthetic_gguf import SyntheticModel


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


@pytest.mark.django_db(transaction=True)
async def test_ready_engines_are_remembered_for_a_moment_and_looked_up_again_when_forgotten(
    tiny_model: Callable[..., SyntheticModel], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dispatch, "READY_CACHE_S", 600.0)

    def write() -> Engine:
        return add_engine(add_model(tiny_model("llama").path, tmp_path))

    engine = await in_db(write)
    ready = ReadyEngines()
    # What does not serve is not remembered: the first request after a start finds the engine.
    with pytest.raises(NoEngineReady):
        await ready.of("tiny")
    await in_db(set_ready, engine, 8080)
    (endpoint,) = await ready.of("tiny")
    with pytest.raises(ModelNotFound):
        await ready.of("unknown")

    await in_db(set_ready, engine, 8081)
    assert await ready.of("tiny") == [endpoint]
    ready.forget()
    assert [found.base_url for found in await ready.of("tiny")] == ["http://127.0.0.1:8081"]

    monkeypatch.setattr(dispatch, "READY_CACHE_S", 0.0)
    await in_db(set_ready, engine, 8082)
    assert [found.base_url for found in await ready.of("tiny")] == ["http://127.0.0.1:8082"]
