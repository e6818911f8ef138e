"""Whether a request needs whole rows of logits, of which a card that samples itself serves fewer at once. A hint: the engine
judges by its own settings."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from engines.config import EngineConfig

# As many likeliest tokens as a card hands out, unless its engine's settings say otherwise.
DEVICE_CANDIDATES = EngineConfig.device_candidates
_LIFTS_BELOW = (("repeat_penalty", 1), ("presence_penalty", 0), ("frequency_penalty", 0))


def needs_whole_rows(field: Callable[[str], Any]) -> bool:
    """`field` tells the value of a body's field by its name; of any type, and None where there is none."""
    logprobs = field("logprobs")
    if logprobs is True or _is_number(logprobs) or _number(field("n_probs")) > 0:
        return True
    top_k = field("top_k")
    if _is_number(top_k) and not 0 < top_k <= DEVICE_CANDIDATES and field("temperature") != 0:
        return True
    if any(_number(field(name), limit) < limit for name, limit in _LIFTS_BELOW):
        return True
    bias = field("logit_bias")
    if isinstance(bias, dict):
        return any(_number(value) > 0 for value in bias.values())
    pairs = bias if isinstance(bias, list) else []
    return any(isinstance(pair, list) and len(pair) == 2 and _number(pair[1]) > 0 for pair in pairs)


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _number(value: Any, otherwise: float = 0.0) -> float:
    return value if _is_number(value) else otherwise
