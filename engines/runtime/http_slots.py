"""`POST /slots/{id}?action=…`: a slot's content thrown away, saved under a name, or brought back."""

from __future__ import annotations

import time
from collections.abc import Generator
from pathlib import Path
from typing import Any

from aiohttp import web

from engines.api_body import validated
from engines.api_schema import parse_json_object
from engines.api_slots import SlotFileRequest
from engines.errors import InvalidRequest, NotServed, SlotBusy, SlotNotFound
from engines.runtime.http_park import snapshot_body
from engines.runtime.operations import Operation, Parameter
from engines.runtime.parking import Parking
from engines.runtime.prefix import PrefixCache
from engines.runtime.preparation import Preparation
from engines.runtime.slot_files import SlotFiles
from engines.runtime.state_desk import StateDesk

MAX_ID_DIGITS = 6


class SlotEndpoint:
    def __init__(self, preparation: Preparation, desk: StateDesk, parking: Parking) -> None:
        self._preparation = preparation
        self._parking = parking
        folder = preparation.config.slot_save_path
        self._files = SlotFiles(Path(folder), desk) if folder else None

    def operations(self) -> list[Operation]:
        slot = Parameter("id", "path", {"type": "integer", "minimum": 0}, "The slot, as GET /slots names it.")
        action = Parameter(
            "action", "query", {"enum": ["save", "restore", "erase", "park"]}, "What to do.", required=True
        )
        return [
            Operation(
                "POST",
                "/slots/{id}",
                self.act,
                "Saves a slot to a file, restores it from one (both need a body), erases it, or parks it in the host's store.",
                (SlotFileRequest,),
                (slot, action),
                statuses=(404, 409, 422, 501, 503),
            )
        ]

    async def act(self, request: web.Request) -> web.Response:
        slot_id = _slot_id(request.match_info["id"])
        action = request.query.get("action")
        if action == "erase":
            return web.json_response(await self._erase(slot_id))
        if action == "park":
            snapshot = snapshot_body(await self._parking.park_slot(slot_id))
            return web.json_response({"id_slot": slot_id, "snapshot": snapshot})
        if action not in ("save", "restore"):
            raise InvalidRequest("action must be save, restore, erase or park.", param="action")
        if self._files is None:
            raise NotServed(
                "This engine keeps no saved slots.", hint="Start it with slot_save_path, the folder that they go to."
            )
        name = validated(SlotFileRequest, parse_json_object(await request.read())).filename
        self._preparation.llama  # noqa: B018 -- a model that is being loaded has no slots yet
        act = self._save if action == "save" else self._restore
        return web.json_response(await act(self._files, slot_id, name))

    async def _erase(self, slot_id: int) -> dict[str, Any]:
        def erase(cache: PrefixCache) -> Generator[None, None, int]:
            slot = next((slot for slot in cache.slots if slot.index == slot_id), None)
            if slot is None:
                raise SlotNotFound(f"There is no slot {slot_id}.")
            yield from cache.moves.settled(slot)
            if not slot.idle:
                raise SlotBusy(f"Slot {slot_id} is busy.")
            tokens, put_away = len(slot.sequence), cache.host.of_slot(slot_id)
            if put_away is not None and not tokens:
                # An idle conversation may lie in host memory meanwhile; it is the slot's all the same.
                tokens = len(put_away.tokens)
                cache.host.forget(put_away)
            slot.sequence.clear()
            return tokens

        return {"id_slot": slot_id, "n_erased": await self._preparation.core.perform(erase)}

    async def _save(self, files: SlotFiles, slot_id: int, name: str) -> dict[str, Any]:
        started = time.monotonic()
        tokens, size_bytes = await files.save(slot_id, name)
        counts = {"n_saved": tokens, "n_written": size_bytes}
        return {"id_slot": slot_id, "filename": name, **counts, "timings": {"save_ms": _ms_since(started)}}

    async def _restore(self, files: SlotFiles, slot_id: int, name: str) -> dict[str, Any]:
        started = time.monotonic()
        restored, size_bytes = await files.restore(slot_id, name)
        counts = {"n_restored": restored.n_past, "n_read": size_bytes}
        return {"id_slot": slot_id, "filename": name, **counts, "timings": {"restore_ms": _ms_since(started)}}


def _slot_id(text: str) -> int:
    if not (text.isascii() and text.isdigit() and len(text) <= MAX_ID_DIGITS):
        raise SlotNotFound(f"There is no slot {text[:40]!r}.")
    return int(text)


def _ms_since(started: float) -> float:
    return round((time.monotonic() - started) * 1000, 3)
