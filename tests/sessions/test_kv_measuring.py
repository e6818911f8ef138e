"""A measurement of two quants that does not come to its end."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from engines import services as engines
from engines.client import close_client_session
from engines.models import Engine
from pools.db import in_db
from sessions import kv_losses, kv_measuring
from sessions.kv_losses import KvLossView, Pair
from tests.rows import add_engine, add_model, set_ready
from tests.sessions.loopback_engine import mute_peer
from tests.synthetic_gguf import SyntheticModel

pytestmark = pytest.mark.django_db(transaction=True)


async def test_a_pair_is_given_up_before_somebody_else_measures_it_too(
    tiny_model: Callable[..., SyntheticModel], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert kv_losses.MEASURING_S < kv_losses.RETRY_S
    monkeypatch.setattr(kv_losses, "MEASURING_S", 0.3)

    def claimed(port: int) -> Pair:
        row = add_engine(add_model(tiny_model("llama").path, tmp_path))
        Engine.objects.filter(pk=row.pk).update(rpc_port=port, rpc_secret="a secret of the tests")
        set_ready(row, port)
        (endpoint,) = engines.serving_engines(None)
        pair = Pair(endpoint, endpoint)
        assert kv_losses.claim(pair)
        return pair

    async with mute_peer() as port:
        try:
            assert await kv_measuring.measure(await in_db(claimed, port)) is None
        finally:
            await close_client_session()
    (seen,) = await in_db(kv_losses.views)
    assert isinstance(seen, KvLossView)
    assert (seen.kl_mean, seen.problem) == (None, "it was not measured within 0.3 s")
