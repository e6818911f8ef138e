"""The playground's WebSocket: a page holds conversations, this consumer answers them through the same relay as the API.

From the page:
    {"type": "models"}                                   which models there are, and can they answer
    {"type": "chat", "id", "conversation", "body"}       an OpenAI chat body; "conversation" names the ChatSession
    {"type": "ack", "id"}                                one message of that chat was drawn
    {"type": "stop", "id"}
To the page, each with the chat's "id":
    loading {loading: {state, …}} · start {engine, request_id} · progress {processed, total, cached} · delta {text} ·
    reasoning {text} · done {finish_reason, usage, timings, first_token_s, duration_s} ·
    error {error: {message, code, hint, retryable}}
"""

from __future__ import annotations

import asyncio
import json
import logging
import re
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any, TypeGuard

from engines.services import engine_views
from pools.db import in_db
from pools.services import model_views
from sessions.panel_socket import CLOSE_SILENT_PAGE, PanelSocket
from sessions.playground_run import PageSilent, PlaygroundRun

log = logging.getLogger(__name__)

CLOSE_TOO_BIG = 1009
MAX_MESSAGE_BYTES = 1024 * 1024
MAX_RUNNING_CHATS = 4
_NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")
# The state a picker shows for a model is that of its best engine, in this order.
_BEST_FIRST = ("ready", "unhealthy", "starting", "draining", "stopping", "failed", "stopped")


def model_choices() -> list[dict[str, Any]]:
    """The models a page can pick, default first. `state` is the best of the model's engines', "none" without any."""
    states: dict[str, set[str]] = {}
    for engine in engine_views():
        states.setdefault(engine.model_name, set()).add(engine.state)
    return [
        {
            "name": model.name,
            "display_name": model.display_name or model.name,
            "is_default": model.is_default,
            "state": next((state for state in _BEST_FIRST if state in states.get(model.name, ())), "none"),
            "context_tokens": model.context_tokens,
        }
        for model in model_views()
    ]


class PlaygroundConsumer(PanelSocket):
    """At most four running chats a page; a message over 1 MB ends the connection; leaving the page cancels its chats."""

    def __init__(self) -> None:
        super().__init__()
        self.user_id: int | None = None
        self.runs: dict[str, tuple[PlaygroundRun, asyncio.Task[None]]] = {}

    async def opened(self, user_id: int) -> None:
        self.user_id = user_id

    async def ended(self) -> None:
        """The page's chats end with it, and their engines are free."""
        tasks = [task for _, task in self.runs.values()]
        for task in tasks:
            task.cancel()
        for task in tasks:
            with suppress(asyncio.CancelledError):
                await task

    async def receive(self, text_data: str | None = None, bytes_data: bytes | None = None) -> None:
        if self.user_id is None:
            return
        if text_data is None or len(text_data.encode()) > MAX_MESSAGE_BYTES:
            await self._refuse(None, "message_too_big", "A message may have at most 1 MB of text.", "Clear the chat.")
            await self.close(CLOSE_TOO_BIG)
            return
        try:
            message = json.loads(text_data)
        except (ValueError, RecursionError):
            message = None
        kind = message.get("type") if isinstance(message, dict) else None
        handler = self._handlers().get(kind) if isinstance(kind, str) else None
        if handler is None:
            await self._refuse(None, "invalid_request", "The page sent something this server does not know.", "Reload.")
            return
        await handler(message)

    def _handlers(self) -> dict[str, Callable[[dict[str, Any]], Awaitable[None]]]:
        return {"models": self._on_models, "chat": self._on_chat, "ack": self._on_ack, "stop": self._on_stop}

    async def _on_models(self, message: dict[str, Any]) -> None:
        await self.send_message({"type": "models", "models": await in_db(model_choices)})

    async def _on_chat(self, message: dict[str, Any]) -> None:
        run_id, conversation, body = message.get("id"), message.get("conversation"), message.get("body")
        if not _is_name(run_id) or not _is_name(conversation) or not isinstance(body, dict):
            await self._refuse(None, "invalid_request", "A chat needs id, conversation and body.", "Reload the page.")
            return
        if run_id in self.runs:
            await self._refuse(run_id, "duplicate_id", "This chat is already running.", None)
            return
        if len(self.runs) >= MAX_RUNNING_CHATS:
            hint = "Wait for one to end, or stop one."
            await self._refuse(run_id, "too_many_chats", f"{MAX_RUNNING_CHATS} chats already run on this page.", hint)
            return
        assert self.user_id is not None
        run = PlaygroundRun(run_id, self.user_id, conversation, body, self.send_message)
        self.runs[run_id] = (run, asyncio.create_task(self._run(run), name=f"playground-{run_id}"))

    async def _run(self, run: PlaygroundRun) -> None:
        try:
            await run.answer()
        except PageSilent:
            await self.close(CLOSE_SILENT_PAGE)
        except Exception:
            # The page must not wait for ever because of a bug here; the log has the trace.
            log.exception("A playground chat failed")
            await self._refuse(run.id, "internal_error", "Something broke on the server.", "The site's log has more.")
        finally:
            self.runs.pop(run.id, None)

    async def _on_ack(self, message: dict[str, Any]) -> None:
        if (entry := self._entry(message)) is not None:
            entry[0].acknowledged()

    async def _on_stop(self, message: dict[str, Any]) -> None:
        if (entry := self._entry(message)) is not None:
            entry[0].stop()

    def _entry(self, message: dict[str, Any]) -> tuple[PlaygroundRun, asyncio.Task[None]] | None:
        """The chat the message names; None when it has ended, which a page may not know yet."""
        run_id = message.get("id")
        return self.runs.get(run_id) if isinstance(run_id, str) else None

    async def send_message(self, message: dict[str, Any]) -> None:
        await self.send(json.dumps(message, ensure_ascii=False))

    async def _refuse(self, run_id: str | None, code: str, text: str, hint: str | None) -> None:
        error = {"message": text, "code": code, "hint": hint, "retryable": False}
        await self.send_message({"type": "error", "id": run_id, "error": error})


def _is_name(value: Any) -> TypeGuard[str]:
    return isinstance(value, str) and _NAME.fullmatch(value) is not None
