"""From pooled values to what clients get: unit vectors, cut to the asked length, as numbers or base64; scores of a ranker."""

from __future__ import annotations

import base64
import math

import numpy as np

from engines.runtime.embedding_job import Values


def unit(values: Values, dimensions: int | None = None) -> Values:
    """The first `dimensions` of the values (all by default), scaled to length 1; a vector of zeros stays one."""
    cut = values[:dimensions].astype(np.float64)
    # Squares of large float32 values overflow float32.
    length = float(np.linalg.norm(cut))
    return (cut / length if length > 0 else cut).astype(np.float32)


def as_base64(vector: Values) -> str:
    """The vector as little-endian float32 bytes, in base64."""
    return base64.b64encode(vector.astype("<f4").tobytes()).decode()


def as_numbers(vector: Values) -> list[float]:
    """The vector for JSON; nine digits are enough for every float32 to come back exactly."""
    return [float(f"{value:.9g}") for value in vector.tolist()]


def relevance(values: Values, *, raw: bool) -> float:
    """A pair's score: the sigmoid of a single logit, or the first class's probability as the model gives it."""
    score = float(values[0])
    if raw or len(values) > 1:
        return score
    return 1 / (1 + math.exp(-score)) if score >= 0 else math.exp(score) / (1 + math.exp(score))
