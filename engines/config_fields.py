"""Fields of a process's configuration: read out of JSON by their types, and held against their bounds."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from typing import Any


class ConfigInvalid(ValueError):
    """An engine configuration holds a value that cannot work; the message names key, value and bound."""


def check_bounds(config: object, bounds: Mapping[str, tuple[float, float]]) -> None:
    """Raises ConfigInvalid for a field that lies outside its bounds, both of them included."""
    for key, (low, high) in bounds.items():
        value = getattr(config, key)
        if not low <= value <= high:
            raise ConfigInvalid(f"{key} is {value}; it must lie between {low:g} and {high:g}")


def read_fields(cls: type[Any], text: str) -> dict[str, Any]:
    """A dataclass's fields out of a JSON object. Raises ConfigInvalid for malformed JSON, unknown keys and wrong types."""
    try:
        values: Any = json.loads(text)
    except ValueError as error:
        raise ConfigInvalid(f"not valid JSON: {error}") from error
    if not isinstance(values, dict):
        raise ConfigInvalid("the configuration must be a JSON object")
    fields = {f.name: f for f in dataclasses.fields(cls)}
    unknown = sorted(set(values) - set(fields))
    if unknown:
        raise ConfigInvalid(f"unknown keys: {', '.join(unknown)}")
    return {key: _from_json(key, value, str(fields[key].type)) for key, value in values.items()}


_JSON_TYPES: dict[str, tuple[type, ...]] = {"str": (str,), "int": (int,), "bool": (bool,), "float": (float, int)}


def _from_json(key: str, value: object, type_name: str) -> object:
    """`value` as the field's type has it: JSON lists become tuples. Raises ConfigInvalid where the types differ."""
    item_type = type_name.removeprefix("tuple[").removesuffix(", ...]")
    items = value if item_type != type_name and isinstance(value, list) else [value]
    expected = _JSON_TYPES[item_type]
    wrong = [
        item for item in items if not isinstance(item, expected) or (isinstance(item, bool) and bool not in expected)
    ]
    if wrong or (item_type != type_name and items is not value):
        raise ConfigInvalid(f"{key} is {value!r}; it must be of type {type_name}")
    return value if item_type == type_name else tuple(items)
