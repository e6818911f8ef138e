"""Two engine processes between which conversations move, and a reader that follows as a site does. Fixtures: conftest.py."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from engines.rpc_handoff import HandoffClient
from engines.wire_handoff import HandoffAnswer, HandoffBody
from tests.engine_process import EngineProcess, free_port
from tests.paced_engine import PacedEngine
from tests.synthetic_gguf import SyntheticModel

SECRET = "a secret of the tests, long enough"
TENANT = "ab" * 16
PATH = "/v1/chat/completions"
Pair = tuple[PacedEngine, PacedEngine]


@pytest.fixture(scope="module")
def pair(
    tiny_model: Callable[..., SyntheticModel], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Callable[..., Pair]]:
    """`pair(architecture)`: two engines of one model, shared by this file's tests; each test has a session of its own."""
    made: dict[str, Pair] = {}
    folder = tmp_path_factory.mktemp("handoff")
    with ExitStack() as stack:

        def make(architecture: str) -> Pair:
            if architecture not in made:
                drafts = architecture == "qwen35moe"
                model = tiny_model(architecture, tie_free=True, **({"nextn": True} if drafts else {}))
                settings: dict[str, Any] = {"speculation": "mtp", "draft_tokens": 3} if drafts else {}
                first, second = (engine_of(folder, model, **settings) for _ in range(2))
                made[architecture] = stack.enter_context(first), stack.enter_context(second)
            return made[architecture]

        yield make


def engine_of(folder: Path, model: SyntheticModel, **settings: Any) -> PacedEngine:
    values = {"slots": 2, "context_tokens": 4096, "checkpoint_min_tokens": 16, "kv_block_tokens": 64, **settings}
    return PacedEngine(folder, model.path, rpc_port=free_port(), rpc_secret=SECRET, **values)


@pytest.fixture
def session(request: pytest.FixtureRequest) -> str:
    """A conversation's name that no other test has."""
    return re.sub(r"[^A-Za-z0-9_.:-]", ".", request.node.name)[:100]


@pytest.fixture
async def web() -> AsyncIterator[aiohttp.ClientSession]:
    async with aiohttp.ClientSession() as session:
        yield session


def body(text: str = "Tell a story about a river. " * 12, count: int = 120, **fields: Any) -> dict[str, Any]:
    messages = fields.pop("messages", None) or [{"role": "user", "content": text}]
    usage = {"stream_options": {"include_usage": True}} if fields.get("stream", True) else {}
    return {
        "messages": messages,
        "max_tokens": count,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        **usage,
        **fields,
    }


def headers(session: str, request_id: str, **more: str) -> dict[str, str]:
    who = {"X-Request-Id": request_id, "X-Hydra-Session": session, "X-Hydra-Tenant": TENANT, "X-Hydra-Follows": "1"}
    return {**who, **more}


async def asked_to_move(
    session: str, source: EngineProcess, target: EngineProcess, fence: int, request_id: str = ""
) -> HandoffAnswer:
    port, name = target.config.rpc_port, name_of(session, fence)
    async with HandoffClient("127.0.0.1", source.config.rpc_port, secret=SECRET) as client:
        return await client.handoff(HandoffBody(name, fence, session, "127.0.0.1", port, SECRET, 30.0, request_id))


def name_of(session: str, fence: int) -> str:
    return f"h{fence}.{session}"[:64]


class Follower:
    """As a site reads: passes events on, and goes along when the stream says that it moved."""

    def __init__(
        self, web: aiohttp.ClientSession, session: str, request: dict[str, Any], request_id: str, path: str = PATH
    ) -> None:
        self._web, self._raw, self._id, self._path = web, json.dumps(request).encode(), request_id, path
        self._session = session
        self.events: list[bytes] = []
        self.moves: list[str] = []
        self.has_ended = False

    async def read(self, engine: EngineProcess, targets: dict[int, EngineProcess]) -> None:
        """`targets` by the numbers of the moves."""
        url, more = engine.base_url + self._path, {}
        while True:
            async with self._web.post(
                url, data=self._raw, headers=headers(self._session, self._id, **more)
            ) as response:
                assert response.status == 200, await response.text()
                moved = ""
                async for event in _events(response):
                    if event.startswith(b"event: hydra.moved"):
                        moved = json.loads(event.split(b"data: ")[1])["handoff"]
                    elif not event.startswith(b"event: hydra."):
                        self.events.append(event)
            if not moved:
                self.has_ended = True
                return
            self.moves.append(moved)
            url, more = (
                f"{targets[int(moved[1:].split('.')[0])].base_url}/handoffs/{moved}/stream",
                {"X-Hydra-Path": self._path, "X-Hydra-Begun-At": str(self.created)},
            )

    @property
    def created(self) -> int:
        """When the answer says it was begun."""
        first = json.loads(self.events[0].partition(b"data: ")[2])
        return int(first.get("created") or first["response"]["created_at"])

    async def until(self, events: int) -> None:
        async with asyncio.timeout(30):
            while len(self.events) < events and not self.has_ended:  # noqa: ASYNC110
                await asyncio.sleep(0.005)

    @property
    def chunks(self) -> list[dict[str, Any]]:
        return [json.loads(event[6:]) for event in self.events if event.startswith(b"data: {")]

    @property
    def text(self) -> str:
        choices = [choice for chunk in self.chunks for choice in chunk.get("choices", ())]
        return "".join(choice.get("delta", {}).get("content") or choice.get("text") or "" for choice in choices)

    @property
    def finish_reasons(self) -> list[str]:
        choices = [choice for chunk in self.chunks for choice in chunk.get("choices", ())]
        return [choice["finish_reason"] for choice in choices if choice.get("finish_reason")]

    @property
    def usage(self) -> dict[str, Any]:
        (usage,) = [chunk["usage"] for chunk in self.chunks if chunk.get("usage")]
        return dict(usage)


async def _events(response: aiohttp.ClientResponse) -> AsyncIterator[bytes]:
    pending = b""
    async for data in response.content.iter_any():
        *events, pending = (pending + data).split(b"\n\n")
        for event in events:
            yield event


async def stayed(
    web: aiohttp.ClientSession, engine: EngineProcess, request: dict[str, Any], path: str = PATH
) -> Follower:
    """The same answer of nobody who moves."""
    follower = Follower(web, "", request, "alone", path)
    await follower.read(engine, {})
    return follower


def until_it_runs(engine: EngineProcess) -> None:
    while not any(slot["is_processing"] for slot in engine.get("/slots")):
        """Asked again."""


def said(follower: Follower) -> tuple[str, str, list[str]]:
    calls = [
        call["function"]
        for chunk in follower.chunks
        for choice in chunk["choices"]
        for call in choice["delta"].get("tool_calls", ())
    ]
    names = [call["name"] for call in calls if "name" in call]
    return follower.text, "".join(call.get("arguments", "") for call in calls), names
