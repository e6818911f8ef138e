"""The client of a handoff's operations: the control plane asks a source, a source asks its target."""

from __future__ import annotations

import struct
from collections.abc import AsyncIterable, AsyncIterator
from typing import Any, TypeVar

from engines.errors import InvalidRequest, ProtocolBroken
from engines.rpc_client import RpcClient
from engines.rpc_stream import Buffer
from engines.wire import Opcode, RequestHead
from engines.wire_handoff import AdoptAnswer, AdoptBody, AdoptedAnswer, AskBody, BlockHead, HandoffAnswer, HandoffBody
from engines.wire_json import read_json, write_json

# Before a payload's bytes stand the length of a JSON head, and the head.
HEAD_LENGTH = struct.Struct("<I")
# Beyond its own deadline a source may still have to learn how its last word was taken.
MARGIN_S = 30.0
ADOPT_PATIENCE_S = 10.0

T = TypeVar("T")


class HandoffClient(RpcClient):
    """An RpcClient that moves conversations. Raises what that does."""

    async def handoff(self, body: HandoffBody) -> HandoffAnswer:
        """Returns when the session has moved; the same fence again joins the move that runs, or tells what came of it."""
        return await self._told(Opcode.HANDOFF, body, HandoffAnswer, body.deadline_s + MARGIN_S)

    async def adopt(self, body: AdoptBody) -> AdoptAnswer:
        return await self._told(Opcode.ADOPT, body, AdoptAnswer, ADOPT_PATIENCE_S)

    async def adopt_ask(self, body: AskBody) -> AdoptedAnswer:
        return await self._told(Opcode.ADOPT_ASK, body, AdoptedAnswer, ADOPT_PATIENCE_S)

    async def adopt_block(self, handoff: str, head: BlockHead, data: Buffer = b"") -> AdoptedAnswer:
        """A piece; without `data` one that lies on the shelf."""
        begin = headed(head)
        return await self._sent(
            Opcode.ADOPT_BLOCK, handoff, _parts(begin, data), len(begin) + len(data), ADOPT_PATIENCE_S
        )

    async def adopt_rest(
        self, handoff: str, payload: AsyncIterable[Buffer], total_bytes: int, patience_s: float
    ) -> AdoptedAnswer:
        """All that is left. Once its last byte has gone the target may go on, whatever becomes of the answer."""
        return await self._sent(Opcode.ADOPT_REST, handoff, payload, total_bytes, patience_s)

    async def _told(self, opcode: Opcode, body: Any, kind: type[T], patience_s: float) -> T:
        async with self._exchange(RequestHead(opcode), write_json(body)) as answer:
            return _read(kind, (await answer.accepted(patience_s)).meta)

    async def _sent(
        self, opcode: Opcode, handoff: str, payload: AsyncIterable[Buffer], total_bytes: int, patience_s: float
    ) -> AdoptedAnswer:
        head = RequestHead(opcode, key=handoff.encode(), payload_bytes=total_bytes)
        async with self._exchange(head, payload) as answer:
            return _read(AdoptedAnswer, (await answer.accepted(patience_s)).meta)


def headed(message: Any) -> bytes:
    """A message as the head of a payload."""
    raw = write_json(message)
    return HEAD_LENGTH.pack(len(raw)) + raw


async def _parts(*parts: Buffer) -> AsyncIterator[Buffer]:
    for part in parts:
        yield part


def _read(kind: type[T], raw: bytes) -> T:
    try:
        return read_json(kind, raw, "an answer's meta")
    except InvalidRequest as error:
        raise ProtocolBroken(str(error)) from error
