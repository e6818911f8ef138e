"""The official clients against a running Hydra: every call they know, streamed and not, through site and engine."""

from __future__ import annotations

import http.client
import json
import time
from typing import Any

import anthropic
import openai
import pytest

from tests.e2e.test_api import HELLO, client, request, wait_idle
from tests.official_clients import anthropic_client
from tests.stack import Stack

MODEL = "smollm2-135m"
# Computed anew each time: after a reused prefix other batch shapes may decide a near tie.
GREEDY: dict[str, Any] = {"model": MODEL, "temperature": 0, "extra_body": {"cache_prompt": False}}


def post(stack: Stack, path: str, **body: Any) -> tuple[int, dict[str, Any]]:
    status, answer, _ = request(stack, "POST", path, json.dumps(body).encode())
    return status, json.loads(answer)


def test_completions_stream_and_not(stack: Stack) -> None:
    arguments: dict[str, Any] = {**GREEDY, "prompt": "The capital of France is", "max_tokens": 12}
    whole = client(stack).completions.create(**arguments)
    chunks = list(client(stack).completions.create(**arguments, stream=True))
    assert "".join(chunk.choices[0].text for chunk in chunks if chunk.choices) == whole.choices[0].text
    assert whole.choices[0].finish_reason in ("stop", "length")
    assert whole.usage is not None
    assert whole.usage.completion_tokens > 0


def test_responses_stream_and_not(stack: Stack) -> None:
    arguments: dict[str, Any] = {**GREEDY, "input": "Name a colour.", "max_output_tokens": 16}
    whole = client(stack).responses.create(**arguments)
    events = list(client(stack).responses.create(**arguments, stream=True))
    deltas = "".join(event.delta for event in events if event.type == "response.output_text.delta")
    assert deltas == whole.output_text != ""
    assert events[0].type == "response.created"
    assert events[-1].type in ("response.completed", "response.incomplete")
    assert [event.sequence_number for event in events] == list(range(len(events)))


def test_chat_with_logprobs_choices_and_a_stop(stack: Stack) -> None:
    answer = client(stack).chat.completions.create(
        model=MODEL, messages=HELLO, max_tokens=8, n=2, logprobs=True, top_logprobs=2, stop=["\n"], seed=7
    )
    assert [choice.index for choice in answer.choices] == [0, 1]
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.content
    assert len(logprobs.content[0].top_logprobs) == 2


def test_a_text_model_says_that_it_embeds_nothing(stack: Stack) -> None:
    with pytest.raises(openai.InternalServerError) as raised:
        client(stack).embeddings.create(model=MODEL, input="Hello")
    assert raised.value.status_code == 501
    assert post(stack, "/rerank", query="a", documents=["b"])[0] == 501


def test_what_a_model_is_good_for_is_listed(stack: Stack) -> None:
    model = client(stack).models.retrieve(MODEL).model_dump()
    assert model["capabilities"][0] == "completion"
    assert model["architecture"]["output_modalities"] == ["text"]


def test_text_and_tokens(stack: Stack) -> None:
    status, answer = post(stack, "/tokenize", content="Name a colour.")
    assert status == 200
    assert post(stack, "/detokenize", tokens=answer["tokens"]) == (200, {"content": "Name a colour."})
    status, answer = post(stack, "/apply-template", messages=HELLO)
    assert status == 200
    assert "Name a colour." in answer["prompt"]
    status, body, _ = request(stack, "GET", f"/props?model={MODEL}")
    assert (status, json.loads(body)["model_alias"]) == (200, MODEL)
    assert request(stack, "GET", "/props?model=unknown")[0] == 404


def test_messages_whole_streamed_and_counted(stack: Stack) -> None:
    talk = anthropic_client(stack.url)
    arguments: dict[str, Any] = {"model": MODEL, "messages": HELLO, "max_tokens": 16, "extra_body": {"temperature": 0}}
    counted = talk.messages.count_tokens(model=MODEL, messages=HELLO)
    whole = talk.messages.create(**arguments)
    assert whole.content[0].type == "text"
    usage = whole.usage
    assert usage.input_tokens + (usage.cache_read_input_tokens or 0) == counted.input_tokens
    with talk.messages.stream(**arguments) as stream:
        text = "".join(stream.text_stream)
        final = stream.get_final_message()
    assert text == final.content[0].text != ""
    assert final.stop_reason in ("end_turn", "max_tokens")
    # Anthropic's client keeps what it does not know: where the time went, of which the router learns as of other answers.
    assert whole.model_extra is not None
    assert whole.model_extra["timings"]["predicted_n"] == usage.output_tokens
    *_, delta, _ = list(talk.messages.create(**arguments, stream=True))
    assert (delta.type, delta.usage.output_tokens) == ("message_delta", delta.model_extra["timings"]["predicted_n"])
    answer = talk.messages.with_raw_response.create(**arguments)
    session = answer.headers["X-Hydra-Session"]
    for _ in range(600):
        turn = json.loads(request(stack, "GET", f"/v1/sessions/{session}")[1])["last_turns"][0]
        if turn["state"] == "done":
            break
        time.sleep(0.1)
    assert set(turn["explanation"]["came"]) >= {"queue_s", "prefill_s", "decode_s"}
    with pytest.raises(anthropic.NotFoundError) as raised:
        talk.messages.create(**{**arguments, "model": "unknown"})
    assert raised.value.body["error"]["type"] == "not_found_error"


def test_messages_refuse_in_anthropics_shape(stack: Stack) -> None:
    headers = {"x-api-key": "sk-hydra-wrong", "Content-Type": "application/json"}
    status, body, _ = request(stack, "POST", "/v1/messages", b"{}", headers)
    assert (status, json.loads(body)["error"]["type"]) == (401, "authentication_error")
    for raw in (b"{", b"{}", b'{"messages":[],"max_tokens":1}'):
        status, body, _ = request(stack, "POST", "/v1/messages", raw)
        values = json.loads(body)
        assert (status, values["type"], values["error"]["type"]) == (400, "error", "invalid_request_error")
    status, body, _ = request(stack, "POST", "/v1/messages", b" " * 40_000_000)
    assert (status, json.loads(body)["error"]["type"]) == (413, "request_too_large")


def without_pings(raw: bytes) -> list[bytes]:
    return [event for event in raw.split(b"\n\n") if event and not event.startswith(b":")]


def begin_and_leave(
    stack: Stack, path: str, body: dict[str, Any], events: int, conversation: str = ""
) -> tuple[str, list[bytes]]:
    """Sends a resumable request, reads some events and closes the connection. Returns the request's id and the events."""
    connection = http.client.HTTPConnection("127.0.0.1", stack.port, timeout=60)
    headers = {"X-Hydra-Resumable": "1", "X-Conversation-Id": conversation}
    connection.request("POST", path, json.dumps(body), headers)
    answer = connection.getresponse()
    assert answer.status == 200, answer.read()
    received: list[bytes] = []
    event = b""
    while len(received) < events:
        line = answer.readline()
        assert line, received
        if line != b"\n":
            event += line
        elif not event.startswith(b":"):
            received.append(event.removesuffix(b"\n"))
            event = b""
        else:
            event = b""
    connection.close()
    answer.close()
    return answer.headers["X-Request-Id"], received


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", {"messages": HELLO, "max_tokens": 48, "ignore_eos": True}),
        ("/v1/completions", {"prompt": "One, two,", "max_tokens": 48, "ignore_eos": True}),
        ("/v1/responses", {"input": "Tell a story.", "max_output_tokens": 48}),
        ("/v1/messages", {"messages": HELLO, "max_tokens": 48}),
    ],
)
def test_a_cut_stream_is_resumed_without_a_loss_or_a_repeat(stack: Stack, path: str, body: dict[str, Any]) -> None:
    name, first = begin_and_leave(stack, path, {**body, "stream": True}, events=4)
    _, rest, _ = request(stack, "GET", f"/v1/stream/{name}?from=4")
    _, whole, _ = request(stack, "GET", f"/v1/stream/{name}")
    assert first + without_pings(rest) == without_pings(whole)
    assert len(without_pings(whole)) > 8
    wait_idle(stack)


def test_a_stopped_stream_frees_its_slot(stack: Stack) -> None:
    body = {"messages": HELLO, "max_tokens": 1800, "ignore_eos": True, "stream": True}
    begin_and_leave(stack, "/v1/chat/completions", body, events=2, conversation="stopped")
    status, listed, _ = request(stack, "GET", "/v1/streams?conversation_id=stopped")
    assert (status, json.loads(listed)["data"][0]["status"]) == (200, "running")
    status, stopped, _ = request(stack, "DELETE", "/v1/stream/stopped")
    assert (status, json.loads(stopped)["status"]) == (200, "stopped")
    wait_idle(stack)


def test_a_session_that_says_that_it_ends_is_parked_by_a_worker(stack: Stack) -> None:
    raw = json.dumps({"model": MODEL, "messages": HELLO, "max_tokens": 8}).encode()
    headers = {"X-Session-Id": "ending", "Content-Type": "application/json"}
    _, _, told = request(stack, "POST", "/v1/chat/completions", raw, headers)
    session = told["X-Hydra-Session"]
    assert _state_of(stack, session, "warm") == "warm"
    final = {**headers, "X-Dynamo-Session-Final": "true"}
    assert request(stack, "POST", "/v1/chat/completions", raw, final)[0] == 200
    assert _state_of(stack, session, "parked") == "parked"


def _state_of(stack: Stack, session: str, wanted: str) -> str:
    """Once it is the wanted one, or after a while."""
    for _ in range(600):
        status, answer, _ = request(stack, "GET", f"/v1/sessions/{session}")
        state = str(json.loads(answer).get("state"))
        if status == 200 and state == wanted:
            break
        time.sleep(0.1)
    return state
