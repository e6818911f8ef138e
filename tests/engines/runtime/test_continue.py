"""Streams whose engine is lost: another engine writes them on from the journal that their site kept, to the byte."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest

from engines.runtime.generation import Piece
from engines.runtime.journal import Head, JournalWriter, begun, read_journal
from engines.runtime.llama import Vocabulary
from engines.runtime.replay import Room, replay
from tests.engine_client import Answer, post
from tests.engine_process import EngineProcess
from tests.engines.runtime.test_core import generation
from tests.synthetic_gguf import SyntheticModel

Pair = tuple[EngineProcess, EngineProcess]
CHAT, COMPLETIONS, RESPONSES, MESSAGES = "/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages"
ID = "11111111-2222-3333-4444-555555555555"
SAY = {"messages": [{"role": "user", "content": "Tell a story about a river."}]}
SCHEMA = {
    "type": "object",
    "properties": {"colour": {"type": "string", "maxLength": 12}, "count": {"type": "integer", "maximum": 99}},
    "required": ["colour", "count"],
}
FORM = {"type": "json_schema", "json_schema": {"name": "it", "schema": SCHEMA, "strict": True}}
TOOL = {"type": "function", "function": {"name": "paint", "parameters": SCHEMA}}
GREEDY = {"temperature": 0}
SAMPLED = {"temperature": 1.5, "top_k": 30, "seed": 11, "repeat_penalty": 1.2, "presence_penalty": 0.3}
# What is asked, where.
REQUESTS: dict[str, tuple[str, dict[str, Any]]] = {
    "greedy": (CHAT, {**SAY, **GREEDY, "ignore_eos": True, "stream_options": {"include_usage": True}}),
    "sampled": (CHAT, {**SAY, **SAMPLED, "ignore_eos": True}),
    "unseeded": (CHAT, {**SAY, "temperature": 2, "ignore_eos": True}),
    "two choices": (CHAT, {**SAY, **SAMPLED, "n": 2, "stream_options": {"include_usage": True}}),
    "probabilities": (CHAT, {**SAY, **GREEDY, "logprobs": True, "top_logprobs": 2, "ignore_eos": True}),
    "schema": (CHAT, {**SAY, **SAMPLED, "response_format": FORM, "max_tokens": 200}),
    "tool": (CHAT, {**SAY, **SAMPLED, "tools": [TOOL], "tool_choice": "required", "max_tokens": 200}),
    "completion": (COMPLETIONS, {"prompt": "Once", **SAMPLED, "echo": True, "stop": ["zq", "!?"], "ignore_eos": True}),
    "old probabilities": (COMPLETIONS, {"prompt": "Once", **GREEDY, "logprobs": 1, "ignore_eos": True}),
    "response": (RESPONSES, {"input": "Tell a story.", **GREEDY, "max_output_tokens": 30}),
    "message": (MESSAGES, {**SAY, **GREEDY, "max_tokens": 30}),
}


@dataclass(frozen=True)
class Stream:
    """A stream as its site has it: the client's events, and the journal as it stood behind so many of them."""

    events: list[str]
    journals: list[tuple[int, str]]

    @classmethod
    def of(cls, text: str) -> Stream:
        events: list[str] = []
        lines: list[str] = []
        journals = []
        for frame in text.split("\n\n"):
            name, _, data = frame.partition("\ndata: ")
            if name in ("event: hydra.begun", "event: hydra.mark"):
                lines.append(data)
                journals.append((len(events), "\n".join(lines) + "\n"))
            elif frame and not frame.startswith(":"):
                events.append(frame)
        return cls(events, journals)


@pytest.fixture(scope="module")
def pair(tiny_model: Callable[..., SyntheticModel], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    folder, model = tmp_path_factory.mktemp("continue"), tiny_model("llama", tie_free=True)
    settings = {"slots": 3, "default_max_tokens": 40}
    # The other one takes no larger requests than these: a journal is no part of that.
    bounded = EngineProcess(folder, model.path, max_body_bytes=1024, **settings)
    with EngineProcess(folder, model.path, **settings) as one, bounded as other:
        yield one, other


def began(engine: EngineProcess, path: str, body: dict[str, Any]) -> Stream:
    answer = post(engine, path, {**body, "stream": True}, {"X-Request-Id": ID, "X-Hydra-Journal": "1"})
    assert answer.status == 200, answer.value
    return Stream.of(answer.value)


def continued(engine: EngineProcess, path: str, body: dict[str, Any], journal: str, **more: str) -> Answer:
    raw = journal.encode() + json.dumps({**body, "stream": True}).encode()
    kept = {"X-Hydra-Journal": "1", "X-Hydra-Journal-Bytes": str(len(journal.encode())), "X-Hydra-Path": path}
    return post(engine, "/continue", raw, {"X-Request-Id": ID, "X-Hydra-Elapsed-S": "1.5", **kept, **more})


def timeless(events: list[str]) -> list[str]:
    """Events without what a clock says, and how much of a prompt was at hand."""
    numbers = r'"(\w+_ms|\w+_per_second|completed_at|cache_n|prompt_n|cached_tokens|draft_\w+)": ?[\d.a-z]+'
    # Said only where there was some of it.
    events = [re.sub(r', ?"(restore|prompt_wait)_ms": ?[\d.]+', "", event) for event in events]
    # Another batch's sums differ in their last digits.
    return [re.sub(r"(-\d+\.\d{3})\d+(e-\d+)?", r"\1", re.sub(numbers, r'"\1":0', event)) for event in events]


def by_choice(events: list[str]) -> list[str]:
    """What of a step's choices is written first is nobody's promise."""
    return sorted(timeless(events), key=lambda event: '"index":1' in event)


def cuts(stream: Stream, count: int) -> list[tuple[int, str]]:
    """Some of the places where the engine may die, the first and the last among them."""
    journals = stream.journals[1:]
    places = sorted({round(place * (len(journals) - 1) / (count - 1)) for place in range(count)})
    return [journals[place] for place in places]


@pytest.mark.parametrize("name", REQUESTS)
def test_a_stream_goes_on_at_another_engine_as_if_nothing_had_happened(pair: Pair, name: str) -> None:
    path, body = REQUESTS[name]
    whole = began(pair[0], path, body)
    assert len(whole.events) > 4
    for written, journal in cuts(whole, 4):
        rest = continued(pair[1], path, body, journal)
        assert rest.status == 200, rest.value
        stream = Stream.of(rest.value)
        assert by_choice(stream.events) == by_choice(whole.events[written:])
        # The next engine's journal goes on where the last one ended, for the one after it.
        both = journal + (stream.journals[-1][1] if stream.journals else "")
        assert Stream.of(continued(pair[0], path, body, both).value).events == []


@pytest.mark.parametrize("name", ["greedy", "response", "message"])
def test_a_stream_can_be_written_again_from_any_of_its_events_on(pair: Pair, name: str) -> None:
    path, body = REQUESTS[name]
    whole = began(pair[0], path, body)
    written, journal = cuts(whole, 3)[1]
    for start in (0, 1, written, written + 3):
        again = continued(pair[1], path, body, journal, **{"X-Hydra-From-Event": str(start)})
        assert timeless(Stream.of(again.value).events) == timeless(whole.events[start:])


def test_times_and_tokens_are_the_whole_answers(pair: Pair) -> None:
    path, body = REQUESTS["greedy"]
    whole = began(pair[0], path, body)
    _, journal = cuts(whole, 3)[1]
    rest = Stream.of(continued(pair[1], path, body, journal).value)
    ending, usage = (json.loads(event.removeprefix("data: ")) for event in rest.events[-3:-1])
    timings = ending["timings"]
    assert (timings["predicted_n"], usage["usage"]["completion_tokens"]) == (40, 40)
    # So long ago it came to the first engine.
    assert timings["queue_ms"] + timings["prompt_ms"] + timings["predicted_ms"] > 1500
    pair[1].wait_idle()


@pytest.mark.parametrize(
    ("journal", "param"),
    [
        ("", None),
        ("[]\n", None),
        ('{"seed":1,"created":1,"tokenizer":"","version":9}\n', None),
        ('{"seed":1,"created":1,"tokenizer":"TOKENIZER"}\n[[7,0,[1]]]\n', None),
        ('{"seed":1,"created":1,"tokenizer":"TOKENIZER"}\n[[0,0,[99999999]]]\n', None),
        ('{"seed":1,"created":1,"tokenizer":"TOKENIZER"}\n[[0,500,[5]]]\n', None),
        ('{"seed":1,"created":1,"tokenizer":"TOKENIZER"}\n[[0,0,[5],{"total":9}]]\n', None),
    ],
)
def test_what_is_no_journal_of_the_request_is_refused(pair: Pair, journal: str, param: str | None) -> None:
    path, body = REQUESTS["greedy"]
    tokenizer = json.loads(began(pair[0], path, {**body, "max_tokens": 1}).journals[0][1])["tokenizer"]
    answer = continued(pair[0], path, body, journal.replace("TOKENIZER", tokenizer))
    assert (answer.status, answer.value["error"]["code"]) == (400, "invalid_request")


def test_another_models_tokens_are_refused(pair: Pair) -> None:
    path, body = REQUESTS["greedy"]
    answer = continued(pair[0], path, body, '{"seed":1,"created":1,"tokenizer":"other"}\n')
    assert (answer.status, answer.value["error"]["code"]) == (422, "state_incompatible")


def test_what_was_drafted_and_waited_for_is_counted_on(tiny_vocabulary: Vocabulary) -> None:
    one = generation([1, 2], 9, drafts=3, drafted_tokens=7, accepted_tokens=5, restore_s=0.5, prompt_wait_s=0.25)
    one.started_at, one.first_token_at, one.cached_tokens = one.queued_at + 1, one.queued_at + 2, 2
    writer = JournalWriter([one])
    writer.note(Piece(token_ids=(5, 6)))
    frames = begun(Head(1, 1, "")) + writer.mark()
    lines = [frame.partition(b"\ndata: ")[2] for frame in frames.split(b"\n\n")]
    again = generation([1, 2], 9)
    replay(read_journal(b"\n".join(lines)), [again], tiny_vocabulary, 3.0, Room(512))
    assert (again.tokens, again.cached_tokens) == ([1, 2, 5, 6], 2)
    assert (again.drafts, again.drafted_tokens, again.accepted_tokens) == (3, 7, 5)
    assert (again.restore_s, again.prompt_wait_s) == (0.5, 0.25)
