"""Where in a JSON schema the compiler stumbles, which it does not say itself."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from typing import Any

MAX_TRIES = 200
_MAPS = ("properties", "patternProperties", "$defs", "definitions")
_LISTS = ("anyOf", "oneOf", "allOf", "prefixItems")
_SINGLE = ("items", "additionalProperties")
_SHARED = ("$defs", "definitions", "x-guidance")


def place_of(grammar: str, complaint: Callable[[str], str | None]) -> str:
    """The path to the innermost part that alone makes the compiler say the same as all of `grammar`; "" for the whole.

    `grammar` is a `%json` expression; `complaint` compiles one, and says what is wrong with it.
    """
    root: dict[str, Any] = json.loads(grammar.removeprefix("%json "))
    said = complaint(grammar)
    shared = {key: root[key] for key in _SHARED if key in root}
    place, schema, tries = "", root, 0
    while True:
        for step, inner in _inside(schema):
            tries += 1
            if tries > MAX_TRIES:
                return place
            if complaint(f"%json {json.dumps({**inner, **shared}, ensure_ascii=False)}") == said:
                place, schema = f"{place}/{step}", inner
                break
        else:
            return place


def _inside(schema: Mapping[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    for key in _MAPS:
        if isinstance(schema.get(key), dict):
            yield from ((f"{key}/{name}", inner) for name, inner in schema[key].items() if isinstance(inner, dict))
    for key in _LISTS:
        if isinstance(schema.get(key), list):
            yield from ((f"{key}/{at}", inner) for at, inner in enumerate(schema[key]) if isinstance(inner, dict))
    for key in _SINGLE:
        if isinstance(schema.get(key), dict):
            yield key, schema[key]
