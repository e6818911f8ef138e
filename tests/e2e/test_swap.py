"""Two models and room for one: a request for the other has it loaded, and no stream that runs meanwhile breaks."""

from __future__ import annotations

import http.client
import json
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import PulledModel
from tests.e2e.test_api import HELLO, chat, request
from tests.hydra_process import ROOT
from tests.stack import Stack
from tests.synthetic_gguf import write_llama

MODEL, OTHER = "smollm2-135m", "other"
STREAMS = 4
LIMIT_BYTES = 2 << 30  # either of them, with its budget for parked states, but not both
SWAP_LIMIT_S = 240.0

pytestmark = [pytest.mark.soak, pytest.mark.timeout(900)]


@dataclass
class Heard:
    """A streamed answer as its client heard it. Times in seconds since it was asked for."""

    chunks: int = 0
    comments: list[str] = field(default_factory=list)
    finish_reason: str | None = None
    error: Any = None
    first_byte_s: float = 0.0
    first_chunk_s: float = 0.0
    ended_s: float = 0.0
    longest_silence_s: float = 0.0


def listen(stack: Stack, model: str, max_tokens: int, begun: threading.Event | None = None) -> Heard:
    heard, asked_s = Heard(), time.monotonic()
    body = {"model": model, "messages": HELLO, "max_tokens": max_tokens, "stream": True, "ignore_eos": True}
    connection = http.client.HTTPConnection("127.0.0.1", stack.port, timeout=SWAP_LIMIT_S)
    connection.request("POST", "/v1/chat/completions", json.dumps(body), {"Content-Type": "application/json"})
    answer = connection.getresponse()
    assert answer.status == 200, answer.read()
    last_s = asked_s
    for line in answer:
        now_s = time.monotonic()
        heard.longest_silence_s, last_s = max(heard.longest_silence_s, now_s - last_s), now_s
        heard.first_byte_s = heard.first_byte_s or now_s - asked_s
        if line.startswith(b": "):
            heard.comments.append(line.decode().strip())
        elif line.startswith(b"data: {"):
            heard_chunk(heard, json.loads(line[6:]), now_s - asked_s)
            if begun is not None:
                begun.set()
    heard.ended_s = time.monotonic() - asked_s
    connection.close()
    return heard


def heard_chunk(heard: Heard, chunk: dict[str, Any], at_s: float) -> None:
    heard.error = chunk.get("error") or heard.error
    for choice in chunk.get("choices", []):
        heard.finish_reason = choice.get("finish_reason") or heard.finish_reason
        if choice["delta"].get("content"):
            heard.chunks += 1
            heard.first_chunk_s = heard.first_chunk_s or at_s


def manage(stack: Stack, *arguments: str) -> str:
    result = subprocess.run(
        [sys.executable, "manage.py", *arguments],
        cwd=ROOT,
        env=stack.environ,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert result.returncode == 0, result.stderr
    return result.stdout


@pytest.fixture(scope="module")
def crowded(tmp_path_factory: pytest.TempPathFactory, pulled_smollm2: PulledModel) -> Iterator[Stack]:
    """A running stack with two models, on whose CPU there is room for one."""
    home = tmp_path_factory.mktemp("crowded")
    stack = Stack(home, pulled_smollm2.models_dir)
    try:
        stack.start()
        model = write_llama(tmp_path_factory.mktemp("other") / "other.gguf", tie_free=True)
        manage(stack, "pull", str(model.path), "--name", OTHER)
        code = "from pools import services, device_limits; from django.conf import settings; "
        code += f"print(device_limits.set_memory_limit(services.cpu_of(settings.HYDRA_HOST_NAME)[1], {LIMIT_BYTES}))"
        assert manage(stack, "shell", "-c", code).splitlines()[-1] == "True"
        yield stack
        assert stack.interrupt() == 0
    finally:
        stack.close()


def engines(stack: Stack) -> dict[str, str]:
    """States of all engines by model."""
    code = "import json; from engines import services; "
    code += "print(json.dumps({view.model_name: view.state for view in services.engine_views()}))"
    return json.loads(manage(stack, "shell", "-c", code).splitlines()[-1])


def test_streams_end_whole_while_another_model_is_asked_for(crowded: Stack, capsys: pytest.CaptureFixture[str]) -> None:
    assert chat(crowded, {"messages": HELLO, "max_tokens": 2})[0] == 200
    time.sleep(10.5)  # who came a moment ago does not make way
    begun, asked_s = [threading.Event() for _ in range(STREAMS)], time.monotonic()
    with ThreadPoolExecutor(STREAMS + 1) as pool:
        running = [pool.submit(listen, crowded, MODEL, 300, one) for one in begun]
        assert all(one.wait(SWAP_LIMIT_S) for one in begun)
        later_s = time.monotonic() - asked_s
        other = pool.submit(listen, crowded, OTHER, 8)
        time.sleep(1.0)
        status, refused, headers = request(
            crowded, "POST", "/v1/chat/completions", json.dumps({"model": OTHER, "messages": HELLO}).encode()
        )
        streams, swapped = [one.result(SWAP_LIMIT_S) for one in running], other.result(SWAP_LIMIT_S)
    assert [(stream.finish_reason, stream.error, stream.chunks > 250) for stream in streams] == [
        ("length", None, True)
    ] * STREAMS
    assert (swapped.finish_reason, swapped.error) == ("length", None)
    assert swapped.chunks > 0
    assert any("draining" in comment for comment in swapped.comments)
    body = json.loads(refused)
    assert (status, body["error"]["code"], int(headers["Retry-After"]) > 0) == (503, "model_loading", True)
    assert body["loading"]["state"] in ("draining", "starting", "loading")
    assert engines(crowded) == {MODEL: "stopped", OTHER: "ready"}
    figures = {
        "streams_s": [round(stream.ended_s, 2) for stream in streams],
        "other_waited_s": round(swapped.first_chunk_s, 2),
        "other_first_byte_s": round(swapped.first_byte_s, 3),
        "other_longest_silence_s": round(swapped.longest_silence_s, 2),
        "after_last_stream_s": round(later_s + swapped.first_chunk_s - max(stream.ended_s for stream in streams), 2),
        "pings": len(swapped.comments),
    }
    with capsys.disabled():
        print(f"\nswap under load: {json.dumps(figures)}")


def test_the_first_model_comes_back_when_it_is_asked_for(crowded: Stack) -> None:
    heard = listen(crowded, MODEL, 4)
    assert (heard.finish_reason, heard.error) == ("length", None)
    assert engines(crowded) == {MODEL: "ready", OTHER: "stopped"}
    assert Path(crowded.home / "engines").is_dir()
