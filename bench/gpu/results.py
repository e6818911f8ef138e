"""What the stages of a call measured: three files for whoever fetches them, and one table."""

from __future__ import annotations

import json
import tarfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from bench import ceiling
from bench.grid import COLUMNS, CellResults, table_row
from bench.measures import median
from bench.report import print_table


def hand_over(folder: Path, logs: Path, out: Path) -> None:
    """Puts everything measured so far into three files of `out`."""
    out.mkdir(parents=True, exist_ok=True)
    (out / "results.json").write_text(json.dumps(_details(folder), indent=1))
    texts = [f"== {path.stem}\n{path.read_text(errors='replace')}" for path in sorted(folder.glob("*.txt"))]
    (out / "tables.txt").write_text("\n".join(texts))
    with tarfile.open(out / "logs.tar.xz", "w:xz") as archive:
        archive.add(logs, "logs")


def print_all(folder: Path, model: str, benches: Mapping[str, Sequence[str]]) -> None:
    """One table of every cell that the folder has results of, then the reuse of each model."""
    details = _details(folder)
    engines = [details[name] for name in benches if name in details and benches[name][0] == "engine"]
    ceilings = [row for one in engines for row in one["ceiling"]]
    measured = [CellResults.from_dict(cell) for one in engines for cell in one["cells"] if cell["rounds"]]
    rows = [[*table_row(results), ceiling.rate(ceilings, results.cell)] for results in measured]
    if rows:
        print_table(f"{model}: Hydra and llama-server", [*COLUMNS, "ceiling"], rows)
    for reused, forms in details.get("prefix", {}).items():
        print(f"prefix, {reused}: ", end="")
        _print_reuse(forms)


def _details(folder: Path) -> dict[str, Any]:
    return {path.stem: json.loads(path.read_text()) for path in sorted(folder.glob("*.json"))}


def _print_reuse(forms: dict[str, list[dict[str, Any]]]) -> None:
    texts = []
    for form, turns in forms.items():
        later = [turn for turn in turns if turn["turn"] > 0]
        share = sum(turn["cached_tokens"] for turn in later) / sum(turn["reusable_tokens"] for turn in later)
        first_ms = (median([turn["first_token_s"] for turn in later]) or 0.0) * 1000
        texts.append(f"{form} cached {share:.3f}, first token {first_ms:.1f} ms")
    print("; ".join(texts))
