"""Tool calls as grammars, in the two formats that are read back: Hermes JSON and Qwen's XML.

A call is written exactly as the templates show it, and its arguments follow the function's schema. The opening mark
`<tool_call>` is not part of these rules: in free text it is what the grammar waits for.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from engines.api_constraint_schema import MAX_OBJECT_PROPERTIES, compact_json, is_regular, schema_grammar
from engines.errors import InvalidRequest

CALL_MARK, END_CALL_MARK = "<tool_call>", "</tool_call>"
FUNCTION_MARK = "<function="
END_PARAMETER = "</parameter>"
_NO_PARAMETERS: dict[str, Any] = {"type": "object", "properties": {}, "additionalProperties": False}
# What a text value can be asked for beside its plain type. A format is left to the model.
_TEXT_KEYWORDS = ("pattern", "minLength", "maxLength")
_ANNOTATIONS = ("type", "title", "description", "default", "examples", "deprecated", "$comment")
_UNIONS = ("anyOf", "oneOf")
_MAX_REFERENCES = 16


def call_rules(name: str, tool_format: str, function: str, parameters: Any, param: str, *, strict: bool) -> str:
    """Lark rules of which `name` is one call of `function`, from behind the opening mark to the closing one.

    In the XML format `name`_bare is such a call from behind FUNCTION_MARK on.
    Raises InvalidRequest for parameters that are no schema of an object, and in the XML format for what it cannot carry.
    """
    schema = _NO_PARAMETERS if parameters is None else parameters
    if not isinstance(schema, dict) or schema.get("type", "object") != "object":
        raise InvalidRequest(f"{param}: a function's parameters are a schema of type 'object'.", param=param)
    schema = {"type": "object", **schema}
    if tool_format == "qwen_xml":
        return _XmlCall(name, schema, param, strict).rules(function)
    opening = json.dumps(f'\n{{"name": "{function}", "arguments": ')
    closing = json.dumps(f"}}\n{END_CALL_MARK}")
    arguments = schema_grammar(schema, param, strict=strict)
    return f"{name}: {opening} {name}_arguments {closing}\n{name}_arguments: {arguments}\n"


class _XmlCall:
    """`<function=f>`, a `<parameter=p>` each with its value on lines of its own, `</function>`.

    Text stands there as it is, up to the closing tag, which it cannot hold; every other type is JSON.
    """

    def __init__(self, name: str, schema: dict[str, Any], param: str, strict: bool) -> None:
        self._name, self._schema, self._param, self._strict = name, schema, param, strict
        self._lines: list[str] = []

    def rules(self, function: str) -> str:
        body = " ".join(
            [json.dumps(f"{function}>\n"), *self._parameters(), json.dumps(f"</function>\n{END_CALL_MARK}")]
        )
        opening = json.dumps(f"\n{FUNCTION_MARK}")
        return "\n".join([f"{self._name}: {opening} {self._name}_bare", f"{self._name}_bare: {body}", *self._lines, ""])

    def _parameters(self) -> list[str]:
        # Also checks the whole schema against the caps, of which only parts are compiled.
        schema_grammar(self._schema, self._param, strict=self._strict)
        described = _resolved(self._schema, self._schema)
        properties = described.get("properties")
        if not isinstance(properties, dict) or not properties:
            return self._any_parameters(described)
        if self._strict and (unknown := [key for key in (*_UNIONS, "allOf", "not", "if") if key in described]):
            raise self._refused("", f"{unknown[0]} of all parameters cannot be enforced in this model's format")
        required = described.get("required")
        wanted = [name for name in required if isinstance(name, str)] if isinstance(required, list) else []
        order = [*properties, *(name for name in wanted if name not in properties)]
        if len(order) > MAX_OBJECT_PROPERTIES:
            raise self._refused("required", f"names more than {MAX_OBJECT_PROPERTIES} parameters")
        return [
            self._parameter(f"{self._name}_{place}", key, properties.get(key, True)) + ("" if key in wanted else "?")
            for place, key in enumerate(order)
        ]

    def _any_parameters(self, described: Mapping[str, Any]) -> list[str]:
        """A schema that names no properties: none, or any of any name."""
        if described.get("additionalProperties") is False or described is _NO_PARAMETERS:
            return []
        rule = f"{self._name}_any"
        self._lines += [
            f'{rule}: "<parameter=" /[^<>\\n]+/ ">\\n" {rule}_text "\\n"',
            *_lazy_text(f"{rule}_text", "/(?s:.*)/"),
        ]
        return [f"{rule}*"]

    def _parameter(self, rule: str, key: str, schema: Any) -> str:
        if not key or re.search(r"[<>\n]", key):
            raise self._refused(f"properties/{key[:100]}", "has a name that this model's format cannot carry")
        value, text = self._value(rule, schema, f"properties/{key}")
        opening = json.dumps(f"<parameter={key}>\n", ensure_ascii=False)
        closing = '"\\n"' if text else json.dumps(f"\n{END_PARAMETER}\n")
        self._lines.append(f"{rule}: {opening} {rule}_value {closing}")
        self._lines += value
        return rule

    def _value(self, rule: str, schema: Any, place: str) -> tuple[list[str], bool]:
        """The lines of the value's rule, and whether it takes the closing tag with it, as text does."""
        described = _resolved(schema, self._schema) if isinstance(schema, dict) else {}
        listed = [described["const"]] if "const" in described else described.get("enum")
        if isinstance(listed, list) and listed:
            return _lazy_text(f"{rule}_value", self._one_of(listed, place)), True
        types = _types(described, self._schema)
        if "string" not in types:
            own = {key: self._schema[key] for key in ("$defs", "definitions") if key in self._schema}
            self._only_own_references(schema, place)
            return [f"{rule}_value: {schema_grammar({**own, **schema}, self._param, strict=self._strict)}"], False
        return _lazy_text(f"{rule}_value", self._text(described, place)), True

    def _one_of(self, values: list[Any], place: str) -> str:
        written = [value if isinstance(value, str) else compact_json(value, self._param) for value in values]
        if any(END_PARAMETER in text for text in written):
            raise self._refused(place, "lists a value that this model's format cannot carry")
        return "(" + " | ".join(json.dumps(text, ensure_ascii=False) for text in written) + ")"

    def _text(self, schema: Mapping[str, Any], place: str) -> str:
        """A terminal for text. Where other types are allowed too, their JSON is text as well."""
        plain = schema.get("type") == "string"
        unknown = [key for key in schema if key not in _ANNOTATIONS and not (plain and key in _TEXT_KEYWORDS)]
        if self._strict and unknown and not self._is_free_union(schema):
            raise self._refused(place, f"{unknown[0]} of a text cannot be enforced in this model's format")
        if not plain:
            return "/(?s:.*)/"
        low, high = schema.get("minLength", 0), schema.get("maxLength", "")
        wanted = [f"/(?s:.{{{low},{high}}})/"] if low or high != "" else []
        if "pattern" in schema:
            given = schema["pattern"]
            pattern = _whole_text_pattern(given) if isinstance(given, str) and is_regular(given) else None
            if pattern is not None:
                wanted.append(f"/{pattern}/")
            elif self._strict:
                raise self._refused(f"{place}/pattern", "cannot be enforced in this model's format")
        return " & ".join(wanted) or "/(?s:.*)/"

    def _is_free_union(self, schema: Mapping[str, Any]) -> bool:
        """Text or something else, where text alone already allows everything."""
        branches: list[Any] = next((schema[key] for key in _UNIONS if isinstance(schema.get(key), list)), [])
        others = [key for key in schema if key not in _ANNOTATIONS and key not in _UNIONS]
        return not others and any(
            isinstance(branch, dict) and branch.get("type") == "string" and not set(branch) - set(_ANNOTATIONS)
            for branch in branches
        )

    def _only_own_references(self, schema: Any, place: str) -> None:
        """A value is compiled alone, with the definitions beside it: a reference elsewhere would mean something else."""
        level = [schema]
        while level:
            for value in level:
                reference = value.get("$ref") if isinstance(value, dict) else None
                if isinstance(reference, str) and not reference.startswith(("#/$defs/", "#/definitions/")):
                    raise self._refused(place, f"refers to {reference[:100]!r}; only '#/$defs/…' can be followed here")
            level = [
                inner
                for value in level
                for inner in (value.values() if isinstance(value, dict) else value if isinstance(value, list) else ())
            ]

    def _refused(self, place: str, what: str) -> InvalidRequest:
        where = f"{self._param}: {place} " if place else f"{self._param}: "
        return InvalidRequest(f"{where}{what}.", param=self._param)


def _lazy_text(rule: str, terminal: str) -> list[str]:
    """Text up to the closing tag, which ends it where it first stands. What closes a whole call ends it too when it is read."""
    upper = rule.upper()
    return [
        f"{rule}[lazy]: {upper}_CLOSED",
        f"{upper}_CLOSED: {upper} {json.dumps(chr(10) + END_PARAMETER)}",
        f"{upper}: {terminal} & ~/(?s:.*)<\\/(parameter>|function>\\s*<\\/tool_call>)(?s:.*)/",
    ]


def _resolved(schema: Any, root: Mapping[str, Any]) -> dict[str, Any]:
    """`schema` with its own reference followed; keywords beside the reference win, as annotations do."""
    for _ in range(_MAX_REFERENCES):
        reference = schema.get("$ref") if isinstance(schema, dict) else None
        if not isinstance(reference, str) or not reference.startswith("#/"):
            break
        target: Any = root
        for step in reference[2:].split("/"):
            target = target.get(step.replace("~1", "/").replace("~0", "~")) if isinstance(target, dict) else None
        if not isinstance(target, dict):
            break
        schema = {**target, **{key: value for key, value in schema.items() if key != "$ref"}}
    return schema if isinstance(schema, dict) else {}


def _types(schema: Mapping[str, Any], root: Mapping[str, Any], depth: int = 0) -> frozenset[str]:
    """The JSON types that a value may have; all of them where the schema does not say."""
    given = schema.get("type")
    if isinstance(given, str):
        return frozenset([given])
    if isinstance(given, list):
        return frozenset(name for name in given if isinstance(name, str))
    branches = next((schema[key] for key in _UNIONS if isinstance(schema.get(key), list)), None)
    if branches is None or depth >= _MAX_REFERENCES:
        return frozenset(["string", "number", "boolean", "null", "object", "array"])
    return frozenset().union(*(_types(_resolved(branch, root), root, depth + 1) for branch in branches))


def _whole_text_pattern(pattern: str) -> str | None:
    """A JSON schema's pattern, which may match anywhere in a text, as one of the whole text; None if its anchors forbid that."""
    steps = re.findall(r"\\.|\[(?:\\.|[^\]\\])*\]|[^\\\[]", pattern, re.DOTALL)
    if "".join(steps) != pattern:
        return None
    begins, ends = steps[:1] == ["^"], steps[-1:] == ["$"]
    inner = steps[1 if begins else 0 : len(steps) - 1 if ends and len(steps) > begins else len(steps)]
    depth, top_level_choice = 0, False
    for step in inner:
        depth += (step == "(") - (step == ")")
        top_level_choice |= step == "|" and depth == 0
    if any(step in ("^", "$", "\\b", "\\B", "\\A", "\\z", "\\Z") for step in inner) or (
        top_level_choice and (begins or ends)
    ):
        return None
    text = "".join(_lark_step(step) for step in inner)
    return ("" if begins else "(?s:.*)") + f"(?:{text})" + ("" if ends else "(?s:.*)")


def _lark_step(step: str) -> str:
    """One step of a regular expression as it may stand between slashes; \\d and \\w mean ASCII, as in a JSON schema."""
    ascii_class = {"\\d": "[0-9]", "\\D": "[^0-9]", "\\w": "[0-9A-Za-z_]", "\\W": "[^0-9A-Za-z_]"}.get(step, step)
    return re.sub(r"(?<!\\)/", r"\\/", ascii_class).replace("\n", "\\n")
