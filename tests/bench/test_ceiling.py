"""llama-batched-bench may end before its own log has written all rows: a program that does so stands in for it here."""

from __future__ import annotations

import json
import stat
from pathlib import Path

import pytest

from bench.ceiling import MAX_TRIES, batched_bench
from bench.errors import BenchError
from bench.grid import Cell
from bench.servers import ServerSettings

CELLS = [Cell(streams, 40, "greedy", 6) for streams in (1, 2)]


def settings(tmp_path: Path, *runs: str) -> ServerSettings:
    """Its n-th run prints the n-th text; the last one is said again and again."""
    program = tmp_path / "bin" / "llama-batched-bench"
    program.parent.mkdir()
    for number, text in enumerate(runs, 1):
        (tmp_path / f"{number}.txt").write_text(text)
    program.write_text(
        f"#!/bin/sh\ncd {tmp_path}\necho >> runs\nn=$(wc -l < runs)\n[ $n -gt {len(runs)} ] && n={len(runs)}\ncat $n.txt\n"
    )
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    return ServerSettings(Path("model.gguf"), slots=2, context_tokens=256, threads=1, peer=tmp_path)


def row(streams: int) -> str:
    return json.dumps({"pp": 40, "pl": streams, "speed_pp": 100.0 * streams, "speed_tg": 10.0 * streams}) + "\n"


def test_rows_that_were_lost_are_asked_for_again(tmp_path: Path) -> None:
    given = settings(tmp_path, "", row(1), row(1) + row(2)[:30], row(1) + row(2))
    assert [(found["streams"], found["decode"]) for found in batched_bench(given, CELLS, tmp_path)] == [
        (1, 10),
        (2, 20),
    ]
    assert len((tmp_path / "runs").read_text()) == 4


def test_rows_that_never_come_are_an_error_that_names_them(tmp_path: Path) -> None:
    with pytest.raises(BenchError, match="no row of 2 x 40"):
        batched_bench(settings(tmp_path, row(1)), CELLS, tmp_path)
    assert len((tmp_path / "runs").read_text()) == MAX_TRIES
