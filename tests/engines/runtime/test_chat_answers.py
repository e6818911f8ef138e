"""Streamed and whole answers say the same, in the shapes that the official client puts together."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

import openai
import pytest

from engines.config import EngineConfig
from engines.runtime.answers import ChatAnswer, event
from engines.runtime.chat_output import ChatFormat
from engines.runtime.generation import Generation, Mailbox, Piece, Stats
from engines.runtime.llama import Llama, Vocabulary
from engines.runtime.sampler import SamplingParams, TokenLogprob
from tests.engines.runtime.transcripts import FUNCTIONS, OPENED, TRANSCRIPTS, Transcript
from tests.synthetic_gguf import SyntheticModel

PROMPT = [1, 2, 3]


@pytest.fixture(scope="module")
def vocabulary(tiny_model: Callable[..., SyntheticModel]) -> Iterator[Vocabulary]:
    llama = Llama(
        EngineConfig(str(tiny_model("llama").path), "tiny", slots=1, context_tokens=64), 1, lambda _share: None
    )
    yield llama.vocabulary
    llama.close()


def generated(
    vocabulary: Vocabulary, text: str, *, logprobs: bool = False, choice: int = 0
) -> tuple[Generation, list[Piece]]:
    """A generation that wrote `text`, and its pieces, one a token, as the core makes them."""
    generation = Generation("id", list(PROMPT), SamplingParams(), (), 1000, Mailbox(), 0.0, choice=choice)
    pieces = []
    for token in vocabulary.tokenize(text, add_special=False, parse_special=True):
        generation.tokens.append(token)
        entry = TokenLogprob(token, -0.5, ((token, -0.5),)) if logprobs else None
        released = generation.text.feed(vocabulary.pieces[token], entry)
        if released.text or released.logprobs:
            pieces.append(Piece(choice, released.text, released.logprobs))
    rest = generation.text.finish()
    stats = Stats(len(PROMPT), 1, generation.new_tokens, 0.0, 0.1, 0.2)
    pieces.append(Piece(choice, rest.text, rest.logprobs, finish_reason="stop", stats=stats))
    return generation, pieces


def streamed(vocabulary: Vocabulary, form: ChatFormat, *choices: tuple[Generation, list[Piece]]) -> list[bytes]:
    answer = ChatAnswer("id", "tiny", vocabulary, form)
    frames = [event(answer.opening(generation.choice)) for generation, _ in choices]
    for generation, pieces in choices:
        frames += [frame for piece in pieces for frame in answer.frames(piece, generation)]
    stats = [pieces[-1].stats for _, pieces in choices if pieces[-1].stats]
    return [*frames, event(answer.usage_chunk(stats)), b"data: [DONE]\n\n"]


def whole(
    vocabulary: Vocabulary, form: ChatFormat, *choices: tuple[Generation, list[Piece]], logprobs: bool = False
) -> Any:
    answer = ChatAnswer("id", "tiny", vocabulary, form)
    pieces = {generation.choice: list(parts) for generation, parts in choices}
    return answer.whole(pieces, [generation for generation, _ in choices], with_logprobs=logprobs)


class OneAnswer:
    """A server on loopback that answers every request with the same bytes."""

    def __init__(self, content_type: str, body: bytes) -> None:
        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                self.rfile.read(int(self.headers["Content-Length"]))
                self.send_response(200)
                self.send_header("Content-Type", content_type)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *_: object) -> None: ...

        self._server = HTTPServer(("127.0.0.1", 0), Handler)
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.01})

    def __enter__(self) -> openai.OpenAI:
        self._thread.start()
        self._client = openai.OpenAI(
            base_url=f"http://127.0.0.1:{self._server.server_port}/v1", api_key="unused", max_retries=0
        )
        return self._client

    def __exit__(self, *_: object) -> None:
        self._client.close()
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


def read_stream(frames: list[bytes]) -> Any:
    """What the official client's own accumulator makes of the frames."""
    with OneAnswer("text/event-stream", b"".join(frames)) as client:
        manager = client.chat.completions.stream(model="tiny", messages=[{"role": "user", "content": "x"}])
        with manager as stream:
            for _ in stream:
                """The accumulator works while it is iterated over."""
            return stream.get_final_completion()


def read_whole(body: dict[str, Any]) -> Any:
    with OneAnswer("application/json", json.dumps(body).encode()) as client:
        return client.chat.completions.create(model="tiny", messages=[{"role": "user", "content": "x"}])


def message_of(completion: Any, choice: int = 0) -> tuple[Any, ...]:
    message = completion.choices[choice].message
    calls = [(call.type, call.function.name, call.function.arguments) for call in message.tool_calls or ()]
    reasoning = getattr(message, "reasoning_content", None) or ""
    return message.content or "", reasoning, calls, completion.choices[choice].finish_reason


@pytest.mark.parametrize(
    "name",
    [
        "content: many scripts",
        "reasoning: a thought",
        "reasoning: the prompt opened it",
        "reasoning: a call ends a thought that never ends",
        "Hermes: thought, text, call",
        "Hermes: three calls without whitespace",
        "Hermes: arguments first",
        "broken: a broken call and a good one",
        "Qwen: several parameters",
        "Qwen: both formats",
    ],
)
def test_the_official_client_reads_streams_and_whole_answers_alike(vocabulary: Vocabulary, name: str) -> None:
    transcript = TRANSCRIPTS[name]
    made = generated(vocabulary, transcript.text)
    expected = (
        transcript.content,
        transcript.reasoning,
        [("function", *call) for call in transcript.calls],
        "tool_calls" if transcript.calls else "stop",
    )
    of_stream = read_stream(streamed(vocabulary, transcript.form, made))
    of_whole = read_whole(whole(vocabulary, transcript.form, made))
    assert message_of(of_stream) == message_of(of_whole) == expected
    assert of_stream.usage == of_whole.usage


def assembled(frames: list[bytes]) -> tuple[dict[str, Any], list[Any]]:
    """A message put together by hand, and the log probabilities in the order in which they came."""
    message: dict[str, Any] = {"content": "", "reasoning_content": "", "calls": {}, "reason": None}
    logprobs: list[Any] = []
    for frame in frames:
        if frame == b"data: [DONE]\n\n":
            continue
        for choice in json.loads(frame.removeprefix(b"data: "))["choices"]:
            delta = choice["delta"]
            message["content"] += delta.get("content") or ""
            message["reasoning_content"] += delta.get("reasoning_content", "")
            for call in delta.get("tool_calls", ()):
                entry = message["calls"].setdefault(call["index"], ["", ""])
                entry[0] += call["function"].get("name", "")
                entry[1] += call["function"]["arguments"]
            message["reason"] = choice["finish_reason"] or message["reason"]
            logprobs += (choice["logprobs"] or {}).get("content", [])
    return message, logprobs


@pytest.mark.parametrize("transcript", TRANSCRIPTS.values(), ids=TRANSCRIPTS.keys())
def test_streams_say_what_transcripts_mean_and_lose_no_log_probability(
    vocabulary: Vocabulary, transcript: Transcript
) -> None:
    made = generated(vocabulary, transcript.text, logprobs=True)
    message, logprobs = assembled(streamed(vocabulary, transcript.form, made))
    assert (message["content"], message["reasoning_content"]) == (transcript.content, transcript.reasoning)
    assert [tuple(call) for call in message["calls"].values()] == list(transcript.calls)
    body = whole(vocabulary, transcript.form, made, logprobs=True)
    assert logprobs == body["choices"][0]["logprobs"]["content"]
    assert b"".join(bytes(entry["bytes"]) for entry in logprobs).decode() == transcript.text
    answer = body["choices"][0]["message"]
    assert (answer["content"] or "", answer.get("reasoning_content", "")) == (transcript.content, transcript.reasoning)
    assert (answer["content"] is None) == (bool(transcript.calls) and not transcript.content)


def test_choices_are_read_apart_and_their_reasoning_tokens_add_up(vocabulary: Vocabulary) -> None:
    texts = ["ab</think>\n\nOne", 'c</think><tool_call>{"name": "now"}</tool_call>']
    choices = [generated(vocabulary, text, choice=index) for index, text in enumerate(texts)]
    thoughts = [text.partition("</think>")[0] + "</think>" for text in texts]
    expected = sum(len(vocabulary.tokenize(text, add_special=False, parse_special=True)) for text in thoughts)
    frames = streamed(vocabulary, OPENED, *choices)
    completion = read_stream(frames)
    assert message_of(completion, 0) == ("One", "ab", [], "stop")
    assert message_of(completion, 1) == ("", "c", [("function", "now", "{}")], "tool_calls")
    body = whole(vocabulary, OPENED, *choices)
    for counted in (
        completion.usage.completion_tokens_details.reasoning_tokens,
        body["usage"]["completion_tokens_details"]["reasoning_tokens"],
    ):
        assert counted == expected


def test_reasoning_leaves_by_the_other_name_where_that_is_asked_for(vocabulary: Vocabulary) -> None:
    form = ChatFormat(FUNCTIONS, opens_thought=True, reasoning_field="reasoning")
    made = generated(vocabulary, "ab</think>One")
    deltas = [
        choice["delta"]
        for frame in streamed(vocabulary, form, made)[:-1]
        for choice in json.loads(frame.removeprefix(b"data: "))["choices"]
    ]
    assert "".join(delta.get("reasoning", "") for delta in deltas) == "ab"
    assert not any("reasoning_content" in delta for delta in deltas)
    message = whole(vocabulary, form, made)["choices"][0]["message"]
    assert message == {"role": "assistant", "content": "One", "reasoning": "ab"}


def test_an_answer_of_plain_text_has_no_keys_beside_it(vocabulary: Vocabulary) -> None:
    body = whole(vocabulary, ChatFormat(), generated(vocabulary, "Hello"))
    assert body["choices"][0]["message"] == {"role": "assistant", "content": "Hello"}
    assert body["usage"]["completion_tokens_details"] == {"reasoning_tokens": 0}
