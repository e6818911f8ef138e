"""The completion endpoint: prompts in four forms, echo, stops, legacy log probabilities, suffix, streams."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from tests.engine_client import events, post
from tests.engine_process import EngineProcess
from tests.official_clients import openai_client
from tests.synthetic_gguf import SyntheticModel
from tests.synthetic_vocabulary import FIRST_FILLER, NEWLINE

MARKERS = {name: FIRST_FILLER + index for index, name in enumerate(("pre", "suf", "mid", "sep"))}
GREEDY = {"temperature": 0, "max_tokens": 12}


def client(engine: EngineProcess) -> openai.OpenAI:
    return openai_client(engine.base_url)


def test_the_official_client_continues_a_text(endpoint_engine: EngineProcess, tie_free_model: SyntheticModel) -> None:
    answer = client(endpoint_engine).completions.create(model="x", prompt="go\n", **GREEDY)
    assert answer.object == "text_completion"
    assert answer.choices[0].text.encode() == tie_free_model.answer_bytes(12)
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage is not None
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (3, 12)


def test_a_stream_carries_the_same_text_and_ends_with_usage(
    endpoint_engine: EngineProcess, tie_free_model: SyntheticModel
) -> None:
    chunks = list(
        client(endpoint_engine).completions.create(
            model="x", prompt="go\n", stream=True, stream_options={"include_usage": True}, **GREEDY
        )
    )
    assert {chunk.object for chunk in chunks} == {"text_completion"}
    text = "".join(choice.text for chunk in chunks for choice in chunk.choices)
    assert text.encode() == tie_free_model.answer_bytes(12)
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == 12
    raw = post(endpoint_engine, "/completions", {"prompt": "go\n", "stream": True, **GREEDY}).value
    assert events(raw)[-1] == ("", "[DONE]")
    assert events(raw)[-2][1]["timings"]["predicted_n"] == 12


def test_several_prompts_in_text_or_tokens_have_n_choices_each(endpoint_engine: EngineProcess) -> None:
    texts, tokens = ["a\n", "bcd\n"], [list(b"a\n"), list(b"bcd\n")]
    by_text = post(endpoint_engine, "/v1/completions", {"prompt": texts, "n": 2, **GREEDY}).value
    by_token = post(endpoint_engine, "/v1/completions", {"prompt": tokens, "n": 2, **GREEDY}).value
    assert [choice["index"] for choice in by_text["choices"]] == [0, 1, 2, 3]
    assert [c["text"] for c in by_text["choices"]] == [c["text"] for c in by_token["choices"]]
    assert by_text["usage"]["prompt_tokens"] == by_token["usage"]["prompt_tokens"] == 6
    assert by_text["usage"]["completion_tokens"] == 48
    single = post(endpoint_engine, "/v1/completions", {"prompt": list(b"a\n"), **GREEDY}).value
    assert single["choices"][0]["text"] == by_text["choices"][0]["text"]


def test_echo_puts_the_prompt_first_also_in_a_stream(endpoint_engine: EngineProcess) -> None:
    for prompt in ("häh\n", list("häh\n".encode())):
        body = {"prompt": prompt, "echo": True, **GREEDY}
        whole = post(endpoint_engine, "/v1/completions", body).value["choices"][0]["text"]
        frames = events(post(endpoint_engine, "/v1/completions", {**body, "stream": True}).value)
        streamed = "".join(data["choices"][0]["text"] for _, data in frames[:-1])
        assert whole.startswith("häh\n")
        assert streamed == whole


def test_a_stop_string_ends_the_text(endpoint_engine: EngineProcess, tie_free_model: SyntheticModel) -> None:
    expected = tie_free_model.answer_bytes(12).decode()
    body = {"prompt": "go\n", "stop": expected[5:8], **GREEDY}
    choice = post(endpoint_engine, "/v1/completions", body).value["choices"][0]
    assert (choice["text"], choice["finish_reason"]) == (expected[:5], "stop")


def test_log_probabilities_come_in_the_legacy_form(endpoint_engine: EngineProcess) -> None:
    body = {"prompt": "go\n", "logprobs": 3, **GREEDY}
    choice = post(endpoint_engine, "/v1/completions", body).value["choices"][0]
    lists = choice["logprobs"]
    assert "".join(lists["tokens"]) == choice["text"]
    assert lists["text_offset"] == list(range(12))
    assert all(value <= 0 for value in lists["token_logprobs"])
    assert [len(top) for top in lists["top_logprobs"]] == [3] * 12
    chosen = zip(lists["tokens"], lists["top_logprobs"], strict=True)
    assert all(token in top for token, top in chosen)
    frames = events(post(endpoint_engine, "/v1/completions", {**body, "stream": True}).value)
    streamed = [data["choices"][0]["logprobs"]["text_offset"] for _, data in frames[:-1]]
    assert [offset for offsets in streamed for offset in offsets] == list(range(12))


@pytest.mark.parametrize(
    ("fields", "code", "param"),
    [
        ({}, "invalid_request", "prompt"),
        ({"prompt": ""}, "invalid_request", "prompt"),
        ({"prompt": []}, "invalid_request", "prompt"),
        ({"prompt": [1 << 20]}, "invalid_request", "prompt"),
        ({"prompt": [-1]}, "invalid_request", "prompt"),
        ({"prompt": ["a"] * 65}, "invalid_request", "prompt"),
        ({"prompt": ["a"] * 5, "n": 16}, "unsupported_parameter", "n"),
        ({"prompt": "a", "best_of": 2}, "unsupported_parameter", "best_of"),
        ({"prompt": "a", "echo": True, "logprobs": 1}, "unsupported_parameter", "echo"),
        ({"prompt": "a", "logprobs": 21}, "invalid_request", "logprobs"),
        ({"prompt": "a", "suffix": "b"}, "unsupported_parameter", "suffix"),
        ({"prompt": ["a", "b"], "suffix": "c"}, "invalid_request", "suffix"),
        ({"prompt": "a", "temperature": -1}, "invalid_request", "temperature"),
        ({"prompt": "word " * 2000}, "context_length_exceeded", "prompt"),
        ({"prompt": "x" * 500_000}, "context_length_exceeded", "prompt"),
    ],
)
def test_what_cannot_be_done_is_refused_by_name(
    endpoint_engine: EngineProcess, fields: dict[str, Any], code: str, param: str
) -> None:
    answer = post(endpoint_engine, "/v1/completions", fields)
    error = answer.value["error"]
    assert (answer.status, error["code"]) == (400, code)
    assert str(error["param"]).split(".")[0] == param


@pytest.fixture(scope="module")
def filling_engine(tie_free_model: SyntheticModel, tmp_path_factory: pytest.TempPathFactory) -> Iterator[EngineProcess]:
    """An engine whose vocabulary has the markers; fillers stand for them."""
    folder = tmp_path_factory.mktemp("filling")
    keys = {f"tokenizer.ggml.fim_{name}_token_id": token for name, token in MARKERS.items()}
    with_numbers(tie_free_model.path, folder / "fim.gguf", keys)
    with EngineProcess(folder, folder / "fim.gguf", context_tokens=512, slots=1) as engine:
        yield engine


def cached_of(engine: EngineProcess, tokens: list[int]) -> int:
    """How many of the tokens the last prompt began with: as many as are found in the cache."""
    answer = post(engine, "/v1/completions", {"prompt": [*tokens, NEWLINE], "max_tokens": 1}).value
    return int(answer["usage"]["prompt_tokens_details"]["cached_tokens"])


def test_a_suffix_is_filled_in_where_the_vocabulary_has_the_markers(filling_engine: EngineProcess) -> None:
    body = {"prompt": "ab", "suffix": "cd", "max_tokens": 1, "temperature": 0}
    assert post(filling_engine, "/v1/completions", body).value["usage"]["prompt_tokens"] == 2 + 2 + 3
    spelled = [MARKERS["pre"], *b"ab", MARKERS["suf"], *b"cd", MARKERS["mid"]]
    assert cached_of(filling_engine, spelled) == len(spelled)


def test_an_editor_gets_its_text_with_other_files_before_it(
    filling_engine: EngineProcess, endpoint_engine: EngineProcess
) -> None:
    files = [{"filename": "o.py", "text": "q"}]
    body = {"input_prefix": "a", "prompt": "b", "input_suffix": "cd", "input_extra": files, "n_predict": 5}
    whole = post(filling_engine, "/infill", {**body, "temperature": 0}).value
    assert (whole["stop"], whole["stop_type"], whole["tokens_predicted"]) == (True, "limit", 5)
    spelled = [MARKERS["sep"], *b"o.py\nq\n", MARKERS["pre"], *b"ab", MARKERS["suf"], *b"cd", MARKERS["mid"]]
    assert whole["tokens_evaluated"] == len(spelled)
    assert cached_of(filling_engine, spelled) == len(spelled)
    frames = [data for _, data in events(post(filling_engine, "/infill", {**body, "stream": True, "seed": 1}).value)]
    assert [frame["stop"] for frame in frames][-1] is True
    assert not any(frame["stop"] for frame in frames[:-1])
    many = [{"filename": f"{index}", "text": "word " * 100} for index in range(20)]
    cut = post(filling_engine, "/infill", {**body, "input_extra": many}).value
    assert cut["tokens_evaluated"] == 512 - 5
    refused = post(endpoint_engine, "/infill", body)
    assert (refused.status, refused.value["error"]["code"]) == (400, "unsupported_parameter")


def with_numbers(source: Path, target: Path, numbers: dict[str, int]) -> None:
    """Copies a GGUF with more uint32 keys. They are padded so that the tensors stay aligned."""
    raw = source.read_bytes()
    added = b"".join(_key(name) + struct.pack("<II", 4, value) for name, value in numbers.items())
    room = -(len(added) + len(_key("test.pad")) + 12) % 32
    added += _key("test.pad") + struct.pack("<IQ", 8, room) + b" " * room
    count = struct.unpack_from("<Q", raw, 16)[0] + len(numbers) + 1
    target.write_bytes(raw[:16] + struct.pack("<Q", count) + added + raw[24:])


def _key(name: str) -> bytes:
    return struct.pack("<Q", len(name)) + name.encode()
