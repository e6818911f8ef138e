"""A pool of real engines of unlike speed on one host, with a store beside them, and a client on the same machine."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from engines.models import Engine
from engines.store_calls import StoreCaller
from tests.engine_process import EngineProcess
from tests.engines.store.store_process import StoreProcess, store_on_tmpfs
from tests.rows import add_engine, add_model, set_ready
from tests.sessions.local_client import LocalClient
from tests.synthetic_gguf import SyntheticModel

SYSTEM = "You are told a very long story about rivers and stones. " * 12
# A slow engine computes prompts in small pieces.
FAST, SLOW, SLOWEST = {}, {"batch_tokens": 64, "micro_batch_tokens": 64}, {"batch_tokens": 32, "micro_batch_tokens": 32}
SPEEDS: tuple[dict[str, Any], ...] = (FAST, SLOW, SLOWEST)


@dataclass
class RoutedPool:
    """Engines by name, and the store that all of them use."""

    engines: dict[str, EngineProcess] = field(default_factory=dict)
    store: StoreProcess | None = None

    def write_rows(self, model: SyntheticModel, models_dir: Path) -> None:
        """To be called in a thread with the database."""
        variant = add_model(model.path, models_dir)
        for name, engine in self.engines.items():
            row = add_engine(variant, name=name, slots=engine.config.slots)
            Engine.objects.filter(pk=row.pk).update(context_tokens=engine.config.context_tokens)
            set_ready(row, engine.config.port, engine.process.pid)

    def saved_tokens(self, session: str) -> int:
        """The longest snapshot of the session in the store."""
        assert self.store is not None
        caller = StoreCaller("127.0.0.1", self.store.config.port, "")
        return max((entry.n_past for page in caller.snapshots(session=session) for entry in page), default=0)


@contextmanager
def routed_pool(model: SyntheticModel, folder: Path, count: int, **settings: Any) -> Iterator[RoutedPool]:
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
            engine = EngineProcess(folder, model.path, **{**values, **SPEEDS[number % 3]})
            pool.engines[f"cpu-{number}"] = stack.enter_context(engine)
        yield pool


@dataclass
class Conversation:
    """A client's side of a conversation: it sends all messages each time, as OpenAI's clients do."""

    client: LocalClient
    headers: dict[str, str]
    messages: list[dict[str, str]] = field(default_factory=lambda: [{"role": "system", "content": SYSTEM}])

    async def say(self, text: str, **fields: Any) -> tuple[Any, Any]:
        """The answer's headers and usage."""
        self.messages.append({"role": "user", "content": text})
        body = {"messages": self.messages, "max_tokens": 24, "temperature": 0, "ignore_eos": True, **fields}
        answer = await self.client.post(
            "/v1/chat/completions", json.dumps(body), content_type="application/json", headers=self.headers
        )
        assert answer.status_code == 200, answer.content
        values = answer.json()
        self.messages.append({"role": "assistant", "content": values["choices"][0]["message"]["content"]})
        return answer.headers, values["usage"]
