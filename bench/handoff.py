"""`python -m bench handoff`: conversations moved between two engine processes of this host, while they write and between turns.

For each length: a prompt is computed (that is what a move saves), its stream moves to the other engine while it goes on, and what
is then idle there moves to and fro a few times. `wall_vs_copy`: an idle move's time over copying as many bytes twice;
`idle_vs_prefill`: computing the prompt over that time, both at the longest context; a pause is the gap in the client's stream
over its median gap; `pause_slope_ms_per_10k` is how it grows with the context. A small model's state is copied in less time than
any exchange takes, so that its ratio tells nothing of bytes: `wall_vs_copy` is of states as large as real models have, where some
are (`dense` from 8,192 tokens on), and what a move takes besides its bytes is `idle_beyond_copy_ms`, at the shortest context.
`35b-a3b-kv` has the state of Qwen 3.6 35B-A3B under small weights: 88 MB at 1,024 tokens, whose prompt a processor computes in 10
seconds. The engines keep no checkpoints, whose rows would be there already when a conversation comes back, so that each move
sends all of it; `--set checkpoints=4` measures with some. With `--neighbours` others write at both engines all the while, and
errands get a tenth of the time there.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import re
import statistics
import sys
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import aiohttp

from bench.errors import BenchError
from bench.handoff_figures import Move, row, show, summary
from bench.kv_copy import Copies, copies
from bench.load import Prompts, Request, answer, calibrated, client_session, events_of
from bench.servers import HYDRA, ServerSettings, compute_threads, free_port, model_path, serving
from engines.rpc_handoff import HandoffClient
from engines.wire_handoff import AskBody, HandoffAnswer, HandoffBody

SECRET = "a secret of this bench alone"
PATH = "/v1/chat/completions"
BEFORE_TOKENS, AFTER_TOKENS = 24, 40
# Enough that a small model still writes when its move begins; a stream is left as soon as it has moved.
ANSWER_TOKENS, ROOM_TOKENS = 2048, 2304
USUAL_MODELS, MODELS = ("dense", "hybrid"), ("dense", "hybrid", "35b-a3b-kv")
NEIGHBOUR_TOKENS = 128
PATIENCE_S = 300.0
_TEXT = re.compile(rb'"delta":\{"(?:content|reasoning_content)":"(?!")')


@dataclass
class Side:
    """One engine, and how to ask it for moves."""

    base_url: str
    rpc_port: int


def add_arguments(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--model", action="append", help=f"{', '.join(MODELS)}, or as for engine (default: dense and hybrid)"
    )
    command.add_argument("--contexts", default="1024,4096,16384", help="tokens of the conversations")
    command.add_argument("--rounds", type=int, default=3, help="conversations of each length")
    command.add_argument("--repeats", type=int, default=5, help="idle moves of each conversation; their median counts")
    command.add_argument("--cards", help="card of each engine, as 0,1: across two cards of this host")
    command.add_argument("--neighbours", type=int, default=0, help="short streams that each engine writes meanwhile")
    command.add_argument("--budget-s", type=float, default=0.0, help="begin nothing after so many seconds; 0: no bound")
    command.add_argument("--out", type=Path, help="file for all figures, as JSON")


def run(options: argparse.Namespace) -> dict[str, Any]:
    options.logs.mkdir(parents=True, exist_ok=True)
    contexts = sorted(int(text) for text in options.contexts.split(","))
    ends_at = time.monotonic() + options.budget_s if options.budget_s else None
    moves: list[Move] = []
    for name in options.model or USUAL_MODELS:
        path = model_path(f"synthetic:{name}" if name in MODELS else name)
        if ends_at is not None and time.monotonic() > ends_at and moves:
            break
        moves += _Bench(name, path, contexts, options, ends_at).run()
        if options.out:
            options.out.write_text(json.dumps([asdict(move) for move in moves]))
    if not moves:
        raise BenchError("the time was up before anything was measured")
    show(moves)
    return summary(moves)


def _on_cards(cards: str | None) -> list[dict[str, Any]]:
    """Settings of the two engines. Raises BenchError."""
    if not cards:
        return [{}, {}]
    numbers = cards.split(",")
    if len(numbers) != 2 or not all(number.isdecimal() for number in numbers):
        raise BenchError(f"{cards} are not the numbers of two cards; say --cards 0,1")
    return [{"split_mode": "none", "main_gpu": int(number)} for number in numbers]


class _Bench:
    def __init__(
        self, name: str, path: Path, contexts: list[int], options: argparse.Namespace, ends_at: float | None
    ) -> None:
        self._name, self._contexts, self._options, self._ends_at = name, contexts, options, ends_at
        threads = compute_threads(options.threads)
        cells = contexts[-1] + ROOM_TOKENS
        self._ports = [free_port(), free_port()]
        self._settings = [
            ServerSettings(
                path,
                1 + options.neighbours,
                cells,
                threads,
                options.gpu_layers,
                engine={"checkpoints": 0} | dict(options.set) | on_card | _rpc_settings(port),
            )
            for port, on_card in zip(self._ports, _on_cards(options.cards), strict=True)
        ]
        self._fence = 0

    def run(self) -> list[Move]:
        logs = self._options.logs
        with serving(HYDRA, self._settings[0], logs) as first, serving(HYDRA, self._settings[1], logs) as second:
            sides = [Side(engine.base_url, port) for engine, port in zip((first, second), self._ports, strict=True)]
            return asyncio.run(self._moves(sides))

    async def _moves(self, sides: list[Side]) -> list[Move]:
        found: list[Move] = []
        async with client_session() as web:
            prompts = await calibrated(web, sides[0].base_url)
            await self._warm(web, sides, prompts)
            places = [(side, place) for side in sides for place in range(self._options.neighbours)]
            others = [asyncio.ensure_future(_written_beside(web, side, prompts, place)) for side, place in places]
            try:
                for round_number in range(self._options.rounds):
                    for context in self._contexts:
                        if self._ends_at is not None and time.monotonic() > self._ends_at:
                            return found
                        found.append(await self._one(web, sides, prompts.messages(context, context, round_number)))
                        print(row(found[-1]), file=sys.stderr, flush=True)
                        for other in others:
                            if other.done():
                                other.result()
            finally:
                for other in others:
                    other.cancel()
                await asyncio.gather(*others, return_exceptions=True)
        return found

    async def _warm(self, web: aiohttp.ClientSession, sides: list[Side], prompts: Prompts) -> None:
        """Both have read their model's file and made their buffers."""
        await self._one(web, sides, prompts.messages(self._contexts[0], "warm"))

    async def _one(self, web: aiohttp.ClientSession, sides: list[Side], messages: list[dict[str, str]]) -> Move:
        home, away = sides
        request = Request(messages, ANSWER_TOKENS)
        stream = _Stream(web, request.body(), f"s{self._fence}")
        reading = asyncio.ensure_future(stream.read(home, away))
        await stream.until(BEFORE_TOKENS, reading)
        live = await self._handoff(home, away, stream.session)
        fence = self._fence
        await stream.until(len(stream.arrivals) + AFTER_TOKENS, reading)
        marks_ms = await _marks_ms(away, fence)
        reading.cancel()
        await asyncio.wait((reading,))
        idle, copy_s = await self._idle_moves(away, home, stream.session)
        pause_s, steps = stream.pause()
        return Move(
            model=self._name,
            tokens=live.tokens,
            prefill_s=stream.arrivals[0] - stream.sent_at,
            live_s=live.seconds,
            live_bytes=live.sent_bytes,
            pause_s=pause_s,
            pause_steps=steps,
            engine_pause_ms=live.pause_ms,
            idle_s=idle.seconds,
            idle_bytes=idle.sent_bytes,
            copy_s=copy_s,
            way=idle.way,
            idle_phases_ms=idle.phases_ms,
            live_phases_ms=live.phases_ms,
            source_marks_ms=live.marks_ms,
            target_marks_ms=marks_ms,
        )

    async def _idle_moves(self, away: Side, home: Side, session: str) -> tuple[HandoffAnswer, float]:
        """The move whose ratio to a copy of its bytes just behind it is the median one, and that copy's time. An odd number of
        moves, so that the conversation is at home then."""
        moves: list[tuple[float, HandoffAnswer, float]] = []
        copying: Copies | None = None
        try:
            for number in range(self._options.repeats | 1):
                here, there = (away, home) if number % 2 == 0 else (home, away)
                move = await self._handoff(here, there, session)
                copying = copying or copies(move.total_bytes, self._options.gpu_layers)
                copy_s = _copy_s(copying, move.sent_bytes)
                moves.append((move.seconds / copy_s, move, copy_s))
        finally:
            if copying is not None:
                copying.close()
        _, median_move, copy_s = sorted(moves, key=lambda one: one[0])[len(moves) // 2]
        return median_move, copy_s

    async def _handoff(self, source: Side, target: Side, session: str) -> HandoffAnswer:
        self._fence += 1
        body = HandoffBody(
            f"h{self._fence}", self._fence, session, "127.0.0.1", target.rpc_port, SECRET, deadline_s=PATIENCE_S
        )
        async with HandoffClient("127.0.0.1", source.rpc_port, secret=SECRET) as client:
            return await client.handoff(body)


@dataclass
class _Stream:
    """A site's side of one answer: it opens the other end when it hears of a move, and reads on there."""

    web: aiohttp.ClientSession
    body: dict[str, Any]
    session: str
    sent_at: float = 0.0
    arrivals: list[float] = field(default_factory=list)
    switched_after: int = 0

    async def read(self, home: Side, away: Side) -> None:
        self.sent_at = time.monotonic()
        coming: asyncio.Task[aiohttp.ClientResponse] | None = None
        moved = False
        async with await self._post(home.base_url + PATH) as response:
            async for event in events_of(response):
                if event.startswith(b"event: hydra."):
                    moved = event.startswith(b"event: hydra.moved")
                    handoff = json.loads(event.split(b"data: ")[1])["handoff"]
                    url = f"{away.base_url}/handoffs/{handoff}/stream"
                    coming = coming or asyncio.ensure_future(self._post(url, {"X-Hydra-Path": PATH}))
                else:
                    self._note(event)
        if not moved or coming is None:
            return
        self.switched_after = len(self.arrivals)
        async with await coming as response:
            async for event in events_of(response):
                self._note(event)

    async def _post(self, url: str, more: dict[str, str] | None = None) -> aiohttp.ClientResponse:
        headers = {
            "X-Request-Id": self.session,
            "X-Hydra-Session": self.session,
            "X-Hydra-Follows": "1",
            **(more or {}),
        }
        response = await self.web.post(url, json=self.body, headers=headers)
        if response.status != 200:
            raise BenchError(f"{url} answered {response.status}: {(await response.text())[:400]}")
        return response

    def _note(self, event: bytes) -> None:
        if _TEXT.search(event):
            self.arrivals.append(time.monotonic())

    async def until(self, count: int, reading: asyncio.Task[None]) -> None:
        async with asyncio.timeout(PATIENCE_S):
            while len(self.arrivals) < count:
                if reading.done():
                    reading.result()
                    raise BenchError(f"an answer ended after {len(self.arrivals)} pieces, before it could move")
                await asyncio.sleep(0.001)

    def pause(self) -> tuple[float, float]:
        """The gap at the move without a usual one, and in usual ones."""
        if not 1 < self.switched_after < len(self.arrivals):
            raise BenchError("the stream did not move")
        gaps = [later - earlier for earlier, later in zip(self.arrivals, self.arrivals[1:], strict=False)]
        # Those after the move are undisturbed; while it leaves a generation is slowed as well.
        usual_s = statistics.median(gaps[self.switched_after :])
        pause_s = max(0.0, gaps[self.switched_after - 1] - usual_s)
        return pause_s, pause_s / usual_s if usual_s else 0.0


async def _marks_ms(target: Side, fence: int) -> dict[str, float]:
    """All that a target noted of a live move, its first step and frame too, which come behind its answer."""
    async with HandoffClient("127.0.0.1", target.rpc_port, secret=SECRET) as client:
        return (await client.adopt_ask(AskBody(f"h{fence}", fence))).marks_ms


async def _written_beside(web: aiohttp.ClientSession, side: Side, prompts: Prompts, place: int) -> None:
    """One neighbour of the conversations that move: an answer after the other, until it is cancelled."""
    while True:
        await answer(web, side.base_url, Request(prompts.messages(NEIGHBOUR_TOKENS, "neighbour", place), ANSWER_TOKENS))


def _copy_s(copying: Copies, size_bytes: int) -> float:
    """Out and in again, the better of three."""
    import numpy as np

    source = np.ones(size_bytes, dtype=np.uint8)
    return min(copying.out_s(size_bytes) + copying.in_s(size_bytes, source) for _ in range(3))


def _rpc_settings(port: int) -> dict[str, Any]:
    return {"rpc_port": port, "rpc_secret": SECRET}
