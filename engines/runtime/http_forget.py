"""`POST /sessions/forget`: nothing that this engine holds of a session stays, in its context or in host memory."""

from __future__ import annotations

from collections.abc import Generator

from aiohttp import web

from engines.api_body import validated
from engines.api_schema import parse_json_object
from engines.api_slots import ParkRequest
from engines.errors import InvalidRequest, SlotBusy
from engines.runtime.checkpoint_order import Checkpoint
from engines.runtime.operations import NEEDS_MODEL, Operation
from engines.runtime.origin import plain_session
from engines.runtime.prefix import PrefixCache
from engines.runtime.preparation import Preparation


class ForgetEndpoint:
    def __init__(self, preparation: Preparation) -> None:
        self._preparation = preparation

    def operations(self) -> list[Operation]:
        return [
            Operation(
                "POST",
                "/sessions/forget",
                self.forget,
                "Throws away all that is held of a session; its snapshots in the store are not touched.",
                (ParkRequest,),
                statuses=(409, *NEEDS_MODEL),
            )
        ]

    async def forget(self, request: web.Request) -> web.Response:
        session = plain_session(validated(ParkRequest, parse_json_object(await request.read())).session, "session")
        if not session:
            raise InvalidRequest("session: it must not be empty", param="session")
        tokens: int = await self._preparation.core.perform(lambda cache: forgotten(cache, session))
        return web.json_response({"session": session, "n_erased": tokens})


def forgotten(cache: PrefixCache, session: str) -> Generator[None, None, int]:
    """An errand that returns how many tokens it threw away. Raises SlotBusy, and then throws nothing away."""
    yield from ()  # one slice; an errand is a generator all the same
    slots = [slot for slot in cache.slots if slot.sequence.origin.session == session]
    slots = [slot for slot in slots if len(slot.sequence) or slot.transfer]
    if any(not slot.idle for slot in slots):
        raise SlotBusy("A request of the session is running.")
    # What is on its way to host memory does not get there any more.
    checkpoints = [c for c in cache.lenders if isinstance(c, Checkpoint) and c.sequence.origin.session == session]
    checkpoints = [checkpoint for checkpoint in checkpoints if len(checkpoint.sequence)]
    if any(checkpoint.leaving and checkpoint not in cache.aside for checkpoint in checkpoints):
        raise SlotBusy("A state of the session is on its way out.")
    tokens = 0
    for sequence in [slot.sequence for slot in slots] + [checkpoint.sequence for checkpoint in checkpoints]:
        tokens += len(sequence)
        sequence.clear()
    for entry in [entry for entry in cache.host if entry.origin.session == session]:
        tokens += 0 if entry.is_cut else len(entry.tokens)
        cache.host.forget(entry)
    return tokens
