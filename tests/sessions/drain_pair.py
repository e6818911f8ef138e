"""Two engines of two hosts that drains are begun on, as rows that serve."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from uuid import uuid4

from aiohttp import web

from engines import services as engines
from engines.models import Engine
from sessions.drains import Moved
from tests.rows import add_engine, add_model, set_ready
from tests.synthetic_gguf import SyntheticModel

ME, ANOTHER = uuid4(), uuid4()
STAYS = Moved("a" * 64, "", "one", "", 5, "stays", "idle", reason="no room")


def drain_pair(tiny_model: Callable[..., SyntheticModel], models_dir: Path) -> tuple[Engine, Engine]:
    variant = add_model(tiny_model("llama").path, models_dir)
    first, second = (add_engine(variant, name=name, host_name=f"on-{name}") for name in ("one", "two"))
    for engine in (first, second):
        set_ready(engine, 1)
    return first, second


async def no_slots(_request: web.Request) -> web.StreamResponse:
    return web.json_response([])


def taking() -> list[str]:
    return [endpoint.name for endpoint in engines.serving_engines(None)]
