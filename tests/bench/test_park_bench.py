"""`python -m bench park` on a tiny hybrid: the last line is the object that scripts read."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from bench.vocabulary import ROOT


@pytest.mark.soak
def test_it_resumes_what_was_parked_and_writes_nothing_for_an_unchanged_conversation() -> None:
    options = ["--model", "synthetic:tiny-hybrid", "--conversations", "1", "--system-words", "400"]
    command = [sys.executable, "-m", "bench", "park", *options]
    result = subprocess.run(command, capture_output=True, text=True, timeout=300, cwd=ROOT, check=False)
    assert result.returncode == 0, result.stderr
    (line,) = json.loads(result.stdout.splitlines()[-1]).values()
    assert line["resave_bytes"] == 0
    assert line["in_slot_cached_share"] > 0.9
    assert 0 < line["ideal_vs_stored"] <= 1
