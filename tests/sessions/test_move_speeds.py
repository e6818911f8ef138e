"""How fast a conversation's state goes from one host to another: measured, recorded, or guessed once."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import pytest
from django.utils import timezone

from engines.rates_view import EngineRates
from engines.services import EngineEndpoint
from pools.router_views import LinkView
from sessions import rates_board
from sessions.models import ChatSession, Handoff
from sessions.move_speeds import between_hosts
from sessions.rates_board import NETWORK, RatesBoard
from tests.rows import add_engine, add_model
from tests.sessions.test_dispatch import RATES
from tests.synthetic_gguf import SyntheticModel


@pytest.mark.django_db
def test_the_newest_moves_between_two_hosts_tell_most_and_small_or_failed_ones_nothing(
    tiny_model: Callable[..., SyntheticModel], tmp_path: Path
) -> None:
    variant = add_model(tiny_model("llama").path, tmp_path)
    here, there = (add_engine(variant, host_name=name, name=f"{name}-0") for name in ("here", "there"))
    chat = ChatSession.objects.create(key_hash="1" * 64)
    now = timezone.now()

    def moved(age_s: float, mb_per_s: float | None, sent_bytes: int = 8 << 20, state: str = "committed") -> Handoff:
        return Handoff.objects.create(
            chat=chat,
            source=here,
            target=there,
            state=state,
            sent_bytes=sent_bytes,
            mb_per_s=mb_per_s,
            ended_at=now - timedelta(seconds=age_s),
        )

    assert between_hosts() == {}
    moved(10, 100.0)
    moved(5, 300.0)
    moved(1, 9_000.0, sent_bytes=1_000)
    moved(1, 9_000.0, state="failed")
    moved(1, None)
    assert between_hosts() == {("here", "there"): 200e6}
    Handoff.objects.update(target=None)
    assert between_hosts() == {}


def test_a_link_that_nobody_measured_is_guessed_once_and_then_doubted(monkeypatch: pytest.MonkeyPatch) -> None:
    board = RatesBoard()
    engines = [
        EngineEndpoint(number, f"e{number}", f"http://10.0.0.{number}:1", "m", 1, 2, 100, host_name=f"h{number}")
        for number in (1, 2)
    ]
    for one in engines:
        board._of(one).rates = EngineRates.from_dict({**RATES, "streams_kv": True})

    def link(**recorded: float) -> LinkView:
        speeds = {("h1", "h2"): recorded["speed"]} if recorded else {}
        return board.view(engines, held={}, session="s", prefixes={}, move_speeds=speeds).links["h1", "h2"]

    assert link() == NETWORK
    assert link(speed=5e8) == LinkView(5e8, NETWORK.latency_s)
    board.tries("h1", "h2")
    assert link().doubted
    assert not link(speed=5e8).doubted
    monkeypatch.setattr(rates_board, "TRY_AGAIN_S", 0.0)
    assert not link().doubted
    board.moved("h1", "h2", 2e8)
    assert link(speed=5e8) == LinkView(2e8, NETWORK.latency_s), "what this process has measured last"
