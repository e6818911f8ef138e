"""The small engine whose cache the processes of these tests look into."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from engines.config import EngineConfig
from engines.runtime.llama import Llama

SEQUENCES = 8
BATCH_TOKENS = 512


def small_llama(model: Path, **settings: Any) -> Llama:
    """A context of SEQUENCES sequences of 1,024 tokens on one thread; it takes steps of up to BATCH_TOKENS tokens."""
    config = EngineConfig(
        model_path=str(model),
        model_name="m",
        slots=SEQUENCES,
        context_tokens=1024,
        threads=1,
        batch_tokens=BATCH_TOKENS,
        micro_batch_tokens=256,
        sampling="host",
        **{"speculation": "none", **settings},
    )
    return Llama(config, 1, lambda share: None)
