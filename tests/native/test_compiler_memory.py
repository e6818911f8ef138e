"""Compilers beside engines: as many as there is memory for, and the first to go."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from native.compiler_memory import COMPILER_BYTES, FIRST, go_first, usual_jobs

CORES = len(os.sched_getaffinity(0))


@pytest.mark.parametrize(("compilers", "jobs"), [(0, 1), (1, 1), (CORES + 3, CORES)])
def test_as_many_as_have_memory_and_cores(tmp_path: Path, compilers: int, jobs: int) -> None:
    meminfo = tmp_path / "meminfo"
    meminfo.write_text(f"MemTotal: 1 kB\nMemAvailable:   {compilers * COMPILER_BYTES // 1024} kB\nBuffers: 9 kB\n")
    assert usual_jobs(meminfo) == jobs


def test_a_machine_that_does_not_tell_gets_one(tmp_path: Path) -> None:
    (tmp_path / "meminfo").write_text("MemTotal: 1 kB\n")
    assert usual_jobs(tmp_path / "meminfo") == 1


def test_what_is_started_goes_first_when_memory_runs_out() -> None:
    script = (
        "import subprocess; from native.compiler_memory import go_first; go_first(); go_first();"
        "print(subprocess.run(['cat', '/proc/self/oom_score_adj'], capture_output=True, text=True).stdout)"
    )
    root = Path(__file__).resolve().parent.parent.parent
    told = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, cwd=root, check=True)
    assert int(told.stdout) == FIRST


def test_who_goes_first_already_stays_so(tmp_path: Path) -> None:
    score = tmp_path / "oom_score_adj"
    score.write_text("1000\n")
    go_first(score)
    assert score.read_text() == "1000\n"
