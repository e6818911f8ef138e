"""The API's own description."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import schemathesis
from django.test import AsyncClient
from django.urls import resolve
from hypothesis import HealthCheck, given
from hypothesis import settings as hypothesis_settings
from schemathesis.checks import not_a_server_error
from schemathesis.generation import GenerationMode
from schemathesis.specs.openapi.checks import content_type_conformance, status_code_conformance

from hydra_site.asgi import API_PATHS
from hydra_site.supervisor.home import Services
from sessions.api.openapi import document
from tests.engine_process import EngineProcess
from tests.rows import add_engine, add_model, set_ready
from tests.sessions.site_process import Site
from tests.synthetic_gguf import SyntheticModel

# Their answer is 501: the pool of this test has no model that embeds.
NOT_SERVED = ("/v1/embeddings", "/v1/rerank", "/rerank")
CHECKS = [not_a_server_error, status_code_conformance, content_type_conformance]

SERVED = {
    "/v1/chat/completions",
    "/v1/completions",
    "/v1/responses",
    "/v1/messages",
    "/v1/messages/count_tokens",
    "/v1/embeddings",
    "/v1/rerank",
    "/rerank",
    "/v1/models",
    "/v1/models/{name}",
    "/v1/sessions",
    "/v1/sessions/{session}",
    "/v1/sessions/{session}/park",
    "/v1/sessions/{session}/resume",
    "/v1/sessions/{session}/migrate",
    "/v1/streams",
    "/v1/stream/{name}",
    "/tokenize",
    "/detokenize",
    "/apply-template",
    "/props",
    "/openapi.json",
    "/v1/health",
    "/v1/hosts/join",
    "/health",
    "/healthz",
    "/readyz",
}


def operations() -> list[tuple[str, str, dict[str, Any]]]:
    return [(path, method, values) for path, item in document()["paths"].items() for method, values in item.items()]


def references(value: Any) -> set[str]:
    if isinstance(value, dict):
        own = {value["$ref"]} if isinstance(value.get("$ref"), str) else set()
        return own.union(*(references(item) for item in value.values()))
    return set().union(*(references(item) for item in value)) if isinstance(value, list) else set()


def test_everything_that_is_served_is_described() -> None:
    assert set(document()["paths"]) == SERVED


@pytest.mark.parametrize("path", ["/v1/models/a%0Ab", "/v1/stream/%0A", "/v1/\n", "/v1/a\u2028b"])
async def test_a_name_with_a_line_break_is_told_as_json_too(path: str, settings: Any) -> None:
    settings.ALLOWED_HOSTS = ["testserver"]
    answer = await AsyncClient().get(path)
    assert answer["Content-Type"] == "application/json"


@pytest.mark.parametrize("path", sorted(SERVED))
def test_every_path_leads_to_an_endpoint_of_the_api_and_past_the_middleware_of_pages(path: str) -> None:
    assert hasattr(resolve(path.replace("{name}", "x").replace("{session}", "x")).func, "operations")
    assert path.startswith("/v1/") or path in API_PATHS


def test_every_reference_is_defined() -> None:
    names = {f"#/components/schemas/{name}" for name in document()["components"]["schemas"]}
    assert references(document()) <= names


def test_every_operation_has_a_name_of_its_own_a_summary_and_its_failures() -> None:
    found = operations()
    assert len({values["operationId"] for _, _, values in found}) == len(found)
    for path, method, values in found:
        assert values["summary"], path
        assert {"200", "400", "500"} <= set(values["responses"]), path
        # Parking needs to know nothing but the session.
        assert ("requestBody" in values) == (method == "post" and not path.endswith("/park")), path


def test_bodies_are_those_that_are_judged() -> None:
    chat = document()["components"]["schemas"]["ChatRequest"]["properties"]
    assert {"messages", "model", "temperature", "max_tokens", "stream"} <= set(chat)
    error = document()["paths"]["/v1/messages"]["post"]["responses"]["400"]["content"]["application/json"]
    assert error["schema"] == {"$ref": "#/components/schemas/MessagesError"}


async def test_it_needs_no_key(settings: Any) -> None:
    settings.ALLOWED_HOSTS = ["testserver"]
    answer = await AsyncClient().get("/openapi.json")
    assert (answer.status_code, answer.json()["openapi"]) == (200, "3.1.0")


@pytest.fixture
def site(
    transactional_db: None, servers: Services, tiny_model: Callable[..., SyntheticModel], tmp_path: Path
) -> Iterator[Site]:
    """A site with one engine of a tiny model, which answers with two tokens."""
    path = tiny_model("llama").path
    running = Site(tmp_path, servers)
    with EngineProcess(tmp_path, path, slots=2, context_tokens=512, default_max_tokens=2) as engine:
        set_ready(add_engine(add_model(path, tmp_path)), engine.config.port)
        running.start()
        try:
            running.wait_up()
            yield running
            engine.wait_idle()
        finally:
            running.stop()


def answered_as_described(site: Site, examples: int) -> None:
    """Sends sound and unsound requests of every operation. Nothing may fail, and no slot may stay busy."""
    schema = schemathesis.openapi.from_url(f"http://127.0.0.1:{site.port}/openapi.json")
    served = [operation for result in schema.get_all_operations() if (operation := result.ok()).path not in NOT_SERVED]
    assert len(served) > 15
    for operation in served:
        unsound = [GenerationMode.NEGATIVE] if operation.body else []
        for mode in [GenerationMode.POSITIVE, *unsound]:

            @hypothesis_settings(
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


def test_whatever_the_document_allows_is_answered_as_it_says(site: Site) -> None:
    answered_as_described(site, 2)


@pytest.mark.soak
@pytest.mark.timeout(1200)
def test_many_requests_are_answered_as_the_document_says(site: Site) -> None:
    answered_as_described(site, 40)
