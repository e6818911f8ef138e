"""Tools as text, for chat templates that know none, or write calls in a format that is not read here.

The functions are described in the system message, and calls and results of the conversation stand in its messages' text, in the
Hermes format (JSON between <tool_call> tags).
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

_BEFORE = "# Functions\n\nThese functions can be called for the user. Each line is the signature of one, in JSON:\n"
_AFTER = (
    "\n\nA call is one JSON object with the function's name and its arguments, between tags, and nothing else;"
    " several calls follow one another:\n"
    '<tool_call>\n{"name": "the function", "arguments": {"a parameter": "its value"}}\n</tool_call>\n\n'
    "Results come back between <tool_response> tags. Where no function is needed, the answer is plain text."
)


def with_tools_as_text(messages: Sequence[dict[str, Any]], tools: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """`messages` as a template that knows roles and contents alone can show them."""
    shown: list[dict[str, Any]] = []
    for before, message in zip((None, *messages), messages, strict=False):
        if message["role"] == "tool":
            _add_result(shown, message["content"], is_first=before is None or before["role"] != "tool")
            continue
        plain = {key: value for key, value in message.items() if key not in ("tool_calls", "tool_call_id")}
        if message.get("tool_calls"):
            parts = [message["content"], *(_call(call["function"]) for call in message["tool_calls"])]
            plain["content"] = "\n".join(part for part in parts if part)
        shown.append(plain)
    return _with_functions(shown, tools) if tools else shown


def _add_result(shown: list[dict[str, Any]], content: str, *, is_first: bool) -> None:
    """Results of one answer's calls make one user message, so that roles keep taking turns."""
    result = f"<tool_response>\n{content}\n</tool_response>"
    if is_first:
        shown.append({"role": "user", "content": result})
    else:
        shown[-1]["content"] += "\n" + result


def _call(function: dict[str, Any]) -> str:
    call = {"name": function["name"], "arguments": function["arguments"]}
    return f"<tool_call>\n{json.dumps(call, ensure_ascii=False)}\n</tool_call>"


def _with_functions(shown: list[dict[str, Any]], tools: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    lines = [json.dumps(tool["function"], ensure_ascii=False) for tool in tools]
    described = _BEFORE + "\n".join(lines) + _AFTER
    if shown and shown[0]["role"] == "system":
        first = shown[0]
        return [{**first, "content": f"{first['content']}\n\n{described}"}, *shown[1:]]
    return [{"role": "system", "content": described}, *shown]
