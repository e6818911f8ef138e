"""Parking as a client and the site see it: engines and a store as processes, started, stopped and killed."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.engine_process import EngineProcess
from tests.engines.store.store_process import StoreProcess, store_on_tmpfs
from tests.synthetic_gguf import SyntheticModel

SYSTEM = "You are told a very long story about rivers and stones. " * 12


@pytest.fixture
def store(tmp_path: Path) -> Iterator[StoreProcess]:
    with store_on_tmpfs(tmp_path) as running:
        yield running


def post(engine: EngineProcess, path: str, body: Any, **headers: str) -> tuple[int, Any]:
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    request = urllib.request.Request(
        engine.base_url + path, json.dumps(body).encode(), {"Content-Type": "application/json", **named}
    )
    try:
        with urllib.request.urlopen(request, timeout=60) as answer:
            return answer.status, json.load(answer)
    except urllib.error.HTTPError as error:
        with error:
            return error.code, json.load(error)


def chat(engine: EngineProcess, *texts: str, system: str = SYSTEM, **headers: str) -> tuple[str, int, int]:
    """The answer to the last text, and the prompt's tokens: all, and those that were not computed."""
    roles = ["user", "assistant"] * len(texts)
    messages = [{"role": "system", "content": system}]
    messages += [{"role": role, "content": text} for role, text in zip(roles, texts, strict=False)]
    body = {"messages": messages, "max_tokens": 24, "temperature": 0, "ignore_eos": True}
    status, answer = post(engine, "/v1/chat/completions", body, **headers)
    assert status == 200, answer
    usage = answer["usage"]
    cached = usage["prompt_tokens_details"]["cached_tokens"]
    return answer["choices"][0]["message"]["content"], usage["prompt_tokens"], cached


@pytest.mark.parametrize("architecture", [pytest.param("llama", marks=pytest.mark.soak), "qwen35"])
def test_a_conversation_outlives_its_engine_and_the_store(
    tiny_model: Callable[..., SyntheticModel], store: StoreProcess, tmp_path: Path, architecture: str
) -> None:
    model = tiny_model(architecture, layers=12 if architecture == "llama" else 4)
    settings = {"store_port": store.config.port, "kv_block_tokens": 64, "context_tokens": 2048}
    settings["checkpoint_min_tokens"] = 16
    mine = {"X_Hydra_Session": "me", "X_Hydra_Tenant": "a1"}
    with EngineProcess(tmp_path, model.path, **settings) as engine:
        first, _, _ = chat(engine, "Hello!", **mine)
        stayed, prompt_tokens, in_slot = chat(engine, "Hello!", first, "Go on.", **mine)
    with EngineProcess(tmp_path, model.path, **settings) as engine:
        again, _, cached = chat(engine, "Hello!", **mine)
        assert again == first
        assert cached > 0  # by the first engine's system prompt, saved by itself or when it stopped
        assert engine.stop() == 0
    store.restart()
    with EngineProcess(tmp_path, model.path, **settings) as engine:
        resumed, _, cached = chat(engine, "Hello!", first, "Go on.", **mine)
        assert resumed == stayed
        assert cached >= min(in_slot, prompt_tokens - 64)
        assert 'hydra_engine_resumed_total{place="host"} 1.0' in engine.text("/metrics")
        other, _, others_cached = chat(engine, "Hello!", first, "Go on.", X_Hydra_Session="me", X_Hydra_Tenant="b2")
        assert (other, others_cached) == (stayed, 0)


def test_slots_and_sessions_are_parked_on_request(
    tie_free_model: SyntheticModel, store: StoreProcess, tmp_path: Path
) -> None:
    settings = {"store_port": store.config.port, "kv_block_tokens": 64, "context_tokens": 2048, "slots": 2}
    with EngineProcess(tmp_path, tie_free_model.path, **settings) as engine:
        _, prompt_tokens, _ = chat(engine, "Hello!", X_Hydra_Session="one")
        chat(engine, "Good day!", system=SYSTEM[::-1], X_Hydra_Session="two")
        status, answer = post(engine, "/sessions/park", {"session": "one"})
        assert status == 200
        snapshot = answer["snapshot"]
        assert snapshot["name"].startswith("kv/")
        assert snapshot["session"] == "one"
        assert snapshot["tokens"] == prompt_tokens + 23
        assert snapshot["bytes"] == snapshot["written_bytes"] + snapshot["skipped_bytes"] > 0
        assert post(engine, "/sessions/park", {"session": "one"})[1]["error"]["code"] == "session_not_held"
        slot = next(slot["id"] for slot in engine.get("/slots") if slot["cached_tokens"])
        status, answer = post(engine, f"/slots/{slot}?action=park", {})
        assert (status, answer["id_slot"], answer["snapshot"]["session"]) == (200, slot, "two")
        assert post(engine, f"/slots/{slot}?action=park", {})[1]["error"]["code"] == "slot_empty"
        assert [slot["cached_tokens"] for slot in engine.get("/slots")] == [0, 0]
        store.kill()
        chat(engine, "Hello!", X_Hydra_Session="one")
        status, answer = post(engine, "/sessions/park", {"session": "one"})
        assert (status, answer["error"]["code"]) == (503, "store_away")
        assert engine.health() == "ok"


def test_malformed_headers_are_refused_and_an_engine_without_a_store_says_so(endpoint_engine: EngineProcess) -> None:
    body = {"messages": [{"role": "user", "content": "Hello!"}], "max_tokens": 1}
    for header, value in (
        ("X_Hydra_Session", "a b"),
        ("X_Hydra_Session", "x" * 129),
        ("X_Hydra_Tenant", "xyz"),
        ("X_Hydra_Tenant", "a" * 65),
        ("X_Hydra_Resume_From", "nowhere"),
        ("X_Hydra_Resume_From", "host:99999"),
        ("X_Hydra_Resume_From", ",".join(["a:1"] * 5)),
    ):
        status, answer = post(endpoint_engine, "/v1/chat/completions", body, **{header: value})
        assert (status, answer["error"]["param"]) == (400, header.replace("_", "-"))
    assert post(endpoint_engine, "/sessions/park", {"session": "s"})[1]["error"]["code"] == "not_served"
    assert post(endpoint_engine, "/slots/0?action=park", {})[0] == 501
