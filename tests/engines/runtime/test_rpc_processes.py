"""The engine's binary protocol from a process's start to its end, and between two of them."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.engine_process import EngineProcess, free_port
from tests.engines.runtime.plain_rpc import PlainClient, message
from tests.engines.runtime.test_rpc import OK, chat, tokens
from tests.synthetic_gguf import SyntheticModel


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"host": "0.0.0.0"}, "needs rpc_secret"),
        ({"rpc_secret": "short"}, "fewer than 16 bytes"),
    ],
)
def test_an_engine_without_a_proper_secret_does_not_open_itself(
    tmp_path: Path, settings: dict[str, Any], said: str
) -> None:
    config = {"model_path": "none.gguf", "model_name": "m", "port": free_port(), "rpc_port": free_port(), **settings}
    (tmp_path / "config.json").write_text(json.dumps(config))
    command = [sys.executable, "-m", "engines.runtime", "--config", str(tmp_path / "config.json")]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert ended.returncode == 2
    assert said in ended.stderr


def test_a_hybrids_state_leaves_one_token_to_decode_wherever_it_goes(
    tiny_model: Callable[..., SyntheticModel], tmp_path_factory: pytest.TempPathFactory
) -> None:
    # A recurrent state cannot give a token back, so one token too many in it would mean to compute all of it again.
    model = tiny_model("qwen35", tie_free=True)
    folder = tmp_path_factory.mktemp("rpc-hybrid")
    first, second = (EngineProcess(folder, model.path, slots=1, rpc_port=free_port()) for _ in range(2))
    with first, second, PlainClient(first.config.rpc_port) as source, PlainClient(second.config.rpc_port) as target:
        prefilled = source.ask(0x42, payload=chat(return_state=True))
        assert prefilled.meta["tokens_processed"] == prefilled.meta["n_past"] > 100
        assert source.ask(0x42, payload=chat()).meta["tokens_processed"] == 0
        restored = target.ask(0x31, key="0", payload=prefilled.payload)
        assert (restored.status, restored.meta["n_past"]) == (OK, prefilled.meta["n_past"])
        answers = [client.ask(0x43, payload=chat(max_tokens=8)).frames for client in (source, target)]
        assert tokens(answers[0]) == tokens(answers[1])
        for frames in answers:
            assert next(frame["timings"] for frame in frames if "timings" in frame)["prompt_n"] == 1


def test_an_engine_that_stops_says_so_and_closes(tiny_model: Callable[..., SyntheticModel], tmp_path: Path) -> None:
    model = tiny_model("llama", tie_free=True)
    with EngineProcess(tmp_path, model.path, context_tokens=8192, rpc_port=free_port()) as engine:
        with PlainClient(engine.config.rpc_port) as idle, PlainClient(engine.config.rpc_port) as working:
            working.socket.sendall(message(0x43, payload=chat(max_tokens=8000)))
            assert working.head()[0] == OK
            working.frame()
            engine.process.terminate()
            frames = []
            while data := working.frame():
                frames.append(json.loads(data))
            assert frames[-1]["error"]["code"] == "engine_stopping"
            assert working.is_closed()
            assert idle.is_closed()
        assert engine.stop() == 0
