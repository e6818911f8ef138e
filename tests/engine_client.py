"""Plain HTTP against an engine process, for what the official clients hide: statuses, headers, raw events."""

from __future__ import annotations

import http.client
import json
from dataclasses import dataclass
from typing import Any

from tests.engine_process import EngineProcess

TIMEOUT_S = 60.0


@dataclass(frozen=True)
class Answer:
    """`value` is the body as JSON, or its text where it is none."""

    status: int
    value: Any
    headers: http.client.HTTPMessage


def call(
    engine: EngineProcess, method: str, path: str, body: Any = None, headers: dict[str, str] | None = None
) -> Answer:
    """One request on a connection of its own. A body that is not bytes is sent as JSON."""
    connection = http.client.HTTPConnection("127.0.0.1", engine.config.port, timeout=TIMEOUT_S)
    raw = body if isinstance(body, bytes) or body is None else json.dumps(body).encode()
    try:
        connection.request(method, path, raw, headers or {})
        answer = connection.getresponse()
        text = answer.read().decode()
        is_json = answer.headers.get_content_type() == "application/json"
        return Answer(answer.status, json.loads(text) if is_json else text, answer.headers)
    finally:
        connection.close()


def post(engine: EngineProcess, path: str, body: Any, headers: dict[str, str] | None = None) -> Answer:
    return call(engine, "POST", path, body, headers)


def events(text: str) -> list[tuple[str, Any]]:
    """A whole event stream as (name, data) pairs; data that is no JSON stays text, comments are left out."""
    found = []
    for frame in text.strip().split("\n\n"):
        lines = [line for line in frame.split("\n") if not line.startswith(":")]
        name = next((line.removeprefix("event: ") for line in lines if line.startswith("event: ")), "")
        data = "\n".join(line.removeprefix("data: ") for line in lines if line.startswith("data: "))
        if data:
            found.append((name, json.loads(data) if data.startswith("{") else data))
    return found
