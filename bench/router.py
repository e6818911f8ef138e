"""The router in a simulated pool of an sm_120, an sm_86 and an sm_60 card, against other ways to choose.

Ratios are of mean time from arrival to last token: how many times longer with round-robin, and what share of ours the offline
oracle needs. The oracle knows the trace and every length, and keeps bettering its choices; it is looked for on a part only.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench.errors import BenchError
from bench.measures import percentile
from bench.report import print_table
from bench.router_policies import (
    Router,
    improved,
    knowing,
    least_loaded,
    round_robin,
    sticky,
    total_s,
)
from bench.router_simulation import Card, Job, Policy, cards, run
from bench.router_traces import TraceRequest, at_rate, read_trace, synthetic
from pools.router import route
from pools.router_views import DecodeRates, EngineView, LinkView, PoolView, PrefillFit, RequestView, SnapshotView

# What the pool decides among when a decision is timed.
TIMED_ENGINES = 8
TIMED_SESSIONS = 10_000
TIMED_DECISIONS = 2_000


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--trace", type=Path, help="a trace file: timestamp, input_length, output_length, hash_ids a line"
    )
    parser.add_argument("--load", type=float, default=0.5, help="share of the pool's speed that the trace is scaled to")
    parser.add_argument("--requests", type=int, default=0, help="only so many of a trace; 0: all")
    parser.add_argument("--oracle-requests", type=int, default=300, help="the part that the oracle is looked for on")
    parser.add_argument("--oracle-tries", type=int, default=300, help="how often the oracle tries to do better")
    parser.add_argument("--seed", type=int, default=1, help="of made-up traces and of the oracle")


def run_bench(options: argparse.Namespace) -> dict[str, Any]:
    """Tables on stdout; returns the last line's values. Raises BenchError."""
    if not 0 < options.load < 1:
        raise BenchError("--load must lie between 0 and 1")
    if options.trace is not None:
        traces = {options.trace.name: read_trace(options.trace)[: options.requests or None]}
    else:
        traces = synthetic(options.seed)
    print("pool: " + ", ".join(described(card) for card in cards()))
    compared = [compare(name, trace, options) for name, trace in traces.items()]
    decision_s = timed_decisions(options.seed)
    answer: dict[str, Any] = {"decision_us_p50": round(percentile(decision_s, 0.5) * 1e6, 1)}
    for name in compared[0]:
        answer[name] = round(statistics.geometric_mean([ratios[name] for ratios in compared]), 3)
    return {
        "decision_us_p99": round(percentile(decision_s, 0.99) * 1e6, 1),
        "load": options.load,
        "traces": list(traces),
        **answer,
    }


def described(card: Card) -> str:
    prefill = 4096 / card.prefill.seconds(0, 4096)
    return f"{card.name} {prefill:.0f} tok/s prompt, {1 / card.decode.step_s(1, 4096):.0f} tok/s decode"


def compare(name: str, trace: Sequence[TraceRequest], options: argparse.Namespace) -> dict[str, float]:
    """One trace through all policies; the ratios against ours."""
    scaled = at_rate(trace, needed_s(trace, cards()) / options.load / max(1.0, trace[-1].at_s))
    router = Router()
    began_s = time.perf_counter()
    policies: dict[str, Policy] = {
        "router": router,
        "round-robin": round_robin(),
        "least-loaded": least_loaded,
        "sticky": sticky(),
    }
    jobs = {policy: run(scaled, cards(), choose) for policy, choose in policies.items()}
    part = scaled[: options.oracle_requests]
    ours, oracle = the_oracle(part, options)
    rows = [row(policy, ran) for policy, ran in jobs.items()]
    rows += [row(f"router, first {len(part)}", ours), row(f"oracle, first {len(part)}", oracle)]
    title = f"{name}: {len(scaled)} requests over {scaled[-1].at_s / 3600:.1f} simulated hours, load {options.load}"
    print_table(title, ["", "mean s", "p50", "p95", "first token s", "p50", "p95", "cached"], rows)
    print(f"  decisions in the simulation: {percentile(router.seconds, 0.5) * 1e6:.0f} us p50;"
          f" simulated in {time.perf_counter() - began_s:.0f} s")  # fmt: skip
    mine = total_s(jobs["router"])
    return {
        "vs_round_robin": total_s(jobs["round-robin"]) / mine,
        "vs_least_loaded": total_s(jobs["least-loaded"]) / mine,
        "vs_sticky": total_s(jobs["sticky"]) / mine,
        "vs_oracle": total_s(oracle) / total_s(ours),
    }


def the_oracle(part: Sequence[TraceRequest], options: argparse.Namespace) -> tuple[list[Job], list[Job]]:
    """Our jobs and the best known ones: from our choices and from those of somebody who knows all lengths, bettered."""
    router, choices = Router(), list[tuple[int, bool]]()

    def noting(request: TraceRequest, pool: Any) -> tuple[int, bool]:
        choices.append(knowing(request, pool))
        return choices[-1]

    ours = run(part, cards(), router)
    known = run(part, cards(), noting)
    start = choices if total_s(known) < total_s(ours) else router.choices
    return ours, improved(part, cards(), start, options.oracle_tries, options.seed)


def needed_s(trace: Sequence[TraceRequest], pool: Sequence[Card]) -> float:
    """How long the pool needs for the trace if nobody ever waits for it, and each beginning is computed once."""
    seen: set[int] = set()
    work_s = [0.0] * len(pool)
    for request in trace:
        fresh = next((i for i, block in enumerate(request.blocks) if block not in seen), len(request.blocks))
        seen.update(request.blocks)
        cached = request.prompt_tokens * fresh // max(1, len(request.blocks))
        for number, card in enumerate(pool):
            # Eight streams share a step.
            step_s = card.decode.step_s(8, 8 * request.prompt_tokens) / 8
            work_s[number] += card.prefill.seconds(cached, request.prompt_tokens) + request.output_tokens * step_s
    return 1 / sum(1 / seconds for seconds in work_s)


def row(name: str, jobs: Sequence[Job]) -> list[str]:
    whole = [job.ended_at_s - job.request.at_s for job in jobs]
    first = [job.first_at_s - job.request.at_s for job in jobs]
    cached = sum(job.cached_tokens for job in jobs) / sum(job.request.prompt_tokens for job in jobs)
    figures = [f"{value:.2f}" for seconds in (whole, first)
               for value in (statistics.fmean(seconds), percentile(seconds, 0.5), percentile(seconds, 0.95))]  # fmt: skip
    return [name, *figures, f"{cached:.0%}"]


def timed_decisions(seed: int) -> list[float]:
    """Seconds of decisions among eight busy engines with ten thousand sessions, each with a snapshot."""
    rng = random.Random(seed)
    engines = tuple(timed_engine(number, rng) for number in range(TIMED_ENGINES))
    hosts = sorted({engine.host for engine in engines})
    names = [f"session-{number}" for number in range(TIMED_SESSIONS)]
    homes = {name: rng.randrange(TIMED_ENGINES) for name in names}
    snapshots = {name: (SnapshotView(rng.choice(hosts), "q4", 20_000, 218_000_000, "10.0.0.1:9500"),) for name in names}
    links = {(one, other): LinkView(5e9 if one == other else 1e9) for one in hosts for other in hosts}
    held = {name: {home: rng.randrange(20_000)} for name, home in homes.items()}
    pool = PoolView(engines, held=held, snapshots=snapshots, links=links)
    seconds = []
    for _ in range(TIMED_DECISIONS):
        name = rng.choice(names)
        request = RequestView("m", rng.randrange(100, 30_000), 300, session=name, home=homes[name])
        started = time.perf_counter()
        route(request, pool)
        seconds.append(time.perf_counter() - started)
    return seconds


def timed_engine(number: int, rng: random.Random) -> EngineView:
    slow = 1.0 + number
    return EngineView(
        number, f"engine-{number}", f"host-{number % 4}", "m",
        PrefillFit(1e-4 * slow, 1.7e-10 * slow),
        DecodeRates(((1, 0.004 * slow), (8, 0.009 * slow), (32, 0.02 * slow)), 1.6e-8 * slow),
        slots=8, context_tokens=131_072, cells=524_288, free_slots=number, decoding=8 - number, resident_tokens=40_000,
        pending_tokens=tuple(rng.randrange(8_000) for _ in range(number % 4)), request_s=8.0, chunk_s=0.4,
        idle_tokens=4_000, idle_s=60.0, kv_group="q4", resumes=True,
    )  # fmt: skip
