"""One running stack for all tests of this folder that do not kill it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.conftest import PulledModel
from tests.stack import Stack


@pytest.fixture(scope="session")
def stack(pulled_smollm2: PulledModel, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    running = Stack(tmp_path_factory.mktemp("hydra"), pulled_smollm2.models_dir)
    try:
        running.start()
        yield running
        assert running.interrupt() == 0
    finally:
        running.close()
