"""llama-batched-bench over the same grid: what llama.cpp decodes when nobody samples, detokenises or serves.

It hands its lines to a thread that writes them, and ends without waiting for it: on a busy machine its last rows may be lost
although all went well. It is then asked again.
"""

from __future__ import annotations

import json
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench.errors import BenchError
from bench.grid import Cell
from bench.servers import ALL_LAYERS, ServerSettings, peer_binary

TIMEOUT_S = 600.0
GENERATED_TOKENS = 64
MAX_TRIES = 5


def batched_bench(settings: ServerSettings, cells: Sequence[Cell], logs: Path) -> list[dict[str, Any]]:
    """One row per (streams, context): `streams`, `context_tokens`, `prefill` and `decode` in tokens per second. Raises BenchError
    where it fails, or rows are missing each time."""
    assert settings.peer is not None
    streams, contexts = sorted({c.streams for c in cells}), sorted({c.context_tokens for c in cells})
    layers = ALL_LAYERS if settings.gpu_layers < 0 else settings.gpu_layers
    values = {
        "--model": settings.model,
        "--ctx-size": max(streams) * (max(contexts) + GENERATED_TOKENS),
        "--threads": settings.threads,
        "--threads-batch": settings.threads,
        "--n-gpu-layers": layers,
        "--flash-attn": "on",
        "-npp": ",".join(map(str, contexts)),
        "-ntg": GENERATED_TOKENS,
        "-npl": ",".join(map(str, streams)),
        "--output-format": "jsonl",
    }
    flat = [str(part) for pair in values.items() for part in pair]
    command = [str(peer_binary(settings.peer, "llama-batched-bench")), *flat, "--kv-unified"]
    found: dict[tuple[int, int], dict[str, Any]] = {}
    for _ in range(MAX_TRIES):
        for row in _rows(command, logs / "batched-bench.log"):
            found.setdefault((row["context_tokens"], row["streams"]), row)
        if len(found) == len(streams) * len(contexts):
            return [found[place] for place in sorted(found)]
    missing = [f"{s} x {c}" for c in contexts for s in streams if (c, s) not in found]
    raise BenchError(f"llama-batched-bench printed no row of {', '.join(missing)} (streams x context tokens)")


def _rows(command: list[str], log: Path) -> list[dict[str, Any]]:
    """Those that one run printed; a last line may be cut."""
    result = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S)
    log.write_text(result.stdout + result.stderr)
    if result.returncode:
        raise BenchError(f"llama-batched-bench ended with {result.returncode}: {result.stderr[-1000:]}")
    lines = (line for line in result.stdout.splitlines() if line.startswith("{") and line.endswith("}"))
    return [
        {"streams": row["pl"], "context_tokens": row["pp"], "prefill": row["speed_pp"], "decode": row["speed_tg"]}
        for row in map(json.loads, lines)
    ]


def rate(rows: Sequence[dict[str, Any]], cell: Cell) -> str:
    """The ceiling's decode rate for a cell, as a table shows it."""
    for row in rows:
        if (row["streams"], row["context_tokens"]) == (cell.streams, cell.context_tokens):
            return f"{row['decode']:.1f}"
    return "–"
