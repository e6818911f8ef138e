"""What a request that does not say gets: a model's own sampling values and answer length. Free of Django."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class GenerationDefaults:
    """llama.cpp's values unless a model's makers recommend others. `max_tokens` 0 means until the context is full."""

    max_tokens: int = 0
    temperature: float = 0.8
    top_p: float = 0.95
    top_k: int = 40
    min_p: float = 0.05

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> GenerationDefaults:
        """Missing keys keep their value. Raises ValueError that names an unknown key or a value out of bounds."""
        bounds = {
            "max_tokens": (0, 1 << 22),
            "temperature": (0, 5),
            "top_p": (0, 1),
            "top_k": (0, 1_000_000),
            "min_p": (0, 1),
        }
        for key, value in values.items():
            if key not in bounds:
                raise ValueError(f"{key!r} is unknown; known are {', '.join(bounds)}")
            whole = key in ("max_tokens", "top_k")
            if isinstance(value, bool) or not isinstance(value, int if whole else (int, float)):
                raise ValueError(f"{key} is {value!r}; it must be a {'whole ' if whole else ''}number")
            low, high = bounds[key]
            if not low <= value <= high:
                raise ValueError(f"{key} is {value}; it must lie between {low} and {high}")
        return cls(**values)

    def needs_whole_rows(self, device_candidates: int) -> bool:
        """Whether a request that says nothing of its own would find no use for the likeliest tokens that a device hands out."""
        return self.temperature > 0 and not 0 < self.top_k <= device_candidates

    def as_dict(self) -> dict[str, Any]:
        """Only what differs from the plain defaults, so that a later change of those reaches every other model."""
        plain = GenerationDefaults()
        return {
            field.name: getattr(self, field.name)
            for field in dataclasses.fields(self)
            if getattr(self, field.name) != getattr(plain, field.name)
        }
