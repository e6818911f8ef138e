"""Settings of an engine for which its row has no column: any key of EngineConfig that nobody else decides. Free of Django."""

from __future__ import annotations

import dataclasses
import difflib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from engines.config import ConfigInvalid, EngineConfig
from engines.config_fields import read_fields

_ROW = "the engine's own field of that name"
_MODEL = "the model"
_DEFAULTS = "the model's generation defaults"
_HEAD = "its head, which chooses it at each start"
_CARD = "the engine's card"
# Who decides the others.
DECIDED_BY: Mapping[str, str] = {
    **dict.fromkeys(("slots", "context_tokens", "threads", "gpu_layers", "cpu_moe_layers", "checkpoints"), _ROW),
    **dict.fromkeys(("kv_type_k", "kv_type_v", "whole_vocabulary_slots"), _ROW),
    **dict.fromkeys(("model_path", "model_name", "chat_template", "pooling", "speculation", "draft_tokens"), _MODEL),
    **dict.fromkeys(("projector_path", "kv_family"), _MODEL),
    **dict.fromkeys(("host", "port", "http_secret", "rpc_port", "rpc_secret", "engine_id"), _HEAD),
    **dict.fromkeys(("store_host", "store_port", "store_secret"), "the store of its host"),
    **dict.fromkeys(("devices", "main_gpu", "card_arch"), _CARD),
    "max_body_bytes": "the setting HYDRA_MAX_BODY_BYTES",
    **{one.name: _DEFAULTS for one in dataclasses.fields(EngineConfig) if one.name.startswith("default_")},
}
NAMES = tuple(sorted(one.name for one in dataclasses.fields(EngineConfig) if one.name not in DECIDED_BY))


@dataclass(frozen=True)
class Further:
    """Values for EngineConfig, by its keys. With a `refusal` there are none, and an engine must not start without them."""

    values: Mapping[str, Any] = field(default_factory=dict)
    refusal: str = ""


def checked(settings: object, **row: Any) -> dict[str, Any]:
    """`settings` as EngineConfig takes them, beside what the `row` says. Raises ConfigInvalid, which names the key."""
    if not isinstance(settings, dict):
        raise ConfigInvalid('further settings must be a JSON object, like {"batch_tokens": 2048}')
    for key in settings:
        if key in DECIDED_BY:
            raise ConfigInvalid(f"{key} is decided by {DECIDED_BY[key]}")
        if key not in NAMES:
            near = difflib.get_close_matches(key, NAMES, n=1)
            hint = f"did you mean {near[0]}?" if near else f"known are {', '.join(NAMES)}"
            raise ConfigInvalid(f"{key} is no setting of an engine; {hint}")
    values = read_fields(EngineConfig, json.dumps(settings))
    EngineConfig(**{"model_path": "m", "model_name": "m", **row, **values})
    return values


def usable(settings: object, **row: Any) -> Further:
    """The same for a row that was checked once: what another release, or a smaller context, made wrong is told as a refusal."""
    try:
        return Further(checked(settings, **row))
    except ConfigInvalid as error:
        return Further(refusal=f"Further settings: {error}.")
