"""What a request says about the form of its answer, as one grammar: JSON, a schema, a regular expression, GBNF, tool calls.

Pure text in, pure text out: the grammar is compiled elsewhere (engines/runtime/constraint.py). The grammar describes the
text that the client receives, from the first token on, so reasoning and free text before a call are part of it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, Protocol

from engines.api_constraint_schema import schema_grammar
from engines.api_constraint_tools import CALL_MARK, FUNCTION_MARK, call_rules
from engines.api_schema import ChatRequest
from engines.api_tools import FunctionSpec, chosen_function
from engines.errors import InvalidRequest

Kind = Literal["json_object", "json_schema", "regex", "gbnf", "tools"]
THINK_MARK, END_THINK_MARK = "<think>", "</think>"
MAX_GRAMMAR_BYTES = 1 << 20
MAX_REGEX_CHARS = 8192
# Names of the rules around a grammar that brings its own.
ANSWER, _OPEN, _THOUGHT, _GAP = "hydra_answer", "hydra_open", "hydra_thought", "hydra_gap"


class PromptForm(Protocol):
    """What has to be known of the rendered prompt (engines/runtime/chat.py)."""

    @property
    def opens_thought(self) -> bool: ...

    @property
    def tool_format(self) -> str | None: ...


@dataclass(frozen=True)
class GrammarPart:
    """One thing the request gave: `rules` in Lark with a rule of that `name`, and the request's field it came from.

    `schema` is the JSON schema that the rules are made of, where they are.
    """

    name: str
    rules: str
    param: str
    schema: str | None = None


@dataclass(frozen=True)
class Trigger:
    """Free text ends where `mark` first stands; behind it comes `answer`, a Lark expression."""

    mark: str
    answer: str


@dataclass(frozen=True)
class ConstraintSpec:
    """The answer's grammar before it is compiled. Equal ones compile to the same.

    `answer` is a Lark expression over `parts`; of kind "gbnf" the one part's rules are GBNF and stand for all of it. With
    `triggers` the answer is free text instead, which one of them may end. `begins_after`: the answer begins inside reasoning,
    which ends with that mark. `may_begin_with`: a model that knows this mark may open reasoning itself.
    """

    kind: Kind
    answer: str
    parts: tuple[GrammarPart, ...]
    begins_after: str | None = None
    may_begin_with: str | None = None
    triggers: tuple[Trigger, ...] = ()

    @property
    def text(self) -> str:
        """Everything that names marks."""
        marks = [trigger.mark for trigger in self.triggers]
        if self.begins_after or self.may_begin_with:
            marks += [self.may_begin_with or "", self.begins_after or END_THINK_MARK]
        return "\n".join([self.answer, *(part.rules for part in self.parts), *marks])

    def rules(self) -> str:
        """The rules of the answer, for every kind but "gbnf"."""
        return "\n".join([f"{ANSWER}: {self.answer}", *(part.rules for part in self.parts)])

    def lark(self, answer_rules: str, *, knows_thinking: bool) -> str:
        """The whole grammar around `answer_rules`, in which ANSWER is defined."""
        # Bytes that only one text can follow would be made again for every token: minutes for a{1000000}.
        lines = ['%llguidance {"no_forcing": true}']
        if self.begins_after:
            lines.append(f"start: {_THOUGHT} {_GAP} {ANSWER}")
        elif self.may_begin_with and knows_thinking:
            lines.append(f"start: ({_OPEN} {_THOUGHT} {_GAP})? {ANSWER}")
            lines.append(f"{_OPEN}[lazy]: /[ \\t\\r\\n]{{0,4}}{self.may_begin_with}/")
        else:
            lines.append(f"start: {ANSWER}")
        lines.append(f"{_THOUGHT}[lazy]: {_until(self.begins_after or END_THINK_MARK)}")
        lines.append(f"{_GAP}: /[ \\t\\r\\n]{{0,4}}/")
        if self.triggers:
            lines.append("free: /(?s:.*)/")
        for place, trigger in enumerate(self.triggers):
            # A lazy rule ends where it can, whatever else could go on: free text cannot run over a mark, nor begin with _OPEN.
            lines.append(f"before_{place}[lazy]: {_until(trigger.mark)}")
            lines.append(f"after_{place}: {trigger.answer}")
        return "\n".join([*lines, answer_rules, ""])


def constraint_spec(request: ChatRequest, prompt: PromptForm | None = None) -> ConstraintSpec | None:
    """The form that the request asks for, None if it asks for none. Without a chat's `prompt` there is no reasoning in it.

    Calls of tools are constrained wherever tools are offered: with `tool_choice` "auto" from the mark on that opens a call.
    Raises InvalidRequest for what contradicts itself or goes beyond the caps, with the field as `param`.
    """
    content = _content_form(request)
    functions = _offered(request)
    if not functions:
        return _with_thinking(content, request, prompt) if content else None
    if content and content.kind in ("regex", "gbnf"):
        param = content.parts[0].param
        raise InvalidRequest(f"{param} and tools cannot be used together; set tool_choice to 'none'.", param=param)
    xml = prompt is not None and prompt.tool_format == "qwen_xml"
    parts = _call_parts(request, functions, "qwen_xml" if xml else "hermes_json")
    calls = _calls(request, parts)
    if request.tool_choice not in (None, "auto"):
        spec = ConstraintSpec("tools", f'"{CALL_MARK}" {calls}', parts)
    elif content:
        spec = ConstraintSpec("tools", f'"{CALL_MARK}" {calls} | {content.answer}', parts + content.parts)
    else:
        triggers = [Trigger(CALL_MARK, calls)]
        if xml:  # Qwen's coders forget the outer tag at times, and such calls are read too
            triggers.append(Trigger(FUNCTION_MARK, _calls(request, parts, suffix="_bare")))
        spec = ConstraintSpec("tools", _free_or_called(len(triggers)), parts, triggers=tuple(triggers))
    return _with_thinking(spec, request, prompt)


def _with_thinking(spec: ConstraintSpec, request: ChatRequest, prompt: PromptForm | None) -> ConstraintSpec:
    if prompt is not None and prompt.opens_thought:
        spec = replace(spec, begins_after=END_THINK_MARK)
    elif prompt is not None and request.thinking is not False:
        spec = replace(spec, may_begin_with=THINK_MARK)
    if len(spec.text) > MAX_GRAMMAR_BYTES:
        raise InvalidRequest(
            f"The answer's form takes more than {MAX_GRAMMAR_BYTES} characters.", param=spec.parts[0].param
        )
    return spec


def _content_form(request: ChatRequest) -> ConstraintSpec | None:
    """The form of the content, from the one field that gives it."""
    given: list[tuple[str, Any]] = [
        (param, value)
        for param, value in (
            ("response_format", request.response_format),
            ("json_schema", request.json_schema),
            ("grammar", request.grammar),
            ("regex", request.regex),
            ("guided_regex", request.guided_regex),
        )
        if value is not None and value != {"type": "text"}
    ]
    if not given:
        return None
    if len(given) > 1:
        names = " and ".join(param for param, _ in given)
        raise InvalidRequest(f"{names} exclude each other.", param=given[1][0])
    param, value = given[0]
    if param == "response_format":
        return None if value.get("type") == "text" else _response_format(value)
    if param == "json_schema":
        return _json_form("json_schema", value, param, strict=True)
    if param == "grammar":
        return ConstraintSpec("gbnf", "", (GrammarPart("root", value, param),))
    return _regex_form(value, param)


def _response_format(value: Mapping[str, Any]) -> ConstraintSpec:
    """OpenAI's, and llama-server's, which takes a `schema` beside either type."""
    param = "response_format"
    described = value.get("json_schema")
    if value.get("type") == "json_schema" and described is not None:
        if not isinstance(described, dict) or "schema" not in described:
            raise InvalidRequest(f"{param}.json_schema needs a schema.", param=f"{param}.json_schema")
        strict = described.get("strict") is not False
        return _json_form("json_schema", described["schema"], f"{param}.json_schema.schema", strict=strict)
    if value.get("schema") is not None:
        return _json_form("json_schema", value["schema"], f"{param}.schema", strict=True)
    if value.get("type") == "json_schema":
        raise InvalidRequest(f"{param}.json_schema is missing.", param=param)
    return _json_form("json_object", {"type": "object"}, param, strict=True)


def _json_form(kind: Kind, schema: Any, param: str, *, strict: bool) -> ConstraintSpec:
    grammar = schema_grammar(schema, param, strict=strict)
    return ConstraintSpec(kind, "content", (GrammarPart("content", f"content: {grammar}\n", param, grammar),))


def _regex_form(pattern: str, param: str) -> ConstraintSpec:
    """The whole content matches `pattern` (Rust's syntax: no look-around, no references back)."""
    if len(pattern) > MAX_REGEX_CHARS:
        raise InvalidRequest(f"{param} has more than {MAX_REGEX_CHARS} characters.", param=param)
    if not pattern:
        raise InvalidRequest(f"{param} is empty.", param=param)
    return ConstraintSpec(
        "regex", "content", (GrammarPart("content", f"content: /{_between_slashes(pattern)}/\n", param),)
    )


def _between_slashes(pattern: str) -> str:
    """`pattern` as it may stand in Lark: slashes escaped, on one line, \\d meaning ASCII digits."""
    written, steps = [], iter(pattern)
    for step in steps:
        if step == "\\":
            step += next(steps, "")
            step = {"\\d": "[0-9]", "\\D": "[^0-9]", "\\\n": "\\n"}.get(step, step)
        written.append({"/": "\\/", "\n": "\\n", "\r": "\\r"}.get(step, step))
    return "".join(written)


def _offered(request: ChatRequest) -> Sequence[tuple[str, FunctionSpec]]:
    """The functions that may be called, with the field of each."""
    named = chosen_function(request.tool_choice)
    offered = request.functions_by_name
    return [
        (f"tools.{place}.function.parameters", tool.function)
        for place, tool in enumerate(request.tools or ())
        if tool.function.name in offered and named in (None, tool.function.name)
    ]


def _call_parts(
    request: ChatRequest, functions: Sequence[tuple[str, FunctionSpec]], tool_format: str
) -> tuple[GrammarPart, ...]:
    return tuple(
        GrammarPart(
            f"call_{place}",
            call_rules(
                f"call_{place}",
                tool_format,
                function.name,
                function.parameters,
                param,
                strict=function.strict is True,
            ),
            param,
        )
        for place, (param, function) in enumerate(functions)
    )


def _calls(request: ChatRequest, parts: Sequence[GrammarPart], suffix: str = "") -> str:
    """A call from behind its opening mark on, or several where they are allowed, and nothing behind them."""
    first, one = (" | ".join(part.name + ending for part in parts) for ending in (suffix, ""))
    more = "" if request.parallel_tool_calls is False else f' (/\\n{{0,2}}/ "{CALL_MARK}" ({one}))*'
    return f"({first}){more}"


def _free_or_called(triggers: int) -> str:
    return " | ".join(["free", *(f"before_{place} after_{place}" for place in range(triggers))])


def _until(mark: str) -> str:
    return "/(?s:.*)" + mark.replace("/", "\\/") + "/"
