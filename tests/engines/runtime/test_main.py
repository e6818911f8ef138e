"""The engine as a process: flags, exit codes, and a clean end."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from engines.config import ConfigInvalid, EngineConfig
from tests.engine_process import EngineProcess
from tests.synthetic_gguf import SyntheticModel


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "engines.runtime", *arguments], capture_output=True, text=True, timeout=60
    )


def test_it_ends_with_zero_on_sigterm_and_says_so(tiny_model: Callable[..., SyntheticModel], tmp_path: Path) -> None:
    with EngineProcess(tmp_path, tiny_model("llama", tie_free=True).path) as engine:
        assert engine.stop() == 0
        assert "SIGTERM" in engine.log_path.read_text()


def test_it_starts_from_flags_alone(tiny_model: Callable[..., SyntheticModel]) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        path = str(tiny_model("llama", tie_free=True).path)
        result = run("--model", path, "--port", str(taken.getsockname()[1]))
    assert result.returncode == 4
    assert "cannot listen on 127.0.0.1" in result.stderr


def test_a_file_that_is_no_model_ends_it_with_three(tmp_path: Path) -> None:
    (tmp_path / "broken.gguf").write_bytes(b"GGUF" + b"\0" * 100)
    result = run("--model", str(tmp_path / "broken.gguf"), "--port", "0")
    assert result.returncode == 3
    (why,) = (line for line in result.stderr.splitlines() if " ERROR " in line)
    assert "could not load" in why
    assert "Traceback" not in result.stderr


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        ([], "--config or --model"),
        (["--config", "/nowhere/engine.json"], "cannot read"),
        (["--model", "x.gguf", "--slots", "0"], "slots is 0"),
        (["--model", "x.gguf", "--context", "5"], "context_tokens is 5"),
    ],
)
def test_a_bad_configuration_is_one_line_and_two(arguments: list[str], word: str) -> None:
    result = run(*arguments)
    assert result.returncode == 2
    assert word in result.stderr
    assert len(result.stderr.splitlines()) == 1


def test_a_broken_chat_template_is_one_line_and_two(tmp_path: Path) -> None:
    config = EngineConfig("x.gguf", "x", chat_template="{% for message in messages %}\n{{ message.content }")
    (tmp_path / "engine.json").write_text(config.to_json())
    result = run("--config", str(tmp_path / "engine.json"))
    assert result.returncode == 2
    assert "chat template cannot be compiled: line 2" in result.stderr
    assert len(result.stderr.splitlines()) == 1


@pytest.mark.parametrize(
    ("values", "word"),
    [
        ({"model_name": "m"}, "missing keys: model_path"),
        ({"model_path": "p", "model_name": "m", "slotz": 1}, "unknown keys: slotz"),
        ({"model_path": "p", "model_name": "m", "slots": "4"}, "slots is '4'"),
        ({"model_path": "p", "model_name": "m", "slots": True}, "slots is True"),
        ({"model_path": "p", "model_name": "m", "kv_type_k": "f15"}, "kv_type_k"),
        ({"model_path": "p", "model_name": "m", "cache_tokens": 100}, "cache_tokens is 100"),
    ],
)
def test_a_configuration_says_what_is_wrong_with_it(values: dict[str, object], word: str) -> None:
    with pytest.raises(ConfigInvalid, match=word):
        EngineConfig.from_json(json.dumps(values))


def test_a_configuration_survives_the_trip_through_json() -> None:
    config = EngineConfig(model_path="/m.gguf", model_name="m", slots=7, request_deadline_s=12.5)
    assert EngineConfig.from_json(config.to_json()) == config
