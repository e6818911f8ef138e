"""A conversation with a running Hydra, its snapshot in the host's store, and the row that tells of it."""

from __future__ import annotations

import json
import time
import urllib.request
from typing import Any

import psycopg

from tests.e2e.test_api import chat, request
from tests.stack import Stack

PATIENCE_S = 90.0
LONG = "Colours of the rainbow are red, orange, yellow, green, blue, indigo and violet. " * 30
NAMED = {"X-Session-Id": "a conversation that is kept"}


def store_pages(stack: Stack, page: str) -> Any:
    told = json.loads((stack.home / "store" / "config.json").read_text())
    with urllib.request.urlopen(f"http://127.0.0.1:{told['http_port']}{page}", timeout=30) as answer:
        return json.load(answer)


def rows(stack: Stack, query: str) -> list[Any]:
    url = json.loads((stack.home / "run" / "services.json").read_text())["database_url"]
    with psycopg.connect(url) as connection:
        return connection.execute(query).fetchall()


def until(stack: Stack, query: str) -> list[Any]:
    deadline = time.monotonic() + PATIENCE_S
    while not (found := rows(stack, query)):
        assert time.monotonic() < deadline, stack.logs()
        time.sleep(0.5)
    return found


def test_a_conversation_is_saved_and_its_row_says_where(stack: Stack) -> None:
    messages = [{"role": "user", "content": LONG + "Name one of them."}]
    status, answer = chat(stack, {"messages": messages, "max_tokens": 8}, NAMED)
    assert status == 200
    # Rows are written behind the answers.
    ((key, title),) = until(
        stack, f"SELECT key_hash, title FROM hydra_sessions_chatsession WHERE title LIKE '{LONG[:20]}%'"
    )
    assert title
    ((name, tokens, size_bytes, port),) = until(
        stack,
        "SELECT s.name, s.tokens, s.size_bytes, e.port FROM hydra_sessions_snapshot s"
        " JOIN engines_store e ON e.id = s.store_id JOIN hydra_sessions_chatsession c ON c.id = s.chat_id"
        f" WHERE c.key_hash = '{key}' AND e.state = 'ready'",
    )
    assert tokens > answer["usage"]["prompt_tokens"] // 2
    assert size_bytes > 0
    assert port == json.loads((stack.home / "store" / "config.json").read_text())["port"]
    shown = store_pages(stack, "/debug")["manifests"]
    assert {"name": name, "session": key} in [{field: one[field] for field in ("name", "session")} for one in shown]
    assert request(stack, "GET", "/readyz")[0] == 200
