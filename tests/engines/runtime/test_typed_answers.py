"""The typed dialects: what a model wrote as Anthropic's blocks and OpenAI's items, streamed and whole alike."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import anthropic
import pytest

from engines.api_responses import ResponsesRequest
from engines.errors import DecodeFailed
from engines.runtime.generation import Generation, Piece
from engines.runtime.llama import Vocabulary
from engines.runtime.messages_answer import MessagesAnswer
from engines.runtime.responses_answer import ResponsesAnswer
from tests.engine_client import events
from tests.engines.runtime.test_chat_answers import OneAnswer, generated
from tests.engines.runtime.transcripts import TRANSCRIPTS, Transcript

ASKED = ResponsesRequest(input="x")
each_transcript = pytest.mark.parametrize("transcript", TRANSCRIPTS.values(), ids=TRANSCRIPTS.keys())
# A thought, text and calls; calls alone; nothing but text.
TELLING = ("Hermes: thought, text, call", "Hermes: three calls without whitespace", "content: many scripts")


def frames_of(answer: MessagesAnswer | ResponsesAnswer, made: tuple[Generation, list[Piece]]) -> str:
    generation, pieces = made
    frames = [answer.opening([generation])]
    for piece in pieces:
        frames += answer.frames(piece, generation)
    frames.append(answer.closing([piece.stats for piece in pieces if piece.stats]))
    return b"".join(frames).decode()


def messages_answer(vocabulary: Vocabulary, transcript: Transcript) -> MessagesAnswer:
    return MessagesAnswer("id", "tiny", vocabulary, transcript.form)


def responses_answer(
    vocabulary: Vocabulary, transcript: Transcript, asked: ResponsesRequest = ASKED
) -> ResponsesAnswer:
    return ResponsesAnswer("id", "tiny", vocabulary, asked, transcript.form)


def of_blocks(blocks: list[dict[str, Any]]) -> tuple[str, str, list[tuple[str, Any]]]:
    return (
        "".join(block["text"] for block in blocks if block["type"] == "text"),
        "".join(block["thinking"] for block in blocks if block["type"] == "thinking"),
        [(block["name"], block["input"]) for block in blocks if block["type"] == "tool_use"],
    )


def of_items(items: list[dict[str, Any]]) -> tuple[str, str, list[tuple[str, str]]]:
    return (
        "".join(part["text"] for item in items if item["type"] == "message" for part in item["content"]),
        "".join(part["text"] for item in items if item["type"] == "reasoning" for part in item["content"]),
        [(item["name"], item["arguments"]) for item in items if item["type"] == "function_call"],
    )


def built_blocks(text: str) -> list[dict[str, Any]]:
    """The blocks that a client puts together from the events; checks that each is opened, written and closed in turn."""
    blocks: list[dict[str, Any]] = []
    written: list[str] = []
    open_index = None
    for name, data in events(text):
        if name == "content_block_start":
            assert (open_index, data["index"]) == (None, len(blocks))
            open_index = data["index"]
            blocks.append(data["content_block"])
            written.append("")
        elif name == "content_block_delta":
            assert data["index"] == open_index
            written[-1] += next(
                data["delta"][key] for key in ("text", "thinking", "partial_json") if key in data["delta"]
            )
        elif name == "content_block_stop":
            assert data["index"] == open_index
            open_index = None
    assert open_index is None
    for block, said in zip(blocks, written, strict=True):
        key = {"text": "text", "thinking": "thinking", "tool_use": "input"}[block["type"]]
        block[key] = as_input(said) if key == "input" else said
    return blocks


def as_input(text: str) -> Any:
    """Arguments as the answer hands them over: text that is no object stands under a name."""
    try:
        value = json.loads(text or "{}")
    except ValueError:
        value = text
    return value if isinstance(value, dict) else {"arguments": value}


@each_transcript
def test_blocks_say_what_transcripts_mean_streamed_and_whole(
    tiny_vocabulary: Vocabulary, transcript: Transcript
) -> None:
    made = generated(tiny_vocabulary, transcript.text)
    message = messages_answer(tiny_vocabulary, transcript).whole(made[1], made[0])
    calls = [(name, as_input(arguments)) for name, arguments in transcript.calls]
    assert of_blocks(message["content"]) == (transcript.content, transcript.reasoning, calls)
    streamed = built_blocks(frames_of(messages_answer(tiny_vocabulary, transcript), made))
    for block in [*streamed, *message["content"]]:
        block.pop("id", None)
    assert streamed == message["content"]


@each_transcript
def test_items_say_what_transcripts_mean_streamed_and_whole(
    tiny_vocabulary: Vocabulary, transcript: Transcript
) -> None:
    made = generated(tiny_vocabulary, transcript.text)
    response = responses_answer(tiny_vocabulary, transcript).whole(made[1], made[0])
    assert of_items(response["output"]) == (transcript.content, transcript.reasoning, list(transcript.calls))
    frames = events(frames_of(responses_answer(tiny_vocabulary, transcript), made))
    assert [data["sequence_number"] for _, data in frames] == list(range(len(frames)))
    items = [data["item"] for name, data in frames if name == "response.output_item.done"]
    assert items == frames[-1][1]["response"]["output"]
    assert of_items(items) == of_items(response["output"])
    for index, item in enumerate(items):
        said = "".join(
            data["delta"] for name, data in frames if name.endswith(".delta") and data["output_index"] == index
        )
        assert said == (item["arguments"] if item["type"] == "function_call" else item["content"][0]["text"])
    assert {item["status"] for item in items} <= {"completed"}


@pytest.mark.parametrize("name", TELLING)
def test_anthropics_client_builds_the_same_message_from_both(tiny_vocabulary: Vocabulary, name: str) -> None:
    transcript = TRANSCRIPTS[name]
    made = generated(tiny_vocabulary, transcript.text)
    asked: dict[str, Any] = {"model": "x", "max_tokens": 9, "messages": [{"role": "user", "content": "x"}]}
    body = json.dumps(messages_answer(tiny_vocabulary, transcript).whole(made[1], made[0])).encode()
    with OneAnswer("application/json", body) as server, _anthropic(server) as client:
        whole = client.messages.create(**asked)
    text = frames_of(messages_answer(tiny_vocabulary, transcript), made).encode()
    with (
        OneAnswer("text/event-stream", text) as server,
        _anthropic(server) as client,
        client.messages.stream(**asked) as stream,
    ):
        built = stream.get_final_message()
    for message in (whole, built):
        blocks = [block.model_dump() for block in message.content]
        calls = [(called, json.loads(arguments)) for called, arguments in transcript.calls]
        assert of_blocks(blocks) == (transcript.content, transcript.reasoning, calls)
        assert message.stop_reason == ("tool_use" if transcript.calls else "end_turn")
    assert built.usage.output_tokens == whole.usage.output_tokens
    assert whole.usage.output_tokens_details is not None
    assert (whole.usage.output_tokens_details.thinking_tokens > 0) == bool(transcript.reasoning)


def _anthropic(server: Any) -> anthropic.Anthropic:
    return anthropic.Anthropic(base_url=str(server.base_url).removesuffix("v1/"), api_key="unused", max_retries=0)


@pytest.mark.parametrize("name", TELLING)
def test_openais_client_builds_the_same_response_from_both(tiny_vocabulary: Vocabulary, name: str) -> None:
    transcript = TRANSCRIPTS[name]
    made = generated(tiny_vocabulary, transcript.text)
    body = json.dumps(responses_answer(tiny_vocabulary, transcript).whole(made[1], made[0])).encode()
    with OneAnswer("application/json", body) as client:
        whole = client.responses.create(model="x", input="x")
    text = frames_of(responses_answer(tiny_vocabulary, transcript), made).encode()
    with (
        OneAnswer("text/event-stream", text) as client,
        client.responses.stream(model="x", input="x") as stream,
    ):
        built = stream.get_final_response()
    for response in (whole, built):
        items = [item.model_dump() for item in response.output]
        assert of_items(items) == (transcript.content, transcript.reasoning, list(transcript.calls))
        assert response.status == "completed"
    assert built.usage == whole.usage
    assert whole.usage is not None
    assert (whole.usage.output_tokens_details.reasoning_tokens > 0) == bool(transcript.reasoning)


def test_reasoning_leaves_as_a_summary_where_that_is_asked_for(tiny_vocabulary: Vocabulary) -> None:
    transcript = TRANSCRIPTS["reasoning: a thought"]
    asked = ResponsesRequest.model_validate({"input": "x", "reasoning": {"summary": "auto"}})
    made = generated(tiny_vocabulary, transcript.text)
    frames = events(frames_of(responses_answer(tiny_vocabulary, transcript, asked), made))
    deltas = [data for name, data in frames if name == "response.reasoning_summary_text.delta"]
    assert "".join(data["delta"] for data in deltas) == transcript.reasoning
    assert {data["summary_index"] for data in deltas} == {0}
    names = [name for name, _ in frames]
    assert "response.reasoning_summary_part.added" in names
    assert "response.reasoning_summary_part.done" in names
    item = frames[-1][1]["response"]["output"][0]
    assert (item["summary"], item["content"]) == ([{"type": "summary_text", "text": transcript.reasoning}], [])


def test_an_error_in_the_middle_ends_each_stream_in_its_own_way(tiny_vocabulary: Vocabulary) -> None:
    transcript = TRANSCRIPTS["content: many scripts"]
    generation, pieces = generated(tiny_vocabulary, transcript.text)
    broken = [pieces[0], Piece(error=DecodeFailed("No more."), stats=pieces[-1].stats)]
    failed = [
        frame for piece in broken for frame in responses_answer(tiny_vocabulary, transcript).frames(piece, generation)
    ][-1]
    ((name, data),) = events(failed.decode())
    assert (name, data["response"]["status"], data["response"]["error"]["message"]) == (
        "response.failed",
        "failed",
        "No more.",
    )
    failed = [
        frame for piece in broken for frame in messages_answer(tiny_vocabulary, transcript).frames(piece, generation)
    ][-1]
    ((name, data),) = events(failed.decode())
    assert (name, data["error"]["type"], data["error"]["message"]) == ("error", "api_error", "No more.")


@each_transcript
def test_an_answer_that_comes_from_elsewhere_goes_on_as_if_it_had_been_written_here(
    tiny_vocabulary: Vocabulary, transcript: Transcript
) -> None:
    """Wherever it was cut: what was passed over counts, and is in the whole that its end tells."""
    generation, pieces = generated(tiny_vocabulary, transcript.text)
    transcript = replace(transcript, form=replace(transcript.form, call_seed="the same ids"))
    for make in (messages_answer, responses_answer):
        here = make(tiny_vocabulary, transcript)
        here.opening([generation])
        each = [untimed(here.frames(piece, generation)) for piece in pieces]
        for cut in range(0, len(pieces), max(1, len(pieces) // 8)):
            there = make(tiny_vocabulary, transcript)
            there.opening([generation])
            for piece in pieces[:cut]:
                there.passed(piece, generation)
            assert [untimed(there.frames(piece, generation)) for piece in pieces[cut:]] == each[cut:], cut


def untimed(frames: list[bytes]) -> list[tuple[str, Any]]:
    """The events but for the moments at which a response began and ended."""
    found = events(b"".join(frames).decode())
    for _, data in found:
        for moment in ("created_at", "completed_at"):
            data.get("response", {}).pop(moment, None)
    return found
