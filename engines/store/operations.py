"""What a store answers to everybody: named bytes, chunks, manifests, and what it is."""

from __future__ import annotations

import json
import struct
from dataclasses import asdict

from engines.errors import InvalidRequest
from engines.rpc_exchange import Exchange
from engines.rpc_serving import Service
from engines.store.errors import ObjectNotFound
from engines.store.manifests import OBJECT_PREFIX, StoredManifest, check_manifest, check_name, digest_from
from engines.store.objects import StoredObject
from engines.store.store import Store
from engines.store.transfer import Transfer
from engines.wire import MAX_CONFIGURE_BYTES, MAX_JSON_BYTES, MAX_OBJECT_BYTES, PROTOCOL_VERSION, Opcode, Status
from engines.wire_json import Empty, read_json, write_json
from engines.wire_store import (
    DelAnswer,
    GetAnswer,
    GetChunkedAnswer,
    ListAnswer,
    Manifest,
    ManifestChunk,
    MissingHashes,
    PushChunksAnswer,
    PutChunkedAnswer,
    PutManifestAnswer,
    PutMetaBody,
    SnapshotEntry,
    SnapshotsAnswer,
    SnapshotsBody,
    StatAnswer,
    StoredAnswer,
    StoreInfoAnswer,
    SyncMissingAnswer,
)

STORE_VERSION = "S1"
CAPABILITIES = ("objects", "manifests", "logical_keys", "in_place", "sendfile")
# Where a foreign client's blob is cut.
BLOB_CHUNK_BYTES = 1 << 20
LOOK_DEADLINE_S = 10.0
MAX_LISTED_SNAPSHOTS = 1000
_SIZE = struct.Struct("<i")
_FRAME = struct.Struct("<ii")


class StoreOperations:
    """0x01 to 0x05, 0x10 to 0x15, 0x33 and INFO."""

    def __init__(self, store: Store, transfer: Transfer) -> None:
        self._store = store
        self._transfer = transfer

    def services(self) -> dict[int, Service]:
        looks = {
            Opcode.DEL: Service(self.delete, 0, LOOK_DEADLINE_S),
            Opcode.STAT: Service(self.stat, 0, LOOK_DEADLINE_S),
            Opcode.LIST: Service(self.list, 0, LOOK_DEADLINE_S),
            Opcode.SYNC_MISSING: Service(self.sync_missing, MAX_JSON_BYTES, LOOK_DEADLINE_S),
            Opcode.PUT_META: Service(self.put_meta, MAX_JSON_BYTES, LOOK_DEADLINE_S),
            Opcode.PUT_MANIFEST: Service(self.put_manifest, MAX_JSON_BYTES, LOOK_DEADLINE_S),
            Opcode.GET_MANIFEST: Service(self.get_manifest, 0, LOOK_DEADLINE_S),
            Opcode.SNAPSHOTS: Service(self.snapshots, MAX_CONFIGURE_BYTES, LOOK_DEADLINE_S),
            Opcode.INFO: Service(self.info, 0, LOOK_DEADLINE_S),
        }
        transfers = {
            Opcode.PUT: Service(self.put, MAX_OBJECT_BYTES, None, reads_payload=True),
            Opcode.GET: Service(self.get, 0, None),
            Opcode.PUT_CHUNKED: Service(self.put_chunked, MAX_OBJECT_BYTES, None, reads_payload=True),
            Opcode.GET_CHUNKED: Service(self.get_chunked, MAX_JSON_BYTES, None),
            Opcode.PUSH_CHUNKS: Service(self.push_chunks, MAX_OBJECT_BYTES, None, reads_payload=True),
        }
        return {int(opcode): service for opcode, service in (looks | transfers).items()}

    # --- named bytes ----------------------------------------------------------------------------

    async def put(self, exchange: Exchange, _body: bytes) -> None:
        await self._take_blob(exchange)
        await exchange.answer(Status.OK, StoredAnswer(stored=True))

    async def put_chunked(self, exchange: Exchange, _body: bytes) -> None:
        new, total = await self._take_blob(exchange)
        await exchange.answer(Status.OK, PutChunkedAnswer(new, total - new, total))

    async def _take_blob(self, exchange: Exchange) -> tuple[int, int]:
        """The payload as a manifest of raw chunks. Returns how many of how many were new."""
        name = writable_name(exchange)
        chunks: list[ManifestChunk] = []
        held: list[StoredObject] = []
        new = 0
        try:
            while exchange.unread_bytes:
                found, is_new = await self._transfer.receive(
                    exchange, min(BLOB_CHUNK_BYTES, exchange.unread_bytes), "raw"
                )
                held += self._store.objects.hold([found])
                new += is_new
                chunks.append(ManifestChunk(len(chunks), found.digest.hex(), found.size))
            total = sum(chunk.size for chunk in chunks)
            self._store.put_manifest(name, Manifest(0, total, "", "", "", tuple(chunks)))
        finally:
            self._store.objects.drop(held)
        return new, len(chunks)

    async def get(self, exchange: Exchange, _body: bytes) -> None:
        held = self._store.objects.hold(self._objects(exchange.head.key_text))
        try:
            await self._transfer.verify(held)
            total = sum(found.size for found in held)
            await exchange.begin(Status.OK, GetAnswer(total), total)
            await self._transfer.send_all(exchange, held)
        finally:
            self._store.objects.drop(held)

    def _objects(self, key: str) -> tuple[StoredObject, ...]:
        """What a key names: one object by `objects/<hash>`, or all those of a manifest."""
        if key.startswith(OBJECT_PREFIX):
            found = self._store.present(digest_from(key.removeprefix(OBJECT_PREFIX)))
            if found is None:
                raise ObjectNotFound("No object has that hash.")
            return (found,)
        return self._store.get(check_name(key)).objects

    async def delete(self, exchange: Exchange, _body: bytes) -> None:
        await exchange.answer(Status.OK, DelAnswer(self._store.delete(writable_name(exchange))))

    async def stat(self, exchange: Exchange, _body: bytes) -> None:
        key = exchange.head.key_text
        objects = self._objects(key)
        stored = self._store.manifests.get(key)
        modified = stored.modified if stored else objects[0].name.modified
        await exchange.answer(Status.OK, StatAnswer(key, sum(found.size for found in objects), modified))

    async def list(self, exchange: Exchange, _body: bytes) -> None:
        names = self._store.manifests.names(exchange.head.key_text)
        await _answer_with(exchange, Status.OK, ListAnswer(len(names)), json.dumps(names).encode())

    # --- chunks ---------------------------------------------------------------------------------

    async def get_chunked(self, exchange: Exchange, body: bytes) -> None:
        has = frozenset(_hashes(body))
        wanted = [
            (index, found)
            for index, found in enumerate(self._store.get(check_name(exchange.head.key_text)).objects)
            if found.digest.hex() not in has
        ]
        held = self._store.objects.hold(found for _, found in wanted)
        try:
            await self._transfer.verify(held)
            total = sum(found.size for found in held)
            meta = GetChunkedAnswer(len(wanted), total)
            await exchange.begin(Status.OK, meta, total + _FRAME.size * len(wanted))
            for index, found in wanted:
                await exchange.send(_FRAME.pack(index, found.size))
                await self._transfer.send(exchange, found)
        finally:
            self._store.objects.drop(held)

    async def sync_missing(self, exchange: Exchange, body: bytes) -> None:
        hashes = _hashes(body)
        missing = tuple(text for text in hashes if self._store.present(digest_from(text)) is None)
        meta = SyncMissingAnswer(len(missing), len(hashes))
        await _answer_with(exchange, Status.OK, meta, write_json(MissingHashes(missing)))

    async def push_chunks(self, exchange: Exchange, _body: bytes) -> None:
        stored = received = 0
        while exchange.unread_bytes:
            header = bytearray(_SIZE.size)
            await exchange.read_into(memoryview(header))
            (size,) = _SIZE.unpack(header)
            if not 0 < size <= exchange.unread_bytes:
                raise InvalidRequest(
                    f"A chunk announces {size} bytes; {exchange.unread_bytes} are left of the payload."
                )
            _, is_new = await self._transfer.receive(exchange, size, "raw")
            received += 1
            stored += is_new
        await exchange.answer(Status.OK, PushChunksAnswer(stored, received))

    # --- manifests ------------------------------------------------------------------------------

    async def put_meta(self, exchange: Exchange, body: bytes) -> None:
        self._store.set_n_past(writable_name(exchange), read_json(PutMetaBody, body, "PUT_META").n_past)
        await exchange.answer(Status.OK, StoredAnswer(stored=True))

    async def put_manifest(self, exchange: Exchange, body: bytes) -> None:
        name = writable_name(exchange)
        manifest = read_json(Manifest, body, "PUT_MANIFEST")
        check_manifest(manifest)
        missing = tuple(self._store.missing(manifest))
        if not missing:
            self._store.put_manifest(name, manifest)
        answer = PutManifestAnswer(not missing, len(manifest.chunks), manifest.n_past, missing)
        await exchange.answer(Status.PARTIAL if missing else Status.OK, answer)

    async def get_manifest(self, exchange: Exchange, _body: bytes) -> None:
        stored = self._store.get(check_name(exchange.head.key_text))
        await _answer_with(exchange, Status.OK, Empty(), write_json(stored.manifest))

    async def snapshots(self, exchange: Exchange, body: bytes) -> None:
        asked = read_json(SnapshotsBody, body, "SNAPSHOTS")
        if not 1 <= asked.limit <= MAX_LISTED_SNAPSHOTS:
            raise InvalidRequest(f"limit lies between 1 and {MAX_LISTED_SNAPSHOTS}.", param="limit")
        page = self._store.manifests.page(exchange.head.key_text, asked.session, asked.after, asked.limit + 1)
        entries = [asdict(_entry(stored)) for stored in page[: asked.limit]]
        answer = SnapshotsAnswer(len(entries), more=len(page) > asked.limit)
        await _answer_with(exchange, Status.OK, answer, json.dumps(entries).encode())

    # --- itself ---------------------------------------------------------------------------------

    async def info(self, exchange: Exchange, _body: bytes) -> None:
        answer = StoreInfoAnswer(
            engine="hydra-store",
            version=STORE_VERSION,
            protocol=PROTOCOL_VERSION,
            instance=self._store.config.instance,
            capabilities=CAPABILITIES,
            max_object_bytes=self._store.slabs.largest_bytes,
            status=asdict(self._store.status()),
            counts=asdict(self._store.counts),
        )
        await exchange.answer(Status.OK, answer)


def writable_name(exchange: Exchange) -> str:
    """The request's key as a name that may be written or deleted. Raises InvalidRequest."""
    name = check_name(exchange.head.key_text)
    if name.startswith(OBJECT_PREFIX):
        raise InvalidRequest(f"Objects under {OBJECT_PREFIX} are named by their bytes and live as manifests need them.")
    return name


def _entry(stored: StoredManifest) -> SnapshotEntry:
    manifest = stored.manifest
    return SnapshotEntry(
        name=stored.name,
        session=manifest.session,
        n_past=manifest.n_past,
        total_size=manifest.total_size,
        fingerprint=manifest.fingerprint,
        checkpoint=stored.has_checkpoint,
        pinned=manifest.pinned,
        modified=stored.modified,
    )


async def _answer_with(exchange: Exchange, status: Status, message: object, payload: bytes) -> None:
    await exchange.begin(status, message, len(payload))
    await exchange.send(payload)


def _hashes(body: bytes) -> list[str]:
    try:
        values = json.loads(body or b"[]")
    except (ValueError, RecursionError) as error:
        raise InvalidRequest(f"The list of hashes is not JSON: {error}") from error
    if not isinstance(values, list) or not all(isinstance(value, str) for value in values):
        raise InvalidRequest("The payload must be a JSON list of hashes.")
    for value in values:
        digest_from(value)
    return values
