"""What crosses the boundary of an engine's process, as frozen dataclasses with one section per receiver.

Knows nothing of Django, Celery or llama.cpp. Both sides import these classes; nobody passes loose dicts.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

# --- received by the engine: its configuration ---------------------------------------------------

KV_TYPES = ("f16", "q8_0", "q5_1", "q5_0", "q4_1", "q4_0", "f32", "bf16")


class ConfigInvalid(ValueError):
    """An engine configuration holds a value that cannot work; the message names key, value and bound."""


@dataclass(frozen=True)
class EngineConfig:
    """All an engine process needs to start alone. Written by the head as JSON, read by `python -m engines.runtime`.

    `context_tokens` bounds one request (prompt + answer); `cache_tokens` is the number of KV cells that all slots share
    (0: context_tokens × slots). `threads` 0 means all cores but one. Times in seconds, sizes as named.
    """

    model_path: str
    model_name: str
    host: str = "127.0.0.1"
    port: int = 8080
    slots: int = 4
    context_tokens: int = 4096
    cache_tokens: int = 0
    batch_tokens: int = 128
    micro_batch_tokens: int = 128
    threads: int = 0
    gpu_layers: int = 0
    main_gpu: int = 0
    kv_type_k: str = "f16"
    kv_type_v: str = "f16"
    mmap: bool = True
    queue_limit: int = 64
    request_deadline_s: float = 1800.0
    max_body_bytes: int = 32 * 1024 * 1024
    engine_id: int = 0
    log_level: str = "INFO"

    def __post_init__(self) -> None:
        bounds: Mapping[str, tuple[float, float]] = {
            "port": (0, 65535),
            "slots": (1, 64),
            "context_tokens": (16, 1 << 22),
            "cache_tokens": (0, 1 << 24),
            "batch_tokens": (16, 1 << 16),
            "micro_batch_tokens": (16, 1 << 16),
            "threads": (0, 1024),
            "queue_limit": (0, 65536),
            "request_deadline_s": (1, 86400),
            "max_body_bytes": (1024, 1 << 32),
        }
        for key, (low, high) in bounds.items():
            value = getattr(self, key)
            if not low <= value <= high:
                raise ConfigInvalid(f"{key} is {value}; it must lie between {low:g} and {high:g}")
        for key in ("kv_type_k", "kv_type_v"):
            if getattr(self, key) not in KV_TYPES:
                raise ConfigInvalid(f"{key} is {getattr(self, key)!r}; it must be one of {', '.join(KV_TYPES)}")
        if self.cells < self.context_tokens:
            raise ConfigInvalid(f"cache_tokens is {self.cells}; one request alone may take {self.context_tokens}")
        if not self.model_path or not self.model_name:
            raise ConfigInvalid("model_path and model_name must be given")

    @property
    def cells(self) -> int:
        """KV cells of the context: every slot can hold a full request unless cache_tokens says otherwise."""
        return self.cache_tokens or self.context_tokens * self.slots

    def to_json(self) -> str:
        return json.dumps(dataclasses.asdict(self), indent=2, sort_keys=True)

    @classmethod
    def from_json(cls, text: str) -> EngineConfig:
        """Raises ConfigInvalid for malformed JSON, unknown keys, missing keys and wrong types."""
        try:
            values: Any = json.loads(text)
        except ValueError as error:
            raise ConfigInvalid(f"not valid JSON: {error}") from error
        if not isinstance(values, dict):
            raise ConfigInvalid("the configuration must be a JSON object")
        fields = {f.name: f for f in dataclasses.fields(cls)}
        unknown = sorted(set(values) - set(fields))
        if unknown:
            raise ConfigInvalid(f"unknown keys: {', '.join(unknown)}")
        for key, value in values.items():
            expected = _JSON_TYPES[str(fields[key].type)]
            if not isinstance(value, expected) or (isinstance(value, bool) and bool not in expected):
                raise ConfigInvalid(f"{key} is {value!r}; it must be of type {fields[key].type}")
        missing = {"model_path", "model_name"} - set(values)
        if missing:
            raise ConfigInvalid(f"missing keys: {', '.join(sorted(missing))}")
        return cls(**values)


_JSON_TYPES: dict[str, tuple[type, ...]] = {"str": (str,), "int": (int,), "bool": (bool,), "float": (float, int)}


# --- received by the site and the head: an engine's view of itself -------------------------------


@dataclass(frozen=True)
class SlotView:
    """One slot as `GET /slots` shows it. `state` is idle, prefill or decode; cached tokens of an idle slot can be reused."""

    id: int
    state: str
    is_processing: bool
    request_id: str | None
    prompt_tokens: int
    prompt_done_tokens: int
    decoded_tokens: int
    cached_tokens: int
    context_tokens: int
    tokens_per_s: float

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> SlotView:
        """Reads what a possibly newer engine sent: unknown keys are ignored, missing ones raise KeyError."""
        return cls(**{f.name: values[f.name] for f in dataclasses.fields(cls)})
