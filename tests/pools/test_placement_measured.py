"""What the header's formula says against what loaded engines took of an H200 and its host: recorded figures, no card needed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from pools.ledger import Form, ModelFacts
from pools.ledger_predict import predict

RECORDED = json.loads((Path(__file__).parent / "placements" / "h200.json").read_text())
ALLOWED = 0.05


@pytest.mark.parametrize("number", range(len(RECORDED["placements"])))
def test_a_prediction_is_near_to_what_was_taken(number: int) -> None:
    taken = RECORDED["placements"][number]
    model = RECORDED["models"][taken["model"]]
    # As many sequences for whole rows, and checkpoints, as engines had when this was measured.
    form = Form(**{"whole_vocabulary_slots": 1, "checkpoints": 4, **taken["form"]})
    prediction = predict(ModelFacts.from_header(model["header"], model["size_bytes"]), form)
    assert prediction.host.loaded_bytes == pytest.approx(taken["host_bytes"], rel=ALLOWED)
    if taken["card_bytes"]:
        assert prediction.device.loaded_bytes == pytest.approx(taken["card_bytes"], rel=ALLOWED)
