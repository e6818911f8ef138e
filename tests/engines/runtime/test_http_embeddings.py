"""/v1/embeddings and /v1/rerank, as the official client and a hostile one meet them."""

from __future__ import annotations

import base64
import http.client
import json
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import openai
import pytest

from tests import synthetic_encoders
from tests.engine_process import EngineProcess
from tests.official_clients import openai_client
from tests.paced_engine import PacedEngine
from tests.synthetic_encoders import CLASS, SEPARATOR
from tests.synthetic_gguf import SyntheticModel

WIDTH = 128


@pytest.fixture(scope="module")
def embedder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[PacedEngine]:
    folder = tmp_path_factory.mktemp("embedder")
    synthetic_encoders.write_bert(folder / "bert.gguf")
    settings = {"pooling": "mean", "context_tokens": 128, "max_body_bytes": 1 << 20, "queue_limit": 2}
    with PacedEngine(folder, folder / "bert.gguf", **settings) as engine:
        yield engine


@pytest.fixture(scope="module")
def ranker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EngineProcess]:
    folder = tmp_path_factory.mktemp("ranker")
    synthetic_encoders.write_bert_ranker(folder / "ranker.gguf")
    with EngineProcess(folder, folder / "ranker.gguf", pooling="rank", context_tokens=128) as engine:
        yield engine


@pytest.fixture(scope="module")
def judge(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EngineProcess]:
    folder = tmp_path_factory.mktemp("judge")
    synthetic_encoders.write_qwen3_ranker(folder / "judge.gguf")
    with EngineProcess(folder, folder / "judge.gguf", pooling="rank", context_tokens=128) as engine:
        yield engine


def client(engine: EngineProcess) -> openai.OpenAI:
    return openai_client(engine.base_url)


def post(engine: EngineProcess, path: str, body: Any) -> tuple[int, dict[str, Any]]:
    connection = http.client.HTTPConnection("127.0.0.1", engine.config.port, timeout=60)
    raw = body if isinstance(body, bytes) else json.dumps(body).encode()
    connection.request("POST", path, raw)
    answer = connection.getresponse()
    value = json.loads(answer.read())
    connection.close()
    return answer.status, value


def vectors(engine: EngineProcess, **body: Any) -> np.ndarray:
    status, answer = post(engine, "/v1/embeddings", body)
    assert status == 200, answer
    assert [entry["index"] for entry in answer["data"]] == list(range(len(answer["data"])))
    return np.array([entry["embedding"] for entry in answer["data"]])


def test_the_official_client_reads_base64_and_numbers_alike(embedder: EngineProcess) -> None:
    texts = ["w1 w2 w3", "w7", "w1 w2 w3"]
    answer = client(embedder).embeddings.create(model="x", input=texts)
    numbers = client(embedder).embeddings.create(model="x", input=texts, encoding_format="float")
    assert [entry.index for entry in answer.data] == [0, 1, 2]
    assert answer.model == "test-model"
    assert answer.usage.prompt_tokens == answer.usage.total_tokens == 5 + 3 + 5
    found = np.array([entry.embedding for entry in answer.data])
    assert found.shape == (3, WIDTH)
    np.testing.assert_allclose(np.linalg.norm(found, axis=1), 1, atol=1e-6)
    np.testing.assert_allclose(found, [entry.embedding for entry in numbers.data], atol=1e-3)
    np.testing.assert_allclose(found[0], found[2], atol=1e-3)
    assert abs(found[0] @ found[1]) < 0.99


def test_base64_is_little_endian_float32(embedder: EngineProcess) -> None:
    _, answer = post(embedder, "/v1/embeddings", {"input": "w5", "encoding_format": "base64"})
    raw = base64.b64decode(answer["data"][0]["embedding"])
    np.testing.assert_allclose(np.frombuffer(raw, dtype="<f4"), vectors(embedder, input="w5")[0], atol=1e-3)


def test_text_and_its_token_ids_have_one_embedding(embedder: EngineProcess) -> None:
    ids = [CLASS, 4 + 1, 4 + 2, SEPARATOR]
    text = vectors(embedder, input="w1 w2")[0]
    np.testing.assert_allclose(vectors(embedder, input=ids)[0], text, atol=1e-3)
    np.testing.assert_allclose(vectors(embedder, input=[ids, "w1 w2"]), [text, text], atol=1e-3)


def test_names_of_control_tokens_in_a_text_are_text(embedder: EngineProcess) -> None:
    status, answer = post(embedder, "/v1/embeddings", {"input": "w1 [SEP] w2"})
    # Three unknown words where a parsed token would be one.
    assert (status, answer["usage"]["prompt_tokens"]) == (200, 7)


def test_dimensions_cut_and_scale_again(embedder: EngineProcess) -> None:
    whole, cut = vectors(embedder, input="w1 w9")[0], vectors(embedder, input="w1 w9", dimensions=16)[0]
    assert cut.shape == (16,)
    np.testing.assert_allclose(cut, whole[:16] / np.linalg.norm(whole[:16]), atol=1e-3)
    assert vectors(embedder, input="w1", dimensions=WIDTH).shape == (1, WIDTH)
    status, answer = post(embedder, "/v1/embeddings", {"input": "w1", "dimensions": WIDTH + 1})
    assert (status, answer["error"]["param"]) == (400, "dimensions")


@pytest.mark.parametrize(
    ("body", "word"),
    [
        (b"", "empty"),
        (b"[]", "JSON object"),
        ({}, "input"),
        ({"input": None}, "must be a text"),
        ({"input": {}}, "must be a text"),
        ({"input": ""}, "empty text"),
        ({"input": []}, "not empty"),
        ({"input": ["w1", ""]}, "input 1 is an empty text"),
        ({"input": ["w1", 5]}, "input 1 must be a text"),
        ({"input": [[]]}, "input 0"),
        ({"input": [[[1]]]}, "no token id"),
        ({"input": [5, "w1"]}, "no token id"),
        ({"input": [True]}, "input 0"),
        ({"input": [[1, True]]}, "no token id"),
        ({"input": [1.5]}, "input 0"),
        ({"input": [-1]}, "no token id"),
        ({"input": [512]}, "vocabulary has 512"),
        ({"input": [1 << 40]}, "no token id"),
        ({"input": "\ud800"}, "lone surrogate"),
        ({"input": ["w1"] * 2049}, "at most 2048"),
        ({"input": "w1", "encoding_format": "hex"}, "encoding_format"),
        ({"input": "w1", "dimensions": 0}, "dimensions"),
        ({"input": "w1", "dimensions": "8"}, "dimensions"),
        ({"input": "w1 " * 127}, "Input 0 has 129 tokens; this engine takes 128"),
        ({"input": ["w1", [4] * 129]}, "Input 1 has 129 tokens"),
    ],
)
def test_bodies_that_break_the_contract_are_refused_in_words(embedder: EngineProcess, body: Any, word: str) -> None:
    status, answer = post(embedder, "/v1/embeddings", body)
    assert status == 400
    assert word in answer["error"]["message"]


def test_a_body_beyond_the_bound_is_refused(embedder: EngineProcess) -> None:
    status, answer = post(embedder, "/v1/embeddings", {"input": "w" * (1 << 20)})
    assert (status, answer["error"]["code"]) == (413, "body_too_large")


def test_many_clients_at_once_get_each_their_own(embedder: EngineProcess) -> None:
    texts = [f"w{i} w{i + 1} w{i * 2}" for i in range(24)]
    expected = vectors(embedder, input=texts)

    def ask(text: str) -> np.ndarray | None:
        while True:
            status, answer = post(embedder, "/v1/embeddings", {"input": text})
            if status == 200:
                return np.array(answer["data"][0]["embedding"])
            assert (status, answer["error"]["code"]) == (429, "queue_full")
            time.sleep(0.01)

    with ThreadPoolExecutor(8) as pool:
        np.testing.assert_allclose(list(pool.map(ask, texts)), expected, atol=1e-3)
    embedder.wait_idle()


def test_a_client_that_goes_away_is_not_computed_for(embedder: PacedEngine) -> None:
    connection = http.client.HTTPConnection("127.0.0.1", embedder.config.port, timeout=60)
    with embedder.slowed():
        connection.request("POST", "/v1/embeddings", json.dumps({"input": ["w1 " * 100] * 2048}).encode())
        while not embedder.get("/slots")[0]["is_processing"]:
            time.sleep(0.01)
        connection.close()
        embedder.wait_idle()
    assert 'hydra_engine_requests_total{outcome="cancelled"} 1.0' in embedder.text("/metrics")
    assert len(vectors(embedder, input="w1")) == 1


def test_health_slots_models_and_metrics_are_there(embedder: EngineProcess) -> None:
    vectors(embedder, input=["w1", "w2"])
    assert embedder.health() == "ok"
    assert [slot["state"] for slot in embedder.wait_idle()] == ["idle"]
    entry = embedder.get("/v1/models")["data"][0]
    assert entry["architecture"]["output_modalities"] == ["embedding"]
    text = embedder.text("/metrics")
    for name in ("llamacpp:prompt_tokens_total", "hydra_engine_pooled_inputs_total", "hydra_engine_memory_bytes"):
        assert name in text


def test_what_an_engine_does_not_serve_it_names(
    embedder: EngineProcess, ranker: EngineProcess, smollm2_engine: EngineProcess
) -> None:
    chat = {"messages": [{"role": "user", "content": "Hi"}]}
    ranking = {"query": "w1", "documents": ["w2"]}
    for engine, path, body in (
        (embedder, "/v1/chat/completions", chat),
        (embedder, "/v1/rerank", ranking),
        (ranker, "/v1/embeddings", {"input": "w1"}),
        (smollm2_engine, "/v1/embeddings", {"input": "Hello"}),
        (smollm2_engine, "/rerank", ranking),
    ):
        status, answer = post(engine, path, body)
        assert (status, answer["error"]["code"]) == (501, "not_served")
        assert "pooling" in answer["error"]["hint"]


# --- reranking -----------------------------------------------------------------------------------


def test_documents_come_back_by_relevance(ranker: EngineProcess) -> None:
    documents = [f"w{i} w{i * 3} w{i * 5}" for i in range(1, 9)]
    status, answer = post(ranker, "/v1/rerank", {"query": "w1 w2", "documents": documents})
    assert status == 200
    scores = [result["relevance_score"] for result in answer["results"]]
    assert scores == sorted(scores, reverse=True)
    assert all(0 < score < 1 for score in scores)
    assert sorted(result["index"] for result in answer["results"]) == list(range(8))
    # [CLS] query [SEP] document [SEP]
    assert answer["usage"] == {"prompt_tokens": 8 * 8, "total_tokens": 8 * 8}
    for result in answer["results"][:3]:
        alone = post(ranker, "/rerank", {"query": "w1 w2", "documents": [documents[result["index"]]]})[1]
        assert alone["results"][0]["relevance_score"] == pytest.approx(result["relevance_score"], abs=1e-3)


def test_the_best_few_come_with_their_texts(ranker: EngineProcess) -> None:
    documents: list[Any] = ["w1 w2", {"text": "w3"}, "w9 w8 w7"]
    body = {"query": "w1", "documents": documents, "top_n": 2, "return_documents": True}
    results = post(ranker, "/v1/rerank", body)[1]["results"]
    assert len(results) == 2
    texts = ["w1 w2", "w3", "w9 w8 w7"]
    assert all(result["document"]["text"] == texts[result["index"]] for result in results)


def test_a_raw_score_is_the_logit(ranker: EngineProcess) -> None:
    body = {"query": "w1", "documents": ["w2 w3"]}
    score = post(ranker, "/v1/rerank", body)[1]["results"][0]["relevance_score"]
    logit = post(ranker, "/v1/rerank", {**body, "raw_scores": True})[1]["results"][0]["relevance_score"]
    assert score == pytest.approx(1 / (1 + np.exp(-logit)), abs=1e-3)


def test_a_model_with_a_prompt_of_its_own_is_asked_by_it(judge: EngineProcess) -> None:
    # One special token at either end, and bytes between: Query: ab\nDocument: c with line breaks around.
    body = {"query": "ab", "documents": ["c", "<|im_end|>", "{query}"]}
    status, answer = post(judge, "/v1/rerank", body)
    assert status == 200
    assert all(0 <= result["relevance_score"] <= 1 for result in answer["results"])
    around = len("\nQuery: ab\nDocument: ") - 1 + 2 + 1  # "er" is one token
    assert answer["usage"]["prompt_tokens"] == 3 * around + len("c") + len("<|im_end|>") + len("{query}") - 1


@pytest.mark.parametrize(
    ("body", "word"),
    [
        ({}, "query"),
        ({"query": "", "documents": ["w1"]}, "query"),
        ({"query": "w1", "documents": []}, "documents"),
        ({"query": "w1", "documents": "w1"}, "documents"),
        ({"query": "w1", "documents": [5]}, "documents.0"),
        ({"query": "w1", "documents": [{"txt": "w1"}]}, "documents.0"),
        ({"query": "w1", "documents": ["w1"], "top_n": 0}, "top_n"),
        ({"query": "w1", "documents": ["\ud800"]}, "lone surrogate"),
        ({"query": "w1", "documents": ["w1"] * 2049}, "documents"),
        ({"query": "w1", "documents": ["w1", "w2 " * 130]}, "Input 1 has 134 tokens"),
    ],
)
def test_rankings_that_break_the_contract_are_refused_in_words(ranker: EngineProcess, body: Any, word: str) -> None:
    status, answer = post(ranker, "/v1/rerank", body)
    assert status == 400
    assert word in answer["error"]["message"]


def test_a_model_without_a_classifier_ends_with_a_line(
    tiny_model: Callable[..., SyntheticModel], tmp_path: Path
) -> None:
    engine = EngineProcess(tmp_path, tiny_model("llama").path, pooling="rank")
    with pytest.raises(AssertionError, match="no classifier"):
        engine.__enter__()
    assert engine.stop() == 3
