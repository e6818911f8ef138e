"""Fetching model files in a process of its own, from a hub on loopback that speaks the real wire."""

from __future__ import annotations

import hashlib
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from pools import fetch, job_process
from pools.download_reach import REACHES, is_allowed
from pools.hub_catalogue import HUB_MODELS
from pools.job_process import Outcome
from tests.local_hub import COMMIT, LocalHub
from tests.pools.conftest import SmallFileSystem

ROOT = Path(__file__).resolve().parent.parent.parent
REPO, FILE = "own/tiny", "tiny-Q4_K_M.gguf"
# huggingface_hub writes what it gets by chunks of 10 MB.
CONTENT = random.Random(1).randbytes(12 << 20)
SMALL = random.Random(2).randbytes(3 << 20)


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[LocalHub]:
    with LocalHub(
        files={(REPO, FILE): CONTENT, (REPO, "tiny-UD-Q4_K_M.gguf"): SMALL, (REPO, "mmproj-F16.gguf"): b"x"}
    ) as hub:
        monkeypatch.setenv("HF_ENDPOINT", hub.url)
        monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
        yield hub


def fetched(reference: str, models_dir: Path, stop: Any = None) -> tuple[Outcome, list[tuple[str, int, int]]]:
    """The command's outcome, and what it told on the way; it is stopped when `stop(stage, done, total)` says so."""
    told: list[tuple[str, int, int]] = []

    def tick(stage: str, done: int, total: int) -> bool:
        told.append((stage, done, total))
        return stop is None or not stop(stage, done, total)

    command = [sys.executable, "-m", "pools.fetch", reference, str(models_dir)]
    return job_process.run(command, ROOT, models_dir.parent / "fetch.log", tick), told


def test_a_file_arrives_whole_proven_and_only_once(hub: LocalHub, tmp_path: Path) -> None:
    outcome, told = fetched(f"hf:{REPO}/{FILE}", tmp_path / "models")
    assert outcome.code == 0, outcome
    path = Path(outcome.last["path"])
    assert path == tmp_path / "models" / "hub" / "own--tiny" / FILE
    assert path.read_bytes() == CONTENT
    assert outcome.last["sha256"] == hashlib.sha256(CONTENT).hexdigest()
    assert outcome.last["source"] == f"hf:{REPO}/{FILE}@{COMMIT}"
    assert outcome.last["verified"] is True
    assert told[-1] == ("checking", len(CONTENT), len(CONTENT))
    again, _ = fetched(f"hf:{REPO}:q4_k_m", tmp_path / "models")
    assert again.last == outcome.last
    assert len(hub.gets(FILE)) == 1


def test_a_connection_that_breaks_is_taken_up_where_it_broke(hub: LocalHub, tmp_path: Path) -> None:
    hub.breaks, hub.break_after_bytes = 1, 11 << 20
    outcome, _ = fetched(f"hf:{REPO}/{FILE}", tmp_path / "models")
    assert Path(outcome.last["path"]).read_bytes() == CONTENT
    assert hub.gets(FILE) == ["", f"bytes={10 << 20}-"]


def test_a_stopped_download_ends_at_once_and_the_next_one_goes_on(hub: LocalHub, tmp_path: Path) -> None:
    hub.stall_after_bytes = 11 << 20
    stopped, _ = fetched(f"hf:{REPO}/{FILE}", tmp_path / "models", stop=lambda stage, done, total: done > 9_000_000)
    partial = [path.name for path in (tmp_path / "models" / "hub" / "own--tiny").glob("*.partial")]
    assert len(partial) == 1
    assert stopped.stopped
    assert not (tmp_path / "models" / "hub" / "own--tiny" / FILE).exists()
    hub.stall_after_bytes = 0
    outcome, _ = fetched(f"hf:{REPO}/{FILE}", tmp_path / "models")
    assert Path(outcome.last["path"]).read_bytes() == CONTENT
    assert hub.gets(FILE)[-1].startswith("bytes=10")


def test_other_bytes_than_the_hub_told_are_refused_and_not_kept(hub: LocalHub, tmp_path: Path) -> None:
    hub.told_sha256 = "ab" * 32
    outcome, _ = fetched(f"hf:{REPO}:UD-Q4_K_M", tmp_path / "models")
    assert outcome.code == 1
    assert "instead of abab" in outcome.last["error"]
    assert not (tmp_path / "models" / "hub" / "own--tiny" / "tiny-UD-Q4_K_M.gguf").exists()


def test_a_hub_that_contradicts_the_catalogue_is_not_believed(hub: LocalHub, tmp_path: Path) -> None:
    pinned = next((model, variant) for model in HUB_MODELS for variant in model.variants if variant.sha256)
    hub.files[pinned[0].repo, pinned[1].file] = SMALL
    outcome, _ = fetched(f"{pinned[0].name}:{pinned[1].quant}", tmp_path / "models")
    assert "the catalogue knows" in outcome.last["error"]
    assert hub.gets(pinned[1].file) == []


def test_a_name_of_the_catalogue_leads_to_its_repository(hub: LocalHub, tmp_path: Path) -> None:
    model = next(model for model in HUB_MODELS if not model.variants[0].sha256)
    hub.files[model.repo, model.variants[0].file] = SMALL
    outcome, _ = fetched(model.name, tmp_path / "models")
    assert (outcome.last["name"], outcome.last["verified"]) == (model.name, True)


@pytest.mark.parametrize(
    ("reference", "words"),
    [
        (f"hf:{REPO}/none.gguf", "the hub has no"),
        ("hf:own/nobody:Q4_K_M", "the hub has no"),
        ("hf:own/evil:Q4_K_M", "is no name that a file can have here"),
        (f"hf:{REPO}:Q8_0", "names no files; there: tiny-Q4_K_M.gguf, tiny-UD-Q4_K_M.gguf"),
    ],
)
def test_what_the_hub_does_not_have_is_told(hub: LocalHub, tmp_path: Path, reference: str, words: str) -> None:
    hub.files["own/evil", "../../../x-Q4_K_M.gguf"] = CONTENT
    outcome, _ = fetched(reference, tmp_path / "models")
    assert outcome.code == 1
    assert words in outcome.last["error"]
    assert outcome.last["hint"]


def test_a_hub_that_is_not_there_can_be_tried_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:1")
    outcome, _ = fetched(f"hf:{REPO}/{FILE}", tmp_path / "models")
    assert (outcome.code, outcome.last["retryable"]) == (1, True)


def test_a_small_disk_is_refused_before_anything_is_fetched(hub: LocalHub, small_file_system: SmallFileSystem) -> None:
    outcome, _ = fetched(f"hf:{REPO}/{FILE}", small_file_system(8 << 20) / "models")
    assert f"needs {len(CONTENT):,} more bytes" in outcome.last["error"]
    assert hub.gets(FILE) == []


def test_a_url_is_fetched_with_resume(hub: LocalHub, tmp_path: Path) -> None:
    url = f"{hub.url}/{REPO}/resolve/main/{FILE}"
    hub.breaks, hub.break_after_bytes = 2, 1 << 20
    outcome, _ = fetched(url, tmp_path / "models")
    assert Path(outcome.last["path"]).read_bytes() == CONTENT
    assert (outcome.last["source"], outcome.last["verified"]) == (url, False)
    assert hub.gets(FILE) == ["", f"bytes={1 << 20}-", f"bytes={2 << 20}-"]
    missing, _ = fetched(f"{hub.url}/{REPO}/resolve/main/none.gguf", tmp_path / "models")
    assert "there is no http" in missing.last["error"]


def test_a_url_of_this_machine_is_refused_before_a_word_is_said(
    hub: LocalHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HYDRA_DOWNLOAD_FROM", "lan")
    for host in ("127.0.0.1", "localhost"):
        url = f"{hub.url}/{REPO}/resolve/main/{FILE}".replace("127.0.0.1", host)
        outcome, _ = fetched(url, tmp_path / "models")
        assert (outcome.code, outcome.last["retryable"]) == (1, False)
        assert "is at 127.0.0.1" in outcome.last["error"]
        assert "HYDRA_DOWNLOAD_FROM" in outcome.last["hint"]
    assert hub.asked == []


@pytest.mark.parametrize(
    ("address", "reaches"),
    [
        ("1.1.1.1", {"public", "lan", "any"}),
        ("2606:4700::1111", {"public", "lan", "any"}),
        ("192.168.1.7", {"lan", "any"}),
        ("100.64.0.7", {"lan", "any"}),
        ("fd12::7", {"lan", "any"}),
        ("127.0.0.1", {"any"}),
        ("::1", {"any"}),
        ("::ffff:127.0.0.1", {"any"}),
        ("0.0.0.0", {"any"}),
        ("169.254.169.254", {"any"}),
        ("fe80::1%eth0", {"any"}),
        ("fd00:ec2::254", {"any"}),
        ("100.100.100.200", {"any"}),
    ],
)
def test_what_only_the_fetching_machine_reaches_is_refused(address: str, reaches: set[str]) -> None:
    assert {reach for reach in REACHES if is_allowed(address, reach)} == reaches


def test_a_file_that_another_process_fetches_is_left_to_it(hub: LocalHub, tmp_path: Path) -> None:
    hub.stall_after_bytes = 1 << 20
    command = [sys.executable, "-m", "pools.fetch", f"hf:{REPO}/{FILE}", str(tmp_path / "models")]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL, start_new_session=True) as first:
        try:
            deadline = time.monotonic() + 60
            while not hub.gets(FILE):
                assert time.monotonic() < deadline
                time.sleep(0.05)
            outcome, _ = fetched(f"hf:{REPO}/{FILE}", tmp_path / "models")
        finally:
            os.killpg(first.pid, signal.SIGKILL)
    assert "another process fetches" in outcome.last["error"]


def test_what_a_text_names_can_be_asked_without_fetching() -> None:
    assert fetch.default_name("qwen3.6-27b:Q4_K_M") == "qwen3.6-27b"
    assert fetch.default_name("hf:unsloth/Qwen3.6-27B-GGUF/Qwen3.6-27B-Q4_K_M.gguf") == "qwen3.6-27b"
    assert fetch.default_name("hf:own/tiny/tiny.gguf") == ""
