"""What the site reads in requests of each API before an engine does."""

from __future__ import annotations

import json
from typing import Any

import pytest

from engines.errors import InvalidRequest, ModelNotFound
from sessions import dialects
from sessions.dialects import Dialect
from sessions.engine_call import EngineCall
from sessions.identity import Identity, Owner

ALL = [
    dialects.COMPLETIONS,
    dialects.RESPONSES,
    dialects.MESSAGES,
    dialects.COUNT_TOKENS,
    dialects.EMBEDDINGS,
    dialects.RERANK,
    dialects.TOKENIZE,
    dialects.DETOKENIZE,
    dialects.APPLY_TEMPLATE,
]
STREAMED = [dialects.COMPLETIONS, dialects.RESPONSES, dialects.MESSAGES]
MESSAGE = {"role": "user", "content": [{"type": "text", "text": "Name a colour."}]}
REPLY = {"role": "assistant", "content": "Red."}


def read(dialect: Dialect, **fields: Any) -> EngineCall:
    return dialect.read(json.dumps(fields).encode())


def identity(call: EngineCall) -> Identity:
    return Identity.of(Owner(), {}, call.hints)


@pytest.mark.parametrize("dialect", ALL)
def test_a_body_goes_to_the_engine_as_it_came(dialect: Dialect) -> None:
    raw = b'{"model" : "tiny", "anything": [1, {"else": null}]}'
    call = dialect.read(raw)
    assert (call.raw, call.model, call.stream, call.resumable) == (raw, "tiny", False, False)


@pytest.mark.parametrize("dialect", ALL)
@pytest.mark.parametrize("raw", [b"", b"{", b"[]", b'"x"', b"\xff", b'{"model": 5}', b'{"model": ["a"]}'])
def test_what_is_no_json_object_never_gets_to_an_engine(dialect: Dialect, raw: bytes) -> None:
    with pytest.raises(InvalidRequest):
        dialect.read(raw)


@pytest.mark.parametrize("dialect", ALL)
@pytest.mark.parametrize("name", ["a\0b", "\ud800", "x" * 200])
def test_a_model_of_an_impossible_name_is_not_found(dialect: Dialect, name: str) -> None:
    with pytest.raises(ModelNotFound):
        read(dialect, model=name)


@pytest.mark.parametrize("dialect", STREAMED)
def test_a_stream_is_one_only_where_the_body_says_true(dialect: Dialect) -> None:
    assert read(dialect, stream=True, resumable=True).resumable
    assert read(dialect, stream=True).stream
    assert not read(dialect, stream="true").stream
    with pytest.raises(InvalidRequest):
        read(dialect, stream=True, resumable="yes")


def test_a_chat_is_judged_here_already() -> None:
    with pytest.raises(InvalidRequest):
        read(dialects.CHAT, messages=[])
    assert read(dialects.CHAT, messages=[MESSAGE], stream=True, resumable=True).resumable


@pytest.mark.parametrize(
    ("dialect", "first", "second"),
    [
        (dialects.MESSAGES, {"messages": [MESSAGE]}, {"messages": [MESSAGE, REPLY, MESSAGE]}),
        (dialects.RESPONSES, {"input": [MESSAGE]}, {"input": [MESSAGE, REPLY, MESSAGE]}),
        (dialects.COMPLETIONS, {"prompt": "ab" * 200}, {"prompt": "ab" * 200 + "c"}),
    ],
)
def test_turns_of_a_conversation_have_one_identity_and_others_another(
    dialect: Dialect, first: dict[str, Any], second: dict[str, Any]
) -> None:
    call = read(dialect, **first)
    assert identity(call) == identity(read(dialect, **second))
    assert identity(call) != identity(read(dialect, **first, model="other"))
    otherwise = {**first, "system": "Be brief.", "instructions": "Be brief.", "prompt": "x"}
    assert identity(call) != identity(read(dialect, **otherwise))


def test_a_title_is_how_the_conversation_begins() -> None:
    assert read(dialects.MESSAGES, messages=[MESSAGE]).hints.title == "Name a colour."
    assert read(dialects.RESPONSES, input="Name a colour.").hints.title == "Name a colour."
    assert read(dialects.COMPLETIONS, prompt=["Name a", "colour."]).hints.title == "Name a"
    assert read(dialects.COMPLETIONS, prompt=[1] * 100_000).hints.title.startswith("[1, 1")
    assert read(dialects.RESPONSES, input="lone \ud800").hints.title == "lone ?"


def test_a_user_named_in_the_metadata_of_a_message_is_its_user() -> None:
    named = read(dialects.MESSAGES, messages=[MESSAGE], metadata={"user_id": "ann"})
    assert named.hints.user == "ann"
    assert identity(named) != identity(read(dialects.MESSAGES, messages=[MESSAGE]))


def test_all_embeddings_of_an_owner_by_one_model_are_one_conversation() -> None:
    first, second = read(dialects.EMBEDDINGS, input="a", model="e"), read(dialects.EMBEDDINGS, input="b", model="e")
    assert identity(first) == identity(second)
    assert identity(first) != identity(read(dialects.RERANK, query="a", model="e"))
    assert len(read(dialects.EMBEDDINGS, input="a", model="e" * 128).hints.title) <= 80


@pytest.mark.parametrize("dialect", ALL)
@pytest.mark.parametrize(
    "nonsense",
    [
        {"messages": 5, "input": 5, "prompt": 5, "system": 5, "instructions": 5, "metadata": 5, "user": 5},
        {"messages": [5], "input": [5], "prompt": [[]], "system": [5], "metadata": [], "prompt_cache_key": {}},
        {"messages": [{"role": "user"}], "input": [{"role": [], "content": {}}], "prompt": {}},
    ],
)
def test_nonsense_is_left_to_the_engine(dialect: Dialect, nonsense: dict[str, Any]) -> None:
    assert identity(read(dialect, **nonsense)).key_hash


@pytest.mark.parametrize(
    ("fields", "needed"),
    [
        ({"logprobs": True}, True),
        ({"top_k": 0}, True),
        ({"top_k": 0, "temperature": 0}, False),
        ({"top_k": 129}, True),
        ({"top_k": 128, "presence_penalty": 0.5}, False),
        ({"logit_bias": {"5": 1}}, True),
        ({"logit_bias": {"5": -100}}, False),
        ({"frequency_penalty": -0.5}, True),
        ({}, False),
    ],
)
def test_whole_rows_are_foreseen(fields: dict[str, Any], needed: bool) -> None:
    chat = read(dialects.CHAT, messages=[{"role": "user", "content": "a"}], **fields)
    assert chat.hints.whole_rows is needed
    assert read(dialects.RESPONSES, input="a", **fields).hints.whole_rows is needed


def test_whole_rows_are_foreseen_in_other_shapes() -> None:
    for fields in ({"logprobs": 0}, {"n_probs": 2}, {"logit_bias": [[5, 2.0]]}):
        assert read(dialects.COMPLETIONS, prompt="a", **fields).hints.whole_rows
    for fields in ({"logprobs": None}, {"logprobs": False}, {"top_k": "x"}, {"logit_bias": [[5, False], 7]}):
        assert not read(dialects.COMPLETIONS, prompt="a", **fields).hints.whole_rows
