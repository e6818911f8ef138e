"""How a process speaks to a store: everything over the connection, or, on the same host, bytes in place.

One connection, one request at a time, as engines/rpc_client.py has it; what arrives from another host is proved here.
"""

from __future__ import annotations

import asyncio
import json
import logging
import struct
import time
from collections.abc import AsyncIterable, AsyncIterator, Callable, Iterable, Sequence
from contextlib import asynccontextmanager, suppress
from typing import TypeVar

import blake3

from engines.errors import EngineError, EngineUnreachable, InvalidRequest, ProtocolBroken, RpcNotFound
from engines.rpc_answer import Answer, IncomingState
from engines.rpc_client import RpcClient
from engines.rpc_stream import Buffer
from engines.store.errors import LeaseLost, ObjectDamaged
from engines.store.in_place import SlabMap
from engines.store.objects import boot_seconds
from engines.wire import MAX_JSON_BYTES, RequestHead, ResponseHead
from engines.wire import Opcode as Op
from engines.wire_json import read_json, write_json
from engines.wire_store import (
    CommitAnswer,
    CommitBody,
    DelAnswer,
    LeaseAnswer,
    LeaseBody,
    ListAnswer,
    Manifest,
    MissingHashes,
    PushChunksAnswer,
    PutChunkedAnswer,
    PutManifestAnswer,
    ReleaseAnswer,
    ReserveAnswer,
    ReserveBody,
    SnapshotEntry,
    SnapshotsAnswer,
    SnapshotsBody,
    StatAnswer,
    StoredAnswer,
    StoreInfoAnswer,
)

log = logging.getLogger("hydra.store.client")

T = TypeVar("T")
PUSH_BATCH_BYTES = 32 << 20
# A lease is extended when this share of it is over.
EXTEND_AT = 1 / 3
MIN_EXTEND_S = 0.02
# What breaks off gives back what it held, if the store hears of it in this time; else it runs out by itself.
LEAVE_S = 0.5
_SIZE = struct.Struct("<i")
_FRAME = struct.Struct("<ii")


class Writing:
    """Room for one object, or the object that is there already. Write all of `view`, then `commit`."""

    def __init__(self, client: StoreClient, answer: ReserveAnswer, view: memoryview | None) -> None:
        self._client = client
        self._answer = answer
        self._view = view
        self.hash = answer.hash
        self.stored = False

    @property
    def present(self) -> bool:
        """Whether there is nothing to write."""
        return self._view is None

    @property
    def size(self) -> int:
        """Bytes of the object that is there, or of the room."""
        return self._answer.size

    def require_time(self, margin_s: float = 0.0) -> None:
        """Raises LeaseLost where the room may be another's in `margin_s`: not a byte may be written then."""
        if self._answer.expires is not None and boot_seconds() + margin_s >= self._answer.expires:
            raise LeaseLost("The reservation has run out before it was written.")

    @property
    def view(self) -> memoryview:
        if self._view is None:
            raise InvalidRequest("The object is stored already; there is nothing to write.")
        return self._view

    async def commit(self, expected: str | None = None) -> str:
        """Makes an object of it and returns its hash: maybe another's, whose writer of the same logical key came first."""
        if self.hash is None:
            assert self._answer.ticket is not None
            answer = await self._client.commit(self._answer.ticket, expected)
            self.hash, self.stored = answer.hash, answer.stored
        return self.hash


class Held:
    """Objects that stay in place, in the order in which they were asked for."""

    def __init__(self, answer: LeaseAnswer) -> None:
        self.lease = answer
        self.places = answer.places
        self.missing = answer.missing


class StoreClient(RpcClient):
    """One store. Raises what RpcClient does, and StoreError's for what it proves itself."""

    slabs = SlabMap()  # of the process: two clients of one store share what is mapped

    # --- named bytes and manifests --------------------------------------------------------------

    async def store_info(self) -> StoreInfoAnswer:
        return await self._call(Op.INFO, StoreInfoAnswer)

    async def put(self, key: str, data: Buffer | AsyncIterable[Buffer], total_bytes: int) -> None:
        await self._call(Op.PUT, StoredAnswer, key, data, total_bytes)

    async def put_chunked(self, key: str, data: Buffer | AsyncIterable[Buffer], total_bytes: int) -> PutChunkedAnswer:
        return await self._call(Op.PUT_CHUNKED, PutChunkedAnswer, key, data, total_bytes)

    @asynccontextmanager
    async def get(self, key: str) -> AsyncIterator[IncomingState]:
        """Named bytes, to be read wholly inside the block; unproved where the caller knows no hash."""
        async with self._exchange(RequestHead(Op.GET, key=key.encode())) as answer:
            await answer.accepted(self._patience.stall_s)
            yield IncomingState(answer, self._patience.stall_s)

    async def delete(self, key: str) -> bool:
        return (await self._call(Op.DEL, DelAnswer, key)).deleted

    async def stat(self, key: str) -> StatAnswer | None:
        try:
            return await self._call(Op.STAT, StatAnswer, key)
        except RpcNotFound:
            return None

    async def list(self, prefix: str = "") -> list[str]:
        head, payload = await self._fetch(Op.LIST, prefix)
        _read(ListAnswer, head.meta)
        return _read(list[str], payload)

    async def put_manifest(self, key: str, manifest: Manifest) -> PutManifestAnswer:
        """Written only if nothing is missing; the answer says what is."""
        return await self._call(Op.PUT_MANIFEST, PutManifestAnswer, key, write_json(manifest))

    async def get_manifest(self, key: str) -> Manifest | None:
        try:
            _, payload = await self._fetch(Op.GET_MANIFEST, key)
        except RpcNotFound:
            return None
        return _read(Manifest, payload)

    async def snapshots(
        self, body: SnapshotsBody | None = None, prefix: str = ""
    ) -> tuple[Sequence[SnapshotEntry], bool]:
        """One page of what is stored, in the order of names, and whether there is more behind it."""
        head, payload = await self._fetch(Op.SNAPSHOTS, prefix, write_json(body or SnapshotsBody()))
        return _read(list[SnapshotEntry], payload), _read(SnapshotsAnswer, head.meta).more

    # --- chunks over the connection -------------------------------------------------------------

    async def sync_missing(self, key: str, hashes: Sequence[str]) -> tuple[str, ...]:
        _, payload = await self._fetch(Op.SYNC_MISSING, key, json.dumps(list(hashes)).encode())
        return _read(MissingHashes, payload).missing_hashes

    async def push_chunks(self, key: str, chunks: Iterable[Buffer]) -> PushChunksAnswer:
        """Chunks in batches of at most 32 MiB, or one by one where they are larger."""
        stored = received = 0
        for batch in _batches(chunks):
            total = sum(_SIZE.size + len(chunk) for chunk in batch)
            answer = await self._call(Op.PUSH_CHUNKS, PushChunksAnswer, key, _framed(batch), total)
            stored, received = stored + answer.stored, received + answer.received
        return PushChunksAnswer(stored, received)

    async def get_chunked(
        self, key: str, manifest: Manifest, have: Iterable[str] = ()
    ) -> AsyncIterator[tuple[int, bytearray]]:
        """The manifest's chunks that are not in `have`, as (index, bytes), each proved. Raises ObjectDamaged."""
        async with self._chunks(key, have) as (answer, stall_s):
            while answer.unread_bytes:
                index, size = await self._frame(answer, stall_s)
                if not 0 <= index < len(manifest.chunks) or manifest.chunks[index].size != size:
                    raise ProtocolBroken(f"Chunk {index} of {size} bytes is not in the manifest.")
                body = bytearray(size)
                await answer.part_into(memoryview(body), stall_s)
                _prove(body, manifest.chunks[index].hash)
                yield index, body

    @asynccontextmanager
    async def _chunks(self, key: str, have: Iterable[str]) -> AsyncIterator[tuple[Answer, float]]:
        head = RequestHead(Op.GET_CHUNKED, key=key.encode())
        async with self._exchange(head, json.dumps(list(have)).encode()) as answer:
            await answer.accepted(self._patience.stall_s)
            yield answer, self._patience.stall_s

    async def _frame(self, answer: Answer, stall_s: float) -> tuple[int, int]:
        header = bytearray(_FRAME.size)
        await answer.part_into(memoryview(header), stall_s)
        index, size = _FRAME.unpack(header)
        if size <= 0 or size > answer.unread_bytes:
            raise ProtocolBroken(f"A chunk of {size} bytes is announced with {answer.unread_bytes} left.")
        return index, size

    async def pull(
        self, source: StoreClient, key: str, *, travelled: Callable[[int, float], None] | None = None
    ) -> PutManifestAnswer:
        """Copies a manifest from another store into this one, which is of this host. Only what is missing here travels: out of
        the source's slab by sendfile, from the socket into this store's slab. `travelled` is told bytes and seconds of that.

        Raises RpcNotFound, RpcBusy (this store is full), RpcBadRequest (damaged on the way). PARTIAL as `put_manifest`.
        """
        manifest = await source.get_manifest(key)
        if manifest is None:
            raise RpcNotFound(f"{source.host}:{source.port} has nothing stored as {key!r}.")
        hashes = list(dict.fromkeys(chunk.hash for chunk in manifest.chunks))
        missing = set(await self.sync_missing(key, hashes))
        if missing:
            began_at = time.monotonic()
            async with source._chunks(key, [text for text in hashes if text not in missing]) as (answer, stall_s):
                size_bytes = answer.unread_bytes
                while answer.unread_bytes:
                    index, size = await source._frame(answer, stall_s)
                    if not 0 <= index < len(manifest.chunks) or manifest.chunks[index].size != size:
                        raise ProtocolBroken(f"Chunk {index} of {size} bytes is not in the manifest.")
                    await self._take_in(answer, manifest, index, stall_s)
            if travelled is not None:
                travelled(size_bytes, time.monotonic() - began_at)
        return await self.put_manifest(key, manifest)

    async def _take_in(self, answer: Answer, manifest: Manifest, index: int, stall_s: float) -> None:
        chunk = manifest.chunks[index]
        async with self.writing(chunk.size, chunk.kind, hash_=chunk.hash) as writing:
            target = bytearray(chunk.size) if writing.present else writing.view
            await answer.part_into(memoryview(target), stall_s)
            await writing.commit(chunk.hash)

    # --- bytes in place -------------------------------------------------------------------------

    @asynccontextmanager
    async def writing(
        self, size: int, kind: str, logical_key: str = "", *, hash_: str | None = None
    ) -> AsyncIterator[Writing]:
        """Room in the store's memory, given up on leaving without a commit. Raises RpcBusy (the store is full), LeaseLost."""
        answer = await self.reserve(size, kind, logical_key, hash_)
        writing = Writing(self, answer, None if answer.present else self.slabs.writable(answer))
        try:
            yield writing
        finally:
            if writing.hash is None and answer.ticket is not None:
                with suppress(TimeoutError, EngineError):
                    async with asyncio.timeout(LEAVE_S):
                        await self.release(answer.ticket)

    @asynccontextmanager
    async def held(
        self,
        key: str = "",
        *,
        hashes: Sequence[str] = (),
        logical_keys: Sequence[str] = (),
        lease_s: float | None = None,
    ) -> AsyncIterator[Held]:
        """Objects that stay in place inside the block, the lease being extended meanwhile: all of a manifest, or those that
        are there of some hashes and logical keys. Raises RpcNotFound, and LeaseLost at the end of a block that outlived it."""
        held = Held(await self.lease(key, LeaseBody(tuple(hashes), tuple(logical_keys), None, lease_s)))
        extending = asyncio.create_task(self._extend(held, lease_s))
        try:
            yield held
        except BaseException:
            # Whoever leaves early has no time for a store that does not answer: the lease then runs out by itself.
            await self._end(extending)
            with suppress(TimeoutError, EngineError):
                async with asyncio.timeout(LEAVE_S):
                    await self.release(held.lease.ticket)
            raise
        await self._end(extending)
        kept = await self._let_go(held.lease)
        if not kept:
            raise LeaseLost("The lease ran out while its objects were read.")

    @staticmethod
    async def _end(extending: asyncio.Task[None]) -> None:
        extending.cancel()
        await asyncio.wait({extending})

    async def _let_go(self, lease: LeaseAnswer) -> bool:
        """Whether the lease held until now. A store that does not answer has kept it all the same, up to its end."""
        try:
            return await self.release(lease.ticket)
        except EngineUnreachable as error:
            log.warning("a lease is left to run out: %s", error)
            return boot_seconds() < lease.expires

    async def _extend(self, held: Held, lease_s: float | None) -> None:
        """Until cancelled, or until the store no longer knows the lease: its end is then what the last answer said."""
        while True:
            await asyncio.sleep(max(MIN_EXTEND_S, (held.lease.expires - boot_seconds()) * EXTEND_AT))
            try:
                held.lease = await self.lease("", LeaseBody(ticket=held.lease.ticket, lease_s=lease_s))
            except RpcNotFound:
                return
            except EngineError as error:
                log.warning("a lease could not be extended: %s", error)
                return

    async def reserve(self, size: int, kind: str, logical_key: str = "", hash_: str | None = None) -> ReserveAnswer:
        return await self._call(Op.RESERVE, ReserveAnswer, logical_key, write_json(ReserveBody(size, kind, hash_)))

    async def commit(self, ticket: str, expected: str | None = None) -> CommitAnswer:
        return await self._call(Op.COMMIT, CommitAnswer, ticket, write_json(CommitBody(expected)))

    async def lease(self, key: str, body: LeaseBody) -> LeaseAnswer:
        return await self._call(Op.LEASE, LeaseAnswer, key, write_json(body))

    async def release(self, ticket: str) -> bool:
        return (await self._call(Op.RELEASE, ReleaseAnswer, ticket)).released

    # --- one exchange ---------------------------------------------------------------------------

    async def _call(
        self,
        opcode: Op,
        kind: type[T],
        key: str = "",
        payload: Buffer | AsyncIterable[Buffer] = b"",
        total_bytes: int | None = None,
    ) -> T:
        size = total_bytes if total_bytes is not None else 0
        async with self._exchange(RequestHead(opcode, key=key.encode(), payload_bytes=size), payload) as answer:
            return _read(kind, (await answer.accepted(self._patience.stall_s)).meta)

    async def _fetch(self, opcode: Op, key: str, payload: bytes = b"") -> tuple[ResponseHead, bytes]:
        async with self._exchange(RequestHead(opcode, key=key.encode()), payload) as answer:
            head = await answer.accepted(self._patience.stall_s)
            if answer.unread_bytes > MAX_JSON_BYTES:
                raise ProtocolBroken(
                    f"The store announces {answer.unread_bytes} bytes; at most {MAX_JSON_BYTES} are read."
                )
            body = bytearray(answer.unread_bytes)
            await answer.part_into(memoryview(body), self._patience.stall_s)
            return head, bytes(body)


def _read(kind: type[T], raw: bytes) -> T:
    try:
        return read_json(kind, raw, "an answer")
    except InvalidRequest as error:
        raise ProtocolBroken(str(error)) from error


def _prove(body: Buffer, expected: str) -> None:
    if blake3.blake3(body).hexdigest() != expected:
        raise ObjectDamaged(f"The object {expected} arrived damaged.")


def _batches(chunks: Iterable[Buffer]) -> Iterable[list[Buffer]]:
    batch: list[Buffer] = []
    size = 0
    for chunk in chunks:
        if batch and size + len(chunk) > PUSH_BATCH_BYTES:
            yield batch
            batch, size = [], 0
        batch.append(chunk)
        size += len(chunk)
    if batch:
        yield batch


async def _framed(chunks: Sequence[Buffer]) -> AsyncIterator[Buffer]:
    for chunk in chunks:
        yield _SIZE.pack(len(chunk))
        yield chunk
