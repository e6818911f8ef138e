"""The bench of placements: one measured on ggml's RPC server as a card, and the experts that leave a capped one."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator

import pytest

from bench import placement
from bench.placement import Placed
from pools.ledger import Form
from tests.synthetic_gguf import SyntheticModel

OPTIONS = argparse.Namespace(threads=1)


@pytest.fixture(scope="module")
def card() -> Iterator[str]:
    with placement._stand_in_card() as endpoint:
        yield endpoint


def test_a_split_model_takes_what_was_planned_on_both_sides(
    tiny_model: Callable[..., SyntheticModel], card: str
) -> None:
    form = Form(slots=4, context_tokens=4096, cpu_moe_layers=1, host_cache_bytes=0)
    row = placement._measure(Placed(str(tiny_model("qwen35moe").path), form), OPTIONS, card)
    assert set(row["measured_bytes"]) == {"CPU", placement.STAND_IN}
    assert max(row["planned_error"].values()) <= placement.ALLOWED_ERROR
    # Of so small a model the rounding of buffers is a visible share.
    for device, size in row["measured_bytes"].items():
        assert abs(row["header_bytes"][device] - size) <= max(placement.ALLOWED_ERROR * size, 4 << 20)


def test_a_model_of_experts_runs_on_a_card_that_cannot_hold_it(
    tiny_model: Callable[..., SyntheticModel], card: str
) -> None:
    form = Form(slots=1, context_tokens=512, checkpoints=0, host_cache_bytes=0)
    model = tiny_model("qwen35moe")
    row = placement._measure(Placed(str(model.path), form, is_capped=True), OPTIONS, card)
    assert row["cap_bytes"] < row["whole_bytes"]
    assert 0 < row["card_bytes"] <= row["cap_bytes"]
    assert row["config"]["cpu_moe_layers"] > 0 or row["config"]["gpu_layers"] > 0
