"""An engine beyond loopback answers those that have its secret, and nobody else."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path

import pytest

from engines.client import EngineClient, close_client_session
from engines.config import ConfigInvalid, EngineConfig
from engines.errors import EngineUnreachable
from engines.runtime.__main__ import main, parse_config
from tests.engine_process import EngineProcess
from tests.synthetic_gguf import SyntheticModel

SECRET = "a secret of thirty-two characters"


def status(url: str, secret: str | None = None, scheme: str = "Bearer") -> int:
    headers = {} if secret is None else {"Authorization": f"{scheme} {secret}"}
    try:
        with urllib.request.urlopen(urllib.request.Request(url, headers=headers), timeout=30) as answer:
            return int(answer.status)
    except urllib.error.HTTPError as error:
        with error:
            assert json.load(error)["error"]["code"] == "not_authenticated"
            return error.code


async def test_only_its_health_is_told_without_the_secret(
    tiny_model: Callable[..., SyntheticModel], tmp_path: Path
) -> None:
    with EngineProcess(tmp_path, tiny_model("llama").path, http_secret=SECRET, context_tokens=64, slots=1) as engine:
        for path in ("/health", "/healthz", "/readyz"):
            assert status(engine.base_url + path) == 200
        for path in ("/slots", "/metrics", "/v1/models", "/props", "/openapi.json", "/slots/0/state"):
            for wrong in (None, "", "wrong", SECRET + "x"):
                assert status(engine.base_url + path, wrong) == 401, (path, wrong)
        assert status(engine.base_url + "/slots", SECRET, "Basic") == 401
        assert status(engine.base_url + "/slots", SECRET) == 200
        try:
            assert len(await EngineClient(engine.base_url, SECRET).slots()) == 1
            with pytest.raises(EngineUnreachable):
                await EngineClient(engine.base_url).slots()
        finally:
            await close_client_session()


def test_beyond_loopback_it_does_not_start_without_one(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert main(["--model", "m.gguf", "--host", "0.0.0.0"]) == 2
    assert "needs http_secret" in capsys.readouterr().err
    monkeypatch.setenv("HYDRA_HTTP_SECRET", SECRET)
    assert parse_config(["--model", "m.gguf", "--host", "0.0.0.0"]).http_secret == SECRET
    with pytest.raises(ConfigInvalid, match="http_secret"):
        EngineConfig("m.gguf", "m", http_secret="short")
    assert SECRET not in repr(EngineConfig("m.gguf", "m", http_secret=SECRET))
