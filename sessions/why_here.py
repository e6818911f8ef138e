"""Why requests went where they went, told as text, and how near their predicted first tokens came: `manage.py why`, the admin."""

from __future__ import annotations

import statistics
from collections.abc import Iterable

from pools.router_plan import TERMS
from sessions.services import TurnView

# Requests that one summary is about, at most.
MOST = 1000
# A prediction that is off by less than this factor chooses well enough among unlike engines.
NEAR = 2.0
# An engine cannot tell apart what it is learned to be late with from what it is late with.
EXPECTED_AS = {"fixed_s": ("fixed_s", "wake_s"), "prefill_s": ("prefill_s", "drift_s", "crowd_s")}


def ratio(actual_s: float | None, predicted_s: float | None) -> float | None:
    """How many times as long a first token took as was predicted; None where either is not known."""
    return actual_s / predicted_s if actual_s and predicted_s else None


def summary(first_tokens: Iterable[tuple[float | None, float | None]]) -> str:
    """One line: how near first tokens' predictions were, of (actual, predicted) in seconds; "" where none can be told."""
    ratios = sorted(times for actual_s, predicted_s in first_tokens if (times := ratio(actual_s, predicted_s)))
    if not ratios:
        return ""
    near = sum(1 / NEAR < times < NEAR for times in ratios)
    return (
        f"{len(ratios)} first tokens: actual / predicted {statistics.median(ratios):.2f} in the middle,"
        f" {ratios[0]:.2f} to {ratios[-1]:.2f}; {near} within a factor of {NEAR:g}"
    )


def described(turn: TurnView) -> str:
    """A request as some lines of text; times in milliseconds."""
    explanation = turn.explanation or {}
    lines = [
        f"{turn.started_at:%H:%M:%S} {str(turn.request_id)[:8]} → {turn.engine_name or '?'}"
        f"{' (background)' if turn.is_background else ''}: {explanation.get('why', 'no explanation was kept')}",
        f"  first token: predicted {_ms(turn.predicted_first_token_s)}, actual {_ms(turn.first_token_s)}{_times(turn)}"
        f" (queue {_ms(turn.queue_s)}); prompt: guessed {explanation.get('prompt_tokens', '?')},"
        f" actual {turn.prompt_tokens}, cached {turn.cached_tokens}; answer: guessed"
        f" {explanation.get('output_tokens', '?')}, actual {turn.completion_tokens}; {turn.state}",
    ]
    if came := explanation.get("came"):
        lines.append(f"  came: {_came(came, (explanation.get('chosen') or {}).get('terms') or {})}")
    if explanation.get("run_mode", "auto") != "auto":
        lines.append(f"  run mode: {explanation['run_mode']}")
    if split := explanation.get("split"):
        told = f"{split.get('sent_bytes')} bytes, pause {split.get('pause_ms')} ms"
        if split.get("fell_back"):
            told = f"one engine did it all: {split['fell_back']}"
        elif split.get("state") == "running":
            told = "under way" if turn.state == "running" else "nobody knows what came of it"
        lines.append(f"  split: {split['prefill']} → {split['decode']}: {told}")
    for candidate in explanation.get("candidates", ()):
        terms = candidate["terms"]
        told = ", ".join(f"{name[:-2]} {_ms(terms[name])}" for name in TERMS if terms.get(name))
        lines.append(
            f"  {candidate['engine']:<12} {candidate['mode']:<5} {_ms(candidate['cost_s'])} = {told or 'nothing'}"
            f"; {candidate['held_tokens']} tokens held, {candidate['cached_tokens']} without computing"
            + ("" if candidate.get("kv_loss") is None else f"; KL {candidate['kv_loss']:.4f} nats between their quants")
        )
    for refusal in explanation.get("refusals", ()):
        lines.append(
            f"  {refusal['engine']:<12} {refusal['mode']:<5} no: {refusal['reason']} {refusal['detail']}".rstrip()
        )
    return "\n".join(lines)


def _came(came: dict[str, float], expected: dict[str, float]) -> str:
    """Where the time went, each with what was expected of it in the chosen engine's terms."""
    told = []
    for name, seconds in came.items():
        terms = EXPECTED_AS.get(name, (name,))
        expected_s = sum(expected.get(term, 0.0) for term in terms)
        if seconds or expected_s:
            named = " + ".join(term[:-2] for term in terms if expected.get(term) or term == name)
            told.append(f"{named} {_ms(seconds)} (expected {_ms(expected_s)})")
    return ", ".join(told)


def _times(turn: TurnView) -> str:
    times = ratio(turn.first_token_s, turn.predicted_first_token_s)
    return "" if times is None else f" = {times:.2f} ×"


def _ms(seconds: float | None) -> str:
    return "?" if seconds is None else f"{seconds * 1000:.1f} ms"
