"""A step's tokens by expert: the kernel that a card's build compiles, run on emulated threads."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

EMULATED = Path(__file__).resolve().parent / "emulated"
CUDA = Path(__file__).resolve().parent.parent.parent / "native" / "cuda"
pytestmark = [
    pytest.mark.soak,
    pytest.mark.timeout(900),
    pytest.mark.skipif(shutil.which("g++") is None, reason="there is no C++ compiler"),
]


def test_lists_are_those_of_one_warp_for_each_expert(tmp_path: Path) -> None:
    shutil.copy(CUDA / "mmid-sorted.cuh", tmp_path)
    program = tmp_path / "sorted_ids"
    command = ["g++", "-std=c++17", "-O1", "-w", "-fpermissive", f"-I{tmp_path}", f"-I{EMULATED}"]
    subprocess.run([*command, "-o", str(program), str(EMULATED / "sorted_ids.cpp")], check=True, timeout=600)
    ended = subprocess.run([str(program)], timeout=600, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert ended.stdout.count("ok ") == 40
