"""Tools in the OpenAI API: functions that a request offers, calls of them in a conversation, and which may be called.

Knows neither Django nor llama.cpp. Templates see tools and calls as the client wrote them, so unknown keys are kept.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, field_validator

from engines.api_body import clean_text, plain_json

MAX_TOOLS = 256
MAX_TOOLS_CHARS = 1 << 20
MAX_TOOL_CALLS = 256
MAX_ARGUMENTS_CHARS = 8 << 20
MAX_NESTING = 32

_NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")
_KEPT = ConfigDict(strict=True, extra="allow", allow_inf_nan=False)


def bounded_json(value: Any, *, chars: int, nesting: int) -> str:
    """`value` as JSON text. Raises ValueError beyond `chars` of text or `nesting` levels, and for what is no plain JSON."""
    level: list[Any] = [value]
    for _ in range(nesting + 1):
        level = [inner for outer in level for inner in _inside(outer)]
        if not level:
            text = plain_json(value)
            if len(text) > chars:
                raise ValueError(f"has {len(text)} characters as JSON; at most {chars} are taken")
            return text
    raise ValueError(f"is nested deeper than {nesting} levels")


def _inside(value: Any) -> Iterable[Any]:
    if isinstance(value, dict):
        return value.values()
    return value if isinstance(value, list) else ()


class FunctionSpec(BaseModel):
    """A function that the model may call. `parameters` is a JSON schema of an object; without it there are none."""

    model_config = _KEPT
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None

    @field_validator("name")
    @classmethod
    def _openai_name(cls, value: str) -> str:
        if not _NAME.fullmatch(value):
            raise ValueError("a function's name has 1 to 64 letters, digits, underscores and dashes")
        return value


class Tool(BaseModel):
    model_config = _KEPT
    type: str
    function: FunctionSpec

    @field_validator("type")
    @classmethod
    def _only_functions(cls, value: str) -> str:
        if value != "function":
            raise ValueError(f"only tools of type 'function' are served, not {value[:40]!r}")
        return value


class CalledFunction(BaseModel):
    """The call as the model made it. `arguments` are JSON text, as OpenAI has it; an object is taken too."""

    model_config = _KEPT
    name: Annotated[str, Field(min_length=1, max_length=256)]
    arguments: str | dict[str, Any] = ""

    @field_validator("arguments")
    @classmethod
    def _plain(cls, value: str | dict[str, Any]) -> str | dict[str, Any]:
        if isinstance(value, str):
            if len(value) > MAX_ARGUMENTS_CHARS:
                raise ValueError(f"has {len(value)} characters; at most {MAX_ARGUMENTS_CHARS} are taken")
            return clean_text(value)
        bounded_json(value, chars=MAX_ARGUMENTS_CHARS, nesting=MAX_NESTING)
        return value

    def argument_values(self) -> dict[str, Any]:
        """The arguments as an object, which is what templates read. Text that is no JSON object stands under `arguments`."""
        if isinstance(self.arguments, dict):
            return self.arguments
        try:
            values: Any = json.loads(self.arguments, strict=False) if self.arguments.strip() else {}
        except (ValueError, RecursionError):
            values = None
        return values if isinstance(values, dict) else {"arguments": self.arguments}


class ToolCall(BaseModel):
    """A call in an assistant's message of the conversation's past."""

    model_config = _KEPT
    id: Annotated[str, Field(max_length=256)] | None = None
    type: str = "function"
    function: CalledFunction


def checked_tools(tools: list[Tool]) -> list[Tool]:
    """Raises ValueError for too many, too large or too deeply nested tools, and for two of one name."""
    if len(tools) > MAX_TOOLS:
        raise ValueError(f"at most {MAX_TOOLS} tools, got {len(tools)}")
    bounded_json([tool.model_dump() for tool in tools], chars=MAX_TOOLS_CHARS, nesting=MAX_NESTING)
    names = [tool.function.name for tool in tools]
    twice = next((name for place, name in enumerate(names) if name in names[:place]), None)
    if twice is not None:
        raise ValueError(f"two tools have the name {twice!r}")
    return tools


def chosen_function(choice: str | dict[str, Any] | None) -> str | None:
    """The function that a `tool_choice` names, if it names one. Raises ValueError for a choice of no known shape."""
    if choice is None or choice in ("none", "auto", "required"):
        return None
    if isinstance(choice, dict) and choice.get("type") == "function" and isinstance(choice.get("function"), dict):
        name = choice["function"].get("name")
        if isinstance(name, str):
            return name
    raise ValueError("must be 'none', 'auto', 'required' or {'type': 'function', 'function': {'name': …}}")
