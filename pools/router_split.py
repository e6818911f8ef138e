"""Which pairs of engines could share a request: one computes the prompt, the other decodes.

Both must be able to do all of it alone, so that either can go on where the other fails.
"""

from __future__ import annotations

from collections.abc import Mapping

from pools.router_cost import NOTHING_SENT, prefill_and_decode
from pools.router_plan import Candidate, Reason, Refusal
from pools.router_views import EngineView, PoolView, RequestView

# Pairs are looked at from so much prefill on; each costs as much to weigh as an engine.
SPLIT_WORTH_S, FAST_SPLIT_WORTH_S = 0.5, 0.05
SPLIT_ENDS = 2
# A split has more that can go wrong, so it must save this much, and this share of what one engine takes.
SPLIT_GAIN_S = 0.1
SPLIT_GAIN_SHARE = 0.1
# KV bytes of a token where neither an engine nor a snapshot has told.
DEFAULT_BYTES_PER_TOKEN = 24_576.0


def add_split(
    request: RequestView,
    pool: PoolView,
    able: list[EngineView],
    alone: Mapping[int, Candidate],
    candidates: list[Candidate],
    refusals: list[Refusal],
) -> None:
    """Adds pairs of a fast prefiller and a fast decoder to `candidates`, or to `refusals` with the reason.

    `alone` is what each of `able` would cost by itself. A pair that was asked for is looked at however little it saves.
    """
    forced = request.force_mode == "pd"
    if request.force_mode not in (None, "pd") or len(able) < 2:
        return
    if not forced and (request.run_mode == "concurrency" or not request.movable):
        return
    if not request.movable:
        refusals += [Refusal("pd", engine.name, Reason.FIXED) for engine in able]
        return
    able_to = [engine for engine in able if engine.streams_kv and engine.kv_group]
    if forced:
        refusals += [Refusal("pd", engine.name, Reason.STREAMS) for engine in able if engine not in able_to]
    if len(able_to) < 2:
        return
    prefill_s = {engine.engine_id: alone[engine.engine_id].terms.prefill_s for engine in able_to}
    worth_s = FAST_SPLIT_WORTH_S if request.run_mode == "fast" else SPLIT_WORTH_S
    if not forced and (least_s := min(prefill_s.values())) < worth_s:
        quickest = min(able_to, key=lambda engine: (prefill_s[engine.engine_id], engine.engine_id))
        refusals.append(Refusal("pd", f"{quickest.name} and another", Reason.SHORT, f"{least_s:.3f} of {worth_s:g} s"))
        return
    firsts = sorted(able_to, key=lambda engine: (prefill_s[engine.engine_id], engine.engine_id))[:SPLIT_ENDS]
    seconds = sorted(able_to, key=lambda engine: (engine.decode.step_s(1, 0), engine.engine_id))[:SPLIT_ENDS]
    bytes_per_token = _bytes_per_token(request, pool)
    for first in firsts:
        for second in seconds:
            if first is second:
                continue
            refusal = _refusal(request, first, second, pool, forced=forced)
            if refusal is not None:
                refusals.append(refusal)
                continue
            loss = None if first.variant == second.variant else pool.kv_losses[first.variant, second.variant]
            at_first = alone[first.engine_id]
            candidates.append(prefill_and_decode(request, at_first, first, second, pool, bytes_per_token, loss))


def _refusal(
    request: RequestView, first: EngineView, second: EngineView, pool: PoolView, *, forced: bool
) -> Refusal | None:
    name = f"{first.name} → {second.name}"
    if first.kv_group != second.kv_group:
        return Refusal("pd", name, Reason.GROUP)
    if first.variant != second.variant:
        loss = pool.kv_losses.get((first.variant, second.variant))
        if loss is None:
            return Refusal("pd", name, Reason.UNMEASURED)
        if loss > pool.most_kv_loss:
            return Refusal("pd", name, Reason.LOSSY, f"KL {loss:.4f} of at most {pool.most_kv_loss:g} nats")
    link = pool.links.get((first.host, second.host))
    if link is None or (link.doubted and not forced):
        return Refusal("pd", name, Reason.LINK)
    _, free_slots = second.places(request)
    if free_slots - pool.sent.get(second.engine_id, NOTHING_SENT).requests <= 0:
        return Refusal("pd", name, Reason.SLOT)
    return None


def gains_too_little(whole_weight_s: float, split_weight_s: float) -> bool:
    """Whether one engine, which takes `whole_weight_s`, is near enough to the split."""
    return whole_weight_s - split_weight_s < max(SPLIT_GAIN_S, SPLIT_GAIN_SHARE * whole_weight_s)


def _bytes_per_token(request: RequestView, pool: PoolView) -> float:
    for snapshot in pool.snapshots.get(request.session, ()):
        if snapshot.tokens:
            return snapshot.size_bytes / snapshot.tokens
    return DEFAULT_BYTES_PER_TOKEN
