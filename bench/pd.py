"""`python -m bench pd`: one engine computes prompts, a slower one writes the answers; against each of them alone, in turn.

The two engines serve one model; the second computes prompts in smaller pieces, as a slower card would (`--set-decode`). Each
prompt is answered by the second alone, by the first alone, and by both: its blocks leave while it is computed. `hidden_share`
is the part of the state's bytes that had left before the first token was drawn; `ttft_vs_solo` the first token's time over that
of the second engine alone, `ttft_vs_prefiller` over that of the first alone, and `gap_vs_step` the gap behind the first token,
which the rest of the state needs, over a usual one. `slow_vs_fast` tells how unlike the two engines were: between alike ones a
split gains nothing. All at the longest context, the worst model counting.

`same_text` says that the split's answer is the first engine's own: its prompt was cut at the same places, and the state went over
to the bit. The second engine alone rounds otherwise in pieces of another size, and random weights have near ties. So the engines
keep no checkpoints: their cells would lie among the next prompt's, which changes the order of sums, also without any move.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import sys
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import aiohttp

from bench.errors import BenchError
from bench.load import Request, calibrated, client_session, events_of
from bench.measures import median
from bench.report import print_table
from bench.servers import HYDRA, ServerSettings, compute_threads, free_port, model_path, serving, setting
from engines.errors import EngineError
from engines.rpc_handoff import HandoffClient
from engines.wire_handoff import HandoffAnswer, HandoffBody

SECRET = "a secret of this bench alone"
PATH = "/v1/chat/completions"
ROOM_TOKENS = 256
PATIENCE_S = 600.0
# What makes the second engine's prompts slow: pieces that are too small for its device.
SLOW_TOKENS, SLOW_CPU_TOKENS = 64, 16
COLUMNS = (
    "model", "tokens", "slow s", "fast s", "both s", "vs slow", "vs fast", "MB", "hidden", "gap ms", "steps", "same",
)  # fmt: skip


@dataclass(frozen=True)
class Split:
    """One prompt, answered three times. Times in seconds until the first token; `gap_s` is what lies behind it, `step_s` a usual
    one at the second engine."""

    model: str
    tokens: int
    slow_s: float
    fast_s: float
    both_s: float
    sent_bytes: int
    hidden_bytes: int
    gap_s: float
    step_s: float
    same_text: bool

    @property
    def hidden_share(self) -> float:
        return self.hidden_bytes / self.sent_bytes if self.sent_bytes else 0.0


def add_arguments(command: argparse.ArgumentParser) -> None:
    command.add_argument("--model", action="append", help="dense, hybrid, or as for engine (default: dense and hybrid)")
    command.add_argument("--contexts", default="2048,8192", help="tokens of the prompts")
    command.add_argument("--rounds", type=int, default=3, help="prompts of each length")
    command.add_argument("--answer", type=int, default=64, help="tokens of an answer")
    command.add_argument("--budget-s", type=float, default=0.0, help="begin nothing after so many seconds; 0: no bound")
    command.add_argument("--out", type=Path, help="file for all figures, as JSON")
    for side in ("prefill", "decode"):
        command.add_argument(
            f"--set-{side}", type=setting, action="append", metavar="KEY=VALUE", help=f"of the {side} engine alone"
        )


def run(options: argparse.Namespace) -> dict[str, Any]:
    options.logs.mkdir(parents=True, exist_ok=True)
    ends_at = time.monotonic() + options.budget_s if options.budget_s else None
    splits: list[Split] = []
    for name in options.model or ["dense", "hybrid"]:
        path = model_path(f"synthetic:{name}" if name in ("dense", "hybrid") else name)
        if ends_at is not None and time.monotonic() > ends_at and splits:
            break
        splits += _Bench(name, path, options, ends_at).run()
        if options.out:
            options.out.write_text(json.dumps([asdict(split) for split in splits]))
    if not splits:
        raise BenchError("the time was up before anything was measured")
    print_table("prefill and decode apart", COLUMNS, [_cells(split) for split in splits])
    return summary(splits)


def summary(splits: list[Split]) -> dict[str, Any]:
    """The bench's last line."""
    longest = max(split.tokens for split in splits) * 0.75
    models = {split.model for split in splits if split.tokens >= longest}
    groups = [[split for split in splits if split.model == model and split.tokens >= longest] for model in models]
    return {
        "hidden_share": round(min(median([s.hidden_share for s in group]) or 0.0 for group in groups), 4),
        "ttft_vs_solo": round(max(median([s.both_s / s.slow_s for s in group]) or 0.0 for group in groups), 4),
        "ttft_vs_prefiller": round(max(median([s.both_s / s.fast_s for s in group]) or 0.0 for group in groups), 4),
        "slow_vs_fast": round(min(median([s.slow_s / s.fast_s for s in group]) or 0.0 for group in groups), 2),
        "gap_vs_step": round(max(median([s.gap_s / s.step_s for s in group]) or 0.0 for group in groups), 2),
        "same_text": all(split.same_text for split in splits),
    }


class _Bench:
    def __init__(self, name: str, path: Path, options: argparse.Namespace, ends_at: float | None) -> None:
        self._name, self._options, self._ends_at = name, options, ends_at
        self._contexts = sorted(int(text) for text in options.contexts.split(","))
        self._ports = (free_port(), free_port())
        common = dict(options.set)
        slow_tokens = SLOW_TOKENS if options.gpu_layers else SLOW_CPU_TOKENS
        slow = {"batch_tokens": slow_tokens, "micro_batch_tokens": slow_tokens}
        own = (dict(options.set_prefill or ()), dict(options.set_decode) if options.set_decode else slow)
        cells = self._contexts[-1] + options.answer + ROOM_TOKENS
        threads = compute_threads(options.threads)
        self._settings = [
            ServerSettings(
                path,
                1,
                cells,
                threads,
                options.gpu_layers,
                engine={"checkpoints": 0} | common | own[side] | {"rpc_port": self._ports[side], "rpc_secret": SECRET},
            )
            for side in (0, 1)
        ]
        self._count = 0

    def run(self) -> list[Split]:
        logs = self._options.logs
        with serving(HYDRA, self._settings[0], logs) as first, serving(HYDRA, self._settings[1], logs) as second:
            return asyncio.run(self._splits((first.base_url, second.base_url)))

    async def _splits(self, urls: tuple[str, str]) -> list[Split]:
        found: list[Split] = []
        async with client_session() as web:
            prompts = await calibrated(web, urls[0])
            await self._one(web, urls, prompts.messages(self._contexts[0], "warm"))
            for round_number in range(self._options.rounds):
                for context in self._contexts:
                    if self._ends_at is not None and time.monotonic() > self._ends_at:
                        return found
                    found.append(await self._one(web, urls, prompts.messages(context, context, round_number)))
                    print(" ".join(_cells(found[-1])), file=sys.stderr, flush=True)
        return found

    async def _one(self, web: aiohttp.ClientSession, urls: tuple[str, str], messages: list[dict[str, str]]) -> Split:
        # The same prompt three times, computed anew each time; both first, for what a target has need not travel.
        request = Request(messages, self._options.answer, extra={"cache_prompt": False})
        both, slow, fast = (_Stream(web, request.body(), self._session()) for _ in range(3))
        moving = asyncio.create_task(self._handoff(both.session))
        try:
            await both.read(urls[0], urls[1])
            told = await moving
        finally:
            moving.cancel()
        if not both.went_on:
            raise BenchError("an answer did not go on at the second engine")
        await slow.read(urls[1])
        await fast.read(urls[0])
        return Split(
            model=self._name,
            tokens=told.tokens,
            slow_s=slow.first_s,
            fast_s=fast.first_s,
            both_s=both.first_s,
            sent_bytes=told.sent_bytes,
            hidden_bytes=told.hidden_bytes,
            gap_s=both.longest_gap_s,
            step_s=slow.usual_gap_s,
            same_text=both.text == fast.text,
        )

    def _session(self) -> str:
        self._count += 1
        return f"pd-{self._count}"

    async def _handoff(self, session: str) -> HandoffAnswer:
        body = HandoffBody(
            f"h-{session}", 1, session, "127.0.0.1", self._ports[1], SECRET, deadline_s=PATIENCE_S, request_id=session
        )
        try:
            async with HandoffClient("127.0.0.1", self._ports[0], secret=SECRET) as client:
                return await client.handoff(body)
        except EngineError as error:
            raise BenchError(f"a prompt's answer did not move (is --answer too short?): {error.message}") from error


@dataclass
class _Stream:
    """A site's side of one answer: it opens the other end when it hears of a move, and reads on there."""

    web: aiohttp.ClientSession
    body: dict[str, Any]
    session: str
    sent_at: float = 0.0
    text: str = ""
    went_on: bool = False
    arrivals: list[float] = field(default_factory=list)

    @property
    def first_s(self) -> float:
        return self.arrivals[0] - self.sent_at

    @property
    def gaps_s(self) -> list[float]:
        return [later - earlier for earlier, later in zip(self.arrivals, self.arrivals[1:], strict=False)]

    @property
    def usual_gap_s(self) -> float:
        return statistics.median(self.gaps_s)

    @property
    def longest_gap_s(self) -> float:
        return max(self.gaps_s[: max(1, len(self.gaps_s) // 2)])

    async def read(self, url: str, second_url: str = "") -> None:
        """All of the answer. Raises BenchError."""
        self.sent_at = time.monotonic()
        coming: asyncio.Task[aiohttp.ClientResponse] | None = None
        try:
            async with await self._post(url + PATH) as response:
                async for event in events_of(response):
                    if event.startswith(b"event: hydra."):
                        handoff = json.loads(event.split(b"data: ")[1])["handoff"]
                        target = f"{second_url}/handoffs/{handoff}/stream"
                        coming = coming or asyncio.create_task(self._post(target, {"X-Hydra-Path": PATH}))
                        self.went_on = event.startswith(b"event: hydra.moved")
                    else:
                        self._note(event)
            if self.went_on and coming is not None:
                async with await coming as response:
                    async for event in events_of(response):
                        self._note(event)
        finally:
            if coming is not None:
                coming.cancel()
        if len(self.arrivals) < 3:
            raise BenchError(f"an answer came in {len(self.arrivals)} pieces, too few to measure")

    async def _post(self, url: str, more: dict[str, str] | None = None) -> aiohttp.ClientResponse:
        named = {"X-Request-Id": self.session, "X-Hydra-Session": self.session, "X-Hydra-Follows": "1"}
        response = await self.web.post(url, json=self.body, headers=named | (more or {}))
        if response.status != 200:
            raise BenchError(f"{url} answered {response.status}: {(await response.text())[:400]}")
        return response

    def _note(self, event: bytes) -> None:
        if not event.startswith(b"data: {"):
            return
        chunk = json.loads(event[6:])
        if "error" in chunk:
            raise BenchError(f"an answer broke off: {json.dumps(chunk['error'])[:400]}")
        for choice in chunk.get("choices", ()):
            delta = choice.get("delta") or {}
            if said := (delta.get("content") or "") + (delta.get("reasoning_content") or ""):
                self.text += said
                self.arrivals.append(time.monotonic())


def _cells(split: Split) -> list[str]:
    return [
        split.model,
        str(split.tokens),
        f"{split.slow_s:.3f}",
        f"{split.fast_s:.3f}",
        f"{split.both_s:.3f}",
        f"{split.both_s / split.slow_s:.3f}",
        f"{split.both_s / split.fast_s:.3f}",
        f"{split.sent_bytes / 1e6:.1f}",
        f"{split.hidden_share:.3f}",
        f"{split.gap_s * 1000:.2f}",
        f"{split.gap_s / split.step_s:.1f}",
        "yes" if split.same_text else "no",
    ]
