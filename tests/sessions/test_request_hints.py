"""What the site guesses about requests without tokenising: beginnings, lengths, and which ones nobody will go on with."""

from __future__ import annotations

import json
from typing import Any

import pytest

from sessions.background import is_background
from sessions.dialects import CHAT, COMPLETIONS, MESSAGES, RESPONSES, Dialect
from sessions.estimates import TEMPLATE_TOKENS, Estimates
from sessions.identity import Identity, Owner
from sessions.key_chain import FIRST_LINKS, LAST_LINKS, Link, chain_of
from sessions.prefix_hints import PrefixHints


def messages(*contents: str) -> list[dict[str, Any]]:
    return [{"role": ("user", "assistant")[i % 2], "content": content} for i, content in enumerate(contents)]


def chain(dialect: Dialect, **body: Any) -> tuple[Link, ...]:
    return dialect.read(json.dumps(body).encode()).hints.chain


@pytest.mark.parametrize(
    ("dialect", "field"),
    [(CHAT, "messages"), (MESSAGES, "messages"), (RESPONSES, "input")],
    ids=lambda value: str(value)[:20],
)
def test_a_turn_begins_with_the_links_of_the_turn_before(dialect: Dialect, field: str) -> None:
    first = chain(dialect, **{field: messages("Hello")})
    second = chain(dialect, **{field: messages("Hello", "Hi!", "How are you?")})
    assert second[: len(first)] == first
    assert second[-1].size_bytes > first[-1].size_bytes
    assert chain(dialect, **{field: messages("Hello", "Hi!", "Who are you?")})[:2] == second[:2]
    assert chain(dialect, **{field: messages("Goodbye", "Hi!")})[0] != first[0]
    assert chain(dialect, model="other", **{field: messages("Hello")})[0] != first[0]


TOOL = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}


@pytest.mark.parametrize(
    ("dialect", "field", "one", "other"),
    [
        (CHAT, "messages", {}, {"chat_template_kwargs": {"enable_thinking": False}}),
        (CHAT, "messages", {"chat_template_kwargs": {"a": 1}}, {"chat_template_kwargs": {"a": 2}}),
        (CHAT, "messages", {"enable_thinking": True}, {"enable_thinking": False}),
        (CHAT, "messages", {"reasoning_effort": "low"}, {"reasoning_effort": "high"}),
        (CHAT, "messages", {"tools": [TOOL]}, {"tools": [TOOL], "tool_choice": "none"}),
        (RESPONSES, "input", {}, {"chat_template_kwargs": {"enable_thinking": False}}),
        (RESPONSES, "input", {}, {"enable_thinking": False}),
        (RESPONSES, "input", {"reasoning": {"effort": "low"}}, {"reasoning": {"effort": "high"}}),
        (MESSAGES, "messages", {"chat_template_kwargs": {"a": 1}}, {"chat_template_kwargs": {"a": 2}}),
        (MESSAGES, "messages", {}, {"thinking": {"type": "disabled"}}),
        (MESSAGES, "messages", {"output_config": {"effort": "low"}}, {"output_config": {"effort": "high"}}),
    ],
)
def test_what_the_template_is_told_stands_before_all_messages(
    dialect: Dialect, field: str, one: dict[str, Any], other: dict[str, Any]
) -> None:
    first, second = (chain(dialect, **{field: messages("Hello", "Hi!", "Bye")}, **told) for told in (one, other))
    assert len(first) == len(second) == 3
    assert not {link.key for link in first} & {link.key for link in second}


@pytest.mark.parametrize(
    ("dialect", "field", "one", "other"),
    [
        (CHAT, "messages", {"chat_template_kwargs": {"a": 1, "b": 2}}, {"chat_template_kwargs": {"b": 2, "a": 1}}),
        (CHAT, "messages", {"enable_thinking": False}, {"chat_template_kwargs": {"enable_thinking": False}}),
        (CHAT, "messages", {"tools": [TOOL], "tool_choice": "none"}, {}),
        (CHAT, "messages", {"chat_template_kwargs": {}, "temperature": 0.5, "max_tokens": 9}, {}),
        (RESPONSES, "input", {"reasoning": {"summary": "auto"}, "temperature": 0.5}, {}),
        (
            MESSAGES,
            "messages",
            {"thinking": {"type": "enabled", "budget_tokens": 10}},
            {"thinking": {"type": "enabled", "budget_tokens": 20}},
        ),
    ],
)
def test_what_is_rendered_alike_has_equal_keys(
    dialect: Dialect, field: str, one: dict[str, Any], other: dict[str, Any]
) -> None:
    first, second = (chain(dialect, **{field: messages("Hello")}, **told) for told in (one, other))
    assert [link.key for link in first] == [link.key for link in second]


def test_a_growing_text_shares_its_whole_pieces() -> None:
    text = "abc " * 2000
    first, second = chain(COMPLETIONS, prompt=text), chain(COMPLETIONS, prompt=text + "and more")
    assert first[:-1] == second[: len(first) - 1]
    assert first[-1] != second[len(first) - 1]


def test_a_long_conversation_keeps_its_first_and_last_links() -> None:
    items = [(str(number).encode(), 1) for number in range(500)]
    links = chain_of([], items)
    assert len(links) == FIRST_LINKS + LAST_LINKS
    assert links[0] == chain_of([], items[:1])[0]
    assert links[-1].size_bytes == 500
    # Parts cannot be shifted into each other.
    assert chain_of([], [(b"ab", 2), (b"c", 1)])[-1].key != chain_of([], [(b"a", 1), (b"bc", 2)])[-1].key


def test_engines_are_known_by_what_they_computed_within_an_owner() -> None:
    hints = PrefixHints()
    first = chain(CHAT, messages=messages("Hello"))
    second = chain(CHAT, messages=messages("Hello", "Hi!", "How are you?"))
    hints.note("a", first, 1, 20)
    assert hints.tokens("a", second) == {1: 20}
    assert hints.longest("a", second) == (20, first[-1].size_bytes)
    hints.note("a", second, 2, 60)
    assert hints.tokens("a", second) == {1: 20, 2: 60}
    assert hints.tokens("b", second) == {}
    assert hints.longest("b", second) == (0, 0)
    hints.forget(2)
    assert hints.tokens("a", second) == {1: 20}


def test_guesses_follow_what_answers_tell() -> None:
    estimates = Estimates()
    assert estimates.prompt_tokens("m", 400) == TEMPLATE_TOKENS + 100
    for _ in range(20):
        estimates.learn("m", 400, TEMPLATE_TOKENS + 200, 50)
    assert estimates.prompt_tokens("m", 400) == TEMPLATE_TOKENS + 200
    assert 50 <= estimates.output_tokens("m", None) < 110
    assert estimates.output_tokens("m", 10) == 10
    assert estimates.prompt_tokens("other", 400) == TEMPLATE_TOKENS + 100


TITLE = (
    "### Task:\nGenerate a concise, 3-5 word title with an emoji summarizing the chat history.\n### Chat History:\n…"
)
TAGS = "### Task:\nGenerate 1-3 broad tags categorizing the main themes of the chat history."
CODING = "Please write a 5-10 word title for the following conversation:\n\nUser: hi"


@pytest.mark.parametrize("text", [TITLE, TAGS, CODING, "Summarize this conversation in one sentence."])
def test_a_programs_own_questions_are_recognised(text: str) -> None:
    assert is_background("", text, 1)
    assert not is_background("", text, 5)


@pytest.mark.parametrize(
    "text",
    ["Name a colour.", "Write a poem about titles of nobility.", "Generate a summary of the French Revolution.", ""],
)
def test_peoples_questions_are_not(text: str) -> None:
    assert not is_background("You are a helpful assistant.", text, 1)


def test_background_requests_have_no_conversation_of_their_own_but_may_name_one() -> None:
    one, other = (
        CHAT.read(json.dumps({"messages": messages(text)}).encode()).hints for text in (TITLE + "a", TITLE + "b")
    )
    assert one.background
    assert Identity.of(Owner(), {}, one) == Identity.of(Owner(), {}, other)
    named = Identity.of(Owner(), {"x-openwebui-chat-id": "c"}, one)
    asked = CHAT.read(json.dumps({"messages": messages("Hello")}).encode()).hints
    assert named == Identity.of(Owner(), {"x-openwebui-chat-id": "c"}, asked)


def test_owners_share_nothing_and_each_replica_says_the_same() -> None:
    owners = [Owner(), Owner(api_key_id=1), Owner(api_key_id=2), Owner(user_id=1)]
    assert len({owner.tenant for owner in owners}) == 4
    assert all(set(owner.tenant) <= set("0123456789abcdef") and len(owner.tenant) == 32 for owner in owners)
