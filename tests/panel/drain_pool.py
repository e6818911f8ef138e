"""Two hosts with three engines between which conversations can move: each answers what an engine is asked for a preview."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import asdict
from typing import Any

from aiohttp import web
from django.utils import timezone

from engines.config import SlotView
from engines.models import Engine
from engines.rates_view import EngineRates
from pools.db import in_db
from pools.models import Gpu, Host
from sessions.models import ChatSession, Handoff, SlotLease
from tests.panel.page import GIB, SmallPool, write_small_pool
from tests.sessions.loopback_engine import loopback_engine

REQUEST = "11111111-1111-4111-8111-111111111111"
TITLES = (
    "Plan of the greenhouse",
    "Why does the build fail?",
    "",
    "A rather long title that somebody's client made out of a whole first question",
)


async def no_slots(_request: web.Request) -> web.StreamResponse:
    return web.json_response([])


def answering(choices: int) -> Any:
    """GET /slots of an engine on which that many choices of the one request are being written."""
    one = SlotView(0, "decode", True, REQUEST, 12_000, 12_000, 400, 0, 32_768, 20.0)

    async def slots(_request: web.Request) -> web.StreamResponse:
        return web.json_response([asdict(one)] * choices)

    return slots


@asynccontextmanager
async def drain_pool(choices: int = 0) -> AsyncIterator[SmallPool]:
    """The small pool's engine holds four conversations, one of which answers (`choices` at once, 0: it tells of no slots); two
    engines of another host could take three."""
    async with AsyncExitStack() as stack:
        keys = [f"{number:064x}" for number in range(1, 5)]
        held = dict(zip(keys, (900, 12_400, 31_000, 2_048), strict=True))
        rates = [_rates(held, 48_000), _rates({}, 14_000), _rates({"b" * 64: 15_000}, 15_000, resident_tokens=15_000)]
        slots = [answering(choices), no_slots, no_slots]
        ports = [
            await stack.enter_async_context(loopback_engine(told, _telling(one)))
            for told, one in zip(slots, rates, strict=True)
        ]
        yield await in_db(_write, ports, keys)


def _rates(sessions: dict[str, int], cells: int, **more: Any) -> EngineRates:
    fields: dict[str, Any] = dict.fromkeys(EngineRates.__dataclass_fields__, 0)
    told = {
        "model": "tiny",
        "slots": 4,
        "free_slots": 4,
        "pending_tokens": (),
        "queue_limit": 8,
        "context_tokens": 32_768,
    }
    told |= {"steps": ((1, 0.05),), "kv_group": "", "streams_kv": True, "kv_token_bytes": 20_480.0, "links": {}}
    return EngineRates(**{**fields, **told, "cells": cells, "sessions": sessions, **more})


def _telling(rates: EngineRates) -> Any:
    async def tell(_request: web.Request) -> web.StreamResponse:
        return web.json_response(json.loads(json.dumps(asdict(rates))))

    return tell


def _write(ports: list[int], keys: list[str]) -> SmallPool:
    pool = write_small_pool()
    now = timezone.now()
    other = Host.objects.create(
        name="boreas", cpu_model="A CPU", cpu_count=8, memory_total_bytes=64 * GIB, last_seen_at=now
    )
    card = Gpu.objects.create(
        host=other,
        kind="cuda",
        uuid="GPU-1",
        name="A card",
        arch="sm_86",
        memory_total_bytes=12 * GIB,
        last_seen_at=now,
    )
    rows = [pool.engine]
    for name in ("tiny-boreas-a", "tiny-boreas-b"):
        rows.append(
            Engine.objects.create(
                name=name,
                host=other,
                gpu=card,
                variant=pool.engine.variant,
                wanted="running",
                state="ready",
                ready_at=now,
                last_seen_at=now,
                slots=4,
                context_tokens=32_768,
            )
        )
    for row, port in zip(rows, ports, strict=True):
        Engine.objects.filter(pk=row.pk).update(http_port=port, rpc_port=port, slots=4, context_tokens=32_768)
    for key, title in zip(keys, TITLES, strict=True):
        chat = ChatSession.objects.create(key_hash=key, model_name="tiny", title=title, engine=pool.engine)
    SlotLease.objects.create(
        request_id=REQUEST,
        session=keys[1],
        engine=pool.engine,
        owner="a test",
        expires_at=now + timezone.timedelta(minutes=10),
    )
    Handoff.objects.create(chat=chat, state="committed", kind="live", tokens=100, sent_bytes=2_048_000, pause_ms=8.4)
    return pool
