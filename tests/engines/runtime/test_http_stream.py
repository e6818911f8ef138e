"""The stream loop of all dialects: pings in silence, also where text is held back, and when it ends."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager

import aiohttp
import pytest
from aiohttp import web
from aiohttp.test_utils import TestClient, TestServer

from engines.errors import DecodeFailed
from engines.runtime.chat_output import PLAIN
from engines.runtime.completion_answer import CompletionAnswer
from engines.runtime.generation import Generation, Mailbox, Piece, Stats
from engines.runtime.http_stream import StreamedAnswer, collect, stream
from engines.runtime.llama import Vocabulary
from engines.runtime.messages_answer import MessagesAnswer
from engines.runtime.sampler import SamplingParams
from tests.engine_client import events

PING_S, PATIENCE_S = 0.05, 20.0
STATS = Stats(3, 1, 2, 0.0, 0.1, 0.2)


def two_generations() -> list[Generation]:
    mailbox = Mailbox()
    return [Generation("id", [1, 2, 3], SamplingParams(), (), 10, mailbox, 0.0, choice=index) for index in (0, 1)]


@asynccontextmanager
async def served(answer: StreamedAnswer, generations: list[Generation]) -> AsyncIterator[TestClient]:
    async def handler(request: web.Request) -> web.StreamResponse:
        return await stream(request, generations, answer, PING_S)

    app = web.Application()
    app.router.add_get("/", handler)
    async with TestClient(TestServer(app)) as client:
        yield client


class Heard:
    """What a client has read so far."""

    def __init__(self, response: aiohttp.ClientResponse) -> None:
        self._response, self.text = response, ""

    async def until(self, word: str, times: int) -> None:
        async with asyncio.timeout(PATIENCE_S):
            while self.text.count(word) < times:
                self.text += (await self._response.content.readany()).decode()

    async def end(self) -> str:
        return self.text + await self._response.text()


async def streamed(
    answer: StreamedAnswer, generations: list[Generation], play: Callable[[Heard], Coroutine[None, None, None]]
) -> str:
    async with served(answer, generations) as client:
        heard = Heard(await client.get("/"))
        await play(heard)
        return await heard.end()


def completion(vocabulary: Vocabulary, choices: int) -> CompletionAnswer:
    return CompletionAnswer(
        "id", "tiny", vocabulary, [""] * choices, choices_per_prompt=choices, with_logprobs=False, with_usage=True
    )


async def test_silence_is_filled_with_comments_and_choices_end_apart(tiny_vocabulary: Vocabulary) -> None:
    generations = two_generations()
    mailbox = generations[0].mailbox

    async def play(heard: Heard) -> None:
        mailbox.put(Piece(0, "a"))
        await heard.until(": ping\n\n", 2)
        mailbox.put(Piece(1, "b"))
        mailbox.put(Piece(1, "", finish_reason="stop", stats=STATS))
        mailbox.put(Piece(0, "c", finish_reason="length", stats=STATS))

    text = await streamed(completion(tiny_vocabulary, 2), generations, play)
    frames = [data for _, data in events(text)]
    assert frames[-1] == "[DONE]"
    assert frames[-2]["usage"]["completion_tokens"] == 4
    said = dict.fromkeys((0, 1), "")
    for choice in (choice for frame in frames[:-1] for choice in frame["choices"]):
        said[choice["index"]] += choice["text"]
    assert said == {0: "ac", 1: "b"}


async def test_a_dialects_own_ping_goes_out_while_tokens_come_without_text(tiny_vocabulary: Vocabulary) -> None:
    generations = two_generations()[:1]

    async def tokens() -> None:
        while True:
            generations[0].mailbox.put(Piece(0, token_ids=(5,)))
            await asyncio.sleep(PING_S / 2)

    async def play(heard: Heard) -> None:
        saying = asyncio.create_task(tokens())
        # One ping belongs to the opening.
        await heard.until("event: ping\n", 2)
        saying.cancel()
        generations[0].mailbox.put(Piece(0, "done", finish_reason="stop", stats=STATS))

    text = await streamed(MessagesAnswer("id", "tiny", tiny_vocabulary, PLAIN), generations, play)
    names = [name for name, _ in events(text)]
    assert names[-1] == "message_stop"


async def test_the_first_error_ends_what_waits_for_the_whole() -> None:
    generations = two_generations()
    generations[0].mailbox.put(Piece(0, "a"))
    generations[0].mailbox.put(Piece(1, error=DecodeFailed("No more."), stats=STATS))
    with pytest.raises(DecodeFailed, match="No more"):
        await collect(generations)
