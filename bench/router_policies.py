"""Who chooses in the simulator: the product's router, what other gateways do, and one who knows the future."""

from __future__ import annotations

import random
import time
from collections import OrderedDict
from collections.abc import Sequence

from bench.router_simulation import (
    BYTES_PER_TOKEN,
    CHUNK_S,
    LINK_BYTES_PER_S,
    MEMORY_BYTES_PER_S,
    STORE_TOKENS,
    Card,
    Job,
    Policy,
    Pool,
    SimulatedEngine,
    run,
)
from bench.router_traces import BLOCK_TOKENS, TraceRequest
from pools.router import route
from pools.router_plan import Explanation
from pools.router_views import EngineView, LinkView, PoolView, RequestView, Sent, SnapshotView

# An engine is asked for its state so often, as the site does it.
POLL_S = 1.0


def round_robin() -> Policy:
    turn = -1

    def choose(_request: TraceRequest, pool: Pool) -> tuple[int, bool]:
        nonlocal turn
        turn = (turn + 1) % len(pool.engines)
        return turn, False

    return choose


def least_loaded(_request: TraceRequest, pool: Pool) -> tuple[int, bool]:
    """The fewest requests per slot."""
    return min(pool.engines, key=lambda engine: engine.in_flight / engine.card.slots).number, False


def sticky() -> Policy:
    """A conversation stays where it began, which is where the load was least."""
    homes: dict[int, int] = {}

    def choose(request: TraceRequest, pool: Pool) -> tuple[int, bool]:
        return homes.setdefault(request.session, least_loaded(request, pool)[0]), False

    return choose


def fixed(numbers: Sequence[tuple[int, bool]]) -> Policy:
    """Choices that were made before."""
    coming = iter(numbers)

    def choose(_request: TraceRequest, _pool: Pool) -> tuple[int, bool]:
        return next(coming)

    return choose


class Router:
    """The product's router, told only what a site can know: polled rates and what it sent, not lengths of answers."""

    def __init__(self) -> None:
        self.seconds: list[float] = []
        self.explanations: list[Explanation] = []
        self.choices: list[tuple[int, bool]] = []
        self._output_tokens = 300.0
        self._homes: dict[int, int] = {}
        self._hints: dict[int, OrderedDict[int, None]] = {}
        self._snapshots: dict[str, dict[str, SnapshotView]] = {}
        self._views: dict[int, tuple[float, EngineView]] = {}
        self._sent: dict[int, Sent] = {}
        self._read: dict[int, int] = {}

    def __call__(self, request: TraceRequest, pool: Pool) -> tuple[int, bool]:
        views = tuple(self._view(engine, request.at_s) for engine in pool.engines)
        self._learn(pool)
        session = str(request.session)
        asked = RequestView(
            "m", request.prompt_tokens, int(self._output_tokens), session=session, prefix_keys=("chain",),
            home=self._homes.get(request.session),
        )  # fmt: skip
        seen = PoolView(
            views,
            prefixes={"chain": {engine.number: self._known(engine.number, request) for engine in pool.engines}},
            snapshots={session: tuple(self._snapshots.get(session, {}).values())},
            links={
                (one.name, other.name): LinkView(MEMORY_BYTES_PER_S if one is other else LINK_BYTES_PER_S)
                for one in views
                for other in views
            },
            sent=self._sent,
        )
        started = time.perf_counter()
        routed = route(asked, seen)
        self.seconds.append(time.perf_counter() - started)
        assert routed.plan is not None
        chosen = routed.plan.engine_id
        self.explanations.append(routed.explanation)
        self._note(request, chosen, views)
        choice = (chosen, routed.explanation.chosen is not None and bool(routed.explanation.chosen.restore_from))
        self.choices.append(choice)
        return choice

    def _known(self, number: int, request: TraceRequest) -> int:
        hints = self._hints.setdefault(number, OrderedDict())
        blocks = request.blocks
        low, high = 0, len(blocks)
        while low < high:
            middle = (low + high + 1) // 2
            low, high = (middle, high) if blocks[middle - 1] in hints else (low, middle - 1)
        return low * BLOCK_TOKENS

    def _note(self, request: TraceRequest, chosen: int, views: Sequence[EngineView]) -> None:
        self._homes[request.session] = chosen
        sent = self._sent.get(chosen, Sent())
        missing = request.prompt_tokens - min(request.prompt_tokens, self._known(chosen, request))
        self._sent[chosen] = Sent((*sent.prompts, missing))
        hints = self._hints[chosen]
        for block in request.blocks:
            hints[block] = None
            hints.move_to_end(block)
        while len(hints) * BLOCK_TOKENS > views[chosen].cells + STORE_TOKENS // 2:
            hints.popitem(last=False)
        known = self._snapshots.setdefault(str(request.session), {})
        tokens = len(request.blocks) * BLOCK_TOKENS
        name = views[chosen].name
        known[name] = SnapshotView(name, "q4", tokens, tokens * BYTES_PER_TOKEN, name)

    def _learn(self, pool: Pool) -> None:
        """From answers that ended: how long they are."""
        for engine in pool.engines:
            for job in engine.ended[self._read.get(engine.number, 0) :]:
                self._output_tokens += 0.02 * (job.request.output_tokens - self._output_tokens)
            self._read[engine.number] = len(engine.ended)

    def _view(self, engine: SimulatedEngine, now_s: float) -> EngineView:
        polled_s, view = self._views.get(engine.number, (-POLL_S, None))
        if view is None or now_s - polled_s >= POLL_S:
            view = view_of(engine)
            self._views[engine.number] = (now_s, view)
            self._sent[engine.number] = Sent()
        return view


def view_of(engine: SimulatedEngine) -> EngineView:
    card = engine.card
    busy = len(engine.filling) + len(engine.decoding)
    return EngineView(
        engine.number,
        card.name,
        card.name,
        "m",
        card.prefill,
        card.decode,
        card.slots,
        1 << 20,
        1 << 24,
        free_slots=card.slots - busy,
        decoding=len(engine.decoding),
        resident_tokens=int(engine.resident_tokens),
        pending_tokens=(
            *(int(job.todo_tokens) for job in engine.filling),
            *(job.request.prompt_tokens for job in engine.queue),
        ),
        queue_length=len(engine.queue),
        queue_limit=1 << 20,
        request_s=engine.slot_s,
        chunk_s=CHUNK_S,
        kv_group="q4",
        resumes=True,
    )


def knowing(request: TraceRequest, pool: Pool) -> tuple[int, bool]:
    """Whoever knows all that runs and how long each answer gets: the engine where all ends soonest in sum."""

    def added_s(engine: SimulatedEngine) -> float:
        without, with_it = engine.copy(), engine.copy()
        with_it.submit(Job(request, True))
        ends = []
        for twin in (without, with_it):
            twin.advance(float("inf"))
            ends.append(sum(job.ended_at_s for job in twin.ended))
        return ends[1] - ends[0]

    return min(pool.engines, key=added_s).number, True


def improved(
    requests: Sequence[TraceRequest], cards: Sequence[Card], choices: list[tuple[int, bool]], tries: int, seed: int
) -> list[Job]:
    """The offline oracle: choices of somebody who saw the whole trace, bettered one by one as long as `tries` last."""
    rng = random.Random(seed)
    best = run(requests, cards, fixed(choices))
    best_s = total_s(best)
    for _ in range(tries):
        # The worst delayed are the likeliest to gain, but not the only ones.
        at = max(
            rng.sample(range(len(best)), min(4, len(best))), key=lambda i: best[i].ended_at_s - best[i].request.at_s
        )
        trial = list(choices)
        trial[at] = (rng.choice([n for n in range(len(cards)) if n != choices[at][0]]), True)
        jobs = run(requests, cards, fixed(trial))
        if total_s(jobs) < best_s:
            best, best_s, choices = jobs, total_s(jobs), trial
    return best


def total_s(jobs: Sequence[Job]) -> float:
    return sum(job.ended_at_s - job.request.at_s for job in jobs)
