"""An engine that dies over a later turn of a conversation: the other one takes what the store has, and writes the stream on."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from sessions.dialects import CHAT
from sessions.identity import Identity, Owner
from sessions.relay import EngineAnswer, ask_engine
from tests.engine_process import EngineProcess
from tests.sessions.routed_pool import SYSTEM, RoutedPool, routed_pools
from tests.sessions.stream_readers import said_in, until
from tests.synthetic_gguf import SyntheticModel

pytestmark = pytest.mark.django_db(transaction=True)
PATIENCE_S = 60.0
COUNT = 900
_RESTORED = re.compile(r"^hydra_engine_resumed_tokens_total ([0-9.e+]+)$", re.MULTILINE)


class Asked:
    """One streamed turn of a conversation, and what its client has of it."""

    def __init__(self, session: str, messages: list[dict[str, str]], count: int) -> None:
        body = {"messages": messages, "max_tokens": count, "temperature": 0, "ignore_eos": True, "stream": True,
                "stream_options": {"include_usage": True}}  # fmt: skip
        self._call, self._identity = CHAT.read(json.dumps(body).encode()), Identity(Owner(), session)
        self.events: list[bytes] = []
        self.answer: EngineAnswer | None = None

    async def read(self) -> Asked:
        self.answer = await ask_engine(self._call, self._identity)
        try:
            async for frames in self.answer.raw():
                self.events += [one + b"\n\n" for one in frames.split(b"\n\n") if one and one[:1] != b":"]
        finally:
            await self.answer.aclose()
        return self

    @property
    def text(self) -> str:
        choices = [choice for chunk in said_in(self.events) for choice in chunk["choices"]]
        return "".join(choice["delta"].get("content") or "" for choice in choices)

    @property
    def usage(self) -> dict[str, Any]:
        chunks = [json.loads(event[6:]) for event in self.events if event.startswith(b"data: {")]
        (usage,) = [chunk["usage"] for chunk in chunks if chunk.get("usage")]
        return dict(usage)


def restored_tokens(engine: EngineProcess) -> float:
    """Tokens whose state it took from the store."""
    found = _RESTORED.search(engine.text("/metrics"))
    assert found is not None
    return float(found[1])


@pytest.mark.soak
@pytest.mark.parametrize("architecture", ["llama", "qwen35", "qwen35moe"])
async def test_another_engine_goes_on_from_what_the_store_has(
    tiny_model: Callable[..., SyntheticModel], tmp_path: Path, architecture: str
) -> None:
    async with routed_pools(tmp_path) as start:
        pool: RoutedPool = await start(tiny_model(architecture, tie_free=True), 2, context_tokens=4096)
        session = "f" * 64
        messages = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": "Tell of the river. " * 24}]
        first = await Asked(session, messages, 40).read()
        messages += [{"role": "assistant", "content": first.text}, {"role": "user", "content": "And then?"}]
        could = first.usage["prompt_tokens"]
        async with asyncio.timeout(PATIENCE_S):
            while await asyncio.to_thread(pool.saved_tokens, session) < could - 64:  # noqa: ASYNC110
                await asyncio.sleep(0.05)
        asked = Asked(session, messages, COUNT)
        async with asyncio.timeout(PATIENCE_S):
            reading = asyncio.create_task(asked.read())
            await until(lambda: len(asked.events) > 40)
            assert asked.answer is not None
            lost = asked.answer.engine.name
            (other,) = set(pool.engines) - {lost}
            before = await asyncio.to_thread(restored_tokens, pool.engines[other])
            pool.engines[lost].process.kill()
            await reading
        usage = asked.usage
        assert usage["completion_tokens"] == COUNT
        # The last block is not full, and a recurrent state goes on from where it was kept.
        assert await asyncio.to_thread(restored_tokens, pool.engines[other]) - before >= 0.9 * could
        alone = await Asked("0" * 64, messages, COUNT).read()
        assert said_in(asked.events) == said_in(alone.events)
        await asyncio.to_thread(pool.engines[other].wait_idle)
