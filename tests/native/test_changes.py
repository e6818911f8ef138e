"""Our changes of llama.cpp's source: made once, and only where they fit."""

from __future__ import annotations

from pathlib import Path

import pytest

from native import changes
from native.errors import BuildFailed


def source(folder: Path) -> Path:
    for change in changes.CHANGES:
        path = folder / change.path
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"before\n{change.old} 1\nbehind\n")
    return folder


def test_a_change_is_made_once(tmp_path: Path) -> None:
    tree = source(tmp_path)
    for _ in range(2):
        changes.apply(tree)
        for change in changes.CHANGES:
            assert (tree / change.path).read_text() == f"before\n{change.new} 1\nbehind\n"


def test_another_source_is_left_alone_and_refused(tmp_path: Path) -> None:
    tree = source(tmp_path)
    path = tree / changes.CHANGES[0].path
    path.write_text(path.read_text() * 2)
    before = path.read_text()
    with pytest.raises(BuildFailed, match=r"changes\.py"):
        changes.apply(tree)
    assert path.read_text() == before
    path.unlink()
    with pytest.raises(BuildFailed):
        changes.apply(tree)
