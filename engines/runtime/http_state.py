"""`/slots/{id}/state`: a slot's KV state as bytes, out of one engine and into another, of any size and never held whole.

A state's own stream carries a digest of each of its pieces. A digest of all of it (RFC 9530) takes a pass of its own, since it
stands in a header: it is sent when it is asked for (`Want-Content-Digest`), and always with small states; one that a sender
states is checked before the slot is given back.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import hashlib
import re
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from typing import Any

import blake3
from aiohttp import web

from engines.errors import InvalidRequest, SlotNotFound, StateInvalid
from engines.rpc_exchange import MIN_BYTES_PER_S
from engines.rpc_stream import Buffer
from engines.runtime.operations import NEEDS_MODEL, Operation, Parameter
from engines.runtime.origin import Origin, read_origin
from engines.runtime.state_desk import FORMS, ExportedState, RestoreTerms, StateDesk, StateMeta
from engines.runtime.state_import import STALL_S

SMALL_BYTES = 16 << 20
MAX_ID_DIGITS = 6
# aiohttp waits behind each write of more than this.
WAITED_FOR_BYTES = 1 << 16
OCTETS = "application/octet-stream"
BLAKE3_HEADER = "X-Hydra-Blake3"
FINGERPRINT_HEADER = "X-Hydra-Fingerprint"
_ALGORITHMS = {"sha-256": hashlib.sha256, "sha-512": hashlib.sha512}
_MEMBER = re.compile(r"\s*([a-z0-9*][a-z0-9_.*-]*)=:([A-Za-z0-9+/=]*):\s*")


class StateEndpoint:
    def __init__(self, desk: StateDesk) -> None:
        self._desk = desk

    def operations(self) -> list[Operation]:
        slot = Parameter("id", "path", {"type": "integer", "minimum": 0}, "The slot, as GET /slots names it.")
        form = Parameter("form", "query", {"enum": list(FORMS), "default": "stream"}, "How the state is laid out.")
        erase = Parameter(
            "erase_existing", "query", {"type": "boolean", "default": True}, "Whether what the slot holds may go."
        )
        path, refusals = "/slots/{id}/state", (400, 404, 409, 501, *NEEDS_MODEL)
        return [
            Operation("GET", path, self.get, "The slot's KV state.", (), (slot, form), (OCTETS,), refusals),
            Operation(
                "PUT",
                path,
                self.put,
                "Replaces the slot's KV state by the body, of any form.",
                (),
                (slot, erase),
                statuses=(*refusals, 413, 422, 504),
            ),
            Operation(
                "GET",
                path + "/meta",
                self.meta,
                "What the slot holds and which engines may take it.",
                (),
                (slot, form),
                statuses=refusals,
            ),
        ]

    async def meta(self, request: web.Request) -> web.Response:
        return web.json_response(asdict(await self._desk.meta(_slot_id(request), request.query.get("form", "stream"))))

    async def get(self, request: web.Request) -> web.StreamResponse:
        form = request.query.get("form", "stream")
        if request.method == "HEAD":
            return web.Response(headers=_headers(await self._desk.meta(_slot_id(request), form)))
        async with await self._desk.export(_slot_id(request), form) as state:
            response = web.StreamResponse(headers=_headers(state.meta))
            if state.total_bytes <= SMALL_BYTES or "sha-256" in request.headers.get("Want-Content-Digest", ""):
                response.headers.update(await _digests(state))
            await response.prepare(request)
            with _unbuffered(request):
                async for buffer in state:
                    # Behind a short write nobody waits.
                    await _write(request, response, bytes(buffer) if len(buffer) <= WAITED_FOR_BYTES else buffer)
                await response.write_eof()
            return response

    async def put(self, request: web.Request) -> web.Response:
        erase = request.query.get("erase_existing", "true").lower()
        if erase not in ("true", "false", "1", "0"):
            raise InvalidRequest("erase_existing must be true or false.", param="erase_existing")
        said = read_origin(request.headers)
        terms = RestoreTerms(
            request.content_length,
            request.headers.get(FINGERPRINT_HEADER),
            erase_existing=erase in ("true", "1"),
            origin=Origin(said.tenant, said.session),
        )
        restored = await self._desk.restore(_slot_id(request), terms, _proved(request))
        return web.json_response(
            {"restored": True, **asdict(restored)}, headers={"X-Hydra-N-Past": str(restored.n_past)}
        )


@contextmanager
def _unbuffered(request: web.Request) -> Iterator[None]:
    """The transport sends out of the buffer itself: a write may return only when nothing of it is unsent, or the next piece is
    written over its end."""
    transport = request.transport
    if transport is not None:
        transport.set_write_buffer_limits(high=0)
    try:
        yield
    finally:
        if transport is not None:
            transport.set_write_buffer_limits()


async def _write(request: web.Request, response: web.StreamResponse, buffer: Buffer) -> None:
    """Raises ConnectionResetError, and closes the connection, when the reader takes less than MIN_BYTES_PER_S: it would keep the
    slot and a buffer of the arena."""
    try:
        async with asyncio.timeout(STALL_S + memoryview(buffer).nbytes / MIN_BYTES_PER_S):
            await response.write(buffer)
    except TimeoutError as error:
        if request.transport is not None:
            request.transport.abort()
        raise ConnectionResetError("the reader of the state has stopped reading") from error


def _headers(meta: StateMeta) -> dict[str, str]:
    return {
        "Content-Type": OCTETS,
        "Content-Length": str(meta.state_bytes),
        "X-Hydra-N-Past": str(meta.n_past),
        "X-Hydra-Form": meta.form,
        FINGERPRINT_HEADER: meta.fingerprint,
    }


async def _digests(state: ExportedState) -> dict[str, str]:
    """Both digests, in a pass over the state that sends nothing; the slot holds still, so the second pass is the same."""
    sha256, own = hashlib.sha256(), blake3.blake3()
    async for buffer in state:
        sha256.update(buffer)
        own.update(buffer)
    encoded = base64.b64encode(sha256.digest()).decode()
    return {"Content-Digest": f"sha-256=:{encoded}:", BLAKE3_HEADER: own.hexdigest()}


async def _proved(request: web.Request) -> AsyncIterator[bytes]:
    """The body's chunks. Raises StateInvalid at their end unless they have the digests that the headers state."""
    stated = _stated_digests(request)
    async for chunk in request.content.iter_any():
        for digest, _ in stated:
            digest.update(chunk)
        yield chunk
    if any(digest.digest() != wanted for digest, wanted in stated):
        raise StateInvalid("The state was damaged on its way: it has another digest than its headers say.")


def _stated_digests(request: web.Request) -> list[tuple[Any, bytes]]:
    stated: list[tuple[Any, bytes]] = []
    try:
        for member in filter(None, request.headers.get("Content-Digest", "").split(",")):
            found = _MEMBER.fullmatch(member)
            if found is None:
                raise InvalidRequest("Content-Digest must read like sha-256=:BASE64:.", param="Content-Digest")
            if found[1] in _ALGORITHMS:  # others are allowed and unknown
                stated.append((_ALGORITHMS[found[1]](), base64.b64decode(found[2], validate=True)))
        if own := request.headers.get(BLAKE3_HEADER):
            stated.append((blake3.blake3(), bytes.fromhex(own)))
    except (binascii.Error, ValueError) as error:
        raise InvalidRequest(f"A digest in the headers cannot be read: {error}.", param="Content-Digest") from error
    return stated


def _slot_id(request: web.Request) -> int:
    text = request.match_info["id"]
    if not (text.isascii() and text.isdigit() and len(text) <= MAX_ID_DIGITS):
        raise SlotNotFound(f"There is no slot {text[:40]!r}.")
    return int(text)
