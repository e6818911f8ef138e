"""The API's endpoints through Django, with a real engine behind them."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from django.test import AsyncClient

from engines.client import close_client_session
from engines.models import Engine
from pools.db import in_db
from sessions import services
from sessions.turn import wait_for_writes
from tests.engine_process import EngineProcess
from tests.rows import add_engine, add_model, set_ready
from tests.sessions.local_client import LocalClient

pytestmark = pytest.mark.django_db(transaction=True)

HELLO = {"messages": [{"role": "user", "content": "Name a colour."}], "max_tokens": 4}


@pytest.fixture
async def api(smollm2_engine: EngineProcess, tmp_path: Path, settings: Any) -> AsyncIterator[AsyncClient]:
    """A client on the machine itself, and a pool whose one engine is ready."""
    settings.ALLOWED_HOSTS = ["localhost"]

    def write() -> None:
        variant = add_model(Path(smollm2_engine.config.model_path), tmp_path, "smollm2-135m")
        set_ready(add_engine(variant), smollm2_engine.config.port)

    await in_db(write)
    yield LocalClient()
    await wait_for_writes(10)
    await close_client_session()


async def post(api: AsyncClient, body: Any, **headers: str) -> Any:
    raw = body if isinstance(body, bytes) else json.dumps(body).encode()
    return await api.post("/v1/chat/completions", raw, content_type="text/plain", headers=headers)


async def test_a_request_in_one_piece_is_answered_whatever_its_content_type(api: AsyncClient) -> None:
    answer = await post(api, HELLO)
    values = answer.json()
    assert answer.status_code == 200
    assert values["choices"][0]["message"]["content"]
    assert values["usage"]["completion_tokens"] == 4
    assert answer["X-Hydra-Engine"] == "cpu-0"
    assert answer["X-Hydra-Model"] == "smollm2-135m"
    assert values["id"] == f"chatcmpl-{answer['X-Request-Id']}"
    assert answer["Content-Length"] == str(len(answer.content))


async def test_a_stream_ends_with_done_and_is_not_to_be_buffered(api: AsyncClient) -> None:
    answer = await post(api, {**HELLO, "stream": True})
    assert answer["Content-Type"] == "text/event-stream"
    assert (answer["X-Accel-Buffering"], answer["Cache-Control"]) == ("no", "no-cache")
    body = b"".join([part async for part in answer.streaming_content])
    assert body.endswith(b"data: [DONE]\n\n")
    await wait_for_writes(10)
    (chat,) = await in_db(services.recent_sessions)
    assert (chat.state, chat.completion_tokens) == ("done", 4)


@pytest.mark.parametrize(
    ("body", "status", "code"),
    [
        (b"", 400, "invalid_request"),
        (b"{", 400, "invalid_request"),
        (b"[]", 400, "invalid_request"),
        ({"messages": []}, 400, "invalid_request"),
        ({**HELLO, "max_tokens": 0}, 400, "invalid_request"),
        ({**HELLO, "functions": [{"name": "f"}]}, 400, "unsupported_parameter"),
        ({**HELLO, "model": "unknown"}, 404, "model_not_found"),
        ({"messages": [{"role": "user", "content": "word " * 9000}]}, 400, "context_length_exceeded"),
    ],
)
async def test_bad_requests_are_refused_in_openais_shape(api: AsyncClient, body: Any, status: int, code: str) -> None:
    answer = await post(api, body)
    assert answer.status_code == status
    error = answer.json()["error"]
    assert error["code"] == code
    assert set(error) >= {"message", "type", "param", "code"}


async def test_a_body_over_the_limit_is_a_413(api: AsyncClient, settings: Any) -> None:
    settings.HYDRA_MAX_BODY_BYTES = settings.DATA_UPLOAD_MAX_MEMORY_SIZE = 100
    answer = await post(api, HELLO)
    assert answer.status_code == 200
    answer = await post(api, b" " * 101)
    assert (answer.status_code, answer.json()["error"]["code"]) == (413, "body_too_large")


async def test_models_are_listed_as_clients_expect_them(api: AsyncClient) -> None:
    answer = (await api.get("/v1/models")).json()
    assert answer["object"] == "list"
    (model,) = answer["data"]
    assert (model["id"], model["object"], model["owned_by"]) == ("smollm2-135m", "model", "hydra")
    assert model["status"] == {"value": "loaded"}
    assert model["meta"]["n_vocab"] == 49152
    assert (await api.get("/v1/models/smollm2-135m")).json() == model
    missing = await api.get("/v1/models/org/unknown")
    assert (missing.status_code, missing.json()["error"]["code"]) == (404, "model_not_found")


async def test_unknown_paths_and_methods_are_told_as_json(api: AsyncClient) -> None:
    unknown = await api.get("/v1/nothing/here")
    assert (unknown.status_code, unknown.json()["error"]["code"]) == (404, "path_unknown")
    wrong = await api.get("/v1/chat/completions")
    assert (wrong.status_code, wrong["Allow"]) == (405, "POST")
    assert wrong.json()["error"]["code"] == "method_not_allowed"


async def test_a_refused_key_says_how_to_present_one(api: AsyncClient) -> None:
    answer = await post(api, HELLO, Authorization="Bearer sk-hydra-wrong")
    assert (answer.status_code, answer["WWW-Authenticate"]) == (401, "Bearer")
    assert answer.json()["error"]["type"] == "authentication_error"


async def test_a_model_without_a_ready_engine_is_a_retryable_503(api: AsyncClient) -> None:
    await in_db(Engine.objects.update, state="starting")
    answer = await post(api, HELLO)
    assert (answer.status_code, answer["Retry-After"]) == (503, "2")
    body = answer.json()
    assert (body["error"]["code"], body["loading"]["state"]) == ("model_loading", "starting")
    assert (await api.get("/v1/models")).json()["data"][0]["status"] == {"value": "loading"}


async def test_health_and_readiness_tell_what_is_missing(api: AsyncClient) -> None:
    assert (await api.get("/healthz")).json() == {"status": "ok"}
    assert (await api.get("/readyz")).status_code == 200
    assert (await api.get("/health")).json()["status"] == "ok"
    await in_db(Engine.objects.update, takes_new=False)
    assert (await api.get("/readyz")).json()["missing"] == ["engine"], "all are drained: requests would get 503"
    assert (await api.get("/health")).json()["status"] == "degraded"
    await in_db(Engine.objects.update, state="failed", http_port=None, takes_new=True)
    assert (await api.get("/health")).json()["status"] == "degraded"
    answer = await api.get("/readyz")
    assert (answer.status_code, answer.json()["missing"]) == (503, ["engine"])


async def test_pages_ask_for_a_login_and_the_api_does_not(api: AsyncClient) -> None:
    assert (await api.get("/admin/")).status_code == 302
    assert (await api.get("/")).status_code == 302
    assert (await api.get("/v1/models")).status_code == 200
