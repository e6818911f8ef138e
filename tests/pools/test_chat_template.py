"""What is said of chat templates without running them."""

from __future__ import annotations

import pytest

from pools.chat_template import MAX_TEMPLATE_CHARS, TemplateUnreadable, template_abilities

CHATML = "{% for message in messages %}{{ message.content }}{% endfor %}"


@pytest.mark.parametrize(
    ("source", "abilities"),
    [
        ("", set()),
        (CHATML, set()),
        (CHATML + "{% if tools %}{{ tools | tojson }}{% endif %}", {"tools"}),
        (
            "{% for tool in tools %}{% if loop.first %}{% continue %}{% endif %}{% endfor %}<think>",
            {"tools", "reasoning"},
        ),
        ("{{ message.reasoning_content }}", {"reasoning"}),
        ("{% generation %}{{ enable_thinking }}{% endgeneration %}", {"reasoning"}),
        ("{# tools are not served #}{% set tools = 1 %}", set()),
    ],
)
def test_it_tells_what_a_template_knows_to_write(source: str, abilities: set[str]) -> None:
    assert template_abilities(source) == abilities


@pytest.mark.parametrize(
    ("source", "where"),
    [
        ("{% for %}", "Line 1"),
        ("a\n{{ b", "Line 2"),
        ("{% unknown %}", "Line 1"),
        ("{{ " + "(" * 100_000, "nested too deeply|Line 1"),
        ("x" * (MAX_TEMPLATE_CHARS + 1), "at most"),
    ],
)
def test_what_is_no_template_is_refused_with_the_place(source: str, where: str) -> None:
    with pytest.raises(TemplateUnreadable, match=where):
        template_abilities(source)


def test_nothing_in_a_template_is_computed() -> None:
    assert template_abilities("{{ 'x' * 10**12 }}{{ 10 ** 10 ** 10 }}{{ ''.__class__ }}") == set()
