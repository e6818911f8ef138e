"""`python -m bench spec`: drafts of fixed lengths and of the length that the engine chooses, by how often they are right.

One model serves all acceptance rates: its text is one long circle of tokens, and the draft head is wrong as often as wanted on
an arc for each rate. All servers live at once and are measured in turn, so that a card's warmth is the same for all; ours without
drafts is a server of its own, since a draft head costs something even where it is not asked. Forms are compared round by round,
since a card's clock changes more from one minute to the next than the forms differ: a ratio is the median of its rounds.

`--simulate` asks only for the choice of the length, on simulated devices (bench/spec_simulation.py).
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import random
import sys
from collections.abc import Iterable, Mapping
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
from bench.measures import steady_rate, whole_rate
from bench.models import set_wrong_drafts, text_circle
from bench.report import print_table
from bench.servers import FORMS, HYDRA, ServerSettings, compute_threads, model_path, serving
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
    base_url: str
    extra: Mapping[str, Any]


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
        asyncio.run(_measure(_variants(options, model, peer, servers), arcs, options, rates))
    _print(options, rates)
    if options.out:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text(json.dumps([[*key, *values] for key, values in rates.rounds.items()], indent=1))
    return last_line(options, rates)


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
    def started(form: str, engine: dict[str, Any], *flags: str) -> str:
        settings = _settings(options, model, peer, engine, flags)
        return servers.enter_context(serving(form, settings, options.logs)).base_url

    plain = started(HYDRA, {"speculation": "none"})
    drafting = started(HYDRA, {"speculation": "mtp", "draft_tokens": max(options.lengths)})
    fixed = [Variant(str(n), drafting, {"speculative.n_min": n, "speculative.n_max": n}) for n in options.lengths]
    theirs = []
    for length in filter(None, options.peer_lengths if peer else []):
        # It does not heed a request's own length.
        url = started(options.peer_form, {}, "--spec-type", "draft-mtp", "--spec-draft-n-max", str(length))
        theirs.append(Variant(f"{PEER} {length}", url, {}))
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


async def _measure(
    variants: list[Variant],
    arcs: Mapping[str, npt.NDArray[np.int64]],
    options: argparse.Namespace,
    rates: Rates,
) -> None:
    async with client_session() as session:
        for acceptance, tokens in arcs.items():
            for streams in options.streams:
                for variant in variants:
                    # An engine knows from its traffic what drafts are worth: auto has seen as much as is then measured.
                    count = options.new_tokens if variant.name == AUTO else WARM_UP_TOKENS
                    await drive(session, variant.base_url, _requests(variant, tokens, streams, count, options, "warm"))
            for round_index in range(options.rounds):
                for streams in options.streams:
                    await _round(session, variants, tokens, (acceptance, streams), options, round_index, rates)


async def _round(
    session: aiohttp.ClientSession,
    variants: list[Variant],
    tokens: npt.NDArray[np.int64],
    cell: tuple[str, int],
    options: argparse.Namespace,
    round_index: int,
    rates: Rates,
) -> None:
    acceptance, streams = cell
    for variant in variants if round_index % 2 == 0 else reversed(variants):
        requests = _requests(variant, tokens, streams, options.new_tokens, options, round_index)
        records = await drive(session, variant.base_url, requests)
        rate = steady_rate(records) or whole_rate(records)
        rates.add(acceptance, streams, variant.name, rate)
        print(f"  {acceptance} {variant.name} × {streams}: {rate:.1f} tok/s", file=sys.stderr, flush=True)


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


def _least(ratios: Iterable[float | None]) -> float | None:
    return min((round(ratio, 4) for ratio in ratios if ratio), default=None)


def _print(options: argparse.Namespace, rates: Rates) -> None:
    forms = (NONE, *map(str, options.lengths), AUTO, *(f"{PEER} {n}" for n in options.peer_lengths))
    rows = []
    for acceptance, streams in rates.cells:
        values = [rates.of(acceptance, streams, form) for form in forms]
        rows.append([acceptance, str(streams), *("–" if v is None else f"{v:.1f}" for v in values)])
    print_table(f"{options.model}: tokens/s by draft length", ["acceptance", "streams", *forms], rows)
