"""A running pool with two engines: a conversation moves in the middle of its answer, asked for over the API, done by a worker."""

from __future__ import annotations

import http.client
import json
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

from tests.conftest import PulledModel
from tests.e2e.test_swap import manage
from tests.stack import Stack

pytestmark = pytest.mark.soak
MODEL, COUNT, PATIENCE_S = "smollm2-135m", 600, 120.0
SECOND = """
from engines.models import Engine
from engines import services
first = Engine.objects.get()
pk = services.ensure_engine("second", host_id=first.host_id, gpu_id=first.gpu_id, variant_id=first.variant_id,
                            slots=first.slots, context_tokens=first.context_tokens, threads=1)
services.start(pk)
"""


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory, pulled_smollm2: PulledModel) -> Iterator[Stack]:
    """One with two engines of the default model."""
    running = Stack(tmp_path_factory.mktemp("handoff") / "home", pulled_smollm2.models_dir)
    try:
        running.start()
        manage(running, "shell", "-c", SECOND)
        deadline = time.monotonic() + PATIENCE_S
        while _ready(running) < 2:
            assert time.monotonic() < deadline, running.logs()
            time.sleep(0.5)
        yield running
    finally:
        running.close()


def _ready(stack: Stack) -> int:
    code = "from engines.services import serving_engines as s; print('READY', len(s()))"
    return int(manage(stack, "shell", "-c", code).split("READY ")[1].split()[0])


def ask(stack: Stack, method: str, path: str, body: Any = None, **headers: str) -> tuple[int, dict[str, Any]]:
    connection = http.client.HTTPConnection("127.0.0.1", stack.port, timeout=PATIENCE_S)
    raw = None if body is None else json.dumps(body)
    connection.request(method, path, raw, headers | ({"Content-Type": "application/json"} if raw else {}))
    answer = connection.getresponse()
    values = json.loads(answer.read())
    connection.close()
    return answer.status, values


def test_a_running_answer_moves_to_another_engine_of_the_pool(stack: Stack) -> None:
    connection = http.client.HTTPConnection("127.0.0.1", stack.port, timeout=PATIENCE_S)
    messages = [{"role": "user", "content": "Tell a long story about a river."}]
    body = {"model": MODEL, "messages": messages, "max_tokens": COUNT, "temperature": 0, "ignore_eos": True}
    streamed = {**body, "stream": True, "stream_options": {"include_usage": True}}
    connection.request("POST", "/v1/chat/completions", json.dumps(streamed), {"Content-Type": "application/json"})
    answer = connection.getresponse()
    assert answer.status == 200
    session, home = answer.getheader("X-Hydra-Session"), answer.getheader("X-Hydra-Engine")
    chunks: list[dict[str, Any]] = []
    reading = threading.Thread(
        target=lambda: chunks.extend(json.loads(line[6:]) for line in answer if line.startswith(b"data: {"))
    )
    reading.start()
    time.sleep(1.0)  # the session's row is written a moment after its answer has begun
    away = "second" if home != "second" else "cpu-0"
    status, moved = ask(stack, "POST", f"/v1/sessions/{session}/migrate", {"engine": away})
    assert status == 200, moved
    reading.join(PATIENCE_S)
    answer.close()
    connection.close()
    assert [(move["state"], move["kind"], move["target"]) for move in moved["moves"]] == [("committed", "live", away)]
    text = "".join(choice["delta"].get("content") or "" for chunk in chunks for choice in chunk["choices"])
    reasons = [choice["finish_reason"] for chunk in chunks for choice in chunk["choices"] if choice["finish_reason"]]
    assert (reasons, chunks[-1]["usage"]["completion_tokens"]) == (["length"], COUNT)
    status, shown = ask(stack, "GET", f"/v1/sessions/{session}")
    assert [held["engine"] for held in shown["held"]] == [away]
    own = {"X-Session-Id": "alone"}
    status, alone = ask(stack, "POST", "/v1/chat/completions", {**body, "cache_prompt": False}, **own)
    assert alone["choices"][0]["message"]["content"] == text
