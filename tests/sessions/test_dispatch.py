"""Which engine answers."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from django.db import Error as DatabaseError

from engines.client import close_client_session
from engines.errors import ModelNotFound, NoEngineReady
from engines.models import Engine
from engines.rates_view import EngineRates
from engines.services import EngineEndpoint
from pools.db import in_db
from pools.router_views import LinkView, SnapshotView
from sessions import known_engines
from sessions.known_engines import ReadyEngines
from sessions.rates_board import NETWORK, RatesBoard
from tests.frozen_table import frozen
from tests.rows import add_engine, add_model, set_ready
from tests.sessions.loopback_engine import loopback_engine, streaming
from tests.synthetic_gguf import SyntheticModel


@pytest.mark.django_db(transaction=True)
async def test_ready_engines_are_remembered_for_a_moment_and_looked_up_again_when_forgotten(
    tiny_model: Callable[..., SyntheticModel], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(known_engines, "READY_CACHE_S", 600.0)

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
    ready.forget(endpoint)
    assert [found.base_url for found in await ready.of("tiny")] == ["http://127.0.0.1:8081"]

    monkeypatch.setattr(known_engines, "READY_CACHE_S", 0.0)
    await in_db(set_ready, engine, 8082)
    assert [found.base_url for found in await ready.of("tiny")] == ["http://127.0.0.1:8082"]


@pytest.mark.django_db(transaction=True)
async def test_a_database_that_hangs_keeps_no_request_from_the_engines_of_before(
    tiny_model: Callable[..., SyntheticModel], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(known_engines, "READY_CACHE_S", 0.0)

    def write() -> None:
        variant = add_model(tiny_model("llama").path, tmp_path)
        set_ready(add_engine(variant, name="cpu-0"), 8080)
        set_ready(add_engine(variant, name="cpu-1"), 8081)

    await in_db(write)
    ready = ReadyEngines()
    known = await ready.of("tiny")
    monkeypatch.setattr(known_engines, "DATABASE_PATIENCE_S", 0.05)
    monkeypatch.setattr(known_engines, "FIRST_PATIENCE_S", 0.05)
    with frozen("engines_engine"):
        assert await ready.of("tiny") == known
        with pytest.raises(DatabaseError):
            await ReadyEngines().of("tiny")
        # One that failed is not believed in for want of news; the others are.
        ready.forget(known[0])
        assert await ready.of("tiny") == known[1:]
        ready.forget(known[1])
        with pytest.raises(DatabaseError):
            await ready.of("tiny")


def test_links_are_as_fast_as_the_engines_of_a_host_have_told() -> None:
    board = RatesBoard()
    one = EngineEndpoint(1, "e", "http://10.0.0.2:1", "m", 1, 2, 100, host_name="second")
    saved = SnapshotView("first", "f", 100, 1 << 20, "10.0.0.1:7000")

    def link() -> LinkView:
        return board.view([one], held={}, session="s", prefixes={}, snapshots=(saved,)).links["first", "second"]

    def told(speed: float) -> EngineRates:
        return EngineRates.from_dict({**RATES, "links": {saved.address: speed}})

    assert link() == NETWORK
    board._learn_links("second", None, told(speed=4e8))
    assert link().bytes_per_s == 4e8
    board._learn_links("second", told(speed=4e8), told(speed=4e8))
    board._learn_links("second", told(speed=4e8), told(speed=2e8))
    assert link().bytes_per_s == 3e8
    board._learn_links("third", None, told(speed=1e6))
    assert link().bytes_per_s == 3e8, "another host's way there"
    assert EngineRates.from_dict(RATES).links == {}, "an engine of before tells none"
    with pytest.raises(ValueError, match="no duration"):
        told(speed=float("nan"))


RATES = {
    **dict.fromkeys(("slots", "free_slots", "decoding", "queue_length", "queue_limit", "context_tokens"), 1),
    **dict.fromkeys(("cells", "resident_tokens", "idle_tokens", "prefill_token_s", "prefill_pair_s", "idle_s"), 1),
    **dict.fromkeys(("resident_token_s", "request_s", "chunk_s", "restore_bytes_per_s"), 1.0),
    "model": "m",
    "pending_tokens": [],
    "steps": [[1, 0.1]],
    "interleaves": False,
    "kv_group": "",
    "sessions": {},
}


async def test_an_engine_that_has_no_rates_is_asked_without_a_failure() -> None:
    board = RatesBoard()
    async with loopback_engine(streaming()) as port:
        endpoint = EngineEndpoint(1, "e", f"http://127.0.0.1:{port}", "m", 1, 2, 100)
        try:
            await board._ask(endpoint, board._of(endpoint))
        finally:
            await close_client_session()
    assert board._of(endpoint).rates is None
