"""Which of a host's builds an engine gets, and how an engine refuses one without code for its card."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
from pathlib import Path

import pytest

from engines import launch, native_library
from engines.config import ConfigInvalid, EngineConfig
from engines.errors import LibraryUnfit
from engines.native_library import Manifest, builds, choose, cpu_digest
from engines.runtime.card_code import library_folder, require_card_code
from tests.cuda_library import write_library

ROOT = Path(__file__).resolve().parent.parent.parent
PACKAGE = "llama-cpp-python==0.3.36"
CPUINFO = (
    "processor\t: 0\nvendor_id\t: GenuineIntel\nflags\t\t: fpu vme avx2 avx512f\n\nprocessor\t: 1\nflags\t\t: fpu\n"
)


def put(home: Path, key: str, archs: tuple[str, ...], built_at: str, **changes: object) -> Path:
    """A finished build, without its libraries."""
    images = tuple(arch for arch in archs if arch != "cpu")
    manifest = Manifest(
        key, PACKAGE, "0" * 64, archs, images, "cuobjdump", "13.0.88", "g++", "", (), cpu_digest(), 1.0, built_at, {}
    )
    folder = home / "native" / key
    (folder / "lib").mkdir(parents=True)
    (folder / "manifest.json").write_text(dataclasses.replace(manifest, **changes).to_json())
    return folder / "lib"


def test_each_card_gets_the_newest_build_with_code_for_it_and_the_cpu_one_without_cuda(tmp_path: Path) -> None:
    put(tmp_path, "old", ("sm_86",), "2026-11-01T00:00:00+00:00")
    fat = put(tmp_path, "fat", ("sm_86", "sm_120"), "2026-11-02T00:00:00+00:00", images=("sm_86", "sm_120a"))
    cpu = put(tmp_path, "cpu", ("cpu",), "2026-11-03T00:00:00+00:00")
    pascal = put(tmp_path, "pascal", ("sm_60",), "2026-10-01T00:00:00+00:00")
    chosen = {arch: choose(tmp_path, arch, PACKAGE) for arch in ("sm_86", "sm_89", "sm_120", "sm_60", "cpu", "x86-64")}
    paths = {arch: build.library_path if build else None for arch, build in chosen.items()}
    assert paths == {"sm_86": fat, "sm_89": fat, "sm_120": fat, "sm_60": pascal, "cpu": cpu, "x86-64": cpu}
    assert choose(tmp_path, "sm_90", PACKAGE) is None


def test_builds_for_other_bindings_or_another_cpu_are_left_alone(tmp_path: Path) -> None:
    put(tmp_path, "bindings", ("cpu",), "2026-11-02T00:00:00+00:00", package="llama-cpp-python==0.3.35")
    put(tmp_path, "moved", ("cpu",), "2026-11-02T00:00:00+00:00", cpu_sha256=cpu_digest(CPUINFO))
    assert choose(tmp_path, "cpu", PACKAGE) is None
    assert cpu_digest(CPUINFO) == cpu_digest(CPUINFO.replace("vme avx2", "avx2 vme"))
    assert cpu_digest(CPUINFO) != cpu_digest(CPUINFO.replace("avx512f", ""))


def test_what_is_no_manifest_is_no_build(tmp_path: Path) -> None:
    for key, text in {"a": "", "b": "[]", "c": "{}", "d": '{"key": 1}'}.items():
        folder = tmp_path / "native" / key
        (folder / "lib").mkdir(parents=True)
        (folder / "manifest.json").write_text(text)
    (tmp_path / "native" / "empty").mkdir()
    assert builds(tmp_path) == []
    assert builds(tmp_path / "absent") == []


def test_the_head_gives_an_engine_its_build_by_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(native_library.LIBRARY_VARIABLE, raising=False)
    assert launch.library_environment(tmp_path, "") == {}
    cpu = put(tmp_path, "cpu", ("cpu",), "2026-11-03T00:00:00+00:00")
    card = put(tmp_path, "card", ("sm_120",), "2026-11-03T00:00:00+00:00", images=("sm_120a",))
    assert launch.library_environment(tmp_path, "") == {"LLAMA_CPP_LIB_PATH": str(cpu)}
    assert launch.library_environment(tmp_path, "sm_120") == {"LLAMA_CPP_LIB_PATH": str(card)}
    assert launch.library_environment(tmp_path, "sm_86") == {}
    monkeypatch.setenv(native_library.LIBRARY_VARIABLE, "/somewhere")
    assert launch.library_environment(tmp_path, "") == {}


def test_an_engine_refuses_a_library_without_code_for_its_card(tmp_path: Path) -> None:
    config = EngineConfig("model.gguf", "m", card_arch="sm_86", gpu_layers=-1)
    with pytest.raises(LibraryUnfit, match="was built without CUDA") as refused:
        require_card_code(config, tmp_path)
    assert refused.value.hint == "Build one on this host: manage.py build-native --arch sm_86"
    write_library(tmp_path, "sm_60", "sm_120a")
    with pytest.raises(LibraryUnfit, match="has code for sm_60, sm_120a"):
        require_card_code(config, tmp_path)
    require_card_code(dataclasses.replace(config, card_arch="sm_120"), tmp_path)
    (tmp_path / "libggml-cuda.so").write_bytes(b"\x7fELF")
    with pytest.raises(LibraryUnfit, match="cannot be read"):
        require_card_code(config, tmp_path)


def test_an_engine_for_the_cpu_asks_for_no_code(tmp_path: Path) -> None:
    require_card_code(EngineConfig("model.gguf", "m"), tmp_path)
    # Here is no driver, so nobody can say which cards there are.
    require_card_code(EngineConfig("model.gguf", "m", gpu_layers=-1), library_folder())
    with pytest.raises(ConfigInvalid, match="card_arch"):
        EngineConfig("model.gguf", "m", card_arch="RTX 3060")


def test_the_process_ends_with_one_line_that_says_what_to_build(tmp_path: Path) -> None:
    config = tmp_path / "config.json"
    config.write_text(EngineConfig("model.gguf", "m", card_arch="sm_86", gpu_layers=-1).to_json())
    command = [sys.executable, "-m", "engines.runtime", "--config", str(config)]
    ended = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=60)
    assert ended.returncode == 3
    assert ended.stderr.startswith("engine: The card is sm_86, and llama.cpp in ")
    assert ended.stderr.endswith("Build one on this host: manage.py build-native --arch sm_86\n")
    assert ended.stderr.count("\n") == 1
