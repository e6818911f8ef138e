"""`python -m bench` with real servers on a tiny model: the last line is the object that scripts read."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from bench.gpu.pack import ROOTS, SOURCE_KEPT, _lock_entries
from bench.models import SHAPES, write
from bench.vocabulary import ROOT
from tests.bench.small_vocabulary import small_vocabulary

PEER = ROOT / "build" / "peer"
needs_peer = pytest.mark.skipif(not (PEER / "built").exists(), reason="build/peer is not built: make peer")


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("bench-models")
    for name in ("tiny-dense", "tiny-hybrid"):
        write(folder / f"{name}.gguf", SHAPES[name], small_vocabulary())
    return folder


def bench(tmp_path: Path, *arguments: str) -> dict[str, Any]:
    command = [sys.executable, "-m", "bench", *arguments, "--threads", "1", "--logs", str(tmp_path), "--out"]
    result = subprocess.run(
        [*command, str(tmp_path / "details.json")], capture_output=True, text=True, timeout=300, cwd=ROOT
    )
    assert result.returncode == 0, result.stderr
    line: dict[str, Any] = json.loads(result.stdout.splitlines()[-1])
    return line


def test_it_measures_our_engine_alone(models: Path, tmp_path: Path) -> None:
    model = str(models / "tiny-hybrid.gguf")
    grid = ["--streams", "1,2", "--context", "40", "--new-tokens", "6", "--rounds", "1", "--sampling", "both"]
    line = bench(tmp_path, "engine", "--model", model, *grid, "--peer", "none")
    assert line == {"ratio": {"1": None, "2": None}, "steady": {"1": None, "2": None}, "peer": ""}
    details = json.loads((tmp_path / "details.json").read_text())
    assert [len(cell["rounds"]["hydra"]) for cell in details["cells"]] == [1, 1, 1, 1]
    assert all(cell["rounds"]["hydra"][0]["whole"] > 0 for cell in details["cells"])


@needs_peer
def test_it_compares_with_llama_server(models: Path, tmp_path: Path) -> None:
    model = str(models / "tiny-dense.gguf")
    grid = ["--streams", "2", "--context", "40", "--new-tokens", "6", "--rounds", "1", "--peer-forms", "unified"]
    line = bench(tmp_path, "engine", "--model", model, *grid, "--ceiling")
    assert line["peer"] == "unified"
    assert line["ratio"]["2"] > 0
    ceiling = json.loads((tmp_path / "details.json").read_text())["ceiling"]
    assert [row["decode"] > 0 for row in ceiling] == [True]


@needs_peer
def test_it_counts_what_each_server_reuses(models: Path, tmp_path: Path) -> None:
    few = ["--conversations", "1", "--rounds", "1", "--system-words", "40", "--answer-tokens", "2"]
    line = bench(tmp_path, "prefix", "--model", str(models / "tiny-dense.gguf"), *few)
    assert line["cached_share"] > 0.9
    assert line["ttft_ratio"] > 0
    (forms,) = json.loads((tmp_path / "details.json").read_text()).values()
    assert [turn["prompt_tokens"] for turn in forms["hydra"]] == [turn["prompt_tokens"] for turn in forms["unified"]]


def test_it_finds_all_that_the_bundle_needs_in_the_lock_files() -> None:
    entries = list(_lock_entries())
    names = {entry.partition("==")[0] for entry in entries}
    assert set(ROOTS) <= names
    assert all("--hash=sha256:" in entry for entry in entries)


def test_it_packs_the_source_that_a_cuda_build_reads_and_nothing_else() -> None:
    kept = ["CMakeLists.txt", "ggml/src/ggml-cuda/mmq.cu", "tools/ui/CMakeLists.txt", "scripts/ui-assets.cmake"]
    left = ["ggml/src/ggml-vulkan/x.cpp", "tools/ui/src/app.ts", "docs/build.md", "models/ggml-vocab-bert-bge.gguf"]
    assert [name for name in kept + left if SOURCE_KEPT.fullmatch(name)] == kept
