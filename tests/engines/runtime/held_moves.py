"""Moves that a test holds at their commit: a generation of this process, and a target whose answers come when they may."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from engines.rpc_handoff import HandoffClient
from engines.runtime.core import EngineCore
from engines.runtime.generation import Generation, Piece
from engines.runtime.handoff_out import LeavingHandoffs
from engines.runtime.sampler import SamplingParams
from engines.wire_handoff import AdoptedAnswer, AskBody, HandoffAnswer, HandoffBody
from tests.engine_process import EngineProcess
from tests.engines.runtime.handoff_pair import SECRET, TENANT
from tests.engines.runtime.test_core import generation, prompt_of
from tests.engines.runtime.test_state_desk import desk_of
from tests.paced_engine import slow_steps
from tests.synthetic_gguf import SyntheticModel

HANDOFF, COUNT = "h1", 1500


@dataclass
class HeldAnswers:
    """Stands before a target: from the manifest on its answers, or what it is sent, are held back until `released` is set."""

    released: asyncio.Event = field(default_factory=asyncio.Event)
    is_holding: asyncio.Event = field(default_factory=asyncio.Event)
    port: int = 0
    holds_manifest: bool = False

    @asynccontextmanager
    async def before(self, target: EngineProcess) -> AsyncIterator[HeldAnswers]:
        async def pass_on(
            reader: asyncio.StreamReader, writer: asyncio.StreamWriter, seen: Callable[[bytes], Any] | None
        ) -> None:
            try:
                while data := await reader.read(1 << 16):
                    if seen is not None:
                        seen(data)
                        if self.holds_manifest and self.is_holding.is_set():
                            await self.released.wait()
                    elif self.is_holding.is_set():
                        await self.released.wait()
                    writer.write(data)
                    await writer.drain()
            except ConnectionError:
                pass  # one of both has gone
            finally:
                writer.close()

        def look(data: bytes) -> None:
            if b'"moves_with"' in data:
                self.is_holding.set()

        async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            there, back = await asyncio.open_connection("127.0.0.1", target.config.rpc_port)
            await asyncio.gather(pass_on(reader, back, look), pass_on(there, writer, None))

        async with await asyncio.start_server(connected, "127.0.0.1", 0) as server:
            self.port = server.sockets[0].getsockname()[1]
            yield self
            self.released.set()


class Reader:
    """Reads a generation's pieces as a stream does."""

    def __init__(self, work: Generation) -> None:
        self.text, self.events, self.last = "", list[str](), Piece()
        self._task = asyncio.create_task(self._read(work))

    async def _read(self, work: Generation) -> None:
        while not self.last.is_last:
            for piece in await work.mailbox.take(1.0):
                self.text += piece.text
                self.events += [f"moving {piece.moving}"] if piece.moving else []
                self.events += [f"stays {piece.stays}"] if piece.stays else []
                if piece.told is not None:
                    piece.told.set()
                if piece.is_last:
                    self.last = piece

    async def end(self) -> Piece:
        async with asyncio.timeout(60):
            await self._task
        return self.last

    def close(self) -> None:
        self._task.cancel()


def followed(core: EngineCore, model: SyntheticModel) -> Generation:
    bias = tuple((token, float("-inf")) for token in core.loaded.vocabulary.end_tokens)
    params = SamplingParams(temperature=0, logit_bias=bias)
    work = generation(prompt_of(model, 100), COUNT, params=params, tenant=TENANT, session="s", followed=True)
    work.siblings = (work,)
    return work


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(60):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.005)


async def asked(target: EngineProcess) -> AdoptedAnswer:
    async with HandoffClient("127.0.0.1", target.config.rpc_port, secret=SECRET) as client:
        return await client.adopt_ask(AskBody(HANDOFF, 1))


async def reading(core: EngineCore, model: SyntheticModel) -> tuple[Generation, Reader]:
    """One that has begun its answer, and who reads that."""
    work = followed(core, model)
    core.submit(work)
    reader = Reader(work)
    await until(lambda: work.new_tokens > 20)
    return work, reader


@dataclass(frozen=True)
class HeldMove:
    """Its manifest is on the way to the target, whose answers are held."""

    core: EngineCore
    work: Generation
    reader: Reader
    moving: asyncio.Task[HandoffAnswer]


@asynccontextmanager
async def held_move(model: SyntheticModel, target: EngineProcess, held: HeldAnswers) -> AsyncIterator[HeldMove]:
    async with desk_of(model, slots=2, context_tokens=4096) as (core, desk), held.before(target):
        leaving = LeavingHandoffs(core, desk)
        with slow_steps():
            work, reader = await reading(core, model)
            move = HandoffBody(HANDOFF, 1, "s", "127.0.0.1", held.port, SECRET, 30.0)
            moving = asyncio.create_task(leaving.move(move))
            await held.is_holding.wait()
        yield HeldMove(core, work, reader, moving)
        await leaving.close()
