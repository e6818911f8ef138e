"""Which conversation a request belongs to."""

from __future__ import annotations

from typing import Any

import pytest

from engines.api_schema import ChatRequest
from sessions.engine_call import TITLE_CHARS, BodyHints, chat_hints
from sessions.identity import SESSION_HEADERS, Identity, Owner

ANN, BOB = Owner(api_key_id=1), Owner(api_key_id=2)
# What ANN's conversation "abc" has been called in the database so far.
NAMED = "5224daf8db959509905d2ae2d4cf3de0c52d483653ec42fa4dbde67301ccde48"


def chat(*contents: str, **fields: Any) -> BodyHints:
    roles = ("user", "assistant")
    messages = [{"role": roles[i % 2], "content": content} for i, content in enumerate(contents)]
    return chat_hints(ChatRequest.model_validate({"messages": messages, **fields}))


def test_every_turn_of_a_conversation_without_a_key_has_the_same_identity() -> None:
    first, second = chat("Hello"), chat("Hello", "Hi!", "How are you?")
    assert Identity.of(ANN, {}, first) == Identity.of(ANN, {}, second)
    assert Identity.of(ANN, {}, first) != Identity.of(ANN, {}, chat("Goodbye"))


def test_another_system_prompt_or_model_is_another_conversation() -> None:
    plain = chat("Hello")
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hello"}]
    with_system = chat_hints(ChatRequest.model_validate({"messages": messages}))
    assert (
        len({Identity.of(ANN, {}, body).key_hash for body in (plain, with_system, chat("Hello", model="other"))}) == 3
    )


@pytest.mark.parametrize("header", SESSION_HEADERS)
def test_a_session_header_names_the_conversation_whatever_is_said(header: str) -> None:
    named = Identity.of(ANN, {header: "abc"}, chat("Hello"))
    assert named == Identity.of(ANN, {header: "abc"}, chat("Something else"))
    assert named != Identity.of(ANN, {header: "abd"}, chat("Hello"))


def test_headers_win_in_their_order_and_over_the_body() -> None:
    body = chat("Hello", prompt_cache_key="cached")
    by_explicit = Identity.of(ANN, {"x-hydra-session-id": "a"}, body)
    assert Identity.of(ANN, {"x-hydra-session-id": "a", "x-session-id": "b"}, body) == by_explicit
    assert Identity.of(ANN, {"x-session-id": " "}, body) == Identity.of(ANN, {}, body)


def test_agents_of_one_coding_session_hold_conversations_of_their_own() -> None:
    session = {"x-claude-code-session-id": "s"}
    main = Identity.of(ANN, session, chat("Hello"))
    assert Identity.of(ANN, {**session, "x-claude-code-agent-id": "1"}, chat("Hello")) != main


def test_an_agent_of_an_agent_is_not_its_namesake_of_another() -> None:
    agent = {"x-claude-code-session-id": "s", "x-claude-code-agent-id": "1"}
    parent = "x-claude-code-parent-agent-id"
    plain = Identity.of(ANN, agent, chat("Hello"))
    of_x, of_y = (Identity.of(ANN, {**agent, parent: name}, chat("Hello")) for name in "xy")
    assert len({plain.key_hash, of_x.key_hash, of_y.key_hash}) == 3
    assert Identity.of(ANN, {**agent, parent: "x"}, chat("More")) == of_x
    # It comes with an agent's id only; alone it says nothing.
    session = {"x-claude-code-session-id": "s"}
    assert Identity.of(ANN, {**session, parent: "x"}, chat("Hello")) == Identity.of(ANN, session, chat("Hello"))


def test_a_child_session_is_told_from_its_namesake_by_its_parent_and_its_end_by_nothing() -> None:
    child, parent = {"x-dynamo-session-id": "c"}, "x-dynamo-parent-session-id"
    plain = Identity.of(ANN, child, chat("Hello"))
    of_x, of_y = (Identity.of(ANN, {**child, parent: name}, chat("Hello")) for name in "xy")
    assert len({plain.key_hash, of_x.key_hash, of_y.key_hash}) == 3
    assert of_x != Identity.of(ANN, {"x-dynamo-session-id": "x"}, chat("Hello"))
    assert of_x != Identity.of(BOB, {**child, parent: "x"}, chat("Hello"))
    assert Identity.of(ANN, {parent: "x"}, chat("Hello")) == Identity.of(ANN, {}, chat("Hello"))
    # Parts cannot be shifted into each other.
    assert of_x != Identity.of(ANN, {"x-claude-code-session-id": "c", "x-claude-code-agent-id": "x"}, chat("Hello"))
    assert Identity.of(ANN, {**child, parent: "x", "x-dynamo-session-final": "true"}, chat("Bye")) == of_x


def test_a_name_stays_the_same_over_versions() -> None:
    """Rows hold it: with another hash every conversation would begin anew."""
    assert Identity.of(ANN, {"x-session-id": "abc"}, chat("Hello")).key_hash == NAMED


def test_a_cache_key_names_a_conversation_and_a_user_only_the_one_who_holds_it() -> None:
    assert Identity.of(ANN, {}, chat("A", prompt_cache_key="k")) == Identity.of(
        ANN, {}, chat("B", prompt_cache_key="k")
    )
    assert Identity.of(ANN, {}, chat("A", user="u")) != Identity.of(ANN, {}, chat("B", user="u"))
    assert Identity.of(ANN, {}, chat("A", user="u")) != Identity.of(ANN, {}, chat("A", user="v"))


def test_nobody_can_name_the_conversation_of_another() -> None:
    header = {"x-session-id": "abc"}
    owners = [ANN, BOB, Owner(user_id=1), Owner()]
    assert len({Identity.of(owner, header, chat("Hello")).key_hash for owner in owners}) == 4
    assert Identity.for_user(1, "abc") != Identity.of(Owner(user_id=1), header, chat("Hello"))


def test_a_title_is_one_short_line_of_the_first_user_message() -> None:
    assert chat("  Name\n a   colour.\0 ").title == "Name a colour."
    long = chat("word " * 1000).title
    assert len(long) <= TITLE_CHARS
    assert long.endswith("…")
