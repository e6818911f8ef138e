"""Fields of the engine's own chat request that the other dialects take too, under the same names: llama.cpp's extras."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel

PASSED_ON = frozenset(
    {
        "top_k",
        "min_p",
        "typical_p",
        "presence_penalty",
        "frequency_penalty",
        "repeat_penalty",
        "repeat_last_n",
        "dry_multiplier",
        "dry_base",
        "dry_allowed_length",
        "dry_penalty_last_n",
        "dry_sequence_breakers",
        "xtc_probability",
        "xtc_threshold",
        "seed",
        "priority",
        "logit_bias",
        "ignore_eos",
        "cache_prompt",
        "chat_template_kwargs",
        "enable_thinking",
        "thinking_budget_tokens",
    }
)


def passed_on(request: BaseModel) -> dict[str, Any]:
    """Those of the fields that a request has beside its dialect's own. Its model must allow extra fields."""
    return {name: value for name, value in (request.model_extra or {}).items() if name in PASSED_ON}
