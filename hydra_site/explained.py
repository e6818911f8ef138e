"""Why a request went where it went, and what then happened, as the session page draws it: rows of a table, and bars.

All bars of a request have one scale, so that what was expected and what came can be compared by eye.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from pools.router_plan import TERMS
from sessions.services import TurnView

_NAMES_A_CHOICE = ("engine", "mode", "prefill_engine_id")


@dataclass(frozen=True)
class Part:
    """A piece of a bar: what it stands for, how long that takes, and where it lies ("12.5%")."""

    name: str
    seconds: float
    x: str
    width: str


@dataclass(frozen=True)
class Choice:
    """One way to answer that was weighed. `dearer_s` is its cost less that of the chosen one; None for that itself."""

    engine: str
    mode: str
    cost_s: float
    dearer_s: float | None
    first_token_s: float | None
    held_tokens: int
    cached_tokens: int
    restore_from: str
    is_chosen: bool
    parts: tuple[Part, ...]
    kv_loss: float | None = None


@dataclass(frozen=True)
class SplitTold:
    """What became of a request that two engines were to share: the move's number and figures, or why one did all of it.
    `runs`: that is not known yet."""

    prefill: str
    decode: str
    handoff: int | None
    sent_bytes: int
    pause_ms: float | None
    fell_back: str
    runs: bool = False


@dataclass(frozen=True)
class ExplainedTurn:
    """A request with all that was weighed. `happened` is empty until its first token came; `run_mode` is "" where it is the usual
    one."""

    turn: TurnView
    why: str
    guessed_prompt_tokens: int | None
    guessed_answer_tokens: int | None
    choices: tuple[Choice, ...]
    refusals: tuple[Mapping[str, str], ...]
    happened: tuple[Part, ...]
    run_mode: str = ""
    split: SplitTold | None = None


def explained(turn: TurnView) -> ExplainedTurn:
    """What the row keeps of the router's Explanation, beside the times that were measured."""
    explanation = turn.explanation or {}
    chosen = explanation.get("chosen") or {}
    candidates = explanation.get("candidates", ())
    longest_s = max([turn.duration_s or 0.0, *(candidate["cost_s"] for candidate in candidates)])
    return ExplainedTurn(
        turn=turn,
        why=explanation.get("why", ""),
        guessed_prompt_tokens=explanation.get("prompt_tokens"),
        guessed_answer_tokens=explanation.get("output_tokens"),
        choices=tuple(_choice(candidate, chosen, candidates, longest_s) for candidate in candidates),
        refusals=tuple(explanation.get("refusals", ())),
        happened=_happened(turn, explanation.get("came") or {}, longest_s),
        run_mode="" if explanation.get("run_mode", "auto") == "auto" else explanation["run_mode"],
        split=_split(explanation.get("split"), turn.state),
    )


def _split(told: dict[str, Any] | None, turn_state: str) -> SplitTold | None:
    if told is None:
        return None
    is_open = told.get("state") == "running"
    return SplitTold(
        prefill=told["prefill"],
        decode=told["decode"],
        handoff=told.get("handoff"),
        sent_bytes=told.get("sent_bytes", 0),
        pause_ms=told.get("pause_ms"),
        # A site that dies over a request does not write what came of it.
        fell_back="nobody knows what came of it" if is_open and turn_state != "running" else told.get("fell_back", ""),
        runs=is_open and turn_state == "running",
    )


def _choice(
    candidate: dict[str, Any], chosen: dict[str, Any], candidates: Iterable[dict[str, Any]], longest_s: float
) -> Choice:
    is_chosen = _is_chosen(candidate, chosen)
    chosen_cost_s = next((other["cost_s"] for other in candidates if _is_chosen(other, chosen)), None)
    dearer_s = None if is_chosen or chosen_cost_s is None else candidate["cost_s"] - chosen_cost_s
    terms = candidate["terms"]
    return Choice(
        engine=candidate["engine"],
        mode=candidate["mode"],
        cost_s=candidate["cost_s"],
        dearer_s=dearer_s,
        first_token_s=candidate.get("first_token_s"),
        held_tokens=candidate.get("held_tokens", 0),
        cached_tokens=candidate["cached_tokens"],
        restore_from=candidate.get("restore_from", ""),
        is_chosen=is_chosen,
        parts=bar([(name.removesuffix("_s"), terms[name]) for name in TERMS if terms.get(name)], longest_s),
        kv_loss=candidate.get("kv_loss"),
    )


def _is_chosen(candidate: dict[str, Any], chosen: dict[str, Any]) -> bool:
    """One engine can be a candidate in several forms, so its name alone does not tell."""
    return bool(chosen) and all(candidate.get(name) == chosen[name] for name in _NAMES_A_CHOICE if name in chosen)


def _happened(turn: TurnView, came: Mapping[str, float], longest_s: float) -> tuple[Part, ...]:
    """Under the terms' own names where the engine told its times."""
    if came:
        return bar([(name.removesuffix("_s"), came[name]) for name in TERMS if came.get(name)], longest_s)
    if turn.first_token_s is None:
        return ()
    queue_s = min(turn.queue_s or 0.0, turn.first_token_s)
    spans = [("queue", queue_s), ("reading", turn.first_token_s - queue_s)]
    if turn.duration_s is not None:
        spans.append(("writing", max(0.0, turn.duration_s - turn.first_token_s)))
    return bar([span for span in spans if span[1] > 0], longest_s)


def bar(spans: Iterable[tuple[str, float]], longest_s: float) -> tuple[Part, ...]:
    """Names and seconds as pieces that lie one after the other on a scale whose end is `longest_s`."""
    parts = []
    begin_s = 0.0
    for name, seconds in spans:
        # What is learned may also make a sum shorter: it takes no place, and the next piece begins earlier.
        x, width = (100 * max(0.0, value) / longest_s if longest_s else 0.0 for value in (begin_s, seconds))
        parts.append(Part(name, seconds, f"{x:.2f}%", f"{width:.2f}%"))
        begin_s += seconds
    return tuple(parts)
