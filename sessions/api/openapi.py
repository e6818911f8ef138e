"""The API's description in OpenAPI 3.1, made from the URLs, the operations beside their views, and the models of the bodies."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from typing import Any

from django.http import HttpRequest, HttpResponseBase, JsonResponse
from django.urls import URLPattern, URLResolver, get_resolver
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from sessions.api.answers import endpoint
from sessions.api.operations import JSON, SSE, Operation, Parameter

TITLE = "Hydra"
VERSION = "1"
_CONVERTER = re.compile(r"<(?:[a-z]+:)?([a-z_]+)>")
_REF = "#/components/schemas/{model}"
_ABOUT = (
    "OpenAI's API, Anthropic's Messages API and llama.cpp's tools, for the models of this pool. "
    "Programs of the same machine need no key while the site listens on loopback only."
)
_ERROR = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type"],
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"]},
                "code": {"type": ["string", "integer", "null"]},
                "hint": {"type": "string"},
            },
        }
    },
}
_MESSAGES_ERROR = {
    **_ERROR,
    "required": ["type", "error"],
    "properties": {"type": {"const": "error"}, **_ERROR["properties"]},  # type: ignore[dict-item]
}
_REASONS = {
    200: "The answer.",
    400: "The request breaks the contract.",
    401: "A key is needed, or this one is not valid.",
    403: "A web page of another site sent this.",
    404: "There is no such thing.",
    405: "Another method is served here.",
    409: "The stream was stopped.",
    410: "That is not kept any more.",
    413: "The body is too large.",
    429: "Too much at once; try again.",
    500: "The site or the engine failed.",
    501: "No engine of this model does this.",
    502: "The engine answered something else than it should.",
    503: "Nothing can answer now; try again.",
    504: "The request's time is up.",
}


@endpoint("GET", "HEAD", operations={"GET": Operation("This document", "site", is_open=True)})
async def openapi(request: HttpRequest) -> HttpResponseBase:
    """GET /openapi.json."""
    return JsonResponse(document())


@cache
def document() -> dict[str, Any]:
    """The whole description. Every endpoint with operations is in it, whatever app it belongs to."""
    found = list(_operations(get_resolver().url_patterns, "/"))
    bodies = {operation.body for _, _, operation in found if operation.body is not None}
    refs, definitions = _schemas(bodies)
    paths: dict[str, dict[str, Any]] = {}
    for path, method, operation in found:
        schema = refs[operation.body] if operation.body else None
        paths.setdefault(path, {})[method.lower()] = _described(path, method, operation, schema)
    return {
        "openapi": "3.1.0",
        "info": {"title": TITLE, "version": VERSION, "description": _ABOUT},
        "paths": dict(sorted(paths.items())),
        "components": {
            "schemas": {**definitions, "Error": _ERROR, "MessagesError": _MESSAGES_ERROR},
            "securitySchemes": {
                "bearer": {"type": "http", "scheme": "bearer"},
                "apiKey": {"type": "apiKey", "in": "header", "name": "x-api-key"},
            },
        },
    }


def _operations(patterns: Iterable[URLPattern | URLResolver], prefix: str) -> Iterator[tuple[str, str, Operation]]:
    """Path, method and operation of every endpoint that has one; of two paths to it that differ in a last slash, the first."""
    seen: set[str] = set()
    for pattern in patterns:
        path = prefix + str(pattern.pattern)
        if isinstance(pattern, URLResolver):
            yield from _operations(pattern.url_patterns, path)
            continue
        operations: Mapping[str, Operation] = getattr(pattern.callback, "operations", {})
        path = _CONVERTER.sub(r"{\1}", path)
        if path.rstrip("/") not in seen:
            yield from ((path, method, operation) for method, operation in operations.items())
        seen.add(path.rstrip("/"))


def _schemas(bodies: Iterable[type[BaseModel]]) -> tuple[dict[type[BaseModel], Any], dict[str, Any]]:
    """A reference for each model, and all definitions; models of one name are told apart by their modules."""
    wanted = [(body, "validation") for body in sorted(bodies, key=lambda body: body.__name__)]
    refs, definitions = models_json_schema(wanted, ref_template=_REF)  # type: ignore[arg-type]
    return {model: ref for (model, _), ref in refs.items()}, definitions.get("$defs", {})


def _described(path: str, method: str, operation: Operation, schema: Any) -> dict[str, Any]:
    values: dict[str, Any] = {
        "operationId": re.sub(r"\W+", "_", f"{method} {path}".lower()).strip("_"),
        "summary": operation.summary,
        "tags": [operation.tag],
        "responses": _responses(operation),
    }
    if operation.parameters:
        values["parameters"] = [_parameter(parameter) for parameter in operation.parameters]
    if schema is not None:
        values["requestBody"] = {"required": True, "content": {JSON: {"schema": schema}}}
    if not operation.is_open:
        values["security"] = [{}, {"bearer": []}, {"apiKey": []}]
    return values


def _responses(operation: Operation) -> dict[str, Any]:
    shapes = {JSON: {"type": ["object", "array"]}, SSE: {}}
    content = {kind: {"schema": shapes[kind]} for kind in operation.answers}
    error = {JSON: {"schema": {"$ref": _REF.format(model="MessagesError" if operation.messages_errors else "Error")}}}
    always = (400, 405, 500) if operation.is_open else (400, 401, 403, 405, 500)
    statuses = {*always, *operation.statuses, *((413,) if operation.body else ())}
    responses = {str(status): {"description": _REASONS[status], "content": error} for status in sorted(statuses)}
    return {"200": {"description": _REASONS[200], "content": content}, **responses}


def _parameter(parameter: Parameter) -> dict[str, Any]:
    return {
        "name": parameter.name,
        "in": parameter.place,
        "description": parameter.about,
        "required": parameter.place == "path",
        "schema": dict(parameter.schema),
    }
