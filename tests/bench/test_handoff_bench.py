"""`python -m bench handoff` on a tiny model: the last line is the object that scripts read."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from bench.handoff_figures import REAL_STATE_BYTES, Move, slope_ms_per_10k, summary
from bench.vocabulary import ROOT


def move(tokens: int, pause_ms: float, model: str = "m") -> Move:
    return Move(
        model, tokens, 1.0, 0.2, 1000, pause_ms / 1000, pause_ms / 4, pause_ms, 0.02, 1000, 0.01, "arena", {}, {}
    )


def test_the_last_line_tells_the_worst_model_at_the_longest_context() -> None:
    moves = [move(1_000, 4.0), move(11_000, 6.0), move(1_000, 8.0, "other"), move(11_000, 9.0, "other")]
    assert slope_ms_per_10k(moves[:2]) == pytest.approx(2.0)
    assert slope_ms_per_10k(moves[:1]) == 0.0
    line = summary(moves)
    assert (line["wall_vs_copy"], line["idle_vs_prefill"]) == (2.0, 50.0)
    assert (line["pause_slope_ms_per_10k"], line["pause_ms_p50"], line["pause_steps_p50"]) == (2.0, 7.0, 1.75)


def test_a_ratio_to_copied_bytes_is_of_states_that_take_a_while_to_copy() -> None:
    small, large = move(11_000, 6.0), move(11_000, 6.0, "real")
    large = replace(large, idle_s=0.2, copy_s=0.16, idle_bytes=REAL_STATE_BYTES)
    line = summary([small, large])
    assert (line["wall_vs_copy"], line["idle_beyond_copy_ms"]) == (1.25, 40.0)
    assert (summary([small])["wall_vs_copy"], summary([small])["idle_beyond_copy_ms"]) == (2.0, 10.0)


@pytest.mark.soak
def test_it_moves_conversations_between_two_engines(tmp_path: Path) -> None:
    options = ["--model", "synthetic:tiny-hybrid", "--contexts", "512,1024", "--rounds", "1", "--threads", "1"]
    options += ["--logs", str(tmp_path), "--out", str(tmp_path / "moves.json")]
    command = [sys.executable, "-m", "bench", "handoff", *options]
    result = subprocess.run(command, capture_output=True, text=True, timeout=300, cwd=ROOT, check=False)
    assert result.returncode == 0, result.stderr
    line = json.loads(result.stdout.splitlines()[-1])
    assert line["idle_vs_prefill"] > 0
    assert line["pause_steps_p50"] >= 0
    assert len(json.loads((tmp_path / "moves.json").read_text())) == 2
