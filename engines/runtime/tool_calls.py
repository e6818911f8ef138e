"""One tool call as it streams, from the text of two formats to JSON arguments as OpenAI's clients read them.

Hermes: <tool_call>{"name": …, "arguments": {…}}</tool_call>. Qwen: <tool_call><function=name><parameter=key>value</parameter>…
</function></tool_call>. The parsers here begin behind the head, when the function is known. What comes out depends on the text
alone, never on how it was cut into pieces.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from engines.runtime.tool_arguments import ParameterTypes, argument_json, is_text

CALL, END_CALL = "<tool_call>", "</tool_call>"
FUNCTION, END_FUNCTION = "<function=", "</function>"
PARAMETER, END_PARAMETER = "<parameter=", "</parameter>"
MAX_NAME_CHARS = 256
# Of whitespace before the head of a call; more is none.
MAX_GAP_CHARS = 64

_XML_HEAD = re.compile(rf"(?:{CALL}\s{{0,{MAX_GAP_CHARS}}})?{FUNCTION}([^>\n]{{1,{MAX_NAME_CHARS}}})>")
_JSON_BEGIN = re.compile(rf"{CALL}\s{{0,{MAX_GAP_CHARS}}}(?=\{{)")
_JSON_HEAD = re.compile(
    rf'{CALL}\s{{0,{MAX_GAP_CHARS}}}\{{\s{{0,{MAX_GAP_CHARS}}}"name"\s{{0,9}}:\s{{0,9}}'
    rf'"((?:[^"\\\x00-\x1f]|\\.){{1,{MAX_NAME_CHARS}}})"\s{{0,9}},\s{{0,{MAX_GAP_CHARS}}}'
    r'"(?:arguments|parameters)"\s{0,9}:\s{0,64}(?=\{)'
)
_KEY = re.compile(rf"{PARAMETER}([^>\n]{{1,{MAX_NAME_CHARS}}})>")
_OUTSIDE_STRING = re.compile(r'["{}\[\]<]')
_INSIDE_STRING = re.compile(r'["\\\x00-\x1f]')
_SPACE = re.compile(r"\s*")
_VALUE_ENDS = re.compile(f"{END_PARAMETER}|{END_FUNCTION}")


@dataclass(frozen=True)
class Progress:
    """What a parser took from the text, and the JSON text of the arguments that this gave. `done`: the call is complete."""

    consumed: int
    arguments: str = ""
    done: bool = False


class NotACall(Exception):
    """The text only began like a call of a known function: it is text."""


class CallParser(Protocol):
    def consume(self, text: str, *, final: bool) -> Progress:
        """Reads on: `text` begins with what was not consumed before. With `final` no more will come, and all is consumed."""


def may_become(text: str, markers: tuple[str, ...]) -> bool:
    """Whether `text` is a beginning of one of `markers`, the whole one and "" included."""
    return any(marker.startswith(text) for marker in markers)


def held_back(text: str, markers: tuple[str, ...]) -> int:
    """How many characters at the end of `text` may begin a marker. Markers have their only "<" at the beginning."""
    start = text.rfind("<")
    return len(text) - start if start >= 0 and may_become(text[start:], markers) else 0


# --- Hermes ----------------------------------------------------------------------------------------


class JsonCursor:
    """Walks through JSON text piece by piece and knows how deep it stands. Reads what is broken, too, as far as it goes."""

    def __init__(self, depth: int = 0) -> None:
        self._depth = depth
        self._in_string = False
        self._escaped = False
        self.raw_controls: list[int] = []

    def walk(self, text: str, start: int, *, final: bool) -> tuple[int, bool]:
        """From `start` to behind the bracket that closes everything, or to END_CALL outside of strings, or to where more text is
        needed. Returns the position, and whether one of the first two was met. `raw_controls` then has the places of control
        characters inside of strings, where JSON allows none."""
        self.raw_controls = []
        at = start
        while at < len(text):
            if self._escaped:
                self._escaped = False
                if text[at] < " ":
                    self.raw_controls.append(at)
                at += 1
                continue
            found = (_INSIDE_STRING if self._in_string else _OUTSIDE_STRING).search(text, at)
            if found is None:
                return len(text), False
            letter, at = found.group(), found.end()
            if letter == "<":
                if text.startswith(END_CALL, at - 1):
                    return at - 1, True
                if not final and may_become(text[at - 1 : at - 1 + len(END_CALL)], (END_CALL,)):
                    return at - 1, False
            elif letter < " ":
                self.raw_controls.append(at - 1)
            elif self._step(letter):
                return at, True
        return at, False

    def _step(self, letter: str) -> bool:
        """True for the bracket that closes the last open one."""
        if letter == '"':
            self._in_string = not self._in_string
        elif letter == "\\":
            self._escaped = True
        elif letter in "{[":
            self._depth += 1
        else:
            self._depth -= 1
            return self._depth <= 0
        return False


class JsonArguments:
    """The arguments of a Hermes call, passed on as the model wrote them, and the rest of its object behind them.

    Only raw control characters inside of strings are changed, to JSON's escapes: models write line breaks as they are.
    Arguments that end too early stay broken.
    """

    def __init__(self) -> None:
        self._cursor = JsonCursor()
        self._in_arguments = True
        self._in_tail = False

    def consume(self, text: str, *, final: bool) -> Progress:
        if not self._in_arguments:
            return Progress(*self._skip_tail(text, 0, final=final))
        at, met = self._cursor.walk(text, 0, final=final)
        parts: list[str] = []
        copied = 0
        for control in self._cursor.raw_controls:
            parts += (text[copied:control], json.dumps(text[control])[1:-1])
            copied = control + 1
        arguments = "".join(parts) + text[copied:at]
        if not met:
            return Progress(at, arguments)
        self._in_arguments = False
        self._cursor = JsonCursor(depth=1)
        end, _, done = self._skip_tail(text, at, final=final)
        return Progress(end, arguments, done)

    def _skip_tail(self, text: str, at: int, *, final: bool) -> tuple[int, str, bool]:
        """To behind the call's own closing bracket. Where neither that nor another key follows, the call ends before it."""
        if not self._in_tail:
            rest = text[at:].lstrip()
            if not rest:
                return at, "", False
            if rest[0] not in "},":
                return at, "", True
            self._in_tail = True
            at = len(text) - len(rest)
        end, done = self._cursor.walk(text, at, final=final)
        return end, "", done


class WholeJsonCall:
    """A Hermes call whose keys stand in another order: nothing can be passed on before its object is complete."""

    def __init__(self) -> None:
        self._cursor = JsonCursor()
        self._at: int | None = None

    def read(self, text: str, start: int, *, final: bool) -> tuple[int, str, str] | None:
        """End, name and arguments of the object that begins at `start`; None while it is not complete. Raises NotACall."""
        self._at, met = self._cursor.walk(text, start if self._at is None else self._at, final=final)
        if not met:
            if final:
                raise NotACall
            return None
        try:
            call: Any = json.loads(text[start : self._at], strict=False)
            if isinstance(call, dict) and isinstance(call.get("name"), str):
                return self._at, call["name"], _arguments_text(call.get("arguments", call.get("parameters")))
        except (ValueError, RecursionError) as error:
            raise NotACall from error
        raise NotACall


def _arguments_text(value: Any) -> str:
    if value is None:
        return "{}"
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, allow_nan=False)


# --- Qwen ------------------------------------------------------------------------------------------


class XmlArguments:
    """The parameters of a Qwen call as one JSON object. Strings are passed on while they come, other values when complete.

    A value ends at the </parameter> behind which the call goes on or ends; one without is text. Only </function> or
    </tool_call> close the object, so that a call that was cut off never looks like a whole one.
    """

    def __init__(self, schema: Mapping[str, Any] | None) -> None:
        self._types = ParameterTypes(schema)
        self._state = self._between
        self._separator = "{"
        self._value_types: frozenset[str] | None = None
        self._searched = 0
        self._arguments: list[str] = []
        self._done = False

    def consume(self, text: str, *, final: bool) -> Progress:
        self._arguments = []
        at = 0
        while not self._done:
            taken = self._state(text[at:], final)
            if taken is None:
                break
            at += taken
        if final and not self._done:
            at = len(text)
        return Progress(at, "".join(self._arguments), self._done)

    def _between(self, text: str, final: bool) -> int | None:
        """Before a parameter or the end. Returns how much was read, None when more text is needed."""
        rest = text.lstrip()
        gap = len(text) - len(rest)
        if key := _KEY.match(rest):
            self._arguments.append(f"{self._separator}{json.dumps(key[1], ensure_ascii=False)}: ")
            self._separator = ", "
            self._value_types = self._types.of(key[1])
            self._state = self._before_value
            return gap + key.end()
        if rest.startswith(END_FUNCTION):
            return self._close(gap + len(END_FUNCTION))
        if rest.startswith(END_CALL):
            return self._close(gap)
        unfinished_key = (
            rest.startswith(PARAMETER) and len(rest) <= len(PARAMETER) + MAX_NAME_CHARS and "\n" not in rest
        )
        if unfinished_key or may_become(rest, (PARAMETER, END_FUNCTION, END_CALL)):
            return None
        # Whatever stands here belongs to no parameter; it is text behind the call.
        return self._close(gap)

    def _close(self, taken: int) -> int:
        self._arguments.append("{}" if self._separator == "{" else "}")
        self._done = True
        return taken

    def _before_value(self, text: str, final: bool) -> int | None:
        """The line break behind the parameter's tag is none of the value's."""
        if not text and not final:
            return None
        self._searched = 0
        self._state = self._value
        if is_text(self._value_types):
            self._arguments.append('"')
        return 1 if text.startswith("\n") else 0

    def _value(self, text: str, final: bool) -> int | None:
        end = self._end_of_value(text, final)
        if end is not None:
            value = text[:end].removesuffix("\n")
            if is_text(self._value_types):
                self._arguments.append(_escaped(value) + '"')
            else:
                self._arguments.append(argument_json(value, self._value_types))
            self._state = self._between
            return end + (len(END_PARAMETER) if text.startswith(END_PARAMETER, end) else 0)
        if final:
            self._arguments.append(_escaped(text) if is_text(self._value_types) else text)
            return None
        if not is_text(self._value_types):
            return None
        safe = len(text[: self._searched].removesuffix("\n"))
        if safe == 0:
            return None
        self._arguments.append(_escaped(text[:safe]))
        self._searched -= safe
        return safe

    def _end_of_value(self, text: str, final: bool) -> int | None:
        """Where the value ends; else None, and `_searched` says up to where it certainly has not."""
        for found in _VALUE_ENDS.finditer(text, self._searched):
            gap = _SPACE.match(text, found.end())
            after = text[gap.end() : gap.end() + len(END_CALL)] if gap else ""
            follow = (PARAMETER, END_FUNCTION, END_CALL) if found.group() == END_PARAMETER else (END_CALL,)
            if after.startswith(follow) or (final and not after):
                return found.start()
            if not final and may_become(after, follow):
                self._searched = found.start()
                return None
            self._searched = found.end()
        self._searched = max(self._searched, len(text) - held_back(text, (END_PARAMETER, END_FUNCTION)))
        return None


def _escaped(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)[1:-1]


# --- where a call begins ---------------------------------------------------------------------------


@dataclass(frozen=True)
class Head:
    """The beginning of a call of a known function. `length` characters lead to what `parser` reads, or, without one, behind
    the call's object, whose `arguments` are complete."""

    name: str
    length: int
    parser: CallParser | None = None
    arguments: str = ""


class HeadReader:
    """Tells from its beginning whether text is a call. One for each place where a call may begin.

    `functions` has the schema of each function's parameters; a call of another one is text, for the client did not offer it.
    """

    def __init__(self, functions: Mapping[str, Mapping[str, Any] | None]) -> None:
        self._functions = functions
        self._whole = WholeJsonCall()

    def read(self, text: str, *, final: bool) -> Head | None:
        """`text` begins with CALL or FUNCTION. None while more of it is needed. Raises NotACall."""
        if found := _XML_HEAD.match(text):
            name = self._known(found[1].strip())
            return Head(name, found.end(), XmlArguments(self._functions[name]))
        if found := _JSON_HEAD.match(text):
            name = self._known(_unquoted(found[1]))
            return Head(name, found.end(), JsonArguments())
        if found := _JSON_BEGIN.match(text):
            whole = self._whole.read(text, found.end(), final=final)
            return whole and Head(self._known(whole[1]), whole[0], arguments=whole[2])
        if final or not _may_become_head(text):
            raise NotACall
        return None

    def _known(self, name: str) -> str:
        if name not in self._functions:
            raise NotACall
        return name


def _unquoted(text: str) -> str:
    try:
        return str(json.loads(f'"{text}"'))
    except ValueError as error:
        raise NotACall from error


def _may_become_head(text: str) -> bool:
    rest = text.removeprefix(CALL).lstrip()
    if len(text) - len(rest) > len(CALL) + MAX_GAP_CHARS:
        return False
    unfinished_name = rest.startswith(FUNCTION) and len(rest) <= len(FUNCTION) + MAX_NAME_CHARS and "\n" not in rest
    return unfinished_name or may_become(rest, (FUNCTION, "{"))
