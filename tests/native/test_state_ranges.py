"""Our build of llama.cpp moves ranges of states without a scratch sequence: to the byte what goes through one."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.synthetic_gguf import write_gemma3, write_llama, write_qwen3, write_qwen35, write_qwen35moe

ROOT = Path(__file__).resolve().parent.parent.parent
pytestmark = [
    pytest.mark.soak,
    pytest.mark.timeout(1800),
    pytest.mark.skipif(shutil.which("cmake") is None, reason="cmake is not installed"),
]


def moved(library: Path, model: Path, way: str, options: list[str]) -> list[str]:
    out = model.parent / f"{way}.json"
    command = [sys.executable, "-m", "tests.native.ranges_of", str(model), way, str(out), *options]
    environment = {**os.environ, "LLAMA_CPP_LIB_PATH": str(library)}
    ended = subprocess.run(command, cwd=ROOT, timeout=300, capture_output=True, text=True, env=environment)
    assert ended.returncode == 0, ended.stderr[-3000:]
    found: list[str] = json.loads(out.read_text())
    return found


@pytest.mark.parametrize(
    ("write", "options"),
    [
        (write_llama, []),
        (write_llama, ["transposed"]),
        (write_qwen3, []),
        (write_gemma3, []),
        (write_gemma3, ["windowed"]),
        (write_gemma3, ["transposed"]),
        (write_qwen35, []),
        (write_qwen35, ["transposed"]),
        (write_qwen35moe, []),
    ],
)
def test_both_ways_move_the_same(
    tmp_path: Path, library: Path, write: Callable[[Path], None], options: list[str]
) -> None:
    """Ranges of sequences that share cells and lie in pieces: the bytes, the states made of them, and how these go on."""
    model = tmp_path / "m.gguf"
    write(model)
    by_range, by_scratch = (moved(library, model, way, options) for way in ("ranges", "scratch"))
    assert len(by_range) == 24
    assert by_range == by_scratch
