"""What each endpoint of the API takes and answers, as data beside the view, for the OpenAPI document."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from pydantic import BaseModel

JSON = "application/json"
SSE = "text/event-stream"
# What a request that needs an engine may be answered.
RELAYED = (404, 409, 429, 500, 502, 503, 504)


@dataclass(frozen=True)
class Parameter:
    """A value in the query, the path or a header. `schema` is its JSON Schema; what stands in a path is always required."""

    name: str
    place: Literal["query", "path", "header"]
    about: str
    schema: Mapping[str, Any] = field(default_factory=lambda: {"type": "string"})


@dataclass(frozen=True)
class Operation:
    """One method of one path. `body` is the model of its JSON body; `statuses` what it may answer but 200.

    `is_open`: it asks for no key. `messages_errors`: failures have the shape of Anthropic's API.
    """

    summary: str
    tag: str
    body: type[BaseModel] | None = None
    parameters: tuple[Parameter, ...] = ()
    answers: tuple[str, ...] = (JSON,)
    statuses: tuple[int, ...] = ()
    is_open: bool = False
    messages_errors: bool = False
