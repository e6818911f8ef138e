"""Which llama.cpp a measurement of our engine loads."""

from __future__ import annotations

import os
from pathlib import Path

import llama_cpp
import pytest

from bench.errors import BenchError
from bench.library import AUTO, WHEEL, library_in_use, use_library
from tests.engines.test_native_library import put


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HYDRA_HOME", str(tmp_path))
    monkeypatch.setenv("LLAMA_CPP_LIB_PATH", "")
    return tmp_path


def test_it_is_what_a_head_would_start_the_engine_with(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    use_library(AUTO, 0)
    assert "the bindings' own" in library_in_use()
    own = put(home, "own", ("cpu",), "2026-11-03T00:00:00+00:00")
    use_library(AUTO, 0)
    assert library_in_use() == str(own)
    monkeypatch.setenv("LLAMA_CPP_LIB_PATH", "/somewhere")
    use_library(AUTO, 0)
    assert library_in_use() == "/somewhere"


def test_the_bindings_own_or_a_folder_can_be_asked_for(home: Path) -> None:
    put(home, "own", ("cpu",), "2026-11-03T00:00:00+00:00")
    wheel = Path(llama_cpp.__file__).parent / "lib"
    use_library(str(wheel), 0)
    assert os.environ["LLAMA_CPP_LIB_PATH"] == library_in_use() == str(wheel)
    use_library(WHEEL, 0)
    assert "LLAMA_CPP_LIB_PATH" not in os.environ
    with pytest.raises(BenchError, match="no libllama"):
        use_library(str(home), 0)
