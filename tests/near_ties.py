"""Two greedy answers to one prompt that was computed in unlike ways: the same up to rounding, or not the same.

Chunks of other sizes, a prefix that was computed before, and others' cells in the cache give other low bits (about 0.002 nats on
the synthetic models, also between two cold runs on one engine). Where two tokens are nearer to each other than that, either may
be drawn, and what comes behind is another text. Nothing else may differ: a state of other tokens is off by 0.08 nats and more.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

# What a request asks for beside greedy decoding.
WITH_LOGPROBS = {"logprobs": True, "top_logprobs": 5}
ROUNDING_NATS = 0.02


def logprobs_of(answer: dict[str, Any]) -> list[dict[str, Any]]:
    """Of a whole chat completion."""
    found: list[dict[str, Any]] = answer["choices"][0]["logprobs"]["content"]
    return found


def farthest(one: Sequence[dict[str, Any]], other: Sequence[dict[str, Any]]) -> tuple[int, float]:
    """How many tokens are the same, and how far the two are apart up to there (nats), a first other token included."""
    apart = 0.0
    for same, (mine, its) in enumerate(zip(one, other, strict=True)):
        if mine["token"] != its["token"]:
            return same, max(apart, _gap(mine, its["token"]), _gap(its, mine["token"]))
        apart = max(apart, abs(mine["logprob"] - its["logprob"]))
    return len(one), apart


def _gap(drawn: dict[str, Any], other_token: str) -> float:
    """By how much a drawn token was likelier than another; without end for one that was not among the first."""
    others = [top["logprob"] for top in drawn["top_logprobs"] if top["token"] == other_token]
    return abs(drawn["logprob"] - max(others)) if others else float("inf")


def assert_same_but_for_rounding(one: Sequence[dict[str, Any]], other: Sequence[dict[str, Any]]) -> int:
    """Returns how many tokens are the same."""
    same, apart = farthest(one, other)
    assert apart <= ROUNDING_NATS, (same, apart)
    return same
