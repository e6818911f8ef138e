"""JSON schemas of strangers, before anything compiles them: bounded, and written down the way the grammar compiler reads them.

The caps stand where the compiler's own limits do not hold: the remainders of a large `multipleOf`, thousands of optional
properties and hundreds of pattern properties took it seconds and hundreds of MB. Whatever is refused says where. What is let
through is enforced, with two exceptions: a date is checked by its form (a 29th of February in every year), and names of
additional properties may come twice.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any, TypeGuard

from engines.errors import InvalidRequest

MAX_SCHEMA_BYTES = 256 << 10
MAX_SCHEMA_NESTING = 64
MAX_SCHEMA_PROPERTIES = 4096
MAX_OBJECT_PROPERTIES = 512
MAX_PATTERN_PROPERTIES = 32
MAX_BRANCHES = 512
MAX_ENUM_VALUES = 4096
MAX_ENUM_CONTAINERS = 256
MAX_PATTERN_CHARS = 4096
MAX_COUNT = 65_536
MAX_REMAINDERS = 10_000
_NEAR_ZERO = 1e-9
_IRREGULAR = re.compile(r"\(\?<?[=!]|\\[bB1-9]|\\k<")
_COUNTS = ("minLength", "minItems", "minProperties")
# Each of these is compared with each other one.
_SIZES = {
    "patternProperties": MAX_PATTERN_PROPERTIES,
    "anyOf": MAX_BRANCHES,
    "oneOf": MAX_BRANCHES,
    "allOf": MAX_BRANCHES,
}
# One blank may follow a comma or colon, as models like to write it; else white space is what an answer could be filled with.
_COMPACT = {"whitespace_flexible": False, "item_separator": ", ?", "key_separator": ": ?"}


def compact_json(value: Any, param: str) -> str:
    """`value` as JSON text without white space. Raises InvalidRequest for what is no Unicode text or no finite number."""
    try:
        text = json.dumps(value, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
        text.encode()
    except UnicodeEncodeError as error:
        raise InvalidRequest(f"{param} holds a lone surrogate, which is not valid Unicode.", param=param) from error
    except (TypeError, ValueError, RecursionError) as error:
        raise InvalidRequest(f"{param} is no plain JSON: {error}", param=param) from error
    return text


def schema_grammar(schema: Any, param: str, *, strict: bool) -> str:
    """A Lark expression for the JSON texts that `schema` allows.

    `strict`: a keyword that cannot be enforced is refused when the grammar is compiled; else it is ignored.
    Raises InvalidRequest for a schema beyond the caps or with a reference that leads nowhere.
    """
    if not isinstance(schema, dict):
        raise InvalidRequest(f"{param}: a JSON schema is an object.", param=param)
    if len(compact_json(schema, param).encode()) > MAX_SCHEMA_BYTES:
        raise InvalidRequest(f"{param} is larger than {MAX_SCHEMA_BYTES} bytes.", param=param)
    _Check(schema, param).run()
    enforced = _enforceable(schema, strict=strict)
    return f"%json {compact_json({**enforced, 'x-guidance': {**_COMPACT, 'lenient': not strict}}, param)}"


def is_regular(pattern: str) -> bool:
    """Whether a pattern has none of what only a backtracking matcher knows: look-around, word borders, references back."""
    return _IRREGULAR.search(pattern) is None


def _enforceable(schema: Any, *, strict: bool) -> Any:
    """`schema` in a form that the compiler is right about. If not `strict`, patterns that cannot be enforced are left out, as
    the compiler itself does with unknown keywords and formats."""
    if isinstance(schema, list):
        return [_enforceable(inner, strict=strict) for inner in schema]
    if not isinstance(schema, dict):
        return schema
    kept = {
        name: inner if name == "enum" and isinstance(inner, list) else _enforceable(inner, strict=strict)
        for name, inner in schema.items()
        if strict or not (name == "pattern" and isinstance(inner, str) and not is_regular(inner))
    }
    return _without_zero_bounds(kept)


def _without_zero_bounds(schema: dict[str, Any]) -> dict[str, Any]:
    """An exclusive bound of 0 as the nearest inclusive one: llguidance 1.9 lets 0 itself through between 0 and a fraction."""
    for exclusive, inclusive, nearest, tighter in (
        ("exclusiveMinimum", "minimum", _NEAR_ZERO, max),
        ("exclusiveMaximum", "maximum", -_NEAR_ZERO, min),
    ):
        bound, other = schema.get(exclusive), schema.get(inclusive, nearest)
        if _is_number(bound) and bound == 0 and _is_number(other) and schema.get("type") != "integer":
            schema = {name: value for name, value in schema.items() if name != exclusive}
            schema[inclusive] = tighter(other, nearest)
    return schema


def _is_number(value: Any) -> TypeGuard[float]:
    return isinstance(value, int | float) and not isinstance(value, bool)


@dataclass
class _Check:
    """One walk over all of a schema. Values under `enum`, `const`, `default` and `examples` are no schemas."""

    root: dict[str, Any]
    param: str
    properties: int = 0
    enum_values: int = 0
    enum_containers: int = 0
    remainders: int = 1
    seen_multiples: set[Fraction] = field(default_factory=set)

    def run(self) -> None:
        level: list[tuple[str, Any]] = [("", self.root)]
        for _ in range(MAX_SCHEMA_NESTING):
            level = [inner for place, value in level for inner in self._look(place, value)]
            if not level:
                return
        raise self._refused("", f"is nested deeper than {MAX_SCHEMA_NESTING} levels")

    def _look(self, place: str, value: Any) -> Iterator[tuple[str, Any]]:
        if isinstance(value, list):
            yield from ((f"{place}/{index}", inner) for index, inner in enumerate(value))
        if not isinstance(value, dict):
            return
        self._keywords(place, value)
        for name, inner in value.items():
            if name in ("enum", "const") and not isinstance(inner, dict):
                self._enumerated(place, inner if isinstance(inner, list) else [inner])
            yield f"{place}/{name}", inner

    def _keywords(self, place: str, schema: dict[str, Any]) -> None:
        properties = schema.get("properties")
        if isinstance(properties, dict):
            self.properties += len(properties)
            if len(properties) > MAX_OBJECT_PROPERTIES:
                raise self._refused(
                    place, f"has {len(properties)} properties; at most {MAX_OBJECT_PROPERTIES} are taken"
                )
            if self.properties > MAX_SCHEMA_PROPERTIES:
                raise self._refused(place, f"has more than {MAX_SCHEMA_PROPERTIES} properties in all")
        for name, most in _SIZES.items():
            if isinstance(schema.get(name), dict | list) and len(schema[name]) > most:
                raise self._refused(f"{place}/{name}", f"has {len(schema[name])} entries; at most {most} are taken")
        for name in _COUNTS:
            count = schema.get(name)
            if _is_number(count) and count > MAX_COUNT:
                raise self._refused(f"{place}/{name}", f"is {count}; at most {MAX_COUNT} is taken")
        pattern = schema.get("pattern")
        if isinstance(pattern, str) and len(pattern) > MAX_PATTERN_CHARS:
            raise self._refused(f"{place}/pattern", f"has more than {MAX_PATTERN_CHARS} characters")
        step = schema.get("multipleOf")
        if _is_number(step):
            self._multiple(place, step)
        if isinstance(schema.get("$ref"), str):
            self._reference(place, schema["$ref"])

    def _multiple(self, place: str, value: float) -> None:
        """Numbers are checked by a state for each remainder; those of one number's multiples multiply where schemas meet.

        Factors 2 and 5 cost little, since they show in the last digits.
        """
        if value <= 0:
            raise self._refused(f"{place}/multipleOf", "must be greater than 0")
        step = Fraction(str(value))
        if step in self.seen_multiples:
            return
        self.seen_multiples.add(step)
        states = step.numerator
        for prime in (2, 5):
            while states % prime == 0:
                states //= prime
        self.remainders *= states
        if self.remainders > MAX_REMAINDERS:
            raise self._refused(f"{place}/multipleOf", "asks for too many remainders to be told apart")

    def _reference(self, place: str, reference: str) -> None:
        """Only places inside of this schema can be meant: nothing is fetched."""
        if not reference.startswith("#"):
            raise self._refused(f"{place}/$ref", f"{reference[:100]!r} is not in this schema; only '#…' is followed")
        if not reference.startswith("#/"):
            return  # the whole schema, or an anchor that the compiler looks for
        target: Any = self.root
        for step in reference[2:].split("/"):
            name = step.replace("~1", "/").replace("~0", "~")
            if isinstance(target, list) and name.isdecimal() and int(name) < len(target):
                target = target[int(name)]
            elif isinstance(target, dict) and name in target:
                target = target[name]
            elif "%" in name:
                return  # the compiler decodes it
            else:
                raise self._refused(f"{place}/$ref", f"{reference[:100]!r} leads nowhere")

    def _enumerated(self, place: str, values: list[Any]) -> None:
        self.enum_values += len(values)
        self.enum_containers += sum(isinstance(value, list | dict) for value in values)
        if self.enum_values > MAX_ENUM_VALUES:
            raise self._refused(place, f"lists more than {MAX_ENUM_VALUES} values in all")
        if self.enum_containers > MAX_ENUM_CONTAINERS:
            raise self._refused(place, f"lists more than {MAX_ENUM_CONTAINERS} objects and arrays as values")

    def _refused(self, place: str, what: str) -> InvalidRequest:
        return InvalidRequest(f"{self.param}: {place or 'the schema'} {what}.", param=self.param)
