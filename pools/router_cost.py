"""What it would cost to answer a request on an engine, term by term, in seconds. Pure arithmetic over measured rates."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from pools.router_plan import Candidate, Terms
from pools.router_views import EngineView, PoolView, RequestView, Sent

# Bringing a snapshot in costs this much whatever its size: a look-up, a lease, the recurrent part.
RESTORE_FIXED_S = 0.005
# A conversation that was left alone for so long comes back with a chance of 1/e.
RETURN_S = 300.0
# Nobody goes on with a background request, so it must not push out a conversation that somebody may go on with.
BACKGROUND_EVICTION = 10.0
# Of every so many chunks one goes to whoever waits longest, whatever its prompt's length.
OLDEST_EVERY_CHUNKS = 4
NOTHING_SENT = Sent()
# Of a line of prompts: tokens that are computed before a new one's, tokens after, and seconds of each.
Line = tuple[int, int, float]
NOBODY: Line = (0, 0, 0.0)


@dataclass(frozen=True, slots=True)
class Reuse:
    """How much of a prompt an engine need not compute, and what getting it costs."""

    held_tokens: int = 0
    cached_tokens: int = 0
    restore_s: float = 0.0
    restore_from: str = ""
    restore_address: str = ""


NOTHING_REUSED = Reuse()


def best_reuse(request: RequestView, engine: EngineView, pool: PoolView) -> Reuse:
    """What is on the engine, or a snapshot where reading it saves more prefill than it costs."""
    # One token is always left to compute: a state holds no logits.
    most = max(0, request.prompt_tokens - 1)
    held = min(most, _held_tokens(request, engine.engine_id, pool))
    best = Reuse(held, held)
    if not engine.resumes or not request.session:
        return best
    best_s = engine.prefill.seconds(held, request.prompt_tokens)
    for snapshot in pool.snapshots.get(request.session, ()):
        tokens = min(most, snapshot.tokens)
        link = pool.links.get((snapshot.host, engine.host))
        if link is None or tokens <= held or not engine.kv_group or snapshot.kv_group != engine.kv_group:
            continue
        missing_bytes = snapshot.size_bytes * (tokens - held) / max(1, snapshot.tokens)
        restore_s = RESTORE_FIXED_S + link.seconds(missing_bytes)
        seconds = restore_s + engine.prefill.seconds(tokens, request.prompt_tokens)
        if seconds < best_s:
            best_s = seconds
            best = Reuse(held, tokens, restore_s, snapshot.host, snapshot.address)
    return best


def _held_tokens(request: RequestView, engine_id: int, pool: PoolView) -> int:
    held = pool.held.get(request.session, {}).get(engine_id, 0) if request.session else 0
    for key in request.prefix_keys:
        on_engines = pool.prefixes.get(key)
        if on_engines is not None and engine_id in on_engines:
            # The keys stand longest first, so no later one can say more.
            return max(held, on_engines[engine_id])
    return held


def solo(request: RequestView, engine: EngineView, pool: PoolView) -> Candidate:
    """The engine does all of it."""
    sent = pool.sent.get(engine.engine_id, NOTHING_SENT)
    reuse = best_reuse(request, engine, pool)
    prompt, output = request.prompt_tokens, request.output_tokens
    pending = engine.pending_tokens + sent.prompts if sent.prompts else engine.pending_tokens
    step_s = usual_step_s(engine, pending, prompt)
    missing_tokens = prompt - reuse.cached_tokens
    # What stands there of its own beginning is no other's.
    other_tokens = max(0, engine.resident_tokens - reuse.held_tokens)
    prefill_s = engine.prefill.seconds(reuse.cached_tokens, prompt, other_tokens) * interleaving(
        engine, engine.decoding
    )
    line = line_of(engine, pending, missing_tokens)
    crowding = engine.crowd * engine.neighbours
    terms = Terms(
        queue_s=queue_s(request, engine, sent, line, missing_tokens),
        restore_s=reuse.restore_s,
        prefill_s=prefill_s,
        decode_s=output * step_s * (1.0 + crowding) + stalls_s(engine, line, output),
        evict_s=evict_s(request, engine, reuse),
        # Each of the neighbours is held up as much as this one is.
        others_s=others_s(engine, pending, output, step_s, missing_tokens, prefill_s)
        + crowding * (prefill_s + output * step_s),
        fixed_s=engine.fixed_s,
        wake_s=engine.wake_s,
        drift_s=(engine.drift - 1.0) * (prefill_s + step_s),
        crowd_s=crowding * engine.drift * (prefill_s + step_s),
    )
    first_token_s = terms.queue_s + terms.restore_s + prefill_s + step_s + terms.beside_s
    return Candidate(
        "solo",
        engine.engine_id,
        engine.name,
        engine.engine_id,
        terms,
        terms.total_s,
        first_token_s,
        reuse.held_tokens,
        reuse.cached_tokens,
        reuse.restore_from,
        reuse.restore_address,
        neighbours=engine.neighbours,
    )


def prefill_and_decode(
    request: RequestView,
    at_first: Candidate,
    first: EngineView,
    second: EngineView,
    pool: PoolView,
    bytes_per_token: float,
    kv_loss: float | None = None,
) -> Candidate:
    """`first` computes the prompt while its blocks travel to `second`, which decodes and has a free slot. Both can share KV over
    a known link; `at_first` is what it would cost if `first` did all of it."""
    terms = _shared_terms(request, at_first, first, second, pool, bytes_per_token)
    return Candidate(
        "pd",
        second.engine_id,
        f"{first.name} → {second.name}",
        first.engine_id,
        terms,
        terms.total_s,
        # The first draws the first token itself, and the rest of the state leaves behind it.
        at_first.first_token_s,
        at_first.held_tokens,
        at_first.cached_tokens,
        at_first.restore_from,
        at_first.restore_address,
        kv_loss,
    )


def _shared_terms(
    request: RequestView,
    at_first: Candidate,
    first: EngineView,
    second: EngineView,
    pool: PoolView,
    bytes_per_token: float,
) -> Terms:
    """What a request costs that `first` begins and `second` ends: until the first token as at the first, then at the second."""
    link = pool.links[(first.host, second.host)]
    prompt, output = request.prompt_tokens, request.output_tokens
    prefill_s, missing_tokens = at_first.terms.prefill_s, prompt - at_first.cached_tokens
    pending_second = second.pending_tokens + pool.sent.get(second.engine_id, NOTHING_SENT).prompts
    pending_first = first.pending_tokens + pool.sent.get(first.engine_id, NOTHING_SENT).prompts
    step_s = usual_step_s(second, pending_second, prompt)
    travel_s = link.seconds((first.kv_token_bytes or bytes_per_token) * prompt)
    return replace(
        at_first.terms,
        # Blocks leave as they are finished: what is left then is what travelling takes longer, and the recurrent state.
        restore_s=at_first.terms.restore_s
        + max(0.0, travel_s - prefill_s)
        + link.seconds(first.kv_part_bytes)
        + RESTORE_FIXED_S,
        # No prompt of the second's own line comes before this one's tokens, so all of them hold it up a little.
        decode_s=output * step_s + stalls_s(second, line_of(second, pending_second, 0), output),
        evict_s=at_first.terms.evict_s + evict_s(request, second, NOTHING_REUSED),
        others_s=prefill_costs_others_s(first, pending_first, missing_tokens, prefill_s)
        + steps_cost_others_s(second, second.decoding + len(pending_second), output, step_s),
    )


def usual_step_s(engine: EngineView, pending: tuple[int, ...], prompt_tokens: int) -> float:
    """A step of this request's answer: those who decode do it along, and those whose prompts are under way."""
    along = min(engine.decoding + len(pending), max(0, engine.slots - 1))
    return engine.decode.step_s(along + 1, engine.resident_tokens + prompt_tokens, engine.own_tokens + prompt_tokens)


def line_of(engine: EngineView, pending: tuple[int, ...], missing_tokens: int) -> Line:
    """Whoever is nearest to a first token comes first. A token of theirs takes what it takes in a prompt of their mean length."""
    if not pending:
        return NOBODY
    before = sum([tokens for tokens in pending if tokens <= missing_tokens])
    whole = sum(pending)
    mean = max(1, whole // len(pending))
    return before, whole - before, engine.prefill.seconds(0, mean, engine.resident_tokens) / mean


def queue_s(request: RequestView, engine: EngineView, sent: Sent, line: Line, missing_tokens: int) -> float:
    """Until the engine begins with this prompt: prompts that come before it, and a slot if none is free."""
    before, after, token_s = line
    # Meanwhile every so many chunks one is the oldest prompt's, which may be longer.
    between = min(after, (before + missing_tokens) // (OLDEST_EVERY_CHUNKS - 1)) if after else 0
    waited_s = (before + between) * token_s * engine.drift
    slots, free_slots = engine.places(request)
    lacking = 1 + engine.queue_length + sent.requests - free_slots
    if lacking > 0:
        waited_s += lacking * engine.request_s / max(1, slots)
    return waited_s


def stalls_s(engine: EngineView, line: Line, output_tokens: int) -> float:
    """How long others' prompts that are still to be computed hold this one up while it decodes: a chunk at each step at most."""
    _, after, token_s = line
    return min(after * token_s, output_tokens * engine.chunk_s) if engine.chunk_s else after * token_s


def interleaving(engine: EngineView, decoding: int) -> float:
    """How much longer a prompt takes because others' steps stand between its chunks."""
    if not decoding or engine.chunk_s <= 0.0:
        return 1.0
    return 1.0 + engine.decode.step_s(decoding, engine.resident_tokens, engine.own_tokens) / engine.chunk_s


def evict_s(request: RequestView, engine: EngineView, reuse: Reuse) -> float:
    """What computing the pushed-out conversation again would take, by the chance that it goes on."""
    if not engine.idle_tokens or reuse.held_tokens:
        return 0.0
    again_s = engine.prefill.seconds(0, engine.idle_tokens) * math.exp(-engine.idle_s / RETURN_S)
    return again_s * (BACKGROUND_EVICTION if request.background else 1.0)


def others_s(
    engine: EngineView,
    pending: tuple[int, ...],
    output_tokens: int,
    step_s: float,
    missing_tokens: int,
    prefill_s: float,
) -> float:
    """What the others lose there, all together."""
    return prefill_costs_others_s(engine, pending, missing_tokens, prefill_s) + steps_cost_others_s(
        engine, engine.decoding + len(pending), output_tokens, step_s
    )


def prefill_costs_others_s(
    engine: EngineView, pending: tuple[int, ...], missing_tokens: int, prefill_s: float
) -> float:
    """Those who decode wait for this prompt, and those whose prompts are longer."""
    return prefill_s * (engine.decoding + sum([tokens > missing_tokens for tokens in pending]))


def steps_cost_others_s(engine: EngineView, decoding: int, output_tokens: int, step_s: float) -> float:
    """The steps of those who decode take longer with one more."""
    if not decoding:
        return 0.0
    without_s = engine.decode.step_s(decoding, engine.resident_tokens, engine.own_tokens)
    return max(0.0, step_s - without_s) * output_tokens * decoding
