"""An embedding model's way from its file to an answer: what the file says decides what its engine does."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from django.test import AsyncClient

from engines import engine_rows
from engines.client import close_client_session
from engines.models import Engine
from pools.db import in_db
from sessions.models import Turn
from sessions.turn import wait_for_writes
from tests.engine_process import EngineProcess
from tests.rows import add_engine, add_model, set_ready
from tests.sessions.local_client import LocalClient
from tests.synthetic_encoders import write_bert

pytestmark = pytest.mark.django_db(transaction=True)


@pytest.fixture
async def api(tmp_path: Path, settings: Any) -> AsyncIterator[AsyncClient]:
    settings.ALLOWED_HOSTS = ["localhost"]
    path = write_bert(tmp_path / "encoder.gguf").path

    def write() -> tuple[Engine, engine_rows.EngineTask | None]:
        engine = add_engine(add_model(path, tmp_path, "encoder"))
        return engine, engine_rows.engine_task(engine.pk)

    engine, task = await in_db(write)
    assert task is not None
    wanted = {"context_tokens": task.config.context_tokens, "pooling": task.config.pooling}
    with EngineProcess(tmp_path, path, **wanted) as process:
        await in_db(set_ready, engine, process.config.port)
        yield LocalClient()
        await wait_for_writes(10)
        await close_client_session()


async def test_an_embedding_model_embeds_and_says_so(api: AsyncClient) -> None:
    (model,) = (await api.get("/v1/models")).json()["data"]
    assert (model["capabilities"], model["architecture"]["output_modalities"]) == (["embedding"], ["embedding"])

    body = {"model": "encoder", "input": ["one", "two"]}
    answer = await api.post("/v1/embeddings", json.dumps(body), content_type="application/json")
    values = answer.json()
    assert answer.status_code == 200
    assert [item["index"] for item in values["data"]] == [0, 1]
    assert len(values["data"][0]["embedding"]) == model["meta"]["n_embd"]

    await wait_for_writes(10)
    turn = await in_db(Turn.objects.select_related("chat").get)
    assert (turn.state, turn.prompt_tokens) == ("done", values["usage"]["prompt_tokens"])
    assert turn.chat.title == "Embeddings by encoder"

    refused = await api.post(
        "/v1/chat/completions",
        json.dumps({"messages": [{"role": "user", "content": "Hi"}]}),
        content_type="application/json",
    )
    assert refused.status_code == 501
