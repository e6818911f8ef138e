"""`python -m bench pd` on a tiny model: the last line is the object that scripts read."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from bench.pd import Split, summary
from bench.vocabulary import ROOT


def split(tokens: int, both_s: float, hidden_bytes: int, model: str = "m", *, same_text: bool = True) -> Split:
    return Split(model, tokens, 2.0, 1.0, both_s, 1000, hidden_bytes, 0.03, 0.01, same_text)


def test_the_last_line_tells_the_worst_model_at_the_longest_context() -> None:
    splits = [split(1_000, 3.0, 100), split(8_000, 1.0, 900), split(8_000, 1.2, 800, "other")]
    line = summary(splits)
    assert (line["hidden_share"], line["ttft_vs_solo"], line["ttft_vs_prefiller"]) == (0.8, 0.6, 1.2)
    assert (line["gap_vs_step"], line["slow_vs_fast"], line["same_text"]) == (3.0, 2.0, True)
    assert not summary([*splits, split(1_000, 1.0, 1, same_text=False)])["same_text"]


@pytest.mark.soak
def test_it_splits_prompts_over_two_engines(tmp_path: Path) -> None:
    options = ["--model", "synthetic:tiny-hybrid", "--contexts", "1024,4096", "--rounds", "1", "--threads", "1"]
    # Long enough that a tiny model still writes when its blocks have left.
    options += ["--answer", "2000", "--logs", str(tmp_path), "--out", str(tmp_path / "splits.json")]
    command = [sys.executable, "-m", "bench", "pd", *options]
    result = subprocess.run(command, capture_output=True, text=True, timeout=300, cwd=ROOT, check=False)
    assert result.returncode == 0, result.stderr
    line = json.loads(result.stdout.splitlines()[-1])
    assert line["same_text"] is True
    assert 0 < line["hidden_share"] <= 1
    assert len(json.loads((tmp_path / "splits.json").read_text())) == 2
