"""A page's end of a WebSocket, and the rows of a small pool."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from asgiref.testing import ApplicationCommunicator
from channels.routing import URLRouter
from django.contrib.auth.models import AnonymousUser, User
from django.utils import timezone

from engines.models import Engine
from hydra_site.routing import websocket_urlpatterns
from pools.models import Gpu, Host, Model, Variant

REPLY_TIMEOUT_S = 20.0
GIB = 2**30


@dataclass
class SmallPool:
    """One host with its CPU, one model, one engine of it."""

    host: Host
    gpu: Gpu
    model: Model
    engine: Engine


def write_small_pool() -> SmallPool:
    now = timezone.now()
    host = Host.objects.create(
        name="atlas",
        cpu_model="A CPU",
        cpu_count=2,
        memory_total_bytes=8 * GIB,
        memory_available_bytes=6 * GIB,
        last_seen_at=now,
    )
    gpu = Gpu.objects.create(
        host=host,
        kind="cpu",
        uuid="cpu-0",
        name="A CPU",
        arch="x86-64",
        memory_total_bytes=8 * GIB,
        memory_used_bytes=2 * GIB,
        last_seen_at=now,
    )
    model = Model.objects.create(name="tiny", display_name="Tiny", is_default=True, context_tokens=1024)
    variant = Variant.objects.create(
        model=model,
        path="/nowhere/tiny.gguf",
        filename="tiny.gguf",
        size_bytes=1,
        content_digest="00",
        architecture="llama",
        quantization="Q8_0",
    )
    engine = Engine.objects.create(
        name="tiny-atlas",
        host=host,
        gpu=gpu,
        variant=variant,
        wanted="running",
        state="ready",
        ready_at=now,
        last_seen_at=now,
        slots=1,
        context_tokens=1024,
    )
    return SmallPool(host, gpu, model, engine)


class Page:
    """A page's end of a WebSocket. Not Channels' communicator: that one keeps database connections open behind our back."""

    def __init__(self, path: str, user: User | AnonymousUser) -> None:
        scope = {
            "type": "websocket",
            "path": path,
            "query_string": b"",
            "headers": [],
            "subprotocols": [],
            "user": user,
        }
        self.communicator = ApplicationCommunicator(URLRouter(websocket_urlpatterns), scope)

    async def open(self) -> None:
        await self.communicator.send_input({"type": "websocket.connect"})
        assert (await self.communicator.receive_output(REPLY_TIMEOUT_S))["type"] == "websocket.accept"

    async def say(self, message: dict[str, Any] | str) -> None:
        text = message if isinstance(message, str) else json.dumps(message)
        await self.communicator.send_input({"type": "websocket.receive", "text": text})

    async def hear(self, kind: str | None = None, *, acknowledge: bool = True) -> dict[str, Any]:
        """The next message, or the next of a kind."""
        while True:
            output = await self.communicator.receive_output(REPLY_TIMEOUT_S)
            assert output["type"] == "websocket.send"
            message: dict[str, Any] = json.loads(output["text"])
            if acknowledge and message.get("id"):
                await self.say({"type": "ack", "id": message["id"]})
            if kind is None or message["type"] == kind:
                return message

    async def hears_nothing(self, within_s: float) -> bool:
        return bool(await self.communicator.receive_nothing(timeout=within_s, interval=within_s / 10))

    async def closed_with(self) -> int:
        while True:
            output = await self.communicator.receive_output(REPLY_TIMEOUT_S)
            if output["type"] == "websocket.close":
                return int(output["code"])

    async def leave(self) -> None:
        """Safe to call again, and after the server closed the connection."""
        if not self.communicator.future.done():
            await self.communicator.send_input({"type": "websocket.disconnect", "code": 1000})
        await self.communicator.wait(REPLY_TIMEOUT_S)
