"""HANDOFF, and what a source asks of its target: the binary protocol's side of conversations that move."""

from __future__ import annotations

from engines.rpc_exchange import Exchange
from engines.rpc_serving import Service
from engines.runtime.handoff_in import ArrivingHandoffs
from engines.runtime.handoff_out import LeavingHandoffs
from engines.wire import MAX_CONFIGURE_BYTES, Opcode, Status
from engines.wire_handoff import AdoptBody, AskBody, HandoffBody
from engines.wire_json import read_json


class HandoffOperations:
    def __init__(self, arriving: ArrivingHandoffs, leaving: LeavingHandoffs) -> None:
        self._arriving, self._leaving = arriving, leaving

    def services(self, max_state_bytes: int) -> dict[int, Service]:
        """None has a deadline of its own here: a move has one, and a target gives up on a silent source."""
        return {
            Opcode.HANDOFF: Service(self.handoff, MAX_CONFIGURE_BYTES, None),
            Opcode.ADOPT: Service(self.adopt, MAX_CONFIGURE_BYTES, None),
            Opcode.ADOPT_BLOCK: Service(self.block, max_state_bytes, None, reads_payload=True),
            Opcode.ADOPT_REST: Service(self.rest, max_state_bytes, None, reads_payload=True),
            Opcode.ADOPT_ASK: Service(self.ask, MAX_CONFIGURE_BYTES, None),
        }

    async def handoff(self, exchange: Exchange, body: bytes) -> None:
        await exchange.answer(Status.OK, await self._leaving.move(read_json(HandoffBody, body, "HANDOFF")))

    async def adopt(self, exchange: Exchange, body: bytes) -> None:
        await exchange.answer(
            Status.OK, await self._arriving.begin(read_json(AdoptBody, body, "ADOPT"), exchange.peer_gone)
        )

    async def block(self, exchange: Exchange, _body: bytes) -> None:
        await exchange.answer(Status.OK, await self._arriving.block(exchange))

    async def rest(self, exchange: Exchange, _body: bytes) -> None:
        await exchange.answer(Status.OK, await self._arriving.rest(exchange))

    async def ask(self, exchange: Exchange, body: bytes) -> None:
        await exchange.answer(Status.OK, await self._arriving.ask(read_json(AskBody, body, "ADOPT_ASK")))
