"""The engine's OpenAPI document, made from its operations and the models of their bodies."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from aiohttp import web
from pydantic.json_schema import models_json_schema

from engines.runtime.operations import JSON, Operation

PATH = "/openapi.json"
_REFERENCE = "#/components/schemas/{model}"
_ERROR = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "type": {"const": "error", "description": "Only under /v1/messages."},
        "error": {
            "type": "object",
            "required": ["message", "type", "code"],
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "code": {"type": "string"},
                "param": {"type": ["string", "null"]},
                "hint": {"type": "string"},
            },
        },
    },
}
_REASONS = {
    400: "The request breaks the API's contract; `param` names the field.",
    403: "The request comes from a foreign web page.",
    404: "There is no such thing.",
    409: "Somebody else has it.",
    413: "The body is too large.",
    422: "Sound, but made for something else.",
    429: "The waiting line is full; Retry-After says when to come again.",
    500: "The engine failed; its log has the cause.",
    501: "This engine does not serve that.",
    503: "The model is being loaded, or the engine shuts down.",
    504: "The request's deadline has passed.",
}


class DescriptionEndpoint:
    """Serves the document of the operations it is given, and of itself."""

    def __init__(self, operations: Sequence[Operation]) -> None:
        self._own = Operation("GET", PATH, self.describe, "This document.")
        self._document = document([*operations, self._own])

    def operations(self) -> list[Operation]:
        return [self._own]

    async def describe(self, _request: web.Request) -> web.Response:
        return web.json_response(self._document)


def document(operations: Sequence[Operation]) -> dict[str, Any]:
    """An OpenAPI 3.1 document; bodies are described by the very models that validate them."""
    models = list(dict.fromkeys(model for operation in operations for model in operation.bodies))
    names, definitions = models_json_schema([(model, "validation") for model in models], ref_template=_REFERENCE)
    references = {model: names[(model, "validation")] for model in models}
    paths: dict[str, dict[str, Any]] = {}
    for operation in operations:
        described = _described(operation, [references[model] for model in operation.bodies])
        paths.setdefault(_template(operation.path), {})[operation.method.lower()] = described
    return {
        "openapi": "3.1.0",
        "info": {"title": "Hydra engine", "version": "1", "description": "One model, served by one process."},
        "paths": paths,
        "components": {"schemas": {**definitions.get("$defs", {}), "EngineError": _ERROR}},
    }


def _described(operation: Operation, bodies: list[dict[str, Any]]) -> dict[str, Any]:
    statuses = {403, 500, *operation.statuses, *({400, 413} if bodies or operation.parameters else ())}
    described: dict[str, Any] = {
        "summary": operation.summary,
        "operationId": re.sub(r"\W+", "_", f"{operation.method.lower()}{_template(operation.path)}").strip("_"),
        "responses": {
            "200": {"description": "Done.", "content": {kind: {"schema": {}} for kind in operation.answers}},
            **{str(status): _failure(status) for status in sorted(statuses)},
        },
    }
    if operation.parameters:
        described["parameters"] = [
            {
                "name": parameter.name,
                "in": parameter.place,
                "required": parameter.required or parameter.place == "path",
                "description": parameter.about,
                "schema": dict(parameter.schema),
            }
            for parameter in operation.parameters
        ]
    if bodies:
        schema = bodies[0] if len(bodies) == 1 else {"anyOf": bodies}
        described["requestBody"] = {"required": True, "content": {JSON: {"schema": schema}}}
    return described


def _failure(status: int) -> dict[str, Any]:
    reference = {"$ref": _REFERENCE.format(model="EngineError")}
    return {"description": _REASONS[status], "content": {JSON: {"schema": reference}}}


def _template(path: str) -> str:
    """aiohttp's `{name:pattern}` as OpenAPI's `{name}`."""
    return re.sub(r"{(\w+):[^}]*}", r"{\1}", path)
