"""One owner of a generation that moves, however slow the target's answers come and whoever waits there for a slot."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Generator
from pathlib import Path

import aiohttp
import pytest

from engines.errors import EngineError
from engines.rpc_handoff import HandoffClient
from engines.runtime import handoff_live, state_follow
from engines.runtime.handoff_out import LeavingHandoffs
from engines.runtime.http_rates import sessions_held
from engines.runtime.prefix import PrefixCache
from engines.runtime.state_forget import forget_moved
from engines.wire_handoff import HandoffBody
from tests.engine_process import EngineProcess
from tests.engines.runtime.handoff_pair import SECRET, TENANT, Follower, body, engine_of, name_of, stayed
from tests.engines.runtime.held_moves import COUNT, HANDOFF, HeldAnswers, asked, held_move, until
from tests.engines.runtime.test_core import generation, prompt_of, run
from tests.engines.runtime.test_state_desk import desk_of
from tests.synthetic_gguf import SyntheticModel


@pytest.mark.parametrize("is_told", [True, False])
async def test_a_stop_that_takes_long_has_one_owner_in_the_end(
    tiny_model: Callable[..., SyntheticModel], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, is_told: bool
) -> None:
    """The target goes on, and its answers are held back: longer than a stop lasts, or longer than anybody asks."""
    monkeypatch.setattr(state_follow, "STOP_LIMIT_S", 1.5)
    monkeypatch.setattr(handoff_live, "REST_LIMIT_S", 1.0)
    monkeypatch.setattr(handoff_live, "UNHEARD_S", 60.0 if is_told else 0.5)
    monkeypatch.setattr(handoff_live, "ASK_PATIENCE_S", 0.4)
    model = tiny_model("llama", tie_free=True)
    held = HeldAnswers()
    with engine_of(tmp_path, model) as target, target.slowed():
        async with held_move(model, target, held) as move:
            work, reader, moving = move.work, move.reader, move.moving
            stopped_tokens = work.new_tokens
            if is_told:
                await asyncio.sleep(2.0)
                assert work.new_tokens == stopped_tokens
                held.released.set()
                answer = await moving
                assert (answer.kind, (await reader.end()).finish_reason) == ("live", "moved")
                assert work.new_tokens == stopped_tokens
                assert (await asked(target)).state == "going"
                assert set(reader.events) == {f"moving {HANDOFF}"}
            else:
                assert (await asked(target)).state in ("open", "going")
                await until(lambda: work.new_tokens > stopped_tokens)
                assert (await asked(target)).state == "going"
                held.released.set()
                with pytest.raises(EngineError):
                    await moving
                assert (await asked(target)).state == "over"
                await until(lambda: not any(slot["is_processing"] for slot in target.get("/slots")))
                assert (await reader.end()).finish_reason == "length"
                assert work.new_tokens == COUNT
                assert reader.events[-1] == f"stays {HANDOFF}"


async def test_who_arrives_goes_on_in_its_own_slot_whoever_waits_for_one(
    tiny_model: Callable[..., SyntheticModel], tmp_path: Path, web: aiohttp.ClientSession, session: str
) -> None:
    model = tiny_model("llama", tie_free=True)
    settings = {"slots": 1, "host_cache_bytes": 0, "queue_limit": 1}
    with engine_of(tmp_path, model, **settings) as home, engine_of(tmp_path, model, **settings) as away:
        request = body(count=1500)
        moving, held = Follower(web, session, request, "p1"), HeldAnswers(holds_manifest=True)
        async with held.before(away), HandoffClient("127.0.0.1", home.config.rpc_port, secret=SECRET) as client:
            reading = asyncio.ensure_future(moving.read(home, {1: away}))
            with home.slowed():
                await moving.until(20)
                move = HandoffBody(name_of(session, 1), 1, session, "127.0.0.1", held.port, SECRET, 30.0)
                asking = asyncio.ensure_future(client.handoff(move))
                await held.is_holding.wait()
            # It waits for the one slot, and fills the line.
            other = asyncio.ensure_future(stayed(web, away, body("Else. " * 8, count=40)))
            await until(lambda: figure(away, "llamacpp:requests_deferred") == 1)
            held.released.set()
            assert (await asking).kind == "live"
            await reading
        others_usage = (await other).usage
        computed = figure(away, "llamacpp:prompt_tokens_total")
        assert moving.usage["completion_tokens"] == 1500
        assert computed == others_usage["prompt_tokens"] - others_usage["prompt_tokens_details"]["cached_tokens"]
        assert moving.text == (await stayed(web, home, {**request, "cache_prompt": False})).text


def figure(engine: EngineProcess, name: str) -> float:
    (line,) = [line for line in engine.text("/metrics").splitlines() if line.startswith(f"{name} ")]
    return float(line.split()[-1])


async def test_what_moved_is_forgotten_and_what_others_share_is_not(tiny_model: Callable[..., SyntheticModel]) -> None:
    model = tiny_model("qwen35")
    async with desk_of(model, slots=3, context_tokens=1024, checkpoint_min_tokens=16, host_cache_bytes=1 << 24) as (
        core,
        _,
    ):
        prompts = {"s": prompt_of(model, 220), "other": [*prompt_of(model, 220)[:80], *prompt_of(model, 160, 9)]}
        for name, prompt in prompts.items():
            fields = {"tenant": TENANT, "session": name, "system_cut": 80, "cuts": [80, 110]}
            assert (await run(core, prompt, 8, **fields)).new_tokens == 8

        def put_away(cache: PrefixCache) -> Generator[None, None, list[int]]:
            yield from ()
            for slot in cache.slots:
                cache.moves.put_out(slot.sequence)
            slot = next(slot for slot in cache.slots if slot.sequence.origin.session == "s")
            tokens, origin = slot.sequence.tokens, slot.sequence.origin
            slot.sequence.clear()
            forget_moved(cache, tokens, origin)
            return [len(c.sequence) for c in cache.checkpoints if c.sequence.origin.session == "s"]

        # Its system prompt is what the other conversation begins with, too.
        assert await core.perform(put_away) == [80]
        assert [entry.origin.session for entry in core.cache.host] == ["other"]
        assert list(sessions_held(core.cache)) == ["other"]


async def test_a_request_whose_prefix_comes_in_is_on_its_way(tiny_model: Callable[..., SyntheticModel]) -> None:
    """An older turn of the session that lies idle must not move while its next one is about to begin."""
    model = tiny_model("llama")
    async with desk_of(model, slots=2, context_tokens=1024) as (core, desk):
        await run(core, prompt_of(model, 60), 4, tenant=TENANT, session="s")
        leaving, coming = LeavingHandoffs(core, desk), generation(prompt_of(model, 90), 4, session="s")
        assert not (await leaving._session("s")).is_pending
        core.landing._coming.add(coming)
        assert (await leaving._session("s")).is_pending
        core.landing.take_all()
