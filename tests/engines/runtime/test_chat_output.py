"""Reasoning, content and calls come out of a model's text alike, however the text was cut into pieces."""

from __future__ import annotations

import json
from collections.abc import Iterable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engines.runtime.chat_output import ChatDelta, ChatFormat, ChatOutput
from engines.runtime.text import TextAssembler
from tests.engines.runtime.transcripts import FUNCTIONS, OPENED, TRANSCRIPTS, UNSPLIT, Call, Transcript

Message = tuple[str, str, tuple[Call, ...]]


def message_of(deltas: Iterable[ChatDelta]) -> Message:
    """What a client puts together. Ids must be new, and stand with the name in each call's first delta, and there alone."""
    content, reasoning, ids = "", "", set()
    calls: list[list[str]] = []
    for delta in deltas:
        content += delta.content
        reasoning += delta.reasoning
        for call in delta.tool_calls:
            if call.id is not None:
                assert call.name and call.index == len(calls) and call.id not in ids
                ids.add(call.id)
                calls.append([call.name, call.arguments])
            else:
                assert call.name is None and call.arguments and call.index == len(calls) - 1
                calls[-1][1] += call.arguments
    return content, reasoning, tuple((name, arguments) for name, arguments in calls)


def read(form: ChatFormat, pieces: Iterable[str]) -> Message:
    output = ChatOutput(form)
    return message_of([*map(output.feed, pieces), output.finish()])


def read_bytes(form: ChatFormat, pieces: Iterable[bytes]) -> Message:
    """As the engine does it: tokens are bytes, and may end inside of a character."""
    text, output, deltas = TextAssembler([]), ChatOutput(form), []
    for piece in pieces:
        if released := text.feed(piece).text:
            deltas.append(output.feed(released))
    deltas.append(output.feed(text.finish().text))
    return message_of([*deltas, output.finish()])


def pieces_of(text: str, size: int) -> list[str]:
    return [text[start : start + size] for start in range(0, len(text), size)]


every_transcript = pytest.mark.parametrize("transcript", TRANSCRIPTS.values(), ids=TRANSCRIPTS.keys())


@every_transcript
def test_a_transcript_means_its_message_however_it_comes(transcript: Transcript) -> None:
    expected = (transcript.content, transcript.reasoning, transcript.calls)
    form, text, raw = transcript.form, transcript.text, transcript.text.encode()
    assert read(form, [text]) == expected
    for size in (1, 2, 3, 5, 7, 11):
        assert read(form, pieces_of(text, size)) == expected
    assert read_bytes(form, [raw[at : at + 1] for at in range(len(raw))]) == expected
    for cut in range(len(text)):
        assert read(form, [text[:cut], "", text[cut:]]) == expected


@settings(deadline=None)
@given(st.sampled_from(list(TRANSCRIPTS.values())), st.data())
def test_any_split_of_any_transcript_gives_the_same_message(transcript: Transcript, data: st.DataObject) -> None:
    raw = transcript.text.encode()
    cuts = sorted(data.draw(st.lists(st.integers(0, len(raw)), max_size=12)))
    pieces = [raw[a:b] for a, b in zip([0, *cuts], [*cuts, len(raw)], strict=True)]
    assert read_bytes(transcript.form, pieces) == (transcript.content, transcript.reasoning, transcript.calls)


_FRAGMENTS = [
    "<think>", "</think>", "<tool_call>", "</tool_call>", "<function=weather>", "<function=x>", "</function>", "<parameter=city>",
    "<parameter=days>\n", "<parameter=place>", "</parameter>", "\n</parameter>\n", "</parameter></function></tool_call>",
    '<tool_call>{"name": "weather", "arguments": ', '{"name": "now", "arguments": ', '{"city": "', "{}", '"', "{", "}", "[",
    "\\", ",", "\n", " ", "a", "5", "<", "🦜",
]  # fmt: skip


@settings(deadline=None, max_examples=300)
@given(
    st.lists(st.sampled_from(_FRAGMENTS), max_size=14).map("".join),
    st.sampled_from([ChatFormat(FUNCTIONS, bare_functions=True), OPENED, UNSPLIT, ChatFormat(FUNCTIONS)]),
    st.data(),
)
def test_what_comes_out_of_any_jumble_does_not_depend_on_the_split(
    text: str, form: ChatFormat, data: st.DataObject
) -> None:
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=8)))
    pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    assert read(form, pieces) == read(form, [text])


@settings(deadline=None)
@given(st.text(max_size=200), st.booleans(), st.integers(1, 9))
def test_text_without_markers_is_the_content(text: str, has_tools: bool, size: int) -> None:
    form = ChatFormat(FUNCTIONS if has_tools else {}, bare_functions=True)
    text = text.replace("<", "‹")
    assert read(form, pieces_of(text, size)) == (text, "", ())


@settings(deadline=None)
@given(st.text(max_size=100), st.text(max_size=100), st.integers(1, 9))
def test_a_thought_and_an_answer_lose_nothing_but_whitespace(thought: str, answer: str, size: int) -> None:
    thought, answer = thought.replace("<", "‹"), answer.replace("<", "‹")
    text = f"<think>{thought}</think>{answer}"
    assert read(ChatFormat(), pieces_of(text, size)) == (answer.lstrip(), thought.strip(), ())
    assert read(UNSPLIT, pieces_of(text, size))[0] == text


@settings(deadline=None)
@given(st.text(max_size=100), st.integers(1, 9))
def test_any_string_comes_through_qwens_tags(value: str, size: int) -> None:
    value = value.replace("<", "‹")
    text = f"<tool_call>\n<function=weather>\n<parameter=city>\n{value}\n</parameter>\n</function>\n</tool_call>"
    ((name, arguments),) = read(OPENED, pieces_of("</think>" + text, size))[2]
    assert (name, json.loads(arguments)) == ("weather", {"city": value})


def test_content_is_passed_on_as_it_comes() -> None:
    output = ChatOutput(ChatFormat(FUNCTIONS))
    assert [output.feed(text).content for text in ("One", " two", " ", "<", "b> ", "three")] == [
        "One", " two", "", "", " <b>", " three",
    ]  # fmt: skip


def test_arguments_are_passed_on_as_they_come() -> None:
    output = ChatOutput(ChatFormat(FUNCTIONS))
    output.feed("<tool_call>\n<function=write_file>\n<parameter=text>\n")
    said = [output.feed(text) for text in ("def", " f():\n", "    ", "return 1\n", "</param", "eter>\n</function>")]
    arguments = [call.arguments for delta in said for call in delta.tool_calls]
    assert arguments == ["def", " f():", "\\n    ", "return 1", '"}']


def test_once_only_content_can_follow_the_output_says_so() -> None:
    output = ChatOutput()
    output.feed("<think>\nHm.")
    assert not output.plain
    assert output.feed("</think>\n\nYes").content == "Yes"
    assert output.plain
    assert not ChatOutput(ChatFormat(FUNCTIONS)).plain


@pytest.mark.parametrize(
    ("text", "raw_reason", "reason"),
    [
        ("Hello", "stop", "stop"),
        ("Hello", "length", "length"),
        ('<tool_call>{"name": "now"}</tool_call>', "stop", "tool_calls"),
        ('<tool_call>{"name": "weather", "arguments": {"ci', "length", "length"),
        ('<tool_call>{"name": "unknown"}</tool_call>', "stop", "stop"),
    ],
)
def test_the_finish_reason_tells_of_calls(text: str, raw_reason: str, reason: str) -> None:
    output = ChatOutput(ChatFormat(FUNCTIONS))
    output.feed(text)
    output.finish()
    assert output.finish_reason(raw_reason) == reason


@pytest.mark.parametrize(
    ("form", "text", "reasoning"),
    [
        (ChatFormat(), "no thought", ""),
        (ChatFormat(), "<think>ü\n</think>x", "<think>ü\n</think>"),
        (OPENED, "ü</think>\n\nx", "ü</think>"),
        (OPENED, "never closed", "never closed"),
        (UNSPLIT, "<think>ü</think>x", "<think>ü</think>"),
        (OPENED, 'then <tool_call>{"name": "now"}</tool_call>', "then "),
    ],
)
@pytest.mark.parametrize("size", [1, 4, 100])
def test_it_knows_how_much_of_the_text_was_reasoning(form: ChatFormat, text: str, reasoning: str, size: int) -> None:
    output = ChatOutput(form)
    for piece in pieces_of(text, size):
        output.feed(piece)
    output.finish()
    assert output.reasoning_bytes == len(reasoning.encode())


def test_there_are_enough_transcripts() -> None:
    assert len(TRANSCRIPTS) >= 60
