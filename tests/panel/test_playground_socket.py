"""The playground's WebSocket: answers stream in few messages, stop when told to, and never outlive their page."""

from __future__ import annotations

import asyncio
from typing import Any

from django.contrib.auth.models import AnonymousUser

from engines.models import Engine
from pools.db import in_db
from pools.models import Model
from sessions.models import ChatSession, Turn
from sessions.playground import MAX_MESSAGE_BYTES, MAX_RUNNING_CHATS
from sessions.playground_run import WINDOW
from sessions.turn import wait_for_writes
from tests.panel.conftest import OpenPage
from tests.panel.engine_stand_in import EngineStandIn, chunk
from tests.panel.page import REPLY_TIMEOUT_S, Page, SmallPool

PLAYGROUND = "/ws/playground/"


def chat(run_id: str = "c1", **body: Any) -> dict[str, Any]:
    values = {"messages": [{"role": "user", "content": "Name a colour."}], **body}
    return {"type": "chat", "id": run_id, "conversation": "a-conversation", "body": values}


async def hear_to_the_end(page: Page) -> list[dict[str, Any]]:
    messages = [await page.hear()]
    while messages[-1]["type"] not in ("done", "error"):
        messages.append(await page.hear())
    return messages


async def the_turn() -> Turn:
    await wait_for_writes(REPLY_TIMEOUT_S)
    return await in_db(Turn.objects.select_related("chat").get)


async def test_it_turns_strangers_away_with_a_code_a_browser_can_read(open_page: OpenPage) -> None:
    page = await open_page(PLAYGROUND, AnonymousUser())
    assert await page.closed_with() == 4401


async def test_a_stranger_cannot_chat_before_the_door_closes(open_page: OpenPage, stand_in: EngineStandIn) -> None:
    page = await open_page(PLAYGROUND, AnonymousUser())
    await page.say(chat())
    assert await page.closed_with() == 4401
    assert stand_in.bodies == []


async def test_it_lists_the_default_model_first_and_its_best_engines_state(
    open_page: OpenPage, small_pool: SmallPool
) -> None:
    await in_db(Model.objects.create, name="another")
    page = await open_page(PLAYGROUND)
    await page.say({"type": "models"})
    models = (await page.hear("models"))["models"]
    assert [(model["name"], model["state"], model["is_default"]) for model in models] == [
        ("tiny", "ready", True),
        ("another", "none", False),
    ]


async def test_an_answer_streams_and_ends_with_its_numbers(open_page: OpenPage, stand_in: EngineStandIn) -> None:
    page = await open_page(PLAYGROUND)
    await page.say(chat(model="tiny", temperature=0.5))
    messages = await hear_to_the_end(page)
    assert messages[0]["type"] == "start"
    assert messages[0]["engine"] == "tiny-atlas"
    assert "".join(message["text"] for message in messages if message["type"] == "delta") == "Blue."
    done = messages[-1]
    assert (done["type"], done["finish_reason"], done["usage"]["completion_tokens"]) == ("done", "stop", 3)
    assert done["timings"]["predicted_per_second"] == 41.5
    assert done["first_token_s"] is not None
    assert {message["id"] for message in messages} == {"c1"}


async def test_the_engine_is_asked_for_usage_and_progress(open_page: OpenPage, stand_in: EngineStandIn) -> None:
    page = await open_page(PLAYGROUND)
    await page.say(chat(temperature=0.5, max_tokens=7))
    await hear_to_the_end(page)
    (body,) = stand_in.bodies
    assert (body["temperature"], body["max_tokens"]) == (0.5, 7)
    assert (body["stream"], body["stream_options"], body["return_progress"]) == (True, {"include_usage": True}, True)


async def test_turns_of_one_conversation_belong_to_one_session(
    open_page: OpenPage, stand_in: EngineStandIn, admin: Any
) -> None:
    page = await open_page(PLAYGROUND)
    for run_id in ("c1", "c2"):
        await page.say(chat(run_id))
        await hear_to_the_end(page)
    await wait_for_writes(REPLY_TIMEOUT_S)
    session = await in_db(ChatSession.objects.get)
    assert (session.source, session.user_id, session.turn_count) == ("playground", admin.pk, 2)


async def test_thoughts_and_progress_are_told_apart_from_the_answer(
    open_page: OpenPage, stand_in: EngineStandIn
) -> None:
    progress = {"choices": [], "prompt_progress": {"total": 8, "cache": 2, "processed": 4, "time_ms": 1}}
    stand_in.chunks = [
        progress,
        chunk(reasoning_content="Hm. "),
        chunk(reasoning_content="Sky."),
        chunk(content="Blue"),
    ]
    page = await open_page(PLAYGROUND)
    await page.say(chat())
    messages = await hear_to_the_end(page)
    assert [m for m in messages if m["type"] == "progress"] == [
        {"type": "progress", "id": "c1", "processed": 4, "total": 8, "cached": 2}
    ]
    assert "".join(m["text"] for m in messages if m["type"] == "reasoning") == "Hm. Sky."
    assert "".join(m["text"] for m in messages if m["type"] == "delta") == "Blue"


async def test_stop_ends_the_answer_and_frees_the_engine(open_page: OpenPage, stand_in: EngineStandIn) -> None:
    stand_in.endless = True
    page = await open_page(PLAYGROUND)
    await page.say(chat())
    await page.hear("delta")
    await page.say({"type": "stop", "id": "c1"})
    done = await page.hear("done")
    assert done["finish_reason"] == "stopped"
    async with asyncio.timeout(REPLY_TIMEOUT_S):
        await stand_in.client_left.wait()
    assert (await the_turn()).state == "cancelled"


async def test_stop_works_before_the_engine_has_said_anything(open_page: OpenPage, stand_in: EngineStandIn) -> None:
    stand_in.silent = True
    page = await open_page(PLAYGROUND)
    await page.say(chat())
    async with asyncio.timeout(REPLY_TIMEOUT_S):
        await stand_in.asked.wait()
    await page.say({"type": "stop", "id": "c1"})
    assert (await page.hear("done"))["finish_reason"] == "stopped"
    async with asyncio.timeout(REPLY_TIMEOUT_S):
        await stand_in.client_left.wait()
    assert (await the_turn()).state == "cancelled"


async def test_leaving_the_page_frees_the_engine(open_page: OpenPage, stand_in: EngineStandIn) -> None:
    stand_in.endless = True
    page = await open_page(PLAYGROUND)
    await page.say(chat())
    await page.hear("delta")
    await page.leave()
    async with asyncio.timeout(REPLY_TIMEOUT_S):
        await stand_in.client_left.wait()
    assert (await the_turn()).state == "cancelled"


async def test_a_page_that_draws_nothing_is_sent_few_messages(open_page: OpenPage, stand_in: EngineStandIn) -> None:
    stand_in.endless = True
    page = await open_page(PLAYGROUND)
    await page.say(chat())
    for _ in range(WINDOW):
        await page.hear(acknowledge=False)
    assert await page.hears_nothing(within_s=0.3)
    await page.say({"type": "ack", "id": "c1"})
    assert (await page.hear(acknowledge=False))["type"] == "delta"


async def test_quick_tokens_are_gathered_into_fewer_messages(open_page: OpenPage, stand_in: EngineStandIn) -> None:
    stand_in.chunks = [chunk(content=f"{number} ") for number in range(400)]
    page = await open_page(PLAYGROUND)
    await page.say(chat())
    messages = await hear_to_the_end(page)
    deltas = [message["text"] for message in messages if message["type"] == "delta"]
    assert "".join(deltas) == "".join(f"{number} " for number in range(400))
    assert len(deltas) < 200


async def test_one_chat_too_many_is_refused_and_the_others_go_on(open_page: OpenPage, stand_in: EngineStandIn) -> None:
    stand_in.endless = True
    page = await open_page(PLAYGROUND)
    for number in range(MAX_RUNNING_CHATS + 1):
        await page.say(chat(f"c{number}"))
    error = await page.hear("error")
    assert (error["id"], error["error"]["code"]) == (f"c{MAX_RUNNING_CHATS}", "too_many_chats")
    assert (await page.hear("delta"))["text"]


async def test_an_error_in_the_middle_is_told_after_what_was_said(open_page: OpenPage, stand_in: EngineStandIn) -> None:
    stand_in.chunks = [
        chunk(content="Bl"),
        {"error": {"message": "out of luck", "code": "decode_failed", "type": "server_error"}},
    ]
    page = await open_page(PLAYGROUND)
    await page.say(chat())
    messages = await hear_to_the_end(page)
    assert [message["type"] for message in messages] == ["start", "delta", "error"]
    assert messages[-1]["error"]["message"] == "out of luck"


async def test_a_page_hears_how_far_a_model_is_and_then_the_answer(
    open_page: OpenPage, small_pool: SmallPool, stand_in: EngineStandIn
) -> None:
    engine = Engine.objects.filter(pk=small_pool.engine.pk)
    await in_db(engine.update, state="starting")
    page = await open_page(PLAYGROUND)
    await page.say(chat())
    assert (await page.hear("loading"))["loading"]["state"] == "starting"
    await in_db(engine.update, state="ready")
    assert (await page.hear("start"))["engine"] == small_pool.engine.name


async def test_a_model_that_nobody_serves_is_an_error_with_a_hint(open_page: OpenPage, small_pool: SmallPool) -> None:
    await in_db(Engine.objects.filter(pk=small_pool.engine.pk).update, state="failed")
    page = await open_page(PLAYGROUND)
    await page.say(chat())
    error = (await page.hear("error"))["error"]
    assert (error["code"], error["retryable"]) == ("no_engine_ready", True)
    assert error["hint"]


async def test_a_body_that_breaks_the_contract_is_refused_by_field(open_page: OpenPage, small_pool: SmallPool) -> None:
    page = await open_page(PLAYGROUND)
    await page.say(chat(temperature=99))
    error = await page.hear("error")
    assert error["id"] == "c1"
    assert (error["error"]["code"], "temperature" in error["error"]["message"]) == ("invalid_request", True)


async def test_nonsense_is_refused_and_the_connection_lives(open_page: OpenPage, stand_in: EngineStandIn) -> None:
    page = await open_page(PLAYGROUND)
    nonsense = ["not json", "[" * 100_000, "7", '{"type": []}', '{"type": "x"}', '{"type": "chat", "id": "c1"}']
    for text in [*nonsense, '{"type": "chat", "id": "no spaces", "conversation": "c", "body": {}}']:
        await page.say(text)
        assert (await page.hear("error"))["error"]["code"] == "invalid_request"
    await page.say({"type": "stop", "id": "never-was"})
    await page.say({"type": "ack", "id": 5})
    await page.say(chat())
    assert (await hear_to_the_end(page))[-1]["type"] == "done"


async def test_a_message_over_the_limit_ends_the_connection(open_page: OpenPage, stand_in: EngineStandIn) -> None:
    page = await open_page(PLAYGROUND)
    await page.say("x" * (MAX_MESSAGE_BYTES + 1))
    assert (await page.hear("error"))["error"]["code"] == "message_too_big"
    assert await page.closed_with() == 1009
