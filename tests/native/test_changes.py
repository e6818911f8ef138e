"""Our changes of llama.cpp's source: made once, and only where they fit."""

from __future__ import annotations

from pathlib import Path

import pytest

from native import changes
from native.errors import BuildFailed

PATHS = {change.path for change in changes.CHANGES}


ADDED = {change.path: change.new for change in changes.CHANGES if not change.old}


def text(path: str, *, changed: bool) -> str:
    if path in ADDED:
        return ADDED[path] if changed else ""
    places = (change.new if changed else change.old for change in changes.CHANGES if change.path == path)
    return "before\n" + "".join(f"{place} 1\nbehind\n" for place in places)


def source(folder: Path) -> Path:
    for path in PATHS - ADDED.keys():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_text(text(path, changed=False))
    return folder


def test_a_change_is_made_once(tmp_path: Path) -> None:
    tree = source(tmp_path)
    for _ in range(2):
        changes.apply(tree)
        for path in PATHS:
            assert (tree / path).read_text() == text(path, changed=True)


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
