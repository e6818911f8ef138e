"""`python -m bench park`: conversations parked in the host's store, taken up again by another engine, and after a kill of the
store; their last turn's first token against a cold prompt's and against one that never left its slot. And how much of what
engines save is stored, against each token and each kept checkpoint once.

What could be cached is what the prompt shares with the last turn's; the engines are processes of their own, started and ended
for each step, and the store is killed with -9 before it is started again.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import aiohttp

from bench.conversation import history, reusable_tokens
from bench.errors import BenchError
from bench.load import Request, answer, client_session
from bench.measures import StreamRecord, median
from bench.report import print_table
from bench.servers import HYDRA, ServerSettings, compute_threads, model_path, serving
from bench.store import StoreServer, serving_store
from engines.store.client import StoreClient
from engines.wire_store import Manifest, SnapshotsBody

SLOTS = 4
CONTEXT_TOKENS = 8192
STORE_BYTES = 2 << 30
TURNS_BEFORE = 2
GROWING_SAVES, SHARING_SESSIONS = 12, 8
COLD, IN_SLOT, ELSEWHERE, RESTARTED = "cold", "in slot", "another engine", "store killed"
SLOT_FILE = "parked"
GROUPS = (COLD, IN_SLOT, ELSEWHERE, RESTARTED)


@dataclass(frozen=True)
class Turn:
    """The last turn of one conversation."""

    group: str
    record: StreamRecord
    reusable_tokens: int

    @property
    def cached_share(self) -> float:
        return self.record.cached_tokens / self.reusable_tokens


@dataclass(frozen=True)
class Sizes:
    """Bytes of what engines saved; `resave` is what saving an unchanged conversation once more wrote."""

    logical: int
    ideal: int
    stored: int
    resave: int


def add_arguments(command: argparse.ArgumentParser) -> None:
    command.add_argument("--model", action="append", help="hybrid, dense, or as for engine (default: hybrid and dense)")
    command.add_argument("--conversations", type=int, default=3, help="in each group")
    command.add_argument("--system-words", type=int, default=1500)
    command.add_argument("--answer-tokens", type=int, default=16)


def run(options: argparse.Namespace) -> dict[str, Any]:
    options.logs.mkdir(parents=True, exist_ok=True)
    line: dict[str, Any] = {}
    for name in options.model or ["hybrid", "dense"]:
        path = model_path(f"synthetic:{name}" if name in ("hybrid", "dense") else name)
        threads = compute_threads(options.threads)
        settings = ServerSettings(path, SLOTS, CONTEXT_TOKENS, threads, options.gpu_layers, engine=dict(options.set))
        line[name] = Parked(settings, options).run()
    return line


class Parked:
    """One model's measures."""

    def __init__(self, settings: ServerSettings, options: argparse.Namespace) -> None:
        self._settings = settings
        self._options = options
        self._turns: list[Turn] = []

    def run(self) -> dict[str, Any]:
        count = self._options.conversations
        in_slot, elsewhere, restarted, cold = (range(base, base + count) for base in (100, 200, 300, 400))
        with serving_store(capacity_bytes=STORE_BYTES, session_manifests=4) as store:
            with self._engine(store) as engine:
                asyncio.run(self._stay(engine.base_url, in_slot))
                asyncio.run(self._park(engine.base_url, [*elsewhere, *restarted]))
            with self._engine(store) as engine:
                asyncio.run(self._go_on(engine.base_url, ELSEWHERE, elsewhere))
                asyncio.run(self._go_on(engine.base_url, COLD, cold))
            store.restart()
            with self._engine(store) as engine:
                asyncio.run(self._go_on(engine.base_url, RESTARTED, restarted))
        with serving_store(capacity_bytes=STORE_BYTES, session_manifests=4) as store, self._engine(store) as engine:
            sizes = asyncio.run(self._dedup(engine.base_url, store))
        return self._report(sizes)

    def _engine(self, store: StoreServer) -> Any:
        engine = {"slot_save_path": str(self._options.logs / "slots"), "store_port": store.config.port}
        engine |= self._settings.engine
        settings = ServerSettings(
            self._settings.model,
            SLOTS,
            CONTEXT_TOKENS,
            self._settings.threads,
            self._settings.gpu_layers,
            engine=engine,
        )
        return serving(HYDRA, settings, self._options.logs)

    # --- turns ----------------------------------------------------------------------------------

    async def _stay(self, base_url: str, conversations: Sequence[int]) -> None:
        async with client_session() as session:
            await self._warm_up(session, base_url)
            for conversation in conversations:
                await self._first_turns(session, base_url, conversation)
                await self._last_turn(session, base_url, IN_SLOT, conversation)

    async def _park(self, base_url: str, conversations: Sequence[int]) -> None:
        async with client_session() as session:
            for conversation in conversations:
                await self._first_turns(session, base_url, conversation)
                await _post(session, f"{base_url}/sessions/park", {"session": f"c{conversation}"})

    async def _go_on(self, base_url: str, group: str, conversations: Sequence[int]) -> None:
        async with client_session() as session:
            await self._warm_up(session, base_url)
            for conversation in conversations:
                await self._last_turn(session, base_url, group, conversation)

    async def _warm_up(self, session: aiohttp.ClientSession, base_url: str) -> None:
        await answer(session, base_url, Request(history(-1, 0, 200), 4))

    async def _first_turns(self, session: aiohttp.ClientSession, base_url: str, conversation: int) -> None:
        for turn in range(TURNS_BEFORE):
            await answer(session, base_url, self._request(conversation, turn))

    async def _last_turn(self, session: aiohttp.ClientSession, base_url: str, group: str, conversation: int) -> None:
        record = await answer(session, base_url, self._request(conversation, TURNS_BEFORE))
        prompts = [await self._tokens(session, base_url, conversation, turn) for turn in range(TURNS_BEFORE + 1)]
        self._turns.append(Turn(group, record, reusable_tokens(prompts[-1], prompts[:-1])))
        print(f"{self._settings.model.stem}: {group} {record.first_token_s * 1000:.0f} ms", file=sys.stderr, flush=True)

    def _request(self, conversation: int, turn: int) -> Request:
        messages = history(conversation, turn, self._options.system_words)
        return Request(messages, self._options.answer_tokens, headers={"X-Hydra-Session": f"c{conversation}"})

    async def _tokens(self, session: aiohttp.ClientSession, base_url: str, conversation: int, turn: int) -> list[int]:
        body = {"messages": history(conversation, turn, self._options.system_words)}
        rendered = await _post(session, f"{base_url}/apply-template", body)
        body = {"content": rendered["prompt"], "add_special": True, "parse_special": True}
        tokens: list[int] = (await _post(session, f"{base_url}/tokenize", body))["tokens"]
        return tokens

    # --- bytes ----------------------------------------------------------------------------------

    async def _dedup(self, base_url: str, store: StoreServer) -> Sizes:
        """One session that is saved at each of its turns, then sessions with one system prompt."""
        async with client_session() as session, StoreClient("127.0.0.1", store.config.port) as client:
            assert isinstance(client, StoreClient)
            before = await client.store_info()
            words = self._options.system_words // 2
            for turn in range(GROWING_SAVES):
                await self._saved(session, base_url, history(1, turn, words), "grown")
            shared = history(2, 0, words)[0]
            for number in range(SHARING_SESSIONS):
                messages = [shared, *history(10 + number, 0, 8)[1:]]
                await self._saved(session, base_url, messages, f"s{number}", kept=number == SHARING_SESSIONS - 1)
            after = await client.store_info()
            entries, _ = await client.snapshots(SnapshotsBody(limit=1000), "kv/")
            manifests = [manifest for entry in entries if (manifest := await client.get_manifest(entry.name))]
            again = await _park_again(session, base_url)
        used = [int(info.status["slab_bytes"] - info.status["free_bytes"]) for info in (before, after)]
        return Sizes(int(after.status["logical_bytes"]), _ideal(manifests), used[1] - used[0], again["written_bytes"])

    async def _saved(
        self,
        session: aiohttp.ClientSession,
        base_url: str,
        messages: list[dict[str, str]],
        name: str,
        *,
        kept: bool = False,
    ) -> None:
        """`kept`: the slot's content is also put into a file, to be parked once more."""
        request = Request(messages, self._options.answer_tokens, headers={"X-Hydra-Session": name})
        await answer(session, base_url, request)
        if kept:
            async with session.get(f"{base_url}/slots") as response:
                slots = [slot for slot in await response.json() if slot["cached_tokens"]]
            await _post(session, f"{base_url}/slots/{slots[-1]['id']}?action=save", {"filename": SLOT_FILE})
        await _post(session, f"{base_url}/sessions/park", {"session": name})

    # --- what came out --------------------------------------------------------------------------

    def _report(self, sizes: Sizes) -> dict[str, Any]:
        first = {group: self._median(group, "first_token_s") for group in GROUPS}
        rows = []
        for group in GROUPS:
            of_group = [turn for turn in self._turns if turn.group == group]
            cached = median([turn.record.cached_tokens for turn in of_group]) or 0
            could = median([turn.reusable_tokens for turn in of_group]) or 0
            prompt = median([turn.record.prompt_tokens for turn in of_group]) or 0
            ratios = [f"{first[group] / first[other]:.3f}" for other in (COLD, IN_SLOT)]
            rows.append([group, *(f"{n:.0f}" for n in (prompt, could, cached)), f"{first[group] * 1000:.1f}", *ratios])
        columns = ["last turn", "prompt", "could be cached", "cached", "first token ms", "to cold", "to in slot"]
        print_table(
            f"{self._settings.model.stem}: medians of {self._options.conversations} conversations", columns, rows
        )
        print_table(
            f"{GROWING_SAVES} saves of a growing session, {SHARING_SESSIONS} sessions with one system prompt",
            ["logical MB", "ideal MB", "stored MB", "ideal/stored", "bytes of an unchanged save"],
            [[*(f"{n / 1e6:.2f}" for n in (sizes.logical, sizes.ideal, sizes.stored)),
              f"{sizes.ideal / sizes.stored:.3f}", str(sizes.resave)]],
        )  # fmt: skip
        resumed = [turn for turn in self._turns if turn.group in (ELSEWHERE, RESTARTED)]
        return {
            "cached_share": round(min(turn.cached_share for turn in resumed), 3),
            "in_slot_cached_share": round(min(t.cached_share for t in self._turns if t.group == IN_SLOT), 3),
            "resumed_vs_cold": round(first[ELSEWHERE] / first[COLD], 3),
            "restarted_vs_cold": round(first[RESTARTED] / first[COLD], 3),
            "resumed_vs_in_slot": round(first[ELSEWHERE] / first[IN_SLOT], 3),
            "ideal_vs_stored": round(sizes.ideal / sizes.stored, 3),
            "resave_bytes": sizes.resave,
        }

    def _median(self, group: str, name: str) -> float:
        found = median([getattr(turn.record, name) for turn in self._turns if turn.group == group])
        if found is None:
            raise BenchError(f"no turn was measured: {group}")
        return float(found)


async def _park_again(session: aiohttp.ClientSession, base_url: str) -> dict[str, Any]:
    """The conversation of SLOT_FILE, which was parked already."""
    await _post(session, f"{base_url}/slots/0?action=restore", {"filename": SLOT_FILE})
    return dict((await _post(session, f"{base_url}/slots/0?action=park", {}))["snapshot"])


def _ideal(manifests: Sequence[Manifest]) -> int:
    """Each token once and each checkpoint once: blocks are shared by their keys, and of each session's rows behind them the
    longest count."""
    distinct = {chunk.logical_key: chunk.size for m in manifests for chunk in m.chunks if chunk.kind == "block"}
    distinct |= {chunk.hash: chunk.size for m in manifests for chunk in m.chunks if chunk.kind == "checkpoint"}
    tails: dict[str, tuple[int, int]] = {}
    for manifest in manifests:
        for chunk in manifest.chunks:
            if chunk.kind == "tail":
                tails[manifest.session] = max(tails.get(manifest.session, (0, 0)), (chunk.end, chunk.size))
    return sum(distinct.values()) + sum(size for _, size in tails.values())


async def _post(session: aiohttp.ClientSession, url: str, body: dict[str, Any]) -> dict[str, Any]:
    began = time.monotonic()
    async with session.post(url, json=body) as response:
        if response.status != 200:
            took = time.monotonic() - began
            raise BenchError(f"{url} answered {response.status} after {took:.1f} s: {(await response.text())[:400]}")
        return dict(await response.json())
