"""The router: where a request goes and why. A pure function of the request and the pool, without I/O, in microseconds.

Four steps: the session's engine if it still holds it, else all engines that may; which of them can; what each would cost in
seconds; the least cost wins, but a session that is warm moves only for a clear gain.
"""

from __future__ import annotations

from dataclasses import dataclass

from pools.router_cost import prefill_and_decode, solo
from pools.router_plan import Candidate, Explanation, Plan, Reason, Refusal, Why
from pools.router_views import READY, CombinedView, EngineView, PoolView, RequestView

# A warm session moves if that saves at least so many seconds, and this share of what staying costs.
MOVE_GAIN_S = 0.25
MOVE_GAIN_SHARE = 0.2
# Splitting prefill from decode is looked at from here on; each such pair costs as much to weigh as two engines.
SPLIT_WORTH_S = 0.5
SPLIT_ENDS = 2
# KV bytes of a token where no snapshot has told.
DEFAULT_BYTES_PER_TOKEN = 24_576.0


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
    candidates: list[Candidate] = []
    if request.force_mode in (None, "solo"):
        candidates = [solo(request, engine, pool) for engine in able]
    else:
        refusals += [Refusal("solo", engine.name, Reason.MODE, request.force_mode) for engine in able]
    _add_combined(request, pool, candidates, refusals)
    _add_split(request, pool, able, candidates, refusals)
    # By cost, then by key: equal costs must not depend on the order in which engines are listed.
    candidates.sort(key=lambda candidate: (candidate.cost_s, candidate.engine_id, candidate.prefill_engine_id))
    chosen, why = _choose(request, candidates)
    explanation = Explanation(
        tuple(candidates),
        tuple(refusals),
        chosen,
        why,
        request.prompt_tokens,
        request.output_tokens,
        request.home,
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
    )


def _refusal(request: RequestView, engine: EngineView) -> Refusal | None:
    """Why this engine cannot, the first reason found; None when it can."""
    prompt_tokens = request.sure_prompt_tokens or request.prompt_tokens
    tokens = prompt_tokens + max(1, min(request.output_tokens, request.most_output_tokens or 1 << 62))
    if request.force_engine is not None and engine.engine_id != request.force_engine:
        return Refusal("solo", engine.name, Reason.FORCED)
    if engine.model != request.model:
        return Refusal("solo", engine.name, Reason.MODEL, engine.model)
    if request.allowed_models is not None and engine.model not in request.allowed_models:
        return Refusal("solo", engine.name, Reason.ALLOWED, engine.model)
    if engine.state != READY and engine.load_s <= 0.0:
        return Refusal("solo", engine.name, Reason.STATE, engine.state)
    if engine.tenants is not None and request.tenant not in engine.tenants:
        return Refusal("solo", engine.name, Reason.TENANT)
    if not request.needs <= engine.features:
        return Refusal("solo", engine.name, Reason.FEATURES, ", ".join(sorted(request.needs - engine.features)))
    if engine.quality < request.least_quality:
        return Refusal("solo", engine.name, Reason.QUALITY, f"{engine.quality} of {request.least_quality}")
    if prompt_tokens >= engine.context_tokens:
        return Refusal("solo", engine.name, Reason.CONTEXT, f"{tokens} of {engine.context_tokens} tokens")
    if min(tokens, engine.context_tokens) > engine.cells:
        return Refusal("solo", engine.name, Reason.MEMORY, f"{tokens} of {engine.cells} tokens")
    if engine.queue_length >= engine.queue_limit + max(0, engine.free_slots):
        return Refusal("solo", engine.name, Reason.QUEUE, f"{engine.queue_length} wait")
    return None


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


def _add_split(
    request: RequestView,
    pool: PoolView,
    able: list[EngineView],
    candidates: list[Candidate],
    refusals: list[Refusal],
) -> None:
    """Pairs of a fast prefiller and a fast decoder, where prefill is long enough to be worth the trip."""
    forced = request.force_mode == "pd"
    if request.force_mode not in (None, "pd") or len(pool.engines) < 2:
        return
    able_to = [engine for engine in able if engine.streams_kv and engine.kv_group]
    if forced:
        refusals += [Refusal("pd", engine.name, Reason.STREAMS) for engine in able if engine not in able_to]
    if len(able_to) < 2:
        return
    prefill_s = {engine.engine_id: engine.prefill.seconds(0, request.prompt_tokens) for engine in able_to}
    if not forced and min(prefill_s.values()) < SPLIT_WORTH_S:
        return
    firsts = sorted(able_to, key=lambda engine: (prefill_s[engine.engine_id], engine.engine_id))[:SPLIT_ENDS]
    seconds = sorted(able_to, key=lambda engine: (engine.decode.step_s(1, 0), engine.engine_id))[:SPLIT_ENDS]
    for first in firsts:
        for second in seconds:
            if first is second:
                continue
            name = f"{first.name} → {second.name}"
            if first.kv_group != second.kv_group:
                refusals.append(Refusal("pd", name, Reason.GROUP))
            elif (first.host, second.host) not in pool.links:
                refusals.append(Refusal("pd", name, Reason.LINK))
            else:
                candidates.append(prefill_and_decode(request, first, second, pool, _bytes_per_token(request, pool)))


def _bytes_per_token(request: RequestView, pool: PoolView) -> float:
    for snapshot in pool.snapshots.get(request.session, ()):
        if snapshot.tokens:
            return snapshot.size_bytes / snapshot.tokens
    return DEFAULT_BYTES_PER_TOKEN


def _choose(request: RequestView, candidates: list[Candidate]) -> tuple[Candidate | None, Why | None]:
    """The cheapest of `candidates`, which are in order; the session's home if leaving it gains too little."""
    if not candidates:
        return None, None
    best = candidates[0]
    if request.force_engine is not None or request.force_mode is not None:
        return best, Why.FORCED
    home = next((c for c in candidates if c.mode == "solo" and c.engine_id == request.home and c.held_tokens > 0), None)
    if home is best:
        return best, Why.WARM
    if home is not None and home.cost_s - best.cost_s < max(MOVE_GAIN_S, MOVE_GAIN_SHARE * home.cost_s):
        return home, Why.STAYS
    return best, Why.ONLY if len(candidates) == 1 else Why.CHEAPEST
