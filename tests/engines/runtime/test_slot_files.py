"""What an engine that died left in the folder of saved slots."""

from __future__ import annotations

import os
from pathlib import Path

from engines.runtime.slot_files import _create, remove_unfinished


def test_only_unfinished_files_without_a_living_writer_go(tmp_path: Path) -> None:
    folder = tmp_path / "slots"
    with _create(folder / f".story.bin.{'0a' * 16}") as written:
        (folder / f".old.bin.{'ff' * 16}").write_bytes(b"half")
        (folder / ".hidden").write_bytes(b"not ours")
        (folder / "story.bin").write_bytes(b"whole")
        os.mkfifo(folder / f".pipe.{'1b' * 16}")
        assert remove_unfinished(folder) == 2
        assert sorted(path.name for path in folder.iterdir()) == [".hidden", f".story.bin.{'0a' * 16}", "story.bin"]
        assert not written.closed
    assert remove_unfinished(folder) == 1
    assert remove_unfinished(tmp_path / "not made yet") == 0
