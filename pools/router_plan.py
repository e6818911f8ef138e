"""What the router answers: a plan, and why: every candidate with every term in seconds, every refusal with its reason."""

from __future__ import annotations

from dataclasses import dataclass, fields
from enum import Enum
from typing import Any

from pools.router_views import Mode, RunMode


class Reason(Enum):
    """Why an engine is no candidate. The values are for people."""

    MODEL = "it serves another model"
    CONTEXT = "prompt and answer do not fit its context"
    FEATURES = "it lacks what the request needs"
    MEMORY = "its KV memory cannot hold prompt and answer"
    QUEUE = "its waiting line is full"
    FORCED = "the operator asked for another engine"
    MODE = "the operator asked for another form"
    GROUP = "the two cannot share KV"
    STREAMS = "it does not send or take KV while it computes"
    LINK = "the link between the hosts was not measured when it was tried"
    PEER = "the peer cannot be reached"
    SLOT = "the engine that would decode has no free slot now"
    FIXED = "the request cannot change engines while it runs"
    SHORT = "its prompt takes too little time to be worth two engines"
    UNMEASURED = "what is lost between their quants was never measured"
    LOSSY = "too much is lost between their quants"


class Why(Enum):
    """What decided."""

    WARM = "its engine still holds the session"
    CHEAPEST = "it costs least"
    STAYS = "moving the session would gain too little"
    FORCED = "an operator asked for it"
    ONLY = "no other engine can"
    WHOLE = "splitting it would gain too little"


@dataclass(frozen=True, slots=True)
class Terms:
    """What a candidate costs, in seconds; `total_s` is their sum and nothing else.

    `fixed_s`, `wake_s`, `drift_s` and `crowd_s` are learned from first tokens that came: beside the engine's steps, after
    idleness, where the engine is slower (or, below zero, faster) than its rates say, and beside others on its device.
    """

    queue_s: float = 0.0
    restore_s: float = 0.0
    fixed_s: float = 0.0
    wake_s: float = 0.0
    prefill_s: float = 0.0
    drift_s: float = 0.0
    crowd_s: float = 0.0
    decode_s: float = 0.0
    evict_s: float = 0.0
    others_s: float = 0.0

    @property
    def beside_s(self) -> float:
        """What the engine's own rates do not tell."""
        return self.fixed_s + self.wake_s + self.drift_s + self.crowd_s

    @property
    def total_s(self) -> float:
        return (
            self.queue_s
            + self.restore_s
            + self.prefill_s
            + self.decode_s
            + self.evict_s
            + self.others_s
            + self.beside_s
        )


# As a first token's and then a request's time passes.
TERMS = tuple(field.name for field in fields(Terms))


@dataclass(frozen=True, slots=True)
class Candidate:
    """One way to answer. `engine_id` decodes; `prefill_engine_id` differs from it in a pd plan only.

    `cached_tokens` need no computing there: `held_tokens` of them are on the engine, the rest comes from `restore_from`.
    `first_token_s` is what is predicted until the first token, beside `neighbours` at work on its device. `kv_loss` is the KL
    divergence (nats) that was measured where KV of one quant is read by another, None where both are the same.
    """

    mode: Mode
    engine_id: int
    engine: str
    prefill_engine_id: int
    terms: Terms
    cost_s: float
    first_token_s: float
    held_tokens: int = 0
    cached_tokens: int = 0
    restore_from: str = ""
    restore_address: str = ""
    kv_loss: float | None = None
    neighbours: int = 0

    @property
    def step_s(self) -> float:
        """What of the first token's time is no term: the step that it falls out of."""
        terms = self.terms
        return self.first_token_s - (terms.queue_s + terms.restore_s + terms.prefill_s + terms.beside_s)

    def to_dict(self) -> dict[str, Any]:
        terms = {name: round(getattr(self.terms, name), 6) for name in Terms.__slots__}
        values: dict[str, Any] = {
            "mode": self.mode,
            "engine_id": self.engine_id,
            "engine": self.engine,
            "cost_s": round(self.cost_s, 6),
            "first_token_s": round(self.first_token_s, 6),
            "held_tokens": self.held_tokens,
            "cached_tokens": self.cached_tokens,
            "terms": terms,
        }
        if self.restore_from:
            values["restore_from"] = self.restore_from
        if self.prefill_engine_id != self.engine_id:
            values["prefill_engine_id"] = self.prefill_engine_id
        if self.kv_loss is not None:
            values["kv_loss"] = self.kv_loss
        return values


@dataclass(frozen=True, slots=True)
class Refusal:
    """An engine, or a pair, that is no candidate. `detail` has the numbers."""

    mode: Mode
    engine: str
    reason: Reason
    detail: str = ""

    def to_dict(self) -> dict[str, str]:
        return {"mode": self.mode, "engine": self.engine, "reason": self.reason.value, "detail": self.detail}


@dataclass(frozen=True, slots=True)
class Explanation:
    """All that was weighed. `candidates` cheapest first; `chosen` is one of them, None where nothing could be chosen."""

    candidates: tuple[Candidate, ...]
    refusals: tuple[Refusal, ...]
    chosen: Candidate | None
    why: Why | None
    prompt_tokens: int
    output_tokens: int
    home: int | None = None
    run_mode: RunMode = "auto"

    def to_dict(self) -> dict[str, Any]:
        """As JSON for rows, pages and logs."""
        return {
            "why": self.why.value if self.why else "no engine can take it",
            "chosen": self.chosen.to_dict() if self.chosen else None,
            "candidates": [candidate.to_dict() for candidate in self.candidates],
            "refusals": [refusal.to_dict() for refusal in self.refusals],
            "prompt_tokens": self.prompt_tokens,
            "output_tokens": self.output_tokens,
            "home": self.home,
            "run_mode": self.run_mode,
        }


@dataclass(frozen=True, slots=True)
class Plan:
    """Where the request goes. `resume_from` is the address of a store on another host that the engine should read."""

    mode: Mode
    engine_id: int
    prefill_engine_id: int
    resume_from: str = ""
    cached_tokens: int = 0
    first_token_s: float = 0.0
    kv_loss: float | None = None
