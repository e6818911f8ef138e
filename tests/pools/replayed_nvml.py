"""NVML's library as a recording of a machine answers: the names and errors of `pynvml`, the answers of `pools/nvml_record.py`."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pynvml

RECORDINGS = Path(__file__).parent / "nvml"


class ReplayedNvml:
    """`cards` may be changed between readings; a refusal is an answer of the form {"nvml_error": number}."""

    def __init__(self, *names: str) -> None:
        recordings = [json.loads((RECORDINGS / f"{name}.json").read_text()) for name in names]
        self.system: dict[str, Any] = dict(recordings[0]["system"])
        self.cards: list[dict[str, Any]] = [dict(card) for recording in recordings for card in recording["cards"]]
        self.init_error: int | None = None
        self.lost: set[int] = set()
        self.sessions = 0

    def nvmlInit(self) -> None:
        if self.init_error is not None:
            raise pynvml.NVMLError(self.init_error)
        self.sessions += 1

    def nvmlShutdown(self) -> None:
        pass

    def nvmlDeviceGetCount(self) -> int:
        return len(self.cards)

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:
        if index in self.lost:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_GPU_IS_LOST)
        return index

    def __getattr__(self, name: str) -> Callable[..., Any]:
        if name in self.system:
            return lambda: _answer(self.system[name])
        if name.startswith("nvmlDevice"):
            return lambda index, *_: _answer(self.cards[index][name])
        raise AttributeError(name)


def _answer(recorded: Any) -> Any:
    if isinstance(recorded, dict):
        if "nvml_error" in recorded:
            raise pynvml.NVMLError(recorded["nvml_error"])
        return SimpleNamespace(**recorded)
    if isinstance(recorded, list):
        return [_answer(item) for item in recorded]
    return recorded
