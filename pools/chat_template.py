"""What can be said of a chat template without running it: whether it can be read, and what it knows to write.

Templates come out of files from strangers, so here one is only parsed. Even compiling would compute what it holds of constant
expressions; the engine does that, in a process with limits. Free of Django.
"""

from __future__ import annotations

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension
from jinja2.parser import Parser

MAX_TEMPLATE_CHARS = 256 << 10
# What templates of reasoning models say in one way or another.
_REASONING_MARKS = ("<think>", "reasoning_content", "enable_thinking", "<|channel|>analysis", "[THINK]")


class TemplateUnreadable(ValueError):
    """The text is no Jinja template; the message says where it stops being one."""


class _GenerationBlock(Extension):
    """{% generation %} marks an answer for training; a template with it is in order."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def template_abilities(source: str) -> frozenset[str]:
    """Which of "tools" and "reasoning" the template can write. Raises TemplateUnreadable."""
    names = {name.name for name in _parsed(source).find_all(nodes.Name) if name.ctx == "load"}
    abilities = {"tools"} if "tools" in names else set()
    return frozenset(abilities | ({"reasoning"} if any(mark in source for mark in _REASONING_MARKS) else set()))


def _parsed(source: str) -> nodes.Template:
    if len(source) > MAX_TEMPLATE_CHARS:
        raise TemplateUnreadable(f"A template may have at most {MAX_TEMPLATE_CHARS} characters.")
    environment = jinja2.Environment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", _GenerationBlock]
    )
    try:
        return environment.parse(source)
    except jinja2.TemplateSyntaxError as error:
        raise TemplateUnreadable(f"Line {error.lineno}: {error.message}") from error
    except RecursionError as error:
        raise TemplateUnreadable("It is nested too deeply.") from error
