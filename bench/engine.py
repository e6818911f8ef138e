"""`python -m bench engine`: our engine and llama-server in turn, one at a time, driven by one client through one grid."""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import sys
import time
from pathlib import Path
from typing import Any

from bench import ceiling
from bench.errors import BenchError
from bench.grid import COLUMNS, Cell, CellResults, last_line, make_cells, table_row
from bench.library import library_in_use
from bench.load import Prompts, Request, client_session, drive
from bench.measures import Measures
from bench.report import print_table
from bench.servers import CONTEXT_STEP_TOKENS, FORMS, HYDRA, Running, ServerSettings, compute_threads, serving

WARM_UP_TOKENS = 8
TEMPLATE_TOKENS = 64  # room for the template and for prompts that came out a little longer than asked


class Comparison:
    """Runs lives of servers and gathers what they measure. `budget_s` bounds the time in which new lives may begin."""

    def __init__(self, settings: ServerSettings, cells: list[Cell], options: argparse.Namespace) -> None:
        self.settings, self.options = settings, options
        self.results = [CellResults(cell) for cell in cells]
        self.prompts = Prompts(shared_tokens=options.shared_tokens)
        self.ceiling: list[dict[str, Any]] = []
        self._is_calibrated = False
        self._ends_at = time.monotonic() + options.budget_s
        options.logs.mkdir(parents=True, exist_ok=True)

    def run(self) -> None:
        """The first round tries every form; later ones repeat ours and, for each cell, the forms that were best."""
        forms = self.options.peer_forms if self.settings.peer else []
        for form in [HYDRA, *forms]:
            self._life(form, 0, self.results)
        for round_index in range(1, self.options.rounds):
            lives = [(HYDRA, self.results)]
            lives += [(form, [r for r in self.results if form in r.kept_forms()]) for form in forms]
            for form, results in lives if round_index % 2 == 0 else reversed(lives):
                if results:
                    self._life(form, round_index, results)
        if self.options.ceiling and self.settings.peer and time.monotonic() < self._ends_at:
            self.ceiling = ceiling.batched_bench(self.settings, [r.cell for r in self.results], self.options.logs)
            self._save()

    def _life(self, form: str, round_index: int, results: list[CellResults]) -> None:
        if time.monotonic() > self._ends_at:
            return
        started = time.monotonic()
        with serving(form, self.settings, self.options.logs) as server:
            ready = time.monotonic()
            asyncio.run(self._cells(server, form, round_index, results))
        _say(f"round {round_index + 1} {form}: ready in {ready - started:.1f} s, {len(results)} cells in "
             f"{time.monotonic() - ready:.1f} s")  # fmt: skip
        self._save()

    async def _cells(self, server: Running, form: str, round_index: int, results: list[CellResults]) -> None:
        async with client_session() as session:
            await self._warm_up(session, server, results)
            for result in results:
                cell = result.cell
                requests = [
                    Request(
                        self.prompts.messages(cell.context_tokens, round_index, cell, stream),
                        cell.new_tokens,
                        cell.sampling,
                        seed=stream + 1,
                    )
                    for stream in range(cell.streams)
                ]
                measures = Measures.of(await drive(session, server.base_url, requests))
                result.add(form, round_index, measures)
                _say(f"  {form} {cell.streams} × {cell.context_tokens} {cell.sampling}: {measures.whole:.1f} tok/s")

    async def _warm_up(self, session: Any, server: Running, results: list[CellResults]) -> None:
        """Graphs, buffers and clocks: every number of streams and sampling once, with prompts that nobody measures."""
        if not self._is_calibrated:
            words = (4, min(512, self.settings.context_tokens // 12))  # even a word of bytes has less than 12 tokens
            probes = [Request(Prompts(0, 1).messages(count, "probe", count), 2) for count in words]
            lengths = [record.prompt_tokens for record in await drive(session, server.base_url, probes)]
            self.prompts = self.prompts.calibrated(words, (lengths[0], lengths[1]))
            self._is_calibrated = True
        for streams, sampling in sorted({(r.cell.streams, r.cell.sampling) for r in results}):
            prompts = [Prompts(0, 1).messages(16, "warm-up", sampling, streams, i) for i in range(streams)]
            await drive(session, server.base_url, [Request(prompt, WARM_UP_TOKENS, sampling) for prompt in prompts])

    def _save(self) -> None:
        if self.options.out:
            self.options.out.parent.mkdir(parents=True, exist_ok=True)
            self.options.out.write_text(json.dumps(self.details(), indent=1))

    def details(self) -> dict[str, Any]:
        return {
            "model": self.settings.model.name,
            "library": library_in_use(),
            "machine": f"{platform.node()}, {os.cpu_count()} cores",
            "threads": self.settings.threads,
            "gpu_layers": self.settings.gpu_layers,
            "slots": self.settings.slots,
            "context_tokens": self.settings.context_tokens,
            "cells": [result.as_dict() for result in self.results],
            "ceiling": self.ceiling,
        }


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--streams", type=_numbers, default=[1, 8], help="requests at once, as 1,8,32")
    parser.add_argument("--context", type=_numbers, default=[128], help="prompt tokens of each, as 128,8192")
    parser.add_argument("--rounds", type=int, default=3, help="times each cell is measured on each side")
    parser.add_argument("--new-tokens", type=int, default=64, help="tokens per answer (more where long prompts queue)")
    parser.add_argument("--sampling", choices=["greedy", "topk", "both"], default="greedy")
    parser.add_argument("--shared-tokens", type=int, default=0, help="leading prompt tokens that all streams share")
    parser.add_argument("--slots", type=int, default=0, help="slots of both servers (default: the largest --streams)")
    parser.add_argument("--peer-forms", type=_forms, default=list(FORMS), help=f"of {', '.join(FORMS)}")
    parser.add_argument("--ceiling", action="store_true", help="add llama-batched-bench, which samples nothing")
    parser.add_argument("--budget-s", type=float, default=3600, help="no server is started after so many seconds")
    parser.add_argument("--out", type=Path, help="file for all details as JSON, written after every life of a server")


def _numbers(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


def _forms(text: str) -> list[str]:
    names = text.split(",")
    unknown = [name for name in names if name not in FORMS]
    if unknown:
        raise argparse.ArgumentTypeError(f"no form is called {', '.join(unknown)}")
    return names


def run(options: argparse.Namespace, model: Path, peer: Path | None) -> dict[str, Any]:
    """Measures, prints the table, and returns the object of the last line."""
    samplings = ["greedy", "topk"] if options.sampling == "both" else [options.sampling]
    cells = make_cells(options.streams, options.context, samplings, options.new_tokens)
    needed = max(cell.context_tokens + cell.new_tokens for cell in cells) + TEMPLATE_TOKENS
    needed += max(options.context) // 16
    settings = ServerSettings(
        model=model,
        slots=options.slots or max(options.streams),
        context_tokens=-(-needed // CONTEXT_STEP_TOKENS) * CONTEXT_STEP_TOKENS,
        threads=compute_threads(options.threads),
        gpu_layers=options.gpu_layers,
        peer=peer,
        engine=dict(options.set),
        peer_arguments=tuple(options.peer_argument),
    )
    if settings.slots < max(options.streams):
        raise BenchError(f"{settings.slots} slots cannot serve {max(options.streams)} streams at once")
    comparison = Comparison(settings, cells, options)
    comparison.run()
    measured = [result for result in comparison.results if HYDRA in result.rounds]
    rows = [[*table_row(r), ceiling.rate(comparison.ceiling, r.cell)] for r in measured]
    title = (
        f"{model.name}, {settings.threads} threads, {settings.gpu_layers} GPU layers, {settings.slots} slots;"
        f" our library: {library_in_use()}"
    )
    print_table(title, [*COLUMNS, "ceiling"], rows)
    return last_line(comparison.results)
