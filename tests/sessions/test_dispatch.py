"""Which engine answers."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from engines.errors import ModelNotFound, NoEngineReady
from engines.models import Engine
from pools.db import in_db
from sessions import dispatch
from sessions.dispatch import ReadyEngines
from tests.rows import add_engine, add_model, set_ready
from tests.synthetic_gguf import SyntheticModel


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
