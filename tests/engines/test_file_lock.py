"""A lock among processes that nobody waits for without an end."""

from __future__ import annotations

from pathlib import Path

import pytest

from engines.file_lock import locked


def test_those_who_share_it_hold_it_together(tmp_path: Path) -> None:
    with locked(tmp_path / "lock", 0.0, shared=True), locked(tmp_path / "lock", 0.0, shared=True):
        pass


@pytest.mark.parametrize("shared", [False, True])
def test_who_waits_too_long_is_told_so(tmp_path: Path, shared: bool) -> None:
    lock = tmp_path / "lock"
    with (
        locked(lock, 0.0, shared=shared),
        pytest.raises(TimeoutError, match="locked by others"),
        locked(lock, 0.05),
    ):
        pass
    with locked(tmp_path / "lock", 0.0):
        pass
