"""Slots saved to files, brought back and erased, with llama-server's shapes; a damaged or foreign file changes nothing."""

from __future__ import annotations

import json
import os
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.engine_client import Answer, post
from tests.engine_process import EngineProcess
from tests.paced_engine import PacedEngine
from tests.synthetic_gguf import SyntheticModel

STORY = "Once upon a time there was a slot. " * 12


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("slots") / "made-by-the-engine"


@pytest.fixture(scope="module")
def engine(
    tie_free_model: SyntheticModel, folder: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[PacedEngine]:
    # One slot and no second tier, so that what a request finds can only come from the slot.
    settings: dict[str, Any] = {"slots": 1, "host_cache_bytes": 0, "slot_save_path": str(folder)}
    with PacedEngine(tmp_path_factory.mktemp("engine"), tie_free_model.path, **settings) as running:
        yield running


def act(engine: EngineProcess, action: str, filename: str | None = None, slot: int = 0) -> Answer:
    body = b"" if filename is None else {"filename": filename}
    return post(engine, f"/slots/{slot}?action={action}", body)


def cached_tokens(engine: EngineProcess, prompt: str) -> int:
    answer = post(engine, "/v1/completions", {"prompt": prompt, "max_tokens": 4, "temperature": 0}).value
    return int(answer["usage"]["prompt_tokens_details"]["cached_tokens"])


def held(engine: EngineProcess) -> int:
    return int(engine.wait_idle()[0]["cached_tokens"])


def test_a_saved_slot_comes_back_after_others_had_it(engine: EngineProcess, folder: Path) -> None:
    cached_tokens(engine, STORY)
    tokens = held(engine)
    saved = act(engine, "save", "story.bin")
    assert saved.status == 200
    assert saved.value == {
        "id_slot": 0,
        "filename": "story.bin",
        "n_saved": tokens,
        "n_written": (folder / "story.bin").stat().st_size,
        "timings": {"save_ms": saved.value["timings"]["save_ms"]},
    }
    assert [path.name for path in folder.iterdir()] == ["story.bin"]
    assert act(engine, "erase").value == {"id_slot": 0, "n_erased": tokens}
    assert held(engine) == 0
    assert cached_tokens(engine, STORY) == 0
    cached_tokens(engine, "Something else entirely. " * 12)
    restored = act(engine, "restore", "story.bin")
    assert (restored.value["n_restored"], restored.value["n_read"]) == (tokens, saved.value["n_written"])
    assert restored.value["timings"]["restore_ms"] > 0
    # Every token but the one that must be decoded again.
    prompt = post(engine, "/tokenize", {"content": STORY, "add_special": True}).value["tokens"]
    assert cached_tokens(engine, STORY) == len(prompt) - 1


@pytest.mark.parametrize("damage", ["flipped", "cut", "longer", "empty", "garbage"])
def test_a_damaged_file_is_refused_and_the_engine_serves_on(
    engine: EngineProcess, tie_free_model: SyntheticModel, folder: Path, damage: str
) -> None:
    cached_tokens(engine, STORY)
    before = held(engine)
    assert act(engine, "save", "sound.bin").status == 200
    raw = bytearray((folder / "sound.bin").read_bytes())
    if damage == "flipped":
        raw[len(raw) // 2] ^= 1
    damaged = {"flipped": raw, "cut": raw[:-1], "longer": raw + b"x", "empty": b"", "garbage": b"\xff" * 4096}[damage]
    (folder / "damaged.bin").write_bytes(damaged)
    answer = act(engine, "restore", "damaged.bin")
    assert (answer.status, answer.value["error"]["code"]) == (400, "state_invalid")
    # What was there before stays where the file's first bytes gave it away; else the slot is empty.
    assert held(engine) == (before if damage in ("empty", "garbage") else 0)
    asked = {"prompt": STORY + "\n", "max_tokens": 8, "temperature": 0}
    text = post(engine, "/v1/completions", asked).value["choices"][0]["text"]
    assert text.encode() == tie_free_model.answer_bytes(8)


def test_a_file_of_another_model_is_refused(
    engine: EngineProcess, folder: Path, tiny_model: Callable[..., SyntheticModel], tmp_path: Path
) -> None:
    cached_tokens(engine, STORY)
    assert act(engine, "save", "ours.bin").status == 200
    other = tiny_model("llama", tie_free=True, seed=99)
    with EngineProcess(tmp_path, other.path, slots=1, slot_save_path=str(folder)) as stranger:
        answer = act(stranger, "restore", "ours.bin")
        assert (answer.status, answer.value["error"]["code"]) == (422, "state_incompatible")
        assert post(stranger, "/v1/completions", {"prompt": "a", "max_tokens": 2}).status == 200


def test_what_is_not_there_is_not_found(engine: EngineProcess, folder: Path) -> None:
    assert act(engine, "restore", "never-saved").value["error"]["code"] == "slot_file_not_found"
    (folder / "link.bin").symlink_to(__file__)
    (folder / "folder.bin").mkdir()
    os.mkfifo(folder / "pipe.bin")
    for name in ("link.bin", "folder.bin", "pipe.bin"):
        assert act(engine, "restore", name).value["error"]["code"] == "slot_file_not_found"
    assert act(engine, "save", "a", slot=7).value["error"]["code"] == "slot_not_found"
    assert act(engine, "erase").status == 200
    assert act(engine, "save", "a").value["error"]["code"] == "slot_empty"


def test_a_busy_slot_is_left_alone(engine: PacedEngine) -> None:
    body = json.dumps({"prompt": "go\n", "max_tokens": 1000, "temperature": 0, "stream": True}).encode()
    with engine.slowed(), socket.create_connection(("127.0.0.1", engine.config.port), timeout=20) as running:
        running.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\n")
        running.sendall(b"Content-Length: %d\r\n\r\n" % len(body) + body)
        deadline = time.monotonic() + 30
        while not engine.get("/slots")[0]["is_processing"]:
            assert time.monotonic() < deadline
        answers = [act(engine, action, "busy.bin") for action in ("erase", "save", "restore")]
    # A restore looks for its file first.
    assert [answer.status for answer in answers] == [409, 409, 404]
    assert answers[0].value["error"]["code"] == "slot_busy"
    engine.wait_idle()


def test_without_a_folder_slots_can_only_be_erased(endpoint_engine: EngineProcess) -> None:
    for action in ("save", "restore"):
        answer = act(endpoint_engine, action, "a")
        assert (answer.status, answer.value["error"]["code"]) == (501, "not_served")
    assert act(endpoint_engine, "erase").status == 200
