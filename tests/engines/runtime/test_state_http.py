"""States between real engine processes: out of one by GET, into the other by PUT, and what is refused on the way."""

from __future__ import annotations

import base64
import hashlib
import http.client
import json
import re
import shutil
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from engines.runtime.state_forms import STREAM_MAGIC
from engines.runtime.state_snapshot import Manifest
from tests.engine_process import EngineProcess
from tests.paced_engine import PacedEngine
from tests.synthetic_gguf import SyntheticModel

Answer = tuple[int, dict[str, str], bytes]
PRELUDE_BYTES = 44
CURL = shutil.which("curl") or "curl"
SETTINGS: dict[str, Any] = {"checkpoint_min_tokens": 16, "put_away_idle": False, "kv_block_tokens": 64, "slots": 2}


def call(engine: EngineProcess, method: str, path: str, body: Any = None, **headers: str) -> Answer:
    """One request on a connection of its own; an iterator as body is sent in chunks."""
    connection = http.client.HTTPConnection("127.0.0.1", engine.config.port, timeout=60)
    chunked = body is not None and not isinstance(body, bytes)
    try:
        connection.request(method, path, body, headers, encode_chunked=chunked)
        with connection.getresponse() as response:
            return response.status, dict(response.headers), response.read()
    finally:
        connection.close()


def post(engine: EngineProcess, path: str, body: dict[str, Any]) -> dict[str, Any]:
    status, _, raw = call(engine, "POST", path, json.dumps(body).encode(), **{"Content-Type": "application/json"})
    assert status == 200, raw
    return dict(json.loads(raw))


def complete(engine: EngineProcess, tokens: list[int], count: int, **fields: Any) -> dict[str, Any]:
    body = {"prompt": tokens, "max_tokens": count, "temperature": 0, "logprobs": 5, "ignore_eos": True, **fields}
    return post(engine, "/v1/completions", body)


def get_state(engine: EngineProcess, slot: int, query: str = "", **headers: str) -> tuple[dict[str, str], bytes]:
    status, answered, raw = call(engine, "GET", f"/slots/{slot}/state{query}", **headers)
    assert status == 200, raw
    return answered, raw


def manifest_of(state: bytes) -> Manifest:
    assert state[:4] == STREAM_MAGIC
    length = int.from_bytes(state[8:12], "little")
    return Manifest.from_json(state[PRELUDE_BYTES : PRELUDE_BYTES + length])


def held(engine: EngineProcess) -> list[int]:
    return [slot["cached_tokens"] for slot in engine.get("/slots")]


def used_slot(engine: EngineProcess) -> int:
    return max(range(len(held(engine))), key=lambda slot: held(engine)[slot])


def error_of(answer: Answer) -> tuple[int, str]:
    return answer[0], json.loads(answer[2])["error"]["code"]


@pytest.mark.parametrize("architecture", ["llama", "gemma3", "qwen35", "qwen35moe"])
def test_a_state_piped_from_one_engine_into_another_goes_on_there_bit_for_bit(
    tiny_model: Callable[..., SyntheticModel], tmp_path: Path, architecture: str
) -> None:
    model = tiny_model(architecture)
    with EngineProcess(tmp_path, model.path, **SETTINGS) as a, EngineProcess(tmp_path, model.path, **SETTINGS) as b:
        complete(a, [(31 + 7 * i) % 250 for i in range(200)], 30)
        slot = used_slot(a)
        source = http.client.HTTPConnection("127.0.0.1", a.config.port, timeout=60)
        source.request("GET", f"/slots/{slot}/state")
        with source.getresponse() as response:
            status, headers, raw = call(
                b, "PUT", "/slots/1/state", iter(lambda: response.read(10_000), b""), **{"Transfer-Encoding": "chunked"}
            )
            length = int(response.headers["Content-Length"])
        source.close()
        assert (status, headers["X-Hydra-N-Past"]) == (200, "229"), raw
        assert json.loads(raw)["state_bytes"] == length
        assert json.loads(raw)["model_match"] == "exact"
        tokens = list(manifest_of(get_state(a, slot)[1]).tokens)
        assert len(tokens) == 229
        ours, theirs = (complete(engine, [*tokens, 5, 6, 7], 64) for engine in (b, a))
        # Equal to the last bit of every log probability, and nothing of the prompt's state was computed again.
        assert ours["choices"] == theirs["choices"]
        assert ours["usage"]["prompt_tokens_details"]["cached_tokens"] == 229
        states = [manifest_of(get_state(engine, i)[1]).tokens for engine, i in ((a, slot), (b, 1))]
        assert states[0] == states[1]


@pytest.fixture(scope="module")
def pair(
    tiny_model: Callable[..., SyntheticModel], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[EngineProcess, PacedEngine]]:
    """Two engines of one hybrid model; slot 0 of the first holds 119 tokens."""
    folder, path = tmp_path_factory.mktemp("pair"), tiny_model("qwen35", tie_free=True).path
    with EngineProcess(folder, path, **SETTINGS) as a, PacedEngine(folder, path, **SETTINGS) as b:
        complete(a, [(3 + 7 * i) % 250 for i in range(100)], 20)
        yield a, b


def test_meta_foretells_the_length_of_every_form(pair: tuple[EngineProcess, EngineProcess]) -> None:
    a, _ = pair
    slot = used_slot(a)
    for form in ("stream", "v2", "raw"):
        answered, raw = get_state(a, slot, f"?form={form}")
        meta = a.get(f"/slots/{slot}/state/meta?form={form}")
        assert (meta["n_past"], meta["state_bytes"]) == (119, len(raw))
        assert (answered["X-Hydra-N-Past"], answered["X-Hydra-Form"]) == ("119", form)
        assert answered["X-Hydra-Fingerprint"] == meta["fingerprint"]
        status, headers, body = call(a, "HEAD", f"/slots/{slot}/state?form={form}")
        assert (status, headers["Content-Length"], body) == (200, str(len(raw)), b"")


def test_digests_of_the_whole_are_sent_and_believed(pair: tuple[EngineProcess, EngineProcess]) -> None:
    a, b = pair
    answered, raw = get_state(a, used_slot(a), **{"Want-Content-Digest": "sha-256=1"})
    digest = "sha-256=:" + base64.b64encode(hashlib.sha256(raw).digest()).decode() + ":"
    assert answered["Content-Digest"] == digest
    stated = {"Content-Digest": digest, "X-Hydra-Blake3": answered["X-Hydra-Blake3"]}
    assert call(b, "PUT", "/slots/0/state", raw, **stated)[0] == 200
    wrong = "sha-256=:" + base64.b64encode(bytes(32)).decode() + ":"
    for headers in ({"Content-Digest": wrong}, {"X-Hydra-Blake3": "0" * 64}):
        assert error_of(call(b, "PUT", "/slots/0/state", raw, **headers)) == (400, "state_invalid")
        assert held(b)[0] == 0
    assert error_of(call(b, "PUT", "/slots/0/state", raw, **{"Content-Digest": "sha-256=nothing"}))[0] == 400


@pytest.mark.parametrize("form", ["v2", "raw"])
def test_foreign_forms_come_back_as_the_same_state(pair: tuple[EngineProcess, EngineProcess], form: str) -> None:
    a, b = pair
    answered, raw = get_state(a, used_slot(a), f"?form={form}")
    fingerprint = {"X-Hydra-Fingerprint": answered["X-Hydra-Fingerprint"]}
    assert error_of(call(b, "PUT", "/slots/1/state", raw)) == (422, "state_incompatible")
    if form == "v2":  # as the foreign system writes it: with logits, and with a checkpoint of its own
        head, rows = raw[: 9 + 4 * 119], raw[10 + 4 * 119 :]
        checkpoint = b"\1" + bytes(16) + (3).to_bytes(8, "little") + b"abc" + bytes(8)
        raw = head + checkpoint + rows + np.zeros(512, np.float32).tobytes()
    status, _, answer = call(b, "PUT", "/slots/1/state", raw, **fingerprint)
    assert status == 200, answer
    ours, theirs = (get_state(engine, slot)[1] for engine, slot in ((b, 1), (a, used_slot(a))))
    pieces = manifest_of(theirs).total_bytes
    assert manifest_of(ours).tokens == manifest_of(theirs).tokens
    assert ours[-manifest_of(ours).total_bytes :] == theirs[-pieces:]
    for cut in (5, 9, 100, 600, len(raw) - 1):
        assert error_of(call(b, "PUT", "/slots/1/state", raw[:cut], **fingerprint))[0] in (400, 422)
        assert held(b)[1] in (0, 119)
    # What no state of this context could be is not read to its end, however much an engine's bound allows.
    too_much = call(b, "PUT", "/slots/1/state", raw + bytes(8 << 20), **fingerprint)
    assert error_of(too_much) == (400, "state_invalid")
    bound = int(re.findall(r"the (\d+) bytes", json.loads(too_much[2])["error"]["message"])[0])
    assert len(raw) < bound < 8 << 20


def test_what_is_damaged_or_cut_short_empties_the_slot_and_nothing_else(
    pair: tuple[EngineProcess, EngineProcess],
) -> None:
    a, b = pair
    raw = get_state(a, used_slot(a))[1]
    assert call(b, "PUT", "/slots/1/state", raw)[0] == 200
    head = PRELUDE_BYTES + int.from_bytes(raw[8:12], "little")
    for at in (5, 20, PRELUDE_BYTES + 9, head + 3, head + 40, head + 5000, len(raw) - 7):
        damaged = bytearray(raw)
        damaged[at] ^= 4
        status, code = error_of(call(b, "PUT", "/slots/0/state", bytes(damaged)))
        assert (status, code) == (400, "state_invalid"), at
        assert held(b)[0] == 0
    for body in (raw[:2], raw[:30], raw[: head - 5], raw[: head + 100], raw[:-1], raw + b"\0", b"", b"nonsense"):
        assert error_of(call(b, "PUT", "/slots/0/state", body)) == (400, "state_invalid")
    assert held(b)[1] == 119
    assert get_state(b, 1)[1][-1000:] == raw[-1000:]
    assert complete(b, [1, 2, 3], 5)["usage"]["completion_tokens"] == 5


def test_a_slot_is_refused_with_the_right_status(pair: tuple[EngineProcess, EngineProcess]) -> None:
    a, b = pair
    raw = get_state(a, used_slot(a))[1]
    assert error_of(call(a, "GET", "/slots/99/state")) == (404, "slot_not_found")
    assert error_of(call(a, "PUT", "/slots/x/state", raw)) == (404, "slot_not_found")
    assert error_of(call(a, "GET", "/slots/0/state?form=none"))[0] == 400
    call(b, "POST", "/slots/0?action=erase")
    assert error_of(call(b, "GET", "/slots/0/state")) == (404, "slot_empty")
    assert call(b, "PUT", "/slots/0/state", raw)[0] == 200
    assert error_of(call(b, "PUT", "/slots/0/state?erase_existing=false", raw)) == (409, "slot_occupied")
    assert held(b)[0] == 119
    text = b.text("/metrics")
    assert 'hydra_engine_state_transfers_total{direction="restore",outcome="ok"}' in text
    assert "hydra_engine_state_sharing 1.0" in text


def test_a_busy_slot_is_not_touched_and_a_taken_one_runs_nothing(pair: tuple[EngineProcess, PacedEngine]) -> None:
    a, b = pair
    raw = get_state(a, used_slot(a))[1]
    long = threading.Thread(target=complete, args=(b, list(range(30)), 700))
    with b.slowed():
        long.start()
        while not (busy := [slot for slot in b.get("/slots") if slot["is_processing"]]):
            time.sleep(0.01)
        path = f"/slots/{busy[0]['id']}/state"
        assert error_of(call(b, "GET", path)) == (409, "slot_busy")
        assert error_of(call(b, "PUT", path, raw)) == (409, "slot_busy")
        assert b.get(path + "/meta")["is_processing"]
    long.join()
    # A sender that stops in the middle: its slot is taken, and free and empty again when it hangs up.
    sender = http.client.HTTPConnection("127.0.0.1", b.config.port, timeout=60)
    sender.putrequest("PUT", "/slots/0/state")
    sender.putheader("Content-Length", str(len(raw)))
    sender.endheaders(raw[: len(raw) // 2])
    while not (meta := b.get("/slots/0/state/meta"))["is_transferring"]:
        time.sleep(0.01)
    assert meta["operation"] == "restore"
    assert error_of(call(b, "PUT", "/slots/0/state", raw)) == (409, "slot_busy")
    assert complete(b, [4, 5, 6], 3)["usage"]["completion_tokens"] == 3
    sender.close()
    while b.get("/slots/0/state/meta")["is_transferring"]:
        time.sleep(0.01)
    assert held(b)[0] == 0
    assert call(b, "PUT", "/slots/0/state", raw)[0] == 200


def test_a_chat_goes_on_elsewhere_where_its_template_branches_off(pair: tuple[EngineProcess, EngineProcess]) -> None:
    """A recurrent state cannot go back, so the checkpoint of the last user message travels along."""
    a, b = pair
    messages = [{"role": "user", "content": "tell me about slow rivers " * 20}]
    first = post(a, "/v1/chat/completions", {"messages": messages, "max_tokens": 20, "temperature": 0})
    state = get_state(a, used_slot(a))[1]
    kinds = [piece.kind for piece in manifest_of(state).pieces]
    assert kinds[-2:] == ["part", "checkpoint"]
    assert call(b, "PUT", "/slots/0/state", state)[0] == 200
    # As after a template that drops the reasoning: the answer comes back shorter than it was.
    said = first["choices"][0]["message"]["content"][3:]
    messages += [{"role": "assistant", "content": said}, {"role": "user", "content": "go on"}]
    body = {"messages": messages, "max_tokens": 20, "temperature": 0}
    here, there = (post(engine, "/v1/chat/completions", body) for engine in (b, a))
    cached = here["usage"]["prompt_tokens_details"]["cached_tokens"]
    assert cached == there["usage"]["prompt_tokens_details"]["cached_tokens"]
    assert cached >= 0.9 * first["usage"]["prompt_tokens"]
    assert here["choices"][0]["message"]["content"] == there["choices"][0]["message"]["content"]


@pytest.mark.skipif(shutil.which("curl") is None, reason="there is no curl here")
def test_curl_pipes_a_conversation_into_another_engine(pair: tuple[EngineProcess, EngineProcess]) -> None:
    a, b = pair
    messages = [{"role": "user", "content": "say what grows on the north side of walls " * 18}]
    first = post(a, "/v1/chat/completions", {"messages": messages, "max_tokens": 12, "temperature": 0})
    out = [CURL, "-sS", "--fail-with-body", f"{a.base_url}/slots/{used_slot(a)}/state"]
    into = [CURL, "-sS", "--fail-with-body", "-T", "-", f"{b.base_url}/slots/1/state"]
    with subprocess.Popen(out, stdout=subprocess.PIPE) as source:
        put = subprocess.run(into, stdin=source.stdout, capture_output=True, timeout=60, check=False)
    assert (source.returncode, put.returncode) == (0, 0), put
    assert json.loads(put.stdout)["n_past"] == max(held(a))
    messages += [first["choices"][0]["message"], {"role": "user", "content": "go on"}]
    body = {"messages": messages, "max_tokens": 12, "temperature": 0}
    here, there = (post(engine, "/v1/chat/completions", body) for engine in (b, a))
    assert here["usage"]["prompt_tokens_details"]["cached_tokens"] >= 0.9 * first["usage"]["prompt_tokens"]
    assert here["choices"] == there["choices"]
