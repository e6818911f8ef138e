"""Our own build of llama.cpp, for the soak tests that run it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from native import build_native, llama_source

ROOT = Path(__file__).resolve().parent.parent.parent
# A build is named after what it is made of, and made once.
HOME = ROOT / "build" / "native-soak"


@pytest.fixture(scope="session")
def library() -> Path:
    HOME.mkdir(parents=True, exist_ok=True)
    command = [
        sys.executable,
        "-m",
        "native.build_native",
        "--json",
        "--arch",
        "cpu",
        "--nice",
        "0",
        "--home",
        str(HOME),
    ]
    ended = subprocess.run(command, cwd=ROOT, check=True, timeout=1800, stdout=subprocess.PIPE, text=True)
    return Path(json.loads(ended.stdout.splitlines()[-1])["library"])


@pytest.fixture(scope="session")
def tree() -> Path:
    """The pinned source, changed."""
    HOME.mkdir(parents=True, exist_ok=True)
    return build_native._source(None, llama_source.pinned(build_native.REQUIREMENTS), HOME)
