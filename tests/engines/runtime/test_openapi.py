"""The engine's OpenAPI document: it names every route, and whatever it allows is answered as it says."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from schemathesis.checks import not_a_server_error
from schemathesis.generation import GenerationMode
from schemathesis.specs.openapi.checks import content_type_conformance, status_code_conformance

from tests.engine_client import call
from tests.engine_process import EngineProcess
from tests.engines.store.store_process import store_on_tmpfs
from tests.synthetic_gguf import SyntheticModel

# 501 is their answer: they are other engines' paths.
NOT_SERVED = ("/v1/embeddings", "/v1/rerank", "/rerank")
CHECKS = [not_a_server_error, status_code_conformance, content_type_conformance]


@pytest.fixture(scope="module")
def engine(tie_free_model: SyntheticModel, tmp_path_factory: pytest.TempPathFactory) -> Iterator[EngineProcess]:
    folder = tmp_path_factory.mktemp("described")
    settings: dict[str, Any] = {"slots": 2, "context_tokens": 512, "default_max_tokens": 2}
    settings |= {"slot_save_path": str(folder / "slots")}
    with store_on_tmpfs(folder) as store:
        settings["store_port"] = store.config.port
        with EngineProcess(folder, tie_free_model.path, **settings) as running:
            yield running


def test_the_document_names_every_route_and_its_models(engine: EngineProcess) -> None:
    described = call(engine, "GET", "/openapi.json").value
    assert described["openapi"].startswith("3.1")
    paths = described["paths"]
    for path in ("/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages", "/slots/{id}"):
        assert "requestBody" in paths[path]["post"]
    for path in ("/health", "/metrics", "/props", "/v1/models/{model}", "/openapi.json"):
        assert "get" in paths[path]
    prompt = described["components"]["schemas"]["CompletionBody"]["properties"]
    assert {"prompt", "suffix", "temperature", "stop", "json_schema"} <= set(prompt)
    assert "messages" not in prompt
    references = {part.split('"')[0] for part in json.dumps(described).split("#/components/schemas/")[1:]}
    assert references <= set(described["components"]["schemas"])


def answered_as_described(engine: EngineProcess, examples: int) -> None:
    """Sends sound and unsound requests of every operation. Nothing may fail, and no slot may stay busy."""
    schema = schemathesis.openapi.from_url(engine.base_url + "/openapi.json")
    served = [operation for result in schema.get_all_operations() if (operation := result.ok()).path not in NOT_SERVED]
    assert len(served) > 15
    for operation in served:
        # Only a JSON body has a schema that much can break.
        unsound = [GenerationMode.NEGATIVE] if any("json" in body.media_type for body in operation.body) else []
        for mode in [GenerationMode.POSITIVE, *unsound]:

            @settings(
                max_examples=examples,
                deadline=None,
                derandomize=True,
                database=None,
                suppress_health_check=list(HealthCheck),
            )
            @given(case=operation.as_strategy(generation_mode=mode))
            def check(case: Any) -> None:
                case.call_and_validate(checks=CHECKS, timeout=60)

            check()
    engine.wait_idle()
    assert engine.process.poll() is None


def test_whatever_the_document_allows_is_answered_as_it_says(engine: EngineProcess) -> None:
    answered_as_described(engine, 3)


@pytest.mark.soak
@pytest.mark.timeout(1200)
def test_many_requests_are_answered_as_the_document_says(engine: EngineProcess) -> None:
    answered_as_described(engine, 60)
