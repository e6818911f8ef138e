"""Random JSON schemas as people write them, for tests that hold answers against a validator."""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st

NAMES = ("a", "b", "id", "name", "größe", 'quo"te', "back\\slash", "with space", "0", "tab\t")
PATTERNS = (
    "^[a-z]{2,5}$",
    "^[A-Z][a-z]*$",
    "x",
    "^\\d{3}-\\d{4}$",
    "^(foo|bar)+$",
    "[0-9]{2}",
    "^.{0,8}$",
    "é+$",
    "^$|^a",
)
FORMATS = ("date", "email", "ipv4", "ipv6", "uuid", "date-time", "time", "hostname", "uri", "duration")
WORDS = ("", "a", "red", "green blue", "naïve", '"', "\\", "a\nb", "日本", "😀", "0", "null", "</tool_call>")

_scalars = st.one_of(
    st.sampled_from(WORDS), st.integers(-1000, 1000), st.sampled_from((0.5, -2.25, 1e-3)), st.booleans(), st.none()
)
_values = st.one_of(
    _scalars,
    st.lists(_scalars, max_size=3),
    st.dictionaries(st.sampled_from(NAMES), _scalars, max_size=3),
)


@st.composite
def _strings(draw: st.DrawFn) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "string"}
    kind = draw(st.sampled_from(("plain", "length", "pattern", "format", "both")))
    if kind in ("length", "both"):
        low = draw(st.integers(0, 6))
        schema |= draw(
            st.sampled_from(({"minLength": low}, {"maxLength": low + 3}, {"minLength": low, "maxLength": low + 4}))
        )
    if kind in ("pattern", "both"):
        schema["pattern"] = draw(st.sampled_from(PATTERNS))
    if kind == "format":
        schema["format"] = draw(st.sampled_from(FORMATS))
    return schema


@st.composite
def _numbers(draw: st.DrawFn) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": draw(st.sampled_from(("integer", "number")))}
    bounds = st.integers(-50, 50) if schema["type"] == "integer" else st.integers(-500, 500).map(lambda i: i / 10)
    for key in draw(
        st.lists(
            st.sampled_from(("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")), max_size=2, unique=True
        )
    ):
        schema[key] = draw(bounds)
    if draw(st.integers(0, 4)) == 0:
        schema["multipleOf"] = draw(st.sampled_from((1, 2, 3, 5, 7, 10, 0.5, 0.25, 60)))
    return schema


@st.composite
def _arrays(draw: st.DrawFn, inner: st.SearchStrategy[Any]) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "array"}
    if draw(st.booleans()):
        schema["prefixItems"] = draw(st.lists(inner, min_size=1, max_size=3))
    if draw(st.booleans()):
        schema["items"] = draw(st.one_of(inner, st.booleans()))
    low = draw(st.integers(0, 3))
    schema |= draw(st.sampled_from(({}, {"minItems": low}, {"maxItems": low}, {"minItems": low, "maxItems": low + 2})))
    return schema


@st.composite
def _objects(draw: st.DrawFn, inner: st.SearchStrategy[Any]) -> dict[str, Any]:
    properties = draw(st.dictionaries(st.sampled_from(NAMES), inner, max_size=4))
    schema: dict[str, Any] = {"type": "object", "properties": properties}
    required = [name for name in properties if draw(st.booleans())]
    if draw(st.integers(0, 5)) == 0:
        required.append(draw(st.sampled_from(NAMES)))
    if required:
        schema["required"] = list(dict.fromkeys(required))
    kind = draw(st.integers(0, 4))
    if kind in (0, 1):
        schema["additionalProperties"] = False
    elif kind == 2:
        schema["additionalProperties"] = draw(inner)
    elif kind == 3:
        schema["patternProperties"] = {"^x-": draw(inner)}
    if draw(st.integers(0, 6)) == 0:
        schema["minProperties"] = draw(st.integers(0, 3))
    if draw(st.integers(0, 6)) == 0:
        schema["maxProperties"] = draw(st.integers(0, 5))
    return schema


def _unions(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    branches = st.lists(inner, min_size=1, max_size=3)
    return st.one_of(
        st.fixed_dictionaries({"anyOf": branches}),
        st.fixed_dictionaries({"anyOf": inner.map(lambda schema: [schema, {"type": "null"}])}),
        st.fixed_dictionaries({"oneOf": branches}),
        st.fixed_dictionaries({"allOf": branches}),
        st.tuples(_scalar_schemas, st.just(None)).map(
            lambda pair: (
                {**pair[0], "type": [pair[0]["type"], "null"]} if isinstance(pair[0].get("type"), str) else pair[0]
            )
        ),
    )


_scalar_schemas: st.SearchStrategy[dict[str, Any]] = st.one_of(
    _strings(),
    _numbers(),
    st.just({"type": "boolean"}),
    st.just({"type": "null"}),
    st.fixed_dictionaries({"enum": st.lists(_values, min_size=1, max_size=5)}),
    st.fixed_dictionaries({"const": _values}),
)
_referring = st.one_of(_scalar_schemas, st.sampled_from(("leaf", "tree")).map(lambda name: {"$ref": f"#/$defs/{name}"}))
_nested = st.recursive(
    _referring, lambda inner: st.one_of(_arrays(inner), _objects(inner), _objects(inner), _unions(inner)), max_leaves=6
)


@st.composite
def schemas(draw: st.DrawFn) -> dict[str, Any]:
    """A schema of anything, with a definition for it to refer to, and one that refers to itself."""
    schema = dict(draw(_nested))
    tree = {
        "type": "object",
        "properties": {
            "value": draw(_scalar_schemas),
            "children": {"type": "array", "items": {"$ref": "#/$defs/tree"}},
        },
        "required": ["value"],
        "additionalProperties": False,
    }
    return {**schema, "$defs": {"leaf": draw(_scalar_schemas), "tree": tree}}
