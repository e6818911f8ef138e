"""Text to tokens and back, templates without a generation, and what an engine tells about itself."""

from __future__ import annotations

from typing import Any

import openai
import pytest

from tests.engine_client import call, post
from tests.engine_process import EngineProcess
from tests.official_clients import openai_client
from tests.synthetic_vocabulary import FIRST_SPECIAL, IM_START


def test_text_becomes_tokens_and_comes_back(endpoint_engine: EngineProcess) -> None:
    text = "the häh 😀 <|im_start|>"
    tokens = post(endpoint_engine, "/tokenize", {"content": text}).value["tokens"]
    assert tokens[-1] == IM_START
    assert post(endpoint_engine, "/detokenize", {"tokens": tokens}).value == {"content": text}
    plain = post(endpoint_engine, "/tokenize", {"content": "<|im_start|>", "parse_special": False}).value["tokens"]
    assert max(plain) < FIRST_SPECIAL
    assert post(endpoint_engine, "/tokenize", {"content": ""}).value == {"tokens": []}


def test_pieces_are_text_or_bytes_of_a_split_character(endpoint_engine: EngineProcess) -> None:
    tokens = post(endpoint_engine, "/tokenize", {"content": "aä", "with_pieces": True}).value["tokens"]
    assert [token["piece"] for token in tokens] == ["a", [0xC3], [0xA4]]


def test_special_tokens_of_the_real_vocabulary_are_added_on_demand(smollm2_engine: EngineProcess) -> None:
    body = {"content": "Hello"}
    bare = post(smollm2_engine, "/tokenize", body).value["tokens"]
    added = post(smollm2_engine, "/tokenize", {**body, "add_special": True}).value["tokens"]
    assert added[-len(bare) :] == bare


def test_a_template_is_applied_without_a_generation(endpoint_engine: EngineProcess) -> None:
    answer = post(endpoint_engine, "/apply-template", {"messages": [{"role": "user", "content": "hi"}]})
    assert answer.value == {"prompt": "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"}


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/tokenize", {}, "content"),
        ("/tokenize", {"content": 5}, "content"),
        ("/tokenize", {"content": "\ud800"}, "content"),
        ("/detokenize", {"tokens": [1 << 30]}, "tokens"),
        ("/detokenize", {"tokens": [-1]}, "tokens.0"),
        ("/detokenize", {"tokens": "abc"}, "tokens"),
        ("/apply-template", {"messages": []}, "messages"),
    ],
)
def test_wrong_bodies_are_refused_by_name(
    endpoint_engine: EngineProcess, path: str, body: dict[str, Any], param: str
) -> None:
    answer = post(endpoint_engine, path, body)
    assert (answer.status, answer.value["error"]["param"]) == (400, param)


def test_props_have_llama_cpps_names_and_no_folder(endpoint_engine: EngineProcess) -> None:
    props = endpoint_engine.get("/props")
    assert props["model_path"] == endpoint_engine.config.model_path.rsplit("/", 1)[1]
    assert (props["total_slots"], props["bos_token"], props["eos_token"]) == (2, "<|endoftext|>", "<|im_end|>")
    assert props["default_generation_settings"]["n_ctx"] == 2048
    assert "{% for message in messages %}" in props["chat_template"]
    assert props["modalities"] == {"vision": False, "audio": False}


def test_one_model_is_told_by_its_name_and_no_other(endpoint_engine: EngineProcess) -> None:
    api = openai_client(endpoint_engine.base_url)
    assert api.models.retrieve("test-model").id == "test-model"
    with pytest.raises(openai.NotFoundError) as refusal:
        api.models.retrieve("org/other")
    assert refusal.value.code == "model_not_found"


def test_health_has_all_the_names_that_are_asked_for(endpoint_engine: EngineProcess) -> None:
    for path in ("/health", "/v1/health", "/healthz", "/readyz"):
        answer = call(endpoint_engine, "GET", path)
        assert (answer.status, answer.value) == (200, {"status": "ok"})
