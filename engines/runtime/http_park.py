"""`POST /sessions/park`: a session's conversations saved to the host's store, and out of the engine."""

from __future__ import annotations

from typing import Any

from aiohttp import web

from engines.api_body import validated
from engines.api_schema import parse_json_object
from engines.api_slots import ParkRequest
from engines.runtime.operations import Operation
from engines.runtime.origin import plain_session
from engines.runtime.parking import Parking
from engines.runtime.store_save import SavedSnapshot


class ParkEndpoint:
    def __init__(self, parking: Parking) -> None:
        self._parking = parking

    def operations(self) -> list[Operation]:
        return [
            Operation(
                "POST",
                "/sessions/park",
                self.park,
                "Saves all that is held of a session to the host's store, and empties its slots.",
                (ParkRequest,),
                statuses=(404, 409, 501, 503),
            )
        ]

    async def park(self, request: web.Request) -> web.Response:
        session = plain_session(validated(ParkRequest, parse_json_object(await request.read())).session, "session")
        saved = [snapshot_body(snapshot) for snapshot in await self._parking.park_session(session)]
        return web.json_response({"session": session, "snapshot": saved[0], "snapshots": saved})


def snapshot_body(saved: SavedSnapshot) -> dict[str, Any]:
    """A snapshot as a park answers it; `name` is its manifest's."""
    return {
        "name": saved.name.text,
        "session": saved.session,
        "tokens": saved.tokens,
        "bytes": saved.total_bytes,
        "written_bytes": saved.written_bytes,
        "skipped_bytes": saved.total_bytes - saved.written_bytes,
        "checkpoint": saved.checkpoint,
        "fingerprint": saved.fingerprint,
    }
