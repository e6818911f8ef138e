"""`python -m bench spec`: drafts of fixed lengths and of the length that the engine chooses, by how often they are right.

One model serves all acceptance rates: its text is one long circle of tokens, and the draft head is wrong as often as wanted on
an arc for each rate. All servers live at once and are measured in turn, so that a card's warmth is the same for all; ours without
drafts is a server of its own, since a draft head costs something even where it is not asked. Forms are compared round by round,
since a card's clock changes more from one minute to the next than the forms differ: a ratio is the median of its rounds.

With `--limit-s` the cells take turns in an order drawn for each round, until the time is over; a cell counts with its whole
rounds, and the last line says how many cells have one. `--clock processor` compares by the servers' processor time, for a
machine that has other work too.

`--simulate` asks only for the choice of the length, on simulated devices (bench/spec_simulation.py).
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import random
import sys
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import aiohttp
import numpy as np
import numpy.typing as npt

from bench import spec_simulation
from bench.errors import BenchError
from bench.load import Request, client_session, drive
from bench.models import set_wrong_drafts, text_circle
from bench.report import print_table
from bench.servers import FORMS, HYDRA, Running, ServerSettings, compute_threads, model_path, serving
from bench.spec_clock import CLOCKS, ProcessorClock, speed
from bench.vocabulary import qwen35

LENGTHS = [0, 1, 2, 3, 4]
AUTO, NONE, PEER = "auto", "none", "llama-server"
PEER_LENGTHS = [1, 3]
PROMPT_TOKENS = 48
WARM_UP_TOKENS = 32
CONTEXT_STEP_TOKENS = 256
PASSAGE_SPARE_TOKENS = 32


@dataclass(frozen=True)
class Variant:
    """One way to answer: the server that does, and what its requests say beside the prompt."""

    name: str
    server: Running
    extra: Mapping[str, Any]

    @property
    def base_url(self) -> str:
        return self.server.base_url


class Rates:
    """Tokens per second by acceptance, streams and form, an entry per round."""

    def __init__(self) -> None:
        self.rounds: dict[tuple[str, int, str], list[float]] = {}

    @property
    def cells(self) -> list[tuple[str, int]]:
        """Acceptance and streams of all that was measured, in order."""
        return list(dict.fromkeys((acceptance, streams) for acceptance, streams, _ in self.rounds))

    def add(self, acceptance: str, streams: int, form: str, rate: float) -> None:
        self.rounds.setdefault((acceptance, streams, form), []).append(rate)

    def of(self, acceptance: str, streams: int, form: str) -> float | None:
        """The median of all rounds."""
        rates = self.rounds.get((acceptance, streams, form))
        return median(rates) if rates else None

    def ratio(self, acceptance: str, streams: int, forms: tuple[str, ...]) -> float | None:
        """Of auto to whichever of the forms it compares worst with."""
        ours = self.rounds.get((acceptance, streams, AUTO), [])
        theirs = [self.rounds.get((acceptance, streams, form), []) for form in forms]
        ratios = [[mine / rate for mine, rate in zip(ours, rates, strict=False)] for rates in theirs]
        return min((median(rounds) for rounds in ratios if rounds), default=None)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", default="synthetic:hybrid-drafts", help="synthetic:NAME of a model that knows_next")
    parser.add_argument("--streams", type=_numbers, default=[1, 8], help="requests at once, as 1,8")
    parser.add_argument("--acceptance", type=_shares, default=[1.0, 0.9, 0.7, 0.5, 0.2], help="as 1.0,0.5")
    parser.add_argument("--lengths", type=_numbers, default=LENGTHS, help="fixed lengths of drafts")
    parser.add_argument("--rounds", type=int, default=2, help="times each cell is measured")
    parser.add_argument("--new-tokens", type=int, default=128, help="tokens per answer")
    parser.add_argument("--sampling", choices=["greedy", "topk"], default="greedy")
    parser.add_argument(
        "--peer-lengths",
        type=_numbers,
        default=PEER_LENGTHS,
        help="drafts of llama-server, a life each; 0: leave it out",
    )
    parser.add_argument("--peer-form", choices=FORMS, default="default+bare", help="of llama-server")
    parser.add_argument("--limit-s", type=float, help="time for all of it; cells take turns for as long as it lasts")
    parser.add_argument("--clock", choices=CLOCKS, default="wall", help="processor: of the servers' processor time")
    parser.add_argument("--out", type=Path, help="file for all details as JSON")
    parser.add_argument("--changes", action="store_true", help="also answers whose acceptance changes in the middle")
    parser.add_argument("--simulate", action="store_true", help="the choice of the length alone, without any model")
    parser.add_argument("--seeds", type=int, default=200, help="simulated runs of each cell")
    parser.add_argument("--answer-tokens", type=int, default=192, help="tokens of a simulated answer")


def _numbers(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


def _shares(text: str) -> list[float]:
    return [float(part) for part in text.split(",")]


def run(options: argparse.Namespace, peer: Path | None) -> dict[str, Any]:
    """Measures, prints the table, and returns the object of the last line."""
    ends_at = time.monotonic() + options.limit_s if options.limit_s else None
    if options.simulate:
        return spec_simulation.run(options.seeds, options.answer_tokens)
    if max(options.lengths) < 1:
        raise BenchError("drafts of no length but 0 leave nothing to compare; say --lengths 0,1,2,3,4")
    if not options.model.startswith("synthetic:") or not options.model.endswith("-drafts"):
        raise BenchError(f"{options.model} has no draft head that can be made wrong; say synthetic:hybrid-drafts")
    model = model_path(options.model)
    pieces = np.array_split(text_circle(qwen35()), len(options.acceptance))
    set_wrong_drafts(model, [(piece, 1 - rate) for rate, piece in zip(options.acceptance, pieces, strict=True)])
    arcs = dict(zip(map(str, options.acceptance), pieces, strict=True))
    if options.changes:
        arcs |= _passages(arcs, options.new_tokens)
    rates = Rates()
    options.logs.mkdir(parents=True, exist_ok=True)
    with contextlib.ExitStack() as servers:
        variants = _variants(options, model, peer, servers)
        asyncio.run(Measuring(variants, arcs, options, rates).until(ends_at))
    _print(options, rates)
    if options.out:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text(json.dumps([[*key, *values] for key, values in rates.rounds.items()], indent=1))
    answer = last_line(options, rates)
    return answer if ends_at is None else {**answer, **_reached(options, list(arcs), rates)}


def _passages(arcs: Mapping[str, npt.NDArray[np.int64]], new_tokens: int) -> dict[str, npt.NDArray[np.int64]]:
    """Where each arc passes into the next: answers that begin near the start of these have another acceptance in their second
    half."""
    half = new_tokens // 2 + PASSAGE_SPARE_TOKENS
    return {
        f"{before} then {after}": np.concatenate((arcs[before][-half:], arcs[after][:half]))
        for before, after in pairwise(arcs)
    }


def _variants(
    options: argparse.Namespace, model: Path, peer: Path | None, servers: contextlib.ExitStack
) -> list[Variant]:
    def started(form: str, engine: dict[str, Any], *flags: str) -> Running:
        settings = _settings(options, model, peer, engine, flags)
        return servers.enter_context(serving(form, settings, options.logs))

    plain = started(HYDRA, {"speculation": "none"})
    drafting = started(HYDRA, {"speculation": "mtp", "draft_tokens": max(options.lengths)})
    fixed = [Variant(str(n), drafting, {"speculative.n_min": n, "speculative.n_max": n}) for n in options.lengths]
    theirs = []
    for length in filter(None, options.peer_lengths if peer else []):
        # It does not heed a request's own length.
        server = started(options.peer_form, {}, "--spec-type", "draft-mtp", "--spec-draft-n-max", str(length))
        theirs.append(Variant(f"{PEER} {length}", server, {}))
    # Ours that are compared with each other stand side by side.
    return [*fixed, Variant(NONE, plain, {}), Variant(AUTO, drafting, {}), *theirs]


def _settings(
    options: argparse.Namespace, model: Path, peer: Path | None, engine: dict[str, Any], flags: tuple[str, ...]
) -> ServerSettings:
    needed = 2 * PROMPT_TOKENS + options.new_tokens + max(options.lengths)
    return ServerSettings(
        model=model,
        slots=max(options.streams),
        context_tokens=-(-needed // CONTEXT_STEP_TOKENS) * CONTEXT_STEP_TOKENS,
        threads=compute_threads(options.threads),
        gpu_layers=options.gpu_layers,
        peer=peer,
        engine={**dict(options.set), **engine},
        peer_arguments=(*options.peer_argument, *flags),
    )


class Measuring:
    """All variants of all cells, whose speeds go to `rates`."""

    def __init__(
        self,
        variants: list[Variant],
        arcs: Mapping[str, npt.NDArray[np.int64]],
        options: argparse.Namespace,
        rates: Rates,
    ) -> None:
        self._variants, self._arcs, self._options, self._rates = variants, arcs, options, rates
        # What has been warmed up: forms that choose nothing once for each number of streams, the others for each arc.
        self._warm: set[tuple[str, int]] = set()
        self._arc = ""

    async def until(self, ends_at: float | None) -> None:
        """Measures until all rounds are done or, by the monotonic clock, the time is over; a cell that is cut short then does
        not count."""
        left_s = None if ends_at is None else max(0.0, ends_at - time.monotonic())
        async with client_session() as session:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(left_s):
                    for arc, round_index in self._turns(in_turn=ends_at is not None):
                        for streams in self._options.streams:
                            await self._cell(session, arc, streams, round_index)

    def _turns(self, *, in_turn: bool) -> Iterator[tuple[str, int]]:
        """Arcs with the numbers of their rounds: one arc after the other, or all of them in turn, in another order each round."""
        rounds, names = range(self._options.rounds), list(self._arcs)
        if not in_turn:
            yield from ((arc, index) for arc in names for index in rounds)
            return
        for index in rounds:
            order = random.Random(index).sample(names, len(names))
            yield from ((arc, index) for arc in order)

    async def _cell(self, session: aiohttp.ClientSession, arc: str, streams: int, round_index: int) -> None:
        if arc != self._arc:
            self._warm = {(name, count) for name, count in self._warm if name != AUTO}
            self._arc = arc
        measured = {}
        for variant in self._variants if round_index % 2 == 0 else reversed(self._variants):
            await self._warm_up(session, variant, streams)
            count = self._options.new_tokens
            requests = _requests(variant, self._arcs[arc], streams, count, self._options, round_index)
            clock = ProcessorClock(variant.server.pid) if self._options.clock == "processor" else None
            async with clock.running() if clock else contextlib.nullcontext():
                records = await drive(session, variant.base_url, requests)
            measured[variant.name] = rate = speed(records, clock)
            print(f"  {arc} {variant.name} × {streams}: {rate:.1f} tok/s", file=sys.stderr, flush=True)
        for name, rate in measured.items():
            self._rates.add(arc, streams, name, rate)

    async def _warm_up(self, session: aiohttp.ClientSession, variant: Variant, streams: int) -> None:
        if (variant.name, streams) in self._warm:
            return
        # An engine knows from its traffic what drafts are worth: auto has seen as much as is then measured.
        count = self._options.new_tokens if variant.name == AUTO else WARM_UP_TOKENS
        requests = _requests(variant, self._arcs[self._arc], streams, count, self._options, "warm")
        await drive(session, variant.base_url, requests)
        self._warm.add((variant.name, streams))


def _requests(
    variant: Variant,
    tokens: npt.NDArray[np.int64],
    streams: int,
    new_tokens: int,
    options: argparse.Namespace,
    *names: object,
) -> list[Request]:
    """Prompts of their own for every variant, whose answers are the same places of the arc for all."""
    requests = []
    for stream in range(1, streams + 1):
        place = random.Random(repr((stream, *names))).randrange(max(1, len(tokens) - new_tokens - max(options.lengths)))
        before = random.Random(repr((variant.name, new_tokens, stream, *names))).choices(tokens, k=PROMPT_TOKENS - 1)
        prompt = [*map(int, before), int(tokens[place])]
        requests.append(Request(prompt, new_tokens, options.sampling, stream, extra=variant.extra))
    return requests


def last_line(options: argparse.Namespace, rates: Rates) -> dict[str, Any]:
    """The worst ratios over all cells; `vs_llama_server` compares our auto with the best of its lengths."""
    fixed = tuple(map(str, options.lengths))
    theirs = tuple(f"{PEER} {n}" for n in options.peer_lengths)
    cells = [cell for cell in rates.cells if cell[0] in map(str, options.acceptance)]
    passages = [cell for cell in rates.cells if cell not in cells]
    answer = {
        "auto_vs_best_fixed_min": _least(rates.ratio(*cell, fixed) for cell in cells),
        "auto_vs_none_min": _least(rates.ratio(*cell, (NONE,)) for cell in cells),
        "vs_llama_server": _least(rates.ratio(*cell, theirs) for cell in cells),
    }
    if passages:
        answer["changing_vs_best_fixed_min"] = _least(rates.ratio(*cell, fixed) for cell in passages)
        answer["changing_vs_none_min"] = _least(rates.ratio(*cell, (NONE,)) for cell in passages)
    return answer


def _reached(options: argparse.Namespace, arcs: list[str], rates: Rates) -> dict[str, Any]:
    """How much of what was asked for the time was enough for."""
    rounds = {
        (arc, streams): len(rates.rounds.get((arc, streams, AUTO), [])) for arc in arcs for streams in options.streams
    }
    missing = [f"{arc} × {streams}" for (arc, streams), count in rounds.items() if not count]
    if missing:
        print(f"{options.limit_s:.0f} s were not enough for: {', '.join(missing)}")
    return {
        "cells_measured": len(rounds) - len(missing),
        "cells": len(rounds),
        "rounds": [min(rounds.values()), max(rounds.values())],
    }


def _least(ratios: Iterable[float | None]) -> float | None:
    return min((round(ratio, 4) for ratio in ratios if ratio), default=None)


def _print(options: argparse.Namespace, rates: Rates) -> None:
    forms = (NONE, *map(str, options.lengths), AUTO, *(f"{PEER} {n}" for n in options.peer_lengths))
    rows = []
    for acceptance, streams in rates.cells:
        values = [rates.of(acceptance, streams, form) for form in forms]
        rows.append([acceptance, str(streams), *("–" if v is None else f"{v:.1f}" for v in values)])
    unit = "tokens/s" if options.clock == "wall" else "tokens per second of processor time"
    print_table(f"{options.model}: {unit} by draft length", ["acceptance", "streams", *forms], rows)
