"""A conversation that changes engines, between its turns and in the middle of an answer: two engine processes, the same text."""

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

from engines.errors import EngineError, RpcRefused
from engines.rpc_handoff import HandoffClient
from engines.wire_handoff import AdoptBody, AskBody, HandoffAnswer, HandoffBody
from tests.engine_process import EngineProcess, free_port
from tests.synthetic_gguf import SyntheticModel

SECRET = "a secret of the tests, long enough"
TENANT = "ab" * 16
PATH = "/v1/chat/completions"
Pair = tuple[EngineProcess, EngineProcess]


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


def engine_of(folder: Path, model: SyntheticModel, **settings: Any) -> EngineProcess:
    values = {"slots": 2, "context_tokens": 4096, "checkpoint_min_tokens": 16, "kv_block_tokens": 64, **settings}
    return EngineProcess(folder, model.path, rpc_port=free_port(), rpc_secret=SECRET, **values)


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
                {"X-Hydra-Path": self._path},
            )

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


@pytest.mark.parametrize(
    "architecture", [*(pytest.param(name, marks=pytest.mark.soak) for name in ("llama", "qwen35")), "qwen35moe"]
)
async def test_a_stream_that_moves_twice_is_the_one_that_stayed(
    pair: Callable[..., Pair], web: aiohttp.ClientSession, session: str, architecture: str
) -> None:
    home, away = pair(architecture)
    request = body(count=2000)
    moving = Follower(web, session, request, "r1")
    reading = asyncio.ensure_future(moving.read(home, {1: away, 2: home}))
    await moving.until(40)
    first = await asked_to_move(session, home, away, 1)
    await moving.until(len(moving.events) + 40)
    second = await asked_to_move(session, away, home, 2)
    await reading
    alone = await stayed(web, away, {**request, "cache_prompt": False})
    assert moving.moves == [name_of(session, 1), name_of(session, 2)]
    assert (moving.text, moving.finish_reasons) == (alone.text, alone.finish_reasons)
    assert moving.usage["completion_tokens"] == alone.usage["completion_tokens"] == 2000
    assert moving.usage["prompt_tokens"] == alone.usage["prompt_tokens"]
    assert moving.events[-1] == b"data: [DONE]"
    assert (first.kind, first.request_id, second.kind) == ("live", "r1", "live")
    assert second.tokens > first.tokens > 0
    for engine in (home, away):
        await asyncio.to_thread(engine.wait_idle)
    talk = [
        *request["messages"],
        {"role": "assistant", "content": moving.text},
        {"role": "user", "content": "And then?"},
    ]
    next_turn = body(messages=talk, count=8, stream=False)
    async with web.post(home.base_url + PATH, json=next_turn, headers=headers(session, "r2")) as response:
        cached = (await response.json())["usage"]["prompt_tokens_details"]["cached_tokens"]
    assert cached >= 0.9 * (moving.usage["prompt_tokens"] + moving.usage["completion_tokens"])


@pytest.mark.parametrize("architecture", ["llama", pytest.param("qwen35", marks=pytest.mark.soak), "qwen35moe"])
async def test_a_conversation_that_moves_between_all_turns_answers_the_same(
    pair: Callable[..., Pair], web: aiohttp.ClientSession, session: str, architecture: str
) -> None:
    home, away = pair(architecture)
    messages: list[dict[str, str]] = []
    before = 0
    for turn in range(4):
        here, there = (home, away) if turn % 2 == 0 else (away, home)
        messages.append({"role": "user", "content": f"Turn {turn}: go on with the river and its stones. " * 4})
        request = body(messages=messages, count=24, stream=False)
        async with web.post(here.base_url + PATH, json=request, headers=headers(session, f"t{turn}")) as response:
            answer = await response.json()
        async with web.post(there.base_url + PATH, json={**request, "cache_prompt": False}) as response:
            alone = await response.json()
        text = answer["choices"][0]["message"]["content"]
        assert text == alone["choices"][0]["message"]["content"]
        assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] >= 0.9 * before
        before = answer["usage"]["prompt_tokens"]
        messages.append({"role": "assistant", "content": text})
        moved = await asked_to_move(session, here, there, turn + 1)
        assert (moved.kind, moved.tokens >= before) == ("idle", True)


@pytest.mark.soak
@pytest.mark.parametrize("architecture", ["llama", "qwen35", "qwen35moe"])
async def test_a_conversation_that_moves_inside_and_between_all_turns_answers_the_same(
    pair: Callable[..., Pair], web: aiohttp.ClientSession, session: str, architecture: str
) -> None:
    """Each turn is streamed and moves while it is, free, in a form and as a call in turn; then it moves as an idle one."""
    here, there = pair(architecture)
    schema = {"type": "object", "properties": {"a": {"type": "string", "minLength": 850, "maxLength": 870}},
              "required": ["a"], "additionalProperties": False}  # fmt: skip
    form = {"response_format": {"type": "json_schema", "json_schema": {"name": "s", "schema": schema}}}
    tool = {"type": "function", "function": {"name": "tell", "parameters": schema}}
    call = {"tools": [tool], "tool_choice": "required"}
    messages: list[dict[str, str]] = []
    computed = 0
    for turn, fields in enumerate(({}, form, call)):
        messages.append({"role": "user", "content": f"Turn {turn}: go on with the river and its stones. " * 4})
        is_free = not fields
        request = body(messages=messages, count=1000 if is_free else 1200, ignore_eos=is_free, **fields)
        moving = Follower(web, session, request, f"t{turn}")
        reading = asyncio.ensure_future(moving.read(here, {2 * turn + 1: there}))
        live = await asked_to_move(session, here, there, 2 * turn + 1, f"t{turn}")
        await reading
        alone = await stayed(web, here, {**request, "cache_prompt": False})
        assert (_said(moving), moving.finish_reasons) == (_said(alone), alone.finish_reasons)
        assert (live.kind, len(moving.moves)) == ("live", 1)
        # Tools stand at a prompt's beginning, so that nothing of the earlier turns fits.
        assert fields is call or moving.usage["prompt_tokens_details"]["cached_tokens"] >= 0.9 * computed
        computed = moving.usage["prompt_tokens"]
        messages.append({"role": "assistant", "content": moving.text})
        await asyncio.to_thread(there.wait_idle)
        assert (await asked_to_move(session, there, here, 2 * turn + 2)).kind == "idle"


@pytest.mark.parametrize("architecture", ["llama", pytest.param("qwen35moe", marks=pytest.mark.soak)])
async def test_a_named_request_leaves_while_its_prompt_is_computed(
    pair: Callable[..., Pair], web: aiohttp.ClientSession, session: str, architecture: str
) -> None:
    home, away = pair(architecture)
    request = body("Stones lie in the river, and nobody counts them all. " * 60, count=1500)
    # Asked before the request is there, and while an older turn of the session lies idle.
    moving = Follower(web, session, request, "p1")
    asking = asyncio.ensure_future(asked_to_move(session, home, away, 1, "p1"))
    await asyncio.sleep(0.05)
    await moving.read(home, {1: away})
    moved = await asking
    alone = await stayed(web, home, {**request, "cache_prompt": False})
    assert (moving.text, moving.finish_reasons) == (alone.text, alone.finish_reasons)
    assert (moved.kind, moved.request_id, moved.way) == ("live", "p1", "shelf")
    # It stopped soon behind the first token.
    assert moved.tokens - moving.usage["prompt_tokens"] < 750
    with pytest.raises(RpcRefused) as refused:
        await asked_to_move(session, home, away, 2, "never came")
    assert refused.value.peer_code == "session_not_held"


@pytest.mark.parametrize("architecture", ["llama", pytest.param("qwen35moe", marks=pytest.mark.soak)])
async def test_what_the_target_holds_of_another_conversation_is_not_sent(
    pair: Callable[..., Pair], web: aiohttp.ClientSession, session: str, architecture: str
) -> None:
    home, away = pair(architecture)
    system = {"role": "system", "content": "You tell of rivers. " * 60}
    questions = [[system, {"role": "user", "content": f"Number {number}: go on."}] for number in range(2)]
    for engine, messages, who in ((home, questions[0], session), (away, questions[1], f"{session}2")):
        request = body(messages=messages, count=8, stream=False)
        async with web.post(engine.base_url + PATH, json=request, headers=headers(who, "q")) as response:
            assert response.status == 200, await response.text()
    moved = await asked_to_move(session, home, away, 1)
    assert moved.kind == "idle"
    assert moved.skipped_bytes > 0.5 * moved.sent_bytes
    # What was not sent, the pieces that were, and nothing else make up the state.
    assert moved.skipped_bytes + moved.sent_bytes == moved.total_bytes
    talk = [*questions[0], {"role": "assistant", "content": "Well."}, {"role": "user", "content": "And then?"}]
    request = body(messages=talk, count=40, stream=False)
    async with web.post(away.base_url + PATH, json=request, headers=headers(session, "q2")) as response:
        answer = await response.json()
    async with web.post(home.base_url + PATH, json={**request, "cache_prompt": False}) as response:
        alone = await response.json()
    assert answer["choices"][0]["message"] == alone["choices"][0]["message"]
    assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] > 0


async def test_constrained_answers_and_calls_move_whole(
    pair: Callable[..., Pair], web: aiohttp.ClientSession, session: str
) -> None:
    # Greedy: where the form leaves out what the model wants, the others lie so near to each other that a draw among them hangs on
    # the last bits of a sum, and those on where the cells lie.
    home, away = pair("llama")
    schema = {"type": "object", "properties": {"a": {"type": "string", "minLength": 1500, "maxLength": 1600}},
              "required": ["a"], "additionalProperties": False}  # fmt: skip
    form = {"type": "json_schema", "json_schema": {"name": "s", "schema": schema}}
    tool = {"type": "function", "function": {"name": "tell", "parameters": schema}}
    for fence, fields in enumerate(({"response_format": form}, {"tools": [tool], "tool_choice": "required"}), 1):
        request = body(count=2500, ignore_eos=False, **fields)
        moving = Follower(web, session, request, f"c{fence}")
        reading = asyncio.ensure_future(moving.read(home, {fence: away}))
        # Calls are held back, so what is seen of them tells little.
        await asyncio.sleep(0.15)
        await asked_to_move(session, home, away, fence)
        await reading
        alone = await stayed(web, home, {**request, "cache_prompt": False})
        assert moving.moves
        assert (_said(moving), moving.finish_reasons) == (_said(alone), alone.finish_reasons)


def _until_it_runs(engine: EngineProcess) -> None:
    while not any(slot["is_processing"] for slot in engine.get("/slots")):
        """Asked again."""


def _said(follower: Follower) -> tuple[str, str, list[str]]:
    calls = [
        call["function"]
        for chunk in follower.chunks
        for choice in chunk["choices"]
        for call in choice["delta"].get("tool_calls", ())
    ]
    names = [call["name"] for call in calls if "name" in call]
    return follower.text, "".join(call.get("arguments", "") for call in calls), names


async def test_an_answer_in_one_piece_and_other_dialects_move(
    pair: Callable[..., Pair], web: aiohttp.ClientSession, session: str
) -> None:
    home, away = pair("llama")
    request = body(count=1500, stream=False)

    async def ask(engine: EngineProcess, path: str, **more: str) -> tuple[int, dict[str, Any]]:
        async with web.post(engine.base_url + path, json=request, headers=headers(session, "w", **more)) as response:
            return response.status, await response.json()

    asking = asyncio.ensure_future(ask(home, PATH))
    await asyncio.to_thread(_until_it_runs, home)
    await asked_to_move(session, home, away, 1)
    status, told = await asking
    assert (status, told["error"]["code"], told["error"]["param"]) == (409, "generation_moved", name_of(session, 1))
    status, whole = await ask(away, f"/handoffs/{name_of(session, 1)}/stream", **{"X-Hydra-Path": PATH})
    assert status == 200
    alone = await ask(home, PATH)
    assert whole["choices"] == alone[1]["choices"]
    assert whole["usage"]["completion_tokens"] == 1500

    completion = {"prompt": "A river. " * 30, "max_tokens": 1500, "temperature": 0, "ignore_eos": True, "stream": True}
    moving = Follower(web, session, completion, "k", "/v1/completions")
    reading = asyncio.ensure_future(moving.read(home, {2: away}))
    await moving.until(20)
    await asked_to_move(session, home, away, 2)
    await reading
    assert moving.moves == [name_of(session, 2)]
    assert moving.text == (await stayed(web, home, completion, "/v1/completions")).text


async def test_who_cannot_be_followed_stays_and_old_numbers_are_refused(
    pair: Callable[..., Pair], web: aiohttp.ClientSession, session: str
) -> None:
    home, away = pair("llama")
    with pytest.raises(RpcRefused, match="holds nothing"):
        await asked_to_move(session, home, away, 1)
    staying = Follower(web, session, body(count=1000, n=2), "n")
    reading = asyncio.ensure_future(staying.read(home, {}))
    await staying.until(10)
    with pytest.raises(RpcRefused) as refused:
        await asked_to_move(session, home, away, 2)
    assert refused.value.peer_code == "generation_stays"
    await reading
    assert (await asked_to_move(session, home, away, 3)).kind == "idle"
    # The same number tells what came of it, an older one is nobody's any more.
    assert (await asked_to_move(session, home, away, 3)).kind == "idle"
    for number in (1, 2):
        with pytest.raises(RpcRefused) as refused:
            await asked_to_move(session, home, away, number)
        assert refused.value.peer_code == "handoff_stale"
    async with HandoffClient("127.0.0.1", away.config.rpc_port, secret=SECRET) as late:
        adopt = AdoptBody("h9", 2, session, TENANT, "", 10, False, False, "x")
        for call in (late.adopt(adopt), late.adopt_ask(AskBody(name_of(session, 3), 2))):
            with pytest.raises(RpcRefused) as refused:
                await call
            assert refused.value.peer_code == "handoff_stale"
        with pytest.raises(RpcRefused) as refused:
            await late.adopt_ask(AskBody("unheard", 2))
        assert refused.value.peer_code == "handoff_unknown"


async def test_a_target_that_dies_before_the_commit_leaves_the_source_going(
    tiny_model: Callable[..., SyntheticModel], tmp_path: Path, pair: Callable[..., Pair], web: Any, session: str
) -> None:
    home, _ = pair("llama")
    away = await asyncio.to_thread(engine_of(tmp_path, tiny_model("llama", tie_free=True)).__enter__)
    request = body(count=2500)
    staying = Follower(web, session, request, "d")
    reading = asyncio.ensure_future(staying.read(home, {1: away}))
    await staying.until(20)
    moving = asyncio.ensure_future(asked_to_move(session, home, away, 1))
    await asyncio.sleep(0.01)
    away.process.kill()
    try:
        await moving
    except EngineError:
        """It died before it had everything."""
        await reading
        assert staying.usage["completion_tokens"] == 2500
        assert staying.text == (await stayed(web, home, {**request, "cache_prompt": False})).text
    else:
        reading.cancel()
    away.stop()
    await asyncio.to_thread(home.wait_idle)
