"""What a build would be made of: told without fetching anything, refused where a tool is missing."""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path

import pytest

from native.build_request import compiler_line, request_key, use_own_tools
from native.errors import BuildFailed
from tests.native.test_toolkits import write_toolkit


def write_tool(folder: Path, name: str, printed: str) -> None:
    folder.mkdir(exist_ok=True)
    (folder / name).write_text(f"#!/bin/sh\necho '{printed}'\n")
    (folder / name).chmod(0o755)


@pytest.fixture
def tools(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """All that a build for the CPU needs, and nothing else on PATH."""
    folder = tmp_path / "tools"
    for name in ("c++", "cmake", "nm"):
        write_tool(folder, name, f"{name} 1.0")
    (folder / "sh").symlink_to("/bin/sh")
    monkeypatch.setenv("PATH", str(folder))
    for name in ("CXX", "CUDA_HOME", "CUDA_PATH", "CUDAToolkit_ROOT"):
        monkeypatch.delenv(name, raising=False)
    return folder


def test_the_same_tools_make_the_same_and_another_compiler_or_toolkit_something_else(
    tools: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cpu, card = request_key(("cpu",)), request_key(("sm_86",))
    assert len({cpu, card}) == 2
    assert (request_key(("cpu",)), request_key(("sm_86",))) == (cpu, card)
    (tools / "cat").symlink_to(shutil.which("cat", path=os.defpath) or "")
    monkeypatch.setenv("CUDA_HOME", str(write_toolkit(tmp_path / "cuda")))
    assert request_key(("cpu",)) == cpu, "a toolkit is nothing to the CPU"
    assert request_key(("sm_86",)) != card
    write_tool(tools, "c++", "c++ 2.0")
    assert request_key(("cpu",)) != cpu


def test_the_compiler_is_the_one_that_cmake_takes(tools: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert compiler_line() == "c++ 1.0"
    write_tool(tools, "own-c++", "another")
    monkeypatch.setenv("CXX", "own-c++")
    assert compiler_line() == "another"


@pytest.mark.parametrize(
    ("missing", "package"), [("c++", "build-essential"), ("cmake", "cmake ninja-build"), ("nm", "binutils")]
)
def test_a_tool_that_is_missing_is_named_with_its_package(tools: Path, missing: str, package: str) -> None:
    (tools / missing).unlink()
    with pytest.raises(BuildFailed) as refused:
        request_key(("cpu",))
    assert refused.value.hint == f"apt install {package}"


def test_cmake_and_ninja_come_with_hydras_packages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nonexistent")
    use_own_tools()
    use_own_tools()
    assert os.environ["PATH"] == f"{Path(sys.executable).parent}:/nonexistent"
    assert shutil.which("cmake") and shutil.which("ninja")
