"""The engine's HTTP operations as data: one table makes the routes and the OpenAPI document, so that they cannot differ."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from aiohttp import web
from pydantic import BaseModel

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]

JSON = "application/json"
SSE = "text/event-stream"


@dataclass(frozen=True)
class Parameter:
    """A value in the path or the query. `schema` is its JSON Schema; what stands in a path is always required."""

    name: str
    place: Literal["path", "query"]
    schema: Mapping[str, Any]
    about: str
    required: bool = False


@dataclass(frozen=True)
class Operation:
    """One method of one path. `bodies` are the models that a JSON body may follow; `statuses` what it may answer but 200.

    Every operation with a body may also answer 400 and 413, and every one 403 (a foreign web page) and 500.
    """

    method: Literal["GET", "POST", "PUT"]
    path: str
    handler: Handler
    summary: str
    bodies: tuple[type[BaseModel], ...] = ()
    parameters: tuple[Parameter, ...] = ()
    answers: tuple[str, ...] = (JSON,)
    statuses: tuple[int, ...] = ()


# What an operation may answer that needs the loaded model, and one that generates.
NEEDS_MODEL = (503,)
GENERATES = (429, 503, 504)


def routes(operations: Iterable[Operation]) -> list[web.RouteDef]:
    make = {"GET": web.get, "POST": web.post, "PUT": web.put}
    return [make[operation.method](operation.path, operation.handler) for operation in operations]
