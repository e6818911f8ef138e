"""What ADOPT_REST brings: the manifest of a stopped conversation, and the pieces of its state that had not come before."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable

from engines.errors import InvalidRequest, StateInvalid
from engines.rpc_exchange import Exchange
from engines.runtime.arena import Arena
from engines.runtime.handoff_entry import Adopted, read_head, read_piece, read_tokens
from engines.runtime.handoff_marks import Marks
from engines.runtime.handoff_shelf import Shelf
from engines.runtime.state_forms import DIGEST_BYTES, checksum_of
from engines.runtime.state_snapshot import MAX_MANIFEST_BYTES, Manifest, StatePiece
from engines.runtime.state_transfer import Delivery
from engines.wire_handoff import NO_PLACE, PLACE_OFFSET, PLACE_PROOF_BYTES

# Beyond it a manifest, which log probabilities make long, is read beside the event loop.
LONG_HEAD_BYTES = 1 << 18


async def take_rest(
    entry: Adopted, exchange: Exchange, arena: Arena, begin_making: Callable[[Manifest], None]
) -> Manifest | None:
    """One exchange's part of it; the manifest once all has come, which may still be on its way in. `begin_making` is told of it
    before that. Raises StateInvalid, InvalidRequest, StateTooLarge, and what went wrong with a piece."""
    taken, raw = entry.adopting, await read_head(exchange, MAX_MANIFEST_BYTES)
    if raw:
        begin_making(await _take_manifest(entry, raw, exchange))
    if entry.manifest is None:
        raise StateInvalid("Pieces of the state came before its manifest.")
    while exchange.unread_bytes:
        if not entry.awaited:
            raise StateInvalid("More bytes follow the end of the state.")
        if entry.shelf is None:
            proof = bytearray(DIGEST_BYTES)
            await exchange.read_into(memoryview(proof))
            await taken.begin(await read_piece(exchange, entry.awaited[0], bytes(proof), arena))
        elif not await _take_placed(entry, exchange, entry.shelf, entry.awaited[0]):
            await exchange.drop_rest()
            break
        entry.awaited.popleft()
    if entry.awaited:
        await taken.nearly_settled()
        return None
    return entry.manifest


async def _take_manifest(entry: Adopted, raw: bytes, exchange: Exchange) -> Manifest:
    taken = entry.adopting
    taken.marks = Marks()
    ids = await read_tokens(exchange)
    if entry.manifest is not None:
        raise InvalidRequest("The manifest of the state came before.")
    before, told = len(taken.tokens), ids.tolist()
    if len(raw) < LONG_HEAD_BYTES:
        manifest = Manifest.from_json(raw, before, told)
    else:
        manifest = await asyncio.to_thread(Manifest.from_json, raw, before, told)
    running = manifest.generation
    if entry.body.idle != (running is None) or (
        running and (running.request_id, running.session) != (entry.body.request_id, entry.body.session)
    ):
        raise StateInvalid("The state is not of the generation that was announced.")
    entry.awaited = deque(await taken.complete(manifest, ids))
    entry.manifest = manifest
    taken.mark("manifest_read")
    return manifest


async def _take_placed(entry: Adopted, exchange: Exchange, shelf: Shelf, piece: StatePiece) -> bool:
    """The next piece, which lies on the shelf. One whose proof is still being made at the source enters meanwhile. False where no
    more are told of in this exchange."""
    place, proof = bytearray(PLACE_OFFSET.size), bytearray(PLACE_PROOF_BYTES)
    await exchange.read_into(memoryview(place))
    (offset,) = PLACE_OFFSET.unpack(place)
    if offset == NO_PLACE:
        return False
    data = shelf.piece(offset, piece.size_bytes)
    if entry.body.idle or exchange.waiting_bytes >= PLACE_PROOF_BYTES:
        await exchange.read_into(memoryview(proof))
        entry.adopting.enters(Delivery(piece, data, shelf.left, bytes(proof), checksum_of))
        return True
    with entry.adopting.enters_unproved(Delivery(piece, data, shelf.left, None, checksum_of)) as prove:
        await exchange.read_into(memoryview(proof))
        prove(bytes(proof))
    return True
