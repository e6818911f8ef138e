"""`python -m bench store` on a few small objects: the last line is the object that scripts read."""

from __future__ import annotations

import json
import subprocess
import sys

from bench.vocabulary import ROOT


def test_it_stores_each_byte_once_and_nothing_for_an_unchanged_save() -> None:
    command = [sys.executable, "-m", "bench", "store", "--object-mb", "1", "--objects", "2", "--rounds", "1"]
    result = subprocess.run(command, capture_output=True, text=True, timeout=300, cwd=ROOT, check=False)
    assert result.returncode == 0, result.stderr
    line = json.loads(result.stdout.splitlines()[-1])
    assert line["ideal_vs_stored"] > 0.95
    assert line["resave_bytes"] == 0
    assert all(line[name] > 0 for name in ("put_vs_copy", "get_vs_copy", "sendfile_vs_copy"))
