"""A pool of real engines of unlike speed on one host, with a store beside them, and a client on the same machine."""

from __future__ import annotations

import asyncio
import functools
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

from engines import store_rows
from engines.choices import StoreState
from engines.client import close_client_session
from engines.models import Engine, Store
from engines.store_calls import StoreCaller
from pools.db import in_db
from sessions.relayed_request import lease_desk
from sessions.turn import wait_for_writes
from tests.engine_process import EngineProcess, free_port
from tests.engines.store.store_process import StoreProcess, store_on_tmpfs
from tests.near_ties import logprobs_of
from tests.paced_engine import PROMPT_TOKEN_S, PacedEngine
from tests.rows import add_engine, add_model, set_ready
from tests.sessions.local_client import LocalClient
from tests.synthetic_gguf import SyntheticModel

PATIENCE_S = 60.0
SYSTEM = "You are told a very long story about rivers and stones. " * 12
# A slow engine computes prompts in small pieces.
FAST, SLOW, SLOWEST = {}, {"batch_tokens": 64, "micro_batch_tokens": 64}, {"batch_tokens": 32, "micro_batch_tokens": 32}
SPEEDS: tuple[dict[str, Any], ...] = (FAST, SLOW, SLOWEST)


@dataclass
class RoutedPool:
    """Engines by name, and the store that all of them use."""

    engines: dict[str, EngineProcess] = field(default_factory=dict)
    store: StoreProcess | None = None

    def write_rows(self, model: SyntheticModel, models_dir: Path, **options: Any) -> None:
        """To be called in a thread with the database; `options` are of the model's row."""
        add_model(model.path, models_dir, **options)
        for name, engine in self.engines.items():
            variant = add_model(Path(engine.config.model_path), models_dir, **options)
            row = add_engine(variant, name=name, slots=engine.config.slots)
            rpc = {"rpc_port": engine.config.rpc_port} if engine.config.rpc_port else {}
            Engine.objects.filter(pk=row.pk).update(context_tokens=engine.config.context_tokens, **rpc)
            set_ready(row, engine.config.port, engine.process.pid)
        self._write_store()

    @contextmanager
    def slowed(self) -> Iterator[None]:
        """No long answer ends meanwhile."""
        with ExitStack() as stack:
            for engine in self.engines.values():
                assert isinstance(engine, PacedEngine)
                stack.enter_context(engine.slowed())
            yield

    def _write_store(self) -> None:
        """The store's row as its host's head would have it."""
        assert self.store is not None
        row = store_rows.ensure_store("here")
        assert row is not None
        place = {"address": "127.0.0.1", "port": self.store.config.port, "secret": ""}
        Store.objects.filter(pk=row.store_id).update(state=StoreState.READY, **place)

    def saved_tokens(self, session: str) -> int:
        """The longest snapshot of the session in the store."""
        assert self.store is not None
        caller = StoreCaller("127.0.0.1", self.store.config.port, "")
        return max((entry.n_past for page in caller.snapshots(session=session) for entry in page), default=0)


@contextmanager
def routed_pool(
    model: SyntheticModel,
    folder: Path,
    count: int,
    *,
    moves: bool = False,
    others: Mapping[int, SyntheticModel] = MappingProxyType({}),
    cards: Sequence[tuple[float, float]] = (),
    **settings: Any,
) -> Iterator[RoutedPool]:
    """A prompt takes the engines longer than what they have of it in the store. With `moves` they speak the binary protocol, so
    that conversations can move between them. Engines of a number that is in `others` serve that file of the model. With `cards`
    they are as slow as these: seconds of a step, and of a prompt's token (`tests.slow_card`)."""
    with ExitStack() as stack:
        pool = RoutedPool(store=stack.enter_context(store_on_tmpfs(folder)))
        assert pool.store is not None
        values = {
            "store_port": pool.store.config.port,
            "kv_block_tokens": 64,
            "context_tokens": 2048,
            "checkpoint_min_tokens": 16,
            "slots": 2,
            **settings,
        }
        for number in range(count):
            rpc = {"rpc_port": free_port()} if moves else {}
            path = others.get(number, model).path
            engine: EngineProcess
            if cards:
                card = ("tests.slow_card", *map(str, cards[number]))
                engine = EngineProcess(folder, path, **{**values, "module": card, **rpc})
            else:
                engine = PacedEngine(folder, path, token_s=PROMPT_TOKEN_S, **{**values, **SPEEDS[number % 3], **rpc})
            pool.engines[f"cpu-{number}"] = stack.enter_context(engine)
        yield pool


@asynccontextmanager
async def routed_pools(folder: Path) -> AsyncIterator[Callable[..., Awaitable[RoutedPool]]]:
    """`await start(model, count, ...)` in a test: a pool as of `routed_pool`, its rows written, every engine measured.

    `row` is of the model's row.
    """
    running: list[AbstractContextManager[RoutedPool]] = []

    async def start(
        model: SyntheticModel, count: int, row: Mapping[str, Any] = MappingProxyType({}), **options: Any
    ) -> RoutedPool:
        context = routed_pool(model, folder, count, **options)
        running.append(context)
        pool = await asyncio.to_thread(context.__enter__)
        await in_db(functools.partial(pool.write_rows, model, folder, **row))
        # Each engine has measured itself at the same work: a busy machine must not make one of them look slower.
        for name in pool.engines:
            await Conversation(LocalClient(), {"X-Hydra-Force-Engine": name, "X-Session-Id": name}).say(
                f"Hello {name}."
            )
        return pool

    yield start
    await wait_for_writes(PATIENCE_S)
    await lease_desk().settled()
    await close_client_session()
    for context in running:
        await asyncio.to_thread(context.__exit__, None, None, None)


@dataclass
class Conversation:
    """A client's side of a conversation: it sends all messages each time, as OpenAI's clients do."""

    client: LocalClient
    headers: dict[str, str]
    messages: list[dict[str, str]] = field(default_factory=lambda: [{"role": "system", "content": SYSTEM}])
    # As templates do with the reasoning of earlier turns: the first half of an answer is not sent again.
    drops_half: bool = False
    answer: str = ""
    logprobs: list[dict[str, Any]] = field(default_factory=list)

    async def say(self, text: str, **fields: Any) -> tuple[Any, Any]:
        """The answer's headers and usage."""
        self.messages.append({"role": "user", "content": text})
        body = {"messages": self.messages, "max_tokens": 24, "temperature": 0, "ignore_eos": True, **fields}
        answer = await self.client.post(
            "/v1/chat/completions", json.dumps(body), content_type="application/json", headers=self.headers
        )
        assert answer.status_code == 200, answer.content
        values = answer.json()
        self.answer = values["choices"][0]["message"]["content"]
        self.logprobs = logprobs_of(values) if fields.get("logprobs") else []
        kept = self.answer[len(self.answer) // 2 :] if self.drops_half else self.answer
        self.messages.append({"role": "assistant", "content": kept})
        return answer.headers, values["usage"]
