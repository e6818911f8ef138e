"""Whether the site lives (`/healthz`), can serve (`/readyz`), and how the pool is (`/health`). None asks for a key."""

from __future__ import annotations

from typing import Any

from django.db import Error as DatabaseError
from django.http import HttpRequest, HttpResponseBase, JsonResponse

from engines.choices import SERVING
from engines.services import EngineView, engine_views
from pools.db import in_db
from sessions.api.answers import endpoint
from sessions.api.operations import Operation


@endpoint("GET", "HEAD", operations={"GET": Operation("Whether the site lives", "site", is_open=True)})
async def healthz(request: HttpRequest) -> HttpResponseBase:
    """Liveness: the process answers. Asks nobody else."""
    return JsonResponse({"status": "ok"})


@endpoint(
    "GET",
    "HEAD",
    operations={"GET": Operation("Whether requests can be served", "site", statuses=(503,), is_open=True)},
)
async def readyz(request: HttpRequest) -> HttpResponseBase:
    """Readiness: 200 once the database answers and an engine is ready, else 503 with what is missing."""
    engines, missing = await _engines()
    if not missing and not _serving(engines):
        missing = ["engine"]
    if missing:
        response = JsonResponse({"status": "not ready", "missing": missing}, status=503)
        response["Retry-After"] = "1"
        return response
    return JsonResponse({"status": "ready"})


@endpoint("GET", "HEAD", operations={"GET": Operation("The pool at a glance", "site", is_open=True)})
async def health(request: HttpRequest) -> HttpResponseBase:
    """The pool at a glance: `ok`, or `degraded` where something that is wanted does not serve. Always 200."""
    engines, missing = await _engines()
    wanted = [engine for engine in engines if engine.wanted == "running"]
    is_ok = bool(_serving(engines)) and len(_serving(wanted)) == len(wanted)
    values: dict[str, Any] = {
        "status": "ok" if is_ok else "degraded",
        "engines": [{"name": engine.name, "model": engine.model_name, "state": engine.state} for engine in engines],
    }
    return JsonResponse({**values, "missing": missing} if missing else values)


def _serving(engines: tuple[EngineView, ...] | list[EngineView]) -> list[EngineView]:
    return [engine for engine in engines if engine.state in SERVING and engine.takes_new]


async def _engines() -> tuple[tuple[EngineView, ...], list[str]]:
    """The engines, and what could not be asked for them."""
    try:
        return await in_db(engine_views), []
    except DatabaseError:
        return (), ["database"]
