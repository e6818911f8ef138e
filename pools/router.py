"""The router: where a request goes and why. A pure function of the request and the pool, without I/O, in microseconds.

Four steps: the session's engine if it still holds it, else all engines that may; which of them can; what each would cost in
seconds; the least cost wins, but a session that is warm moves only for a clear gain.
"""

from __future__ import annotations

from dataclasses import dataclass

from pools.router_cost import solo
from pools.router_plan import Candidate, Explanation, Plan, Reason, Refusal, Why
from pools.router_split import add_split, gains_too_little
from pools.router_views import CombinedView, EngineView, PoolView, RequestView

# A warm session moves if that saves at least so many seconds, and this share of what staying costs.
MOVE_GAIN_S = 0.25
MOVE_GAIN_SHARE = 0.2


@dataclass(frozen=True, slots=True)
class Routed:
    """The answer. `plan` is None when nobody can take the request; the explanation says why."""

    plan: Plan | None
    explanation: Explanation


def route(request: RequestView, pool: PoolView) -> Routed:
    """Choose among all engines of the pool. The same views give the same answer."""
    able: list[EngineView] = []
    refusals: list[Refusal] = []
    for engine in pool.engines:
        refusal = _refusal(request, engine)
        if refusal is None:
            able.append(engine)
        else:
            refusals.append(refusal)
    able = _with_room(request, able, refusals)
    alone = {engine.engine_id: solo(request, engine, pool) for engine in able}
    candidates: list[Candidate] = []
    if request.force_mode in (None, "solo"):
        candidates = list(alone.values())
    else:
        refusals += [Refusal("solo", engine.name, Reason.MODE, request.force_mode) for engine in able]
    _add_combined(request, pool, candidates, refusals)
    add_split(request, pool, able, alone, candidates, refusals)
    # By cost, then by key: equal costs must not depend on the order in which engines are listed.
    candidates.sort(key=lambda one: (_weight_s(request, one), one.engine_id, one.prefill_engine_id))
    chosen, why = _choose(request, candidates)
    explanation = Explanation(
        tuple(candidates),
        tuple(refusals),
        chosen,
        why,
        request.prompt_tokens,
        request.output_tokens,
        request.home,
        request.run_mode,
    )
    return Routed(None if chosen is None else _plan(chosen), explanation)


def _plan(chosen: Candidate) -> Plan:
    return Plan(
        chosen.mode,
        chosen.engine_id,
        chosen.prefill_engine_id,
        chosen.restore_address,
        chosen.cached_tokens,
        chosen.first_token_s,
        chosen.kv_loss,
    )


def _weight_s(request: RequestView, candidate: Candidate) -> float:
    """What decides: the whole cost, or in a hurry only what this request itself waits for."""
    if request.run_mode == "fast":
        return candidate.cost_s - candidate.terms.others_s - candidate.terms.evict_s
    return candidate.cost_s


def _refusal(request: RequestView, engine: EngineView) -> Refusal | None:
    """Why this engine cannot, the first reason found; None when it can."""
    prompt_tokens = request.sure_prompt_tokens or request.prompt_tokens
    tokens = prompt_tokens + max(1, min(request.output_tokens, request.most_output_tokens or 1 << 62))
    if request.force_engine is not None and engine.engine_id != request.force_engine:
        return Refusal("solo", engine.name, Reason.FORCED)
    if engine.model != request.model:
        return Refusal("solo", engine.name, Reason.MODEL, engine.model)
    if not request.needs <= engine.features:
        return Refusal("solo", engine.name, Reason.FEATURES, ", ".join(sorted(request.needs - engine.features)))
    if prompt_tokens >= engine.context_tokens:
        return Refusal("solo", engine.name, Reason.CONTEXT, f"{tokens} of {engine.context_tokens} tokens")
    if min(tokens, engine.context_tokens) > engine.cells:
        return Refusal("solo", engine.name, Reason.MEMORY, f"{tokens} of {engine.cells} tokens")
    if engine.queue_length >= engine.queue_limit + max(0, engine.free_slots):
        return Refusal("solo", engine.name, Reason.QUEUE, f"{engine.queue_length} wait")
    return None


def _with_room(request: RequestView, able: list[EngineView], refusals: list[Refusal]) -> list[EngineView]:
    """Those of `able` whose context holds the longest answer that was asked for, if there are any: elsewhere it would be cut."""
    if not request.most_output_tokens:
        return able
    tokens = (request.sure_prompt_tokens or request.prompt_tokens) + request.most_output_tokens
    with_room = [engine for engine in able if tokens <= engine.context_tokens]
    if not with_room:
        return able
    for engine in able:
        if tokens > engine.context_tokens:
            refusals.append(Refusal("solo", engine.name, Reason.CONTEXT, f"{tokens} of {engine.context_tokens} tokens"))
    return with_room


def _add_combined(request: RequestView, pool: PoolView, candidates: list[Candidate], refusals: list[Refusal]) -> None:
    if request.force_mode not in (None, "combined"):
        return
    for pair in pool.combined:
        refusal = _combined_refusal(request, pair)
        if refusal is not None:
            refusals.append(refusal)
            continue
        alone = solo(request, pair.engine, pool)
        candidates.append(
            Candidate(
                "combined",
                alone.engine_id,
                alone.engine,
                alone.engine_id,
                alone.terms,
                alone.cost_s,
                alone.first_token_s,
                alone.held_tokens,
                alone.cached_tokens,
                alone.restore_from,
                alone.restore_address,
            )
        )


def _combined_refusal(request: RequestView, pair: CombinedView) -> Refusal | None:
    if not pair.peer_reachable:
        return Refusal("combined", pair.engine.name, Reason.PEER)
    refusal = _refusal(request, pair.engine)
    return None if refusal is None else Refusal("combined", refusal.engine, refusal.reason, refusal.detail)


def _choose(request: RequestView, candidates: list[Candidate]) -> tuple[Candidate | None, Why | None]:
    """The cheapest of `candidates`, which are in order; the session's home if leaving it gains too little, and one engine where
    two gain too little."""
    if not candidates:
        return None, None
    best, why = candidates[0], Why.ONLY if len(candidates) == 1 else Why.CHEAPEST
    if request.force_engine is not None or request.force_mode is not None:
        return best, Why.FORCED
    if best.mode == "pd":
        whole = next((candidate for candidate in candidates if candidate.mode != "pd"), None)
        if whole is not None and gains_too_little(_weight_s(request, whole), _weight_s(request, best)):
            best, why = whole, Why.WHOLE
    home = next((c for c in candidates if c.mode == "solo" and c.engine_id == request.home and c.held_tokens > 0), None)
    if home is best:
        return best, Why.WARM
    if home is not None:
        home_s = _weight_s(request, home)
        if home_s - _weight_s(request, best) < max(MOVE_GAIN_S, MOVE_GAIN_SHARE * home_s):
            return home, Why.STAYS
    return best, why
