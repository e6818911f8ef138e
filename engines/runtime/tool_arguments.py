"""Values of tool arguments that a model wrote as bare text: which JSON value each means follows the tool's schema."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

_PYTHON_WORDS = {"True": True, "False": False, "None": None}
_REFERENCES = 16
_NO_VALUE = object()


class ParameterTypes:
    """The JSON types that a function's schema allows for each of its parameters. `schema` is one of an object, or none."""

    def __init__(self, schema: Mapping[str, Any] | None) -> None:
        self._root: Mapping[str, Any] = schema or {}
        self._known: dict[str, frozenset[str] | None] = {}

    def of(self, parameter: str) -> frozenset[str] | None:
        """JSON schema's names of types; None where the schema does not say."""
        if parameter not in self._known:
            properties = self._root.get("properties")
            found = properties.get(parameter) if isinstance(properties, Mapping) else None
            self._known[parameter] = self._types(found, _REFERENCES)
        return self._known[parameter]

    def _types(self, schema: Any, references: int) -> frozenset[str] | None:
        if not isinstance(schema, Mapping) or references == 0:
            return None
        if isinstance(schema.get("$ref"), str):
            return self._types(self._referenced(schema["$ref"]), references - 1)
        given = schema.get("type")
        if isinstance(given, str):
            return frozenset((given,))
        if isinstance(given, list):
            return frozenset(name for name in given if isinstance(name, str)) or None
        values = (
            schema["enum"] if isinstance(schema.get("enum"), list) else [schema["const"]] if "const" in schema else []
        )
        if values:
            return frozenset(_type_name(value) for value in values)
        return self._types_of_branches(schema, references)

    def _types_of_branches(self, schema: Mapping[str, Any], references: int) -> frozenset[str] | None:
        for key in ("anyOf", "oneOf", "allOf"):
            branches = schema.get(key)
            if isinstance(branches, list) and branches:
                types = [self._types(branch, references - 1) for branch in branches[:64]]
                known = [names for names in types if names is not None]
                if key == "allOf":
                    return known[0] if known else None
                return frozenset().union(*known) if len(known) == len(types) else None
        return None

    def _referenced(self, path: str) -> Any:
        found: Any = self._root
        for step in path.removeprefix("#/").split("/"):
            found = found.get(step) if isinstance(found, Mapping) else None
        return found


def is_text(types: frozenset[str] | None) -> bool:
    """Whether every text is a value as it stands, so that it can be passed on while it comes."""
    return types == frozenset(("string",))


def argument_json(text: str, types: frozenset[str] | None) -> str:
    """`text` as JSON: of an allowed type where it reads as one, else as the string that it is where strings are allowed.

    A value of a type that is not allowed is left as it was written, so that whoever checks the arguments can say so.
    """
    value = _NO_VALUE if is_text(types) else _read(text)
    if value is _NO_VALUE or isinstance(value, str):
        return json.dumps(
            text if value is _NO_VALUE or types is None or "string" in types else value, ensure_ascii=False
        )
    if types is not None and "string" in types and not _fits(value, types):
        return json.dumps(text, ensure_ascii=False)
    return json.dumps(value, ensure_ascii=False)


def _read(text: str) -> Any:
    """The JSON value (or Python's True, False and None, which templates write into conversations), or _NO_VALUE."""
    text = text.strip()
    if text in _PYTHON_WORDS:
        return _PYTHON_WORDS[text]
    try:
        value = json.loads(text, strict=False)
        json.dumps(value, allow_nan=False)
    except (ValueError, RecursionError):
        return _NO_VALUE
    return value


def _type_name(value: Any) -> str:
    names: dict[type, str] = {
        bool: "boolean",
        int: "integer",
        float: "number",
        str: "string",
        list: "array",
        dict: "object",
        type(None): "null",
    }
    return names[type(value)]


def _fits(value: Any, types: frozenset[str]) -> bool:
    name = _type_name(value)
    if name == "number" and float(value).is_integer() and "integer" in types:
        return True
    return name in types or (name == "integer" and "number" in types)
