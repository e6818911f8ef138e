"""`python -m bench step` on a small model: what it looks at is what a step does, once for each layer."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from bench.vocabulary import ROOT
from tests.synthetic_gguf import write_qwen35moe


def test_the_parts_of_a_step_are_those_of_its_graph(tmp_path: Path) -> None:
    model = tmp_path / "m.gguf"
    write_qwen35moe(model)
    command = [sys.executable, "-m", "bench", "step", "--model", str(model), "--streams", "1,4"]
    command += ["--context", "20", "--steps", "2", "--threads", "1"]
    result = subprocess.run(command, capture_output=True, text=True, timeout=300, cwd=ROOT, check=False)
    assert result.returncode == 0, result.stderr
    line = json.loads(result.stdout.splitlines()[-1])
    assert line["step_ms"].keys() == line["parts_ms"].keys() == {"1", "4"}
    assert all(value > 0 for parts in line["parts_ms"].values() for value in parts.values())
    # The head is one product, and experts are products of their own.
    rows = [cells for row in result.stdout.splitlines() if len(cells := row.split()) > 3]
    counts = {" ".join(cells[:-3]): cells[-3] for cells in rows if cells[0] in ("MUL_MAT", "MUL_MAT_ID")}
    assert counts["MUL_MAT output"] == "1"
    assert int(counts["MUL_MAT_ID ffn_down_exps"]) > 1
