"""Memory of engines that pool: a row of output for every token of a step, and nothing kept between requests."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import llama_cpp
import pytest

from engines.config import EngineConfig
from engines.errors import DoesNotFit
from engines.runtime import memory
from engines.runtime.embedding_llama import PoolingLlama
from engines.runtime.host_memory import Room
from engines.runtime.memory_need import HOST_MARGIN_BYTES
from tests import synthetic_encoders
from tests.conftest import PulledModel


@pytest.fixture(scope="module")
def encoder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    llama_cpp.llama_backend_init()
    path = tmp_path_factory.mktemp("encoder") / "bert.gguf"
    synthetic_encoders.write_bert(path)
    return path


def config(path: Path, **values: object) -> EngineConfig:
    return EngineConfig(**{"model_path": str(path), "model_name": "m", "pooling": "mean", **values})  # type: ignore[arg-type]


@pytest.mark.parametrize("values", [{}, {"batch_tokens": 64}, {"micro_batch_tokens": 32, "embedding_inputs": 200}])
def test_an_encoder_takes_what_was_predicted(encoder: Path, values: dict[str, object]) -> None:
    asked = config(encoder, **values)
    llama = PoolingLlama(asked, 1, lambda _share: None)
    llama.close()
    predicted, measured = llama.memory_report.predicted.host, llama.memory_report.measured.host
    for kind in ("weights_bytes", "kv_bytes", "compute_bytes"):
        assert getattr(predicted, kind) == pytest.approx(getattr(measured, kind), rel=0.05)
    # The rows grow with the first full step, which the report does not see.
    row_bytes = 4 * (llama.vocabulary.size + llama.width)
    assert predicted.output_bytes == pytest.approx(asked.pooled_step_tokens * row_bytes, rel=0.05)
    assert predicted.cache_bytes == 0


def test_the_process_grows_by_what_was_predicted(pulled_smollm2: PulledModel, tmp_path: Path) -> None:
    """Seen from outside: pages that no file backs, after one whole step of a model with a large vocabulary."""
    path = tmp_path / "config.json"
    path.write_text(config(pulled_smollm2.path, pooling="last", threads=1, context_tokens=4096).to_json())
    result = subprocess.run(
        [sys.executable, "-m", "engines.runtime.memory", "--config", str(path)],
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
    )
    figures = json.loads(result.stdout)
    kept_bytes = figures["predicted"]["CPU"]["loaded"] - figures["predicted"]["CPU"]["weights"]
    assert figures["anonymous_grown"] == pytest.approx(kept_bytes, rel=0.1)


def test_what_cannot_fit_is_told_with_a_form_that_can(encoder: Path) -> None:
    asked = config(encoder)
    need = memory.plan(asked)
    kept_bytes = need.host.total_bytes - need.host.mapped_bytes
    rooms = {"CPU": Room(kept_bytes * 2 // 3 + HOST_MARGIN_BYTES, 1 << 50)}
    with pytest.raises(DoesNotFit, match="nearest form that fits: micro_batch_tokens"):
        memory.refuse_if_too_big(asked, need, rooms)
