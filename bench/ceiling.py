"""llama-batched-bench over the same grid: what llama.cpp decodes when nobody samples, detokenises or serves."""

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


def batched_bench(settings: ServerSettings, cells: Sequence[Cell], logs: Path) -> list[dict[str, Any]]:
    """One row per (streams, context): `streams`, `context_tokens`, `prefill` and `decode` in tokens per second."""
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
    result = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S)
    (logs / "batched-bench.log").write_text(result.stdout + result.stderr)
    if result.returncode:
        raise BenchError(f"llama-batched-bench ended with {result.returncode}: {result.stderr[-1000:]}")
    rows = [json.loads(line) for line in result.stdout.splitlines() if line.startswith("{")]
    return [
        {
            "streams": row["pl"],
            "context_tokens": row["pp"],
            "prefill": row["speed_pp"],
            "decode": row["speed_tg"],
        }
        for row in rows
    ]


def rate(rows: Sequence[dict[str, Any]], cell: Cell) -> str:
    """The ceiling's decode rate for a cell, as a table shows it."""
    for row in rows:
        if (row["streams"], row["context_tokens"]) == (cell.streams, cell.context_tokens):
            return f"{row['decode']:.1f}"
    return "–"
