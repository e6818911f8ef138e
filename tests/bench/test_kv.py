"""`python -m bench kv` on a small state: two processes, every block proved, one line of JSON at the end."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from bench.__main__ import main
from tests.synthetic_gguf import SyntheticModel


def test_states_are_measured_against_copies(
    tiny_model: Callable[..., SyntheticModel], capfd: pytest.CaptureFixture[str]
) -> None:
    path = tiny_model("llama").path
    options = ["--model", str(path), "--state-mb", "1", "--rounds", "1", "--blocks", "64", "--threads", "1"]
    assert main(["kv", *options]) == 0
    printed = json.loads(capfd.readouterr().out.strip().splitlines()[-1])
    assert {"export_vs_copy", "import_vs_copy", "neighbour_p99_ratio"} <= set(printed)
    assert all(printed[key] > 0 for key in ("export_vs_copy", "import_vs_copy", "neighbour_p99_ratio"))
    assert printed["blocks"][0]["block_tokens"] == 64


def test_recurrent_state_is_made_up_too_and_windows_are_refused_with_the_reason(
    tiny_model: Callable[..., SyntheticModel], capfd: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    options = ["--contexts", "300", "--rounds", "1", "--blocks", "0", "--threads", "1"]
    out, trace = tmp_path / "kv.json", tmp_path / "trace.json"
    hybrid = ["--model", str(tiny_model("qwen35").path), "--kv-types", "q8_0", "--out", str(out), "--trace", str(trace)]
    assert main(["kv", *options, *hybrid]) == 0
    cases = json.loads(out.read_text())["blocks"]
    assert [(case["kv_type"], case["tokens"]) for case in cases] == [("q8_0", 300)]
    traced = json.loads(trace.read_text())
    assert [one["way"] for one in traced] == ["export", "import"]
    done = [{span["what"] for span in one["spans"]} for one in traced]
    assert {"take_block", "take_part", "prove", "hand on"} <= done[0]
    assert {"enter_block", "enter_part", "prove"} <= done[1]
    assert all(0 < one["figures"]["copying"] <= 1 for one in traced)
    assert main(["kv", *options, "--model", str(tiny_model("gemma3").path)]) == 1
    assert "sliding windows" in capfd.readouterr().err
