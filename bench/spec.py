"""`python -m bench spec`: drafts of fixed lengths and of the length that the engine chooses, by how often they are right.

One model serves all acceptance rates: its draft head's token table is changed in the file between the servers' lives. Ours
without drafts is a server of its own, since a draft head costs something even where it is not asked.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from bench.errors import BenchError
from bench.load import Prompts, Request, client_session, drive
from bench.measures import median, steady_rate, whole_rate
from bench.models import DraftTable
from bench.report import print_table
from bench.servers import FORMS, HYDRA, ServerSettings, compute_threads, model_path, serving

LENGTHS = (0, 1, 2, 3, 4)
AUTO, NONE, PEER = "auto", "none", "llama-server"
PEER_LENGTHS = [1, 3]
PROMPT_TOKENS = 48
WARM_UP_TOKENS = 16
CONTEXT_STEP_TOKENS = 256


class Rates:
    """Tokens per second by acceptance, streams and form, an entry per round."""

    def __init__(self) -> None:
        self.rounds: dict[tuple[float, int, str], list[float]] = {}

    def add(self, acceptance: float, streams: int, form: str, rate: float) -> None:
        self.rounds.setdefault((acceptance, streams, form), []).append(rate)

    def of(self, acceptance: float, streams: int, form: str) -> float | None:
        return median(self.rounds.get((acceptance, streams, form), []))

    def best(self, acceptance: float, streams: int, forms: tuple[str, ...]) -> float | None:
        return max((rate for form in forms if (rate := self.of(acceptance, streams, form))), default=None)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", default="synthetic:hybrid-drafts", help="synthetic:NAME of a model that knows_next")
    parser.add_argument("--streams", type=_numbers, default=[1, 8], help="requests at once, as 1,8")
    parser.add_argument("--acceptance", type=_shares, default=[1.0, 0.9, 0.7, 0.5, 0.2], help="as 1.0,0.5")
    parser.add_argument("--rounds", type=int, default=2, help="times each cell is measured in a server's life")
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


def _numbers(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


def _shares(text: str) -> list[float]:
    return [float(part) for part in text.split(",")]


def run(options: argparse.Namespace, peer: Path | None) -> dict[str, Any]:
    """Measures, prints the table, and returns the object of the last line."""
    if not options.model.startswith("synthetic:") or not options.model.endswith("-drafts"):
        raise BenchError(f"{options.model} has no draft head that can be made wrong; say synthetic:hybrid-drafts")
    model = model_path(options.model)
    table = DraftTable(model)
    rates = Rates()
    options.logs.mkdir(parents=True, exist_ok=True)
    plain = _settings(options, model, peer, {"speculation": "none"}, ())
    for acceptance in options.acceptance:
        # Nothing changes for it, but it is measured near to what it is compared with.
        _life(HYDRA, plain, options, acceptance, {NONE: {}}, rates)
        table.set_wrong(1 - acceptance)
        ours = _settings(options, model, peer, {"speculation": "mtp", "draft_tokens": max(LENGTHS)}, ())
        fixed = {str(n): {"speculative.n_min": n, "speculative.n_max": n} for n in LENGTHS}
        _life(HYDRA, ours, options, acceptance, {AUTO: {}, **fixed}, rates)
        for length in filter(None, options.peer_lengths if peer else []):
            # It does not heed a request's own length.
            flags = ("--spec-type", "draft-mtp", "--spec-draft-n-max", str(length))
            theirs = _settings(options, model, peer, {}, flags)
            _life(options.peer_form, theirs, options, acceptance, {f"{PEER} {length}": {}}, rates)
    _print(options, rates)
    if options.out:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text(json.dumps([[*key, *values] for key, values in rates.rounds.items()], indent=1))
    return last_line(options, rates)


def _settings(
    options: argparse.Namespace, model: Path, peer: Path | None, engine: dict[str, Any], flags: tuple[str, ...]
) -> ServerSettings:
    needed = 2 * PROMPT_TOKENS + options.new_tokens + max(LENGTHS)
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


def _life(
    form: str,
    settings: ServerSettings,
    options: argparse.Namespace,
    acceptance: float,
    variants: Mapping[str, Mapping[str, Any]],
    rates: Rates,
) -> None:
    with serving(form, settings, options.logs) as server:
        asyncio.run(_measure(server.base_url, options, acceptance, variants, rates))


async def _measure(
    base_url: str,
    options: argparse.Namespace,
    acceptance: float,
    variants: Mapping[str, Mapping[str, Any]],
    rates: Rates,
) -> None:
    async with client_session() as session:
        for streams in options.streams:
            for name, extra in variants.items():
                # An engine knows from its traffic what drafts are worth: auto has seen as much as is then measured, and
                # so has what it is compared with, since a card slows down as it grows warm.
                tokens = options.new_tokens if name in (AUTO, NONE) else WARM_UP_TOKENS
                await drive(session, base_url, _requests(options, streams, tokens, extra, "warm-up", name))
        for round_index in range(options.rounds):
            for streams in options.streams:
                for name, extra in variants.items():
                    requests = _requests(options, streams, options.new_tokens, extra, round_index, name, acceptance)
                    records = await drive(session, base_url, requests)
                    rate = steady_rate(records) or whole_rate(records)
                    rates.add(acceptance, streams, name, rate)
                    print(f"  {acceptance} {name} × {streams}: {rate:.1f} tok/s", file=sys.stderr, flush=True)


def _requests(
    options: argparse.Namespace, streams: int, new_tokens: int, extra: Mapping[str, Any], *names: object
) -> list[Request]:
    prompts = Prompts(overhead=16)
    return [
        Request(prompts.messages(PROMPT_TOKENS, stream, *names), new_tokens, options.sampling, stream, extra=extra)
        for stream in range(1, streams + 1)
    ]


def last_line(options: argparse.Namespace, rates: Rates) -> dict[str, Any]:
    """The worst ratios over all cells; `vs_llama_server` compares our auto with the best of its lengths."""
    fixed = tuple(map(str, LENGTHS))
    theirs = tuple(f"{PEER} {n}" for n in options.peer_lengths)
    cells = [(acceptance, streams) for acceptance in options.acceptance for streams in options.streams]
    return {
        "auto_vs_best_fixed_min": _least((rates.of(*c, AUTO), rates.best(*c, fixed)) for c in cells),
        "auto_vs_none_min": _least((rates.of(*c, AUTO), rates.of(*c, NONE)) for c in cells),
        "vs_llama_server": _least((rates.of(*c, AUTO), rates.best(*c, theirs)) for c in cells),
    }


def _least(pairs: Any) -> float | None:
    ratios = [ours / theirs for ours, theirs in pairs if ours and theirs]
    return round(min(ratios), 4) if ratios else None


def _print(options: argparse.Namespace, rates: Rates) -> None:
    forms = (NONE, *map(str, LENGTHS), AUTO, *(f"{PEER} {n}" for n in options.peer_lengths))
    rows = []
    for acceptance in options.acceptance:
        for streams in options.streams:
            values = [rates.of(acceptance, streams, form) for form in forms]
            rows.append([f"{acceptance}", str(streams), *("–" if v is None else f"{v:.1f}" for v in values)])
    print_table(f"{options.model}: tokens/s by draft length", ["acceptance", "streams", *forms], rows)
