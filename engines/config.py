"""What crosses the boundary of an engine's process, as frozen dataclasses with one section per receiver.

Knows nothing of Django, Celery or llama.cpp. Both sides import these classes; nobody passes loose dicts.
"""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

# --- received by the engine: its configuration ---------------------------------------------------

SPLIT_MODES = ("none", "layer", "row")
SAMPLING_PATHS = ("auto", "host", "backend")
KV_TYPES = ("f16", "q8_0", "q5_1", "q5_0", "q4_1", "q4_0", "f32", "bf16")


class ConfigInvalid(ValueError):
    """An engine configuration holds a value that cannot work; the message names key, value and bound."""


@dataclass(frozen=True)
class EngineConfig:
    """All an engine process needs to start alone. Written by the head as JSON, read by `python -m engines.runtime`.

    `context_tokens` bounds one request (prompt + answer); `cache_tokens` is the number of KV cells that all slots share
    (0: context_tokens × slots). `threads` 0 means all cores but one. `checkpoints` states of earlier cuts are kept inside the
    context (for models that cannot drop a suffix), at least `checkpoint_spacing_tokens` apart within a conversation and none
    in a prompt's first `checkpoint_min_tokens` (-1: as many as take 0.15 s); `host_cache_bytes` bounds what is kept in host
    memory behind them, where on a CPU `put_away_idle` moves idle conversations between requests. `full_window` keeps all of a
    sliding-window layer's past, so that prefixes can be shared and cut anywhere; without it such layers take less memory,
    and only whole states are reused. `sampling` says where candidates come from (auto: on the device if layers are there).
    `devices` names the accelerators to use (empty: all), `tensor_split` their shares, `cpu_moe_layers` how many layers from
    the first keep their experts in host memory, `tensor_overrides` are regex=DEVICE entries of which the first match counts.
    The `default_…` values are for requests that do not say; `default_max_tokens` 0 means until the context is full. Times in
    seconds, sizes as named.
    """

    model_path: str
    model_name: str
    host: str = "127.0.0.1"
    port: int = 8080
    slots: int = 4
    context_tokens: int = 4096
    cache_tokens: int = 0
    batch_tokens: int = 512
    micro_batch_tokens: int = 512
    threads: int = 0
    gpu_layers: int = 0
    main_gpu: int = 0
    kv_type_k: str = "f16"
    kv_type_v: str = "f16"
    mmap: bool = True
    devices: tuple[str, ...] = ()
    split_mode: str = "layer"
    tensor_split: tuple[float, ...] = ()
    cpu_moe_layers: int = 0
    tensor_overrides: tuple[str, ...] = ()
    full_window: bool = True
    sampling: str = "auto"
    device_candidates: int = 128
    whole_vocabulary_slots: int = 1
    checkpoints: int = 4
    checkpoint_spacing_tokens: int = 2048
    checkpoint_min_tokens: int = -1
    host_cache_bytes: int = 1 << 30
    put_away_idle: bool = True
    default_max_tokens: int = 0
    default_temperature: float = 0.8
    default_top_p: float = 0.95
    default_top_k: int = 40
    default_min_p: float = 0.05
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
            "gpu_layers": (-1, 4096),
            "main_gpu": (0, 255),
            "cpu_moe_layers": (0, 4096),
            "device_candidates": (8, 4096),
            "whole_vocabulary_slots": (0, 64),
            "checkpoints": (0, 128),
            "checkpoint_spacing_tokens": (0, 1 << 20),
            "checkpoint_min_tokens": (-1, 1 << 20),
            "host_cache_bytes": (0, 1 << 44),
            "default_max_tokens": (0, 1 << 22),
            "default_temperature": (0, 5),
            "default_top_p": (0, 1),
            "default_top_k": (0, 1_000_000),
            "default_min_p": (0, 1),
            "queue_limit": (0, 65536),
            "request_deadline_s": (1, 86400),
            "max_body_bytes": (1024, 1 << 32),
        }
        for key, (low, high) in bounds.items():
            value = getattr(self, key)
            if not low <= value <= high:
                raise ConfigInvalid(f"{key} is {value}; it must lie between {low:g} and {high:g}")
        if self.sampling not in SAMPLING_PATHS:
            raise ConfigInvalid(f"sampling is {self.sampling!r}; it must be one of {', '.join(SAMPLING_PATHS)}")
        for key in ("kv_type_k", "kv_type_v"):
            if getattr(self, key) not in KV_TYPES:
                raise ConfigInvalid(f"{key} is {getattr(self, key)!r}; it must be one of {', '.join(KV_TYPES)}")
        self._check_placement()
        if self.cells < self.context_tokens:
            raise ConfigInvalid(f"cache_tokens is {self.cells}; one request alone may take {self.context_tokens}")
        if not self.model_path or not self.model_name:
            raise ConfigInvalid("model_path and model_name must be given")

    def _check_placement(self) -> None:
        """What can be said of it without the machine's devices; the engine checks names and counts against those."""
        if self.split_mode not in SPLIT_MODES:
            raise ConfigInvalid(f"split_mode is {self.split_mode!r}; it must be one of {', '.join(SPLIT_MODES)}")
        if self.tensor_split and not (min(self.tensor_split) >= 0 and 0 < sum(self.tensor_split) < float("inf")):
            raise ConfigInvalid(
                f"tensor_split is {self.tensor_split}; it needs shares of 0 or more, one of them above 0"
            )
        for entry in self.tensor_overrides:
            pattern, _, device = entry.rpartition("=")
            if not pattern or not device:
                raise ConfigInvalid(f"tensor_overrides has {entry!r}; an entry reads regex=DEVICE")
            try:
                re.compile(pattern)
            except re.error as error:
                raise ConfigInvalid(
                    f"tensor_overrides has {pattern!r}, which is no regular expression: {error}"
                ) from error

    @property
    def cells(self) -> int:
        """KV cells of the context: every slot can hold a full request unless cache_tokens says otherwise."""
        return self.cache_tokens or self.context_tokens * self.slots

    @property
    def samples_on_device(self) -> bool:
        """Whether a static top-k chain runs on the device; decided here alone, so that a seed repeats after a restart.

        On two CPU cores the device chain was 15 to 20 % slower than choosing from raw logits; on a GPU it saves the copy of
        every row and the search through it.
        """
        return self.sampling == "backend" or (self.sampling == "auto" and self.gpu_layers != 0)

    @property
    def decoding_sequences(self) -> int:
        """Sequences that can run a generation: slots, and with device sampling some that keep their raw logits."""
        return self.slots + (self.whole_vocabulary_slots if self.samples_on_device else 0)

    @property
    def sequences(self) -> int:
        """Sequence ids of the context: decoding ones and checkpoints. Recurrent state takes memory for each."""
        return self.decoding_sequences + self.checkpoints

    @property
    def outputs(self) -> int:
        """Rows of logits that one step may ask for. llama.cpp's default, a row per batch token, reserves hundreds of MiB.

        A step asks for one row per running sequence; llama.cpp wants room for one per sequence id all the same.
        """
        return self.sequences

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
            values[key] = _from_json(key, value, str(fields[key].type))
        missing = {"model_path", "model_name"} - set(values)
        if missing:
            raise ConfigInvalid(f"missing keys: {', '.join(sorted(missing))}")
        return cls(**values)


_JSON_TYPES: dict[str, tuple[type, ...]] = {"str": (str,), "int": (int,), "bool": (bool,), "float": (float, int)}


def _from_json(key: str, value: object, type_name: str) -> object:
    """`value` as the field's type has it: JSON lists become tuples. Raises ConfigInvalid where the types differ."""
    item_type = type_name.removeprefix("tuple[").removesuffix(", ...]")
    items = value if item_type != type_name and isinstance(value, list) else [value]
    expected = _JSON_TYPES[item_type]
    wrong = [
        item for item in items if not isinstance(item, expected) or (isinstance(item, bool) and bool not in expected)
    ]
    if wrong or (item_type != type_name and items is not value):
        raise ConfigInvalid(f"{key} is {value!r}; it must be of type {type_name}")
    return value if item_type == type_name else tuple(items)


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
