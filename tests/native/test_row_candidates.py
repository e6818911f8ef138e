"""The k largest numbers of rows: the sources that a card's build compiles, run on emulated threads."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from native.row_candidates import ROW_CANDIDATES

EMULATED = Path(__file__).resolve().parent / "emulated"
CUDA = Path(__file__).resolve().parent.parent.parent / "native" / "cuda"
pytestmark = [
    pytest.mark.timeout(900),
    pytest.mark.skipif(shutil.which("g++") is None, reason="there is no C++ compiler"),
]


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    program = tmp_path_factory.mktemp("row_candidates") / "row_candidates"
    command = ["g++", "-std=c++17", "-O1", "-w", "-fpermissive", f"-I{CUDA}", f"-I{EMULATED}"]
    subprocess.run([*command, "-o", str(program), str(EMULATED / "row_candidates.cpp")], check=True, timeout=600)
    return program


def ran(program: Path, *arguments: str, switch: str = "1") -> list[str]:
    environment = {**os.environ, "GGML_CUDA_TOP_K_ROWS": switch}
    ended = subprocess.run([str(program), *arguments], env=environment, timeout=600, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return ended.stdout.splitlines()


def test_candidates_are_the_largest_in_order(program: Path) -> None:
    assert len(ran(program)) == 9


def test_the_switch_turns_it_off(program: Path) -> None:
    assert ran(program, switch="0") == ["ok  turned off"]


@pytest.mark.soak
def test_any_row_and_any_run_of_rows(program: Path) -> None:
    assert len(ran(program, "all")) == 56


@pytest.mark.soak
def test_the_pinned_source_takes_the_changes(tree: Path) -> None:
    for change in ROW_CANDIDATES:
        assert (tree / change.path).read_text(encoding="utf-8").count(change.new) == 1
