from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.engines.store.objects_made import close_all
from tests.fault_table import pytest_terminal_summary

__all__ = ["pytest_terminal_summary"]

TMPFS = Path("/dev/shm")


@pytest.fixture
def memory() -> Iterator[Path]:
    """A folder on tmpfs for the directories of one test's stores."""
    folder = Path(tempfile.mkdtemp(prefix="test-store-", dir=TMPFS))
    yield folder
    close_all()
    shutil.rmtree(folder)
