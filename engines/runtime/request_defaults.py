"""What a request gets where it does not say: the defaults that CONFIGURE changes while the engine runs.

Changes last until the process ends. The first tier of keys takes effect with the next request; keys of the others need
another context or another model, which this engine gets by being started anew.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from engines.api_body import validated
from engines.api_schema import ChatRequest
from engines.config import EngineConfig
from engines.errors import InvalidRequest

# Key of CONFIGURE -> field of a request. llama.cpp's names stand beside OpenAI's.
FIELD_OF = {
    "temperature": "temperature",
    "temp": "temperature",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "typical_p": "typical_p",
    "presence_penalty": "presence_penalty",
    "frequency_penalty": "frequency_penalty",
    "repeat_penalty": "repeat_penalty",
    "repeat_last_n": "repeat_last_n",
    "dry_multiplier": "dry_multiplier",
    "dry_base": "dry_base",
    "dry_allowed_length": "dry_allowed_length",
    "dry_penalty_last_n": "dry_penalty_last_n",
    "dry_sequence_breakers": "dry_sequence_breakers",
    "xtc_probability": "xtc_probability",
    "xtc_threshold": "xtc_threshold",
    "seed": "seed",
    "n_predict": "max_tokens",
    "max_tokens": "max_tokens",
    "antiprompt": "stop",
    "stop": "stop",
}
_OWN_DEFAULTS = ("temperature", "top_k", "top_p", "min_p")
_ANY_MESSAGE = [{"role": "user", "content": "x"}]
NEVER_SHIFTS = "this engine never shifts a context, so nothing has to be kept of a prompt"
# Key of CONFIGURE -> its tier (2: another context, 3: another model) and the setting that an engine is started with instead.
STARTED_WITH = {
    "n_ctx": (2, "context_tokens"),
    "n_batch": (2, "batch_tokens"),
    "n_ubatch": (2, "micro_batch_tokens"),
    "n_parallel": (2, "slots"),
    "threads": (2, "threads"),
    "cache_type_k": (2, "kv_type_k"),
    "cache_type_v": (2, "kv_type_v"),
    "model_path": (3, "model_path"),
    "n_gpu_layers": (3, "gpu_layers"),
    "n_cpu_moe": (3, "cpu_moe_layers"),
    "main_gpu": (3, "main_gpu"),
    "devices": (3, "devices"),
    "override_tensor": (3, "tensor_overrides"),
    "split_mode": (3, "split_mode"),
    "tensor_split": (3, "tensor_split"),
}
# The same, where no setting changes it: an engine has flash attention and one cache for all, and ropes as its model says.
FIXED = {
    "flash_attn": 2,
    "kv_unified": 2,
    "rope_freq_base": 2,
    "rope_freq_scale": 2,
    "rope_scaling": 2,
    "rpc_servers": 3,
}


@dataclass(frozen=True)
class Change:
    """What became of the keys of one CONFIGURE. `tier` is the highest that was asked for, 4 for a key nobody knows."""

    tier: int
    applied: tuple[str, ...]
    rejected: Mapping[str, str]
    unrecognised: tuple[str, ...]


@dataclass(frozen=True)
class RequestDefaults:
    """Values by a request's field names. Replaced as a whole, so any thread may read one."""

    values: Mapping[str, Any] = field(default_factory=dict)

    def fill(self, request: ChatRequest) -> ChatRequest:
        """The request with a default for each field that it leaves open."""
        missing = {name: value for name, value in self.values.items() if getattr(request, name) is None}
        if request.max_new_tokens is not None:
            missing.pop("max_tokens", None)
        return request.model_copy(update=missing) if missing else request

    def changed(self, params: Mapping[str, Any]) -> tuple[RequestDefaults, Change]:
        """The defaults after `params`, each key taken or refused by itself. null takes a key's change back."""
        values, applied, rejected, unrecognised, tier = dict(self.values), [], dict[str, str](), [], 1
        for key, value in params.items():
            field_name = FIELD_OF.get(key)
            if field_name is not None:
                try:
                    self._set(values, field_name, value)
                    applied.append(key)
                except InvalidRequest as error:
                    rejected[key] = error.message
            elif key == "n_keep":
                rejected[key] = NEVER_SHIFTS
            elif key in STARTED_WITH:
                tier = max(tier, STARTED_WITH[key][0])
                rejected[key] = f"it cannot change while the engine runs: start it again with {STARTED_WITH[key][1]}"
            elif key in FIXED:
                tier = max(tier, FIXED[key])
                rejected[key] = "it is fixed in this engine"
            else:
                tier = 4
                unrecognised.append(key)
        return RequestDefaults(values), Change(tier, tuple(applied), rejected, tuple(unrecognised))

    @staticmethod
    def _set(values: dict[str, Any], name: str, value: Any) -> None:
        # llama.cpp says "until the context is full" by -1.
        if value is None or (name == "max_tokens" and value == -1):
            values.pop(name, None)
        else:
            values[name] = getattr(validated(ChatRequest, {"messages": _ANY_MESSAGE, name: value}), name)

    def in_force(self, config: EngineConfig) -> dict[str, Any]:
        """All defaults as they are now. `max_tokens` 0 means until the context is full."""
        own = {name: getattr(config, f"default_{name}") for name in _OWN_DEFAULTS}
        return {**own, "max_tokens": config.default_max_tokens, **self.values}
