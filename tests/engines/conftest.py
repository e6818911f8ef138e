"""Homes for the engines that the control plane's tests start."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from engines import launch


@pytest.fixture
def home(tmp_path: Path, settings: Any) -> Iterator[Path]:
    """A HYDRA_HOME of this test's own; whatever engine it leaves is ended."""
    settings.HYDRA_HOME = tmp_path
    settings.HYDRA_HOST_NAME = "here"
    yield tmp_path
    for directory in (tmp_path / "engines").glob("*"):
        launch.end_engine(directory)
