"""Streams that would go on at an engine with a shorter context: they are not cut there, unless there is nobody else."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.engine_client import Answer
from tests.engine_process import EngineProcess
from tests.engines.runtime.test_continue import CHAT, COMPLETIONS, GREEDY, SAY, Pair, Stream, began, continued, timeless
from tests.synthetic_gguf import SyntheticModel

LONG, SHORT = 512, 128
BODY = {**SAY, **GREEDY, "ignore_eos": True, "stream_options": {"include_usage": True}}
MAY_CUT = {"X-Hydra-May-Cut": "1"}


@pytest.fixture(scope="module")
def pair(tiny_model: Callable[..., SyntheticModel], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    """One with a long context, and one with a short one that ends answers early by itself."""
    folder, model = tmp_path_factory.mktemp("contexts"), tiny_model("llama", tie_free=True)
    long = EngineProcess(folder, model.path, slots=2, context_tokens=LONG)
    short = EngineProcess(folder, model.path, slots=2, context_tokens=SHORT, default_max_tokens=8)
    with long as one, short as other:
        yield one, other


def journal_behind(stream: Stream, pieces: int, opening: int = 1) -> tuple[int, str]:
    """The journal as it may have stood behind so many pieces of text, each an event, and the events of before."""
    head, *lines = stream.journals[-1][1].splitlines()
    entries = [entry for line in lines for entry in json.loads(line)]
    first = [entry for entry in entries if len(entry) == 4 and "most" in entry[3]]
    written = [entry for entry in entries if entry not in first][:pieces]
    assert all(entry[1] for entry in written)
    return opening + pieces, f"{head}\n{json.dumps(first + written)}\n"


def usage_of(events: list[str]) -> dict[str, int]:
    usage: dict[str, int] = json.loads(events[-2].removeprefix("data: "))["usage"]
    return usage


def reason_of(events: list[str]) -> Any:
    return json.loads(events[-3].removeprefix("data: "))["choices"][0]["finish_reason"]


def refused(answer: Answer) -> tuple[int, str]:
    return answer.status, answer.value["error"]["code"]


@pytest.mark.parametrize("asked", [{"max_tokens": 200}, {}])
def test_an_answer_that_would_be_cut_is_refused(pair: Pair, asked: dict[str, int]) -> None:
    whole = began(pair[0], CHAT, {**BODY, **asked})
    for pieces in (2, 20, 190):
        _, journal = journal_behind(whole, pieces)
        answer = continued(pair[1], CHAT, {**BODY, **asked}, journal)
        assert refused(answer) == (422, "context_too_short")
        assert answer.value["error"]["hint"]
    pair[1].wait_idle()


def test_an_answer_that_fits_goes_on_as_long_as_was_granted(pair: Pair) -> None:
    """The other engine's own bound is for requests that begin there."""
    body = {**BODY, "max_tokens": 30}
    whole = began(pair[0], CHAT, body)
    written, journal = journal_behind(whole, 12)
    rest = continued(pair[1], CHAT, body, journal)
    assert timeless(Stream.of(rest.value).events) == timeless(whole.events[written:])
    # And one that began there under its bound is not longer elsewhere.
    bounded = began(pair[1], CHAT, BODY)
    written, journal = journal_behind(bounded, 4)
    assert timeless(Stream.of(continued(pair[0], CHAT, BODY, journal).value).events) == timeless(
        bounded.events[written:]
    )


def test_where_it_may_be_cut_it_goes_on_as_far_as_it_fits(pair: Pair) -> None:
    body = {**BODY, "max_tokens": 200}
    whole = began(pair[0], CHAT, body)
    prompt_tokens = usage_of(whole.events)["prompt_tokens"]
    written, journal = journal_behind(whole, 12)
    rest = Stream.of(continued(pair[1], CHAT, body, journal, **MAY_CUT).value).events
    assert (reason_of(rest), usage_of(rest)["total_tokens"]) == ("length", SHORT)
    said = SHORT - prompt_tokens
    assert timeless(rest[:-3])[: said - written] == timeless(whole.events[written:])[: said - written]


def test_what_does_not_fit_any_more_ends_where_the_client_stands(pair: Pair) -> None:
    body = {**BODY, "max_tokens": 200, "stop": ["zq", "!?"]}
    whole = began(pair[0], CHAT, body)
    written, journal = journal_behind(whole, 150)
    rest = Stream.of(continued(pair[1], CHAT, body, journal, **MAY_CUT).value).events
    assert reason_of(rest) == "length"
    # Nothing is drawn any more: all there is was written, or held back.
    assert usage_of(rest)["completion_tokens"] >= written - 1 > SHORT
    assert len(rest) <= 4
    pair[1].wait_idle()


def test_what_has_ended_is_written_again_anywhere(pair: Pair) -> None:
    body = {**BODY, "max_tokens": 200}
    whole = began(pair[0], CHAT, body)
    again = continued(pair[1], CHAT, body, whole.journals[-1][1], **{"X-Hydra-From-Event": "0"})
    assert timeless(Stream.of(again.value).events) == timeless(whole.events)


def test_choices_of_prompts_of_several_lengths_are_each_as_long_as_was_granted(pair: Pair) -> None:
    body = {"prompt": ["Once", "Once upon a time there was"], **GREEDY, "ignore_eos": True, "max_tokens": 40}
    whole = began(pair[0], COMPLETIONS, body)
    written, journal = journal_behind(whole, 20, opening=0)
    rest = Stream.of(continued(pair[1], COMPLETIONS, body, journal).value).events
    assert sorted(timeless(rest)) == sorted(timeless(whole.events[written:]))


def test_a_journal_that_does_not_say_how_long_it_may_get_is_held_against_what_there_is(pair: Pair) -> None:
    """One of an engine of before."""
    body = {**BODY, "max_tokens": 200}
    whole = began(pair[0], CHAT, body)

    def of_before(pieces: int) -> str:
        head, line = journal_behind(whole, pieces)[1].splitlines()
        entries = [entry for entry in json.loads(line) if len(entry) < 4 or "most" not in entry[3]]
        return f"{head}\n{json.dumps(entries)}\n"

    assert refused(continued(pair[1], CHAT, body, of_before(150))) == (422, "context_too_short")
    rest = Stream.of(continued(pair[1], CHAT, body, of_before(12)).value).events
    assert (reason_of(rest), usage_of(rest)["total_tokens"]) == ("length", SHORT)
