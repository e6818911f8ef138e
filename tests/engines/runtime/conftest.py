"""One small engine for all tests of endpoints that need an engine and not a mind."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import llama_cpp
import pytest

from engines.config import EngineConfig
from engines.runtime import llama_log
from engines.runtime.llama import Llama, Vocabulary
from tests import synthetic_projector
from tests.conftest import PulledModel
from tests.engine_process import EngineProcess
from tests.engines.runtime.handoff_pair import pair, session, web
from tests.fault_table import pytest_terminal_summary
from tests.synthetic_gguf import SyntheticModel

__all__ = ["pair", "pytest_terminal_summary", "session", "web"]


@pytest.fixture
def slow() -> Iterator[ExitStack]:
    """What `slow_steps()` is entered into while an answer must not end, and closed when it may."""
    with ExitStack() as stack:
        yield stack


@pytest.fixture(scope="session")
def tie_free_model(tiny_model: Callable[..., SyntheticModel]) -> SyntheticModel:
    return tiny_model("llama", tie_free=True)


@pytest.fixture(scope="session")
def tiny_vocabulary(tiny_model: Callable[..., SyntheticModel]) -> Iterator[Vocabulary]:
    config = EngineConfig(str(tiny_model("llama").path), "tiny", slots=1, context_tokens=512)
    llama = Llama(config, 1, lambda _share: None)
    yield llama.vocabulary
    llama.close()


@pytest.fixture(scope="session")
def projectors(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a projector for each kind of model that has one, as <kind>.gguf."""
    folder = tmp_path_factory.mktemp("projectors")
    synthetic_projector.write_qwen_projector(folder / "qwen35.gguf")
    synthetic_projector.write_gemma_projector(folder / "gemma3.gguf")
    return folder


@pytest.fixture(scope="session")
def endpoint_engine(
    tie_free_model: SyntheticModel, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[EngineProcess]:
    settings = {"slots": 2, "context_tokens": 2048, "max_body_bytes": 1 << 20}
    with EngineProcess(tmp_path_factory.mktemp("endpoints"), tie_free_model.path, **settings) as engine:
        yield engine


@pytest.fixture(scope="session")
def smollm2_vocabulary(pulled_smollm2: PulledModel) -> Iterator[Vocabulary]:
    """The 49,152 tokens of a real model, without its weights."""
    llama_log.install()
    params = llama_cpp.llama_model_default_params()
    params.vocab_only = True
    model = llama_cpp.llama_model_load_from_file(str(pulled_smollm2.path).encode(), params)
    yield Vocabulary(model)
    llama_cpp.llama_model_free(model)
