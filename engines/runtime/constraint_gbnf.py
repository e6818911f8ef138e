"""llama.cpp's GBNF grammars as Lark rules, by llguidance's own converter, within bounds that it does not set itself."""

from __future__ import annotations

import re

from llguidance import gbnf_to_lark

from engines.api_constraint import ANSWER
from engines.errors import InvalidRequest

MAX_GBNF_CHARS = 64 << 10
MAX_NESTING = 50
# Rules times characters: the converter goes through all of the text again for each rule that it finds to be a terminal.
MAX_WORK = 8 << 20
_UNICODE_ESCAPE = re.compile(r"\\(?:u([0-9a-fA-F]{4})|U([0-9a-fA-F]{8})|.)", re.DOTALL)
_QUOTED = re.compile(r'"(?:\\.|[^"\\])*"|\[(?:\\.|[^\]\\])*\]|#[^\n]*', re.DOTALL)


def lark_rules(grammar: str, param: str) -> str:
    """Lark rules of which ANSWER is the grammar's root. Raises InvalidRequest, with the place, for what cannot be converted."""
    _check_size(grammar, param)
    try:
        rules = gbnf_to_lark.GrammarParser().parse(_plain_characters(grammar))
        gbnf_to_lark.resolve(rules)
    except RecursionError as error:
        raise InvalidRequest(f"{param} is nested too deeply.", param=param) from error
    except Exception as error:
        # The converter raises plain exceptions, and nothing but the grammar can be their cause.
        raise InvalidRequest(f"{param} is no GBNF grammar that can be used: {str(error)[:300]}", param=param) from error
    if ANSWER in rules:
        raise InvalidRequest(f"{param}: a rule must not be called {ANSWER!r}.", param=param)
    rules["start"].name = ANSWER
    return "\n".join(str(rule) for rule in sorted(rules.values(), key=lambda rule: rule.order)) + "\n"


def _check_size(grammar: str, param: str) -> None:
    if len(grammar) > MAX_GBNF_CHARS:
        raise InvalidRequest(f"{param} has more than {MAX_GBNF_CHARS} characters.", param=param)
    if grammar.count("::=") * len(grammar) > MAX_WORK:
        raise InvalidRequest(f"{param} has too many rules for its length.", param=param)
    depth = 0
    for letter in _QUOTED.sub("", grammar):
        depth += (letter == "(") - (letter == ")")
        if depth > MAX_NESTING:
            raise InvalidRequest(f"{param} is nested deeper than {MAX_NESTING} parentheses.", param=param)


def _plain_characters(grammar: str) -> str:
    """Escapes of characters beyond ASCII as the characters themselves, since the converter drops their leading zeros."""

    def plain(match: re.Match[str]) -> str:
        digits = match[1] or match[2]
        if digits is None:
            return match[0]
        point = int(digits, 16)
        if point < 0x80:
            return f"\\x{point:02x}"
        if point > 0x10FFFF or 0xD800 <= point < 0xE000:
            raise ValueError(f"{match[0]} is no Unicode character")
        return chr(point)

    return _UNICODE_ESCAPE.sub(plain, grammar)
