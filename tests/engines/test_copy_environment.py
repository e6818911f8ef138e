"""Engines are started with glibc's settings for copies, unless somebody chose others."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from engines.config import EngineConfig
from engines.copy_environment import TUNABLES, VARIABLE, copy_environment
from engines.launch import engine_environment


def test_an_engine_gets_them_and_a_choice_of_ones_own_stands(tmp_path: Path) -> None:
    config = EngineConfig("model.gguf", "m")
    assert engine_environment(tmp_path / "engines" / "1", config, "")[VARIABLE] == (
        os.environ.get(VARIABLE) or TUNABLES
    )
    assert copy_environment({VARIABLE: "glibc.malloc.check=1"}) == {}


def test_a_process_starts_with_them_without_a_word() -> None:
    environment = {**os.environ, VARIABLE: TUNABLES}
    ended = subprocess.run(
        [sys.executable, "-c", "print(1)"], env=environment, capture_output=True, text=True, timeout=60
    )
    assert (ended.stdout, ended.stderr, ended.returncode) == ("1\n", "", 0)
