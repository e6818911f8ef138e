"""`python -m bench prefix`: five-turn conversations whose template drops old reasoning, ours and llama-server's side by side.

What could be cached is the longest token prefix that a prompt shares with any prompt before it: for hybrids too, though a
recurrent state can only be taken up where somebody kept it.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import aiohttp

from bench.conversation import TURNS, history, reusable_tokens
from bench.errors import BenchError
from bench.load import Request, answer, client_session
from bench.measures import median
from bench.models import SHAPES
from bench.report import print_table
from bench.servers import HYDRA, ServerSettings, compute_threads, model_path, serving

PEER_FORM = "unified"  # prompt cache and checkpoints as llama-server has them by default
SLOTS = 4
CONTEXT_TOKENS = 8192


@dataclass(frozen=True)
class TurnRecord:
    """One turn on one server; `reusable_tokens` is what could have been cached."""

    conversation: int
    turn: int
    prompt_tokens: int
    cached_tokens: int
    reusable_tokens: int
    first_token_s: float


async def converse(base_url: str, options: argparse.Namespace, *, in_slot: bool) -> list[tuple[int, int, Any]]:
    """All conversations one after another, turn by turn: (conversation, turn, its StreamRecord)."""
    records = []
    async with client_session() as session:
        warm_up = Request(history(-1, 0, 16), 4)
        await answer(session, base_url, warm_up)
        for conversation in range(options.conversations):
            for turn in range(TURNS):
                request = Request(
                    history(conversation, turn, options.system_words),
                    options.answer_tokens,
                    slot=conversation % SLOTS if in_slot else None,
                )
                records.append((conversation, turn, await answer(session, base_url, request)))
    return records


async def tokenised(base_url: str, options: argparse.Namespace) -> dict[tuple[int, int], list[int]]:
    """Every prompt as tokens, by llama-server's own template and tokenizer."""
    prompts = {}
    async with client_session() as session:
        for conversation in range(options.conversations):
            for turn in range(TURNS):
                messages = history(conversation, turn, options.system_words)
                rendered = await _post(session, f"{base_url}/apply-template", {"messages": messages})
                body = {"content": rendered["prompt"], "add_special": True, "parse_special": True}
                tokens = await _post(session, f"{base_url}/tokenize", body)
                prompts[conversation, turn] = tokens["tokens"]
    return prompts


async def _post(session: aiohttp.ClientSession, url: str, body: dict[str, Any]) -> dict[str, Any]:
    async with session.post(url, json=body) as response:
        if response.status != 200:
            raise BenchError(f"{url} answered {response.status}: {(await response.text())[:400]}")
        return dict(await response.json())


class Reuse:
    """Rounds on one model, each server alone at its time."""

    def __init__(self, settings: ServerSettings, options: argparse.Namespace) -> None:
        self.settings, self.options = settings, options
        self.turns: dict[str, list[TurnRecord]] = {HYDRA: [], PEER_FORM: []}
        self._prompts: dict[tuple[int, int], list[int]] = {}
        options.logs.mkdir(parents=True, exist_ok=True)

    def run(self) -> None:
        for round_index in range(self.options.rounds):
            forms = [PEER_FORM, HYDRA]  # llama-server first: it also tells the prompts' tokens
            for form in forms if round_index % 2 == 0 else reversed(forms):
                with serving(form, self.settings, self.options.logs) as server:
                    records = asyncio.run(converse(server.base_url, self.options, in_slot=form != HYDRA))
                    if not self._prompts:
                        self._prompts = asyncio.run(tokenised(server.base_url, self.options))
                self.turns[form] += self._with_reusable(records)
                print(f"{self.settings.model.name}: round {round_index + 1} {form}", file=sys.stderr, flush=True)

    def _with_reusable(self, records: list[tuple[int, int, Any]]) -> list[TurnRecord]:
        turns: list[TurnRecord] = []
        computed: list[list[int]] = []
        for conversation, turn, record in records:
            prompt = self._prompts[conversation, turn]
            if record.prompt_tokens != len(prompt):
                print(f"bench: a prompt has {record.prompt_tokens} tokens for one server and {len(prompt)} for the other",
                      file=sys.stderr)  # fmt: skip
            reusable = reusable_tokens(prompt, computed)
            computed.append(prompt)
            turns.append(
                TurnRecord(
                    conversation, turn, record.prompt_tokens, record.cached_tokens, reusable, record.first_token_s
                )
            )
        return turns

    def cached_share(self, form: str) -> float:
        """Cached of what could be cached, over the turns after the first."""
        later = [t for t in self.turns[form] if t.turn > 0]
        return sum(t.cached_tokens for t in later) / sum(t.reusable_tokens for t in later)

    def first_token_s(self, form: str, turns: range = range(1, TURNS)) -> float:
        return median([t.first_token_s for t in self.turns[form] if t.turn in turns]) or 0.0

    def ttft_ratio(self) -> float:
        return self.first_token_s(HYDRA) / self.first_token_s(PEER_FORM)

    def print(self) -> None:
        rows = [self._row(turn) for turn in range(TURNS)]
        columns = ("turn", "prompt", "could be cached", "cached", "peer's", "first token ms", "peer's", "ratio")
        shares = f"cached share {self.cached_share(HYDRA):.3f}, llama-server's {self.cached_share(PEER_FORM):.3f}"
        print_table(f"{self.settings.model.name}: {shares} (medians over conversations and rounds)", columns, rows)

    def _row(self, turn: int) -> list[str]:
        ours, theirs = ([t for t in self.turns[form] if t.turn == turn] for form in (HYDRA, PEER_FORM))
        counts = [median([getattr(t, name) for t in ours]) for name in ("prompt_tokens", "reusable_tokens")]
        counts += [median([t.cached_tokens for t in side]) for side in (ours, theirs)]
        seconds = [self.first_token_s(form, range(turn, turn + 1)) for form in (HYDRA, PEER_FORM)]
        milliseconds = [f"{s * 1000:.1f}" for s in seconds]
        return [str(turn + 1), *(f"{count:.0f}" for count in counts if count is not None), *milliseconds,
                f"{seconds[0] / seconds[1]:.3f}"]  # fmt: skip


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", action="append", help="hybrid, dense, or as for engine (default: hybrid and dense)")
    parser.add_argument("--conversations", type=int, default=3, help="conversations of five turns in each round")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--system-words", type=int, default=1500, help="length of each conversation's system prompt")
    parser.add_argument("--answer-tokens", type=int, default=16)
    parser.add_argument("--out", type=Path, help="file for all turns as JSON")


def run(options: argparse.Namespace, peer: Path | None) -> dict[str, Any]:
    """Measures every model, prints a table each, and returns the object of the last line: the worst model counts."""
    if peer is None:
        raise BenchError("prefix compares with llama-server; --peer none leaves nothing to compare with")
    reuses = []
    for name in options.model or ["hybrid", "dense"]:
        settings = ServerSettings(
            model=model_path(f"synthetic:{name}" if name in SHAPES else name),
            slots=SLOTS,
            context_tokens=CONTEXT_TOKENS,
            threads=compute_threads(options.threads),
            gpu_layers=options.gpu_layers,
            peer=peer,
            engine=dict(options.set),
            peer_arguments=tuple(options.peer_argument),
        )
        reuse = Reuse(settings, options)
        reuse.run()
        reuse.print()
        reuses.append(reuse)
    if options.out:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        details = {r.settings.model.name: {f: [asdict(t) for t in r.turns[f]] for f in r.turns} for r in reuses}
        options.out.write_text(json.dumps(details, indent=1))
    return {
        "cached_share": round(min(r.cached_share(HYDRA) for r in reuses), 4),
        "ttft_ratio": round(max(r.ttft_ratio() for r in reuses), 4),
    }
