"""The messages of a store's operations, as `engines/wire_json.py` has those of an engine and of both."""

from __future__ import annotations

from dataclasses import dataclass

# --- objects of a store (0x01 to 0x05) ------------------------------------------------------------


@dataclass(frozen=True)
class StoredAnswer:
    """PUT, PUT_META."""

    stored: bool


@dataclass(frozen=True)
class GetAnswer:
    size: int


@dataclass(frozen=True)
class DelAnswer:
    """`deleted` is False where nothing was there, which is no error."""

    deleted: bool


@dataclass(frozen=True)
class StatAnswer:
    """`modified`: seconds since 1970, UTC."""

    name: str
    size: int
    modified: float


@dataclass(frozen=True)
class ListAnswer:
    """The names themselves are the payload, a JSON list of strings."""

    count: int


# --- manifests and chunks of a store (0x10 to 0x15, 0x33) -----------------------------------------


@dataclass(frozen=True)
class PutChunkedAnswer:
    new_chunks: int
    deduped_chunks: int
    total_chunks: int


@dataclass(frozen=True)
class GetChunkedAnswer:
    """`total_size` counts the chunks' bodies; the payload has 8 bytes (i32 index, i32 size) more for each."""

    missing_count: int
    total_size: int


@dataclass(frozen=True)
class SyncMissingAnswer:
    """The payload is MissingHashes."""

    missing_count: int
    candidate_count: int


@dataclass(frozen=True)
class MissingHashes:
    missing_hashes: tuple[str, ...]


@dataclass(frozen=True)
class PushChunksAnswer:
    stored: int
    received: int


@dataclass(frozen=True)
class PutMetaBody:
    n_past: int


@dataclass(frozen=True)
class ManifestChunk:
    """One object of a snapshot. `hash` is the BLAKE3 digest of its bytes, `logical_key` what it was before it existed.

    `kind` is raw, block, tail, checkpoint, draft or state; `start` and `end` are the positions of the tokens it belongs to.
    """

    index: int
    hash: str
    size: int
    kind: str = "raw"
    logical_key: str | None = None
    start: int = 0
    end: int = 0


@dataclass(frozen=True)
class Manifest:
    """Body of PUT_MANIFEST and payload of GET_MANIFEST. `session` groups manifests (empty: its own key); a `pinned` one is never
    evicted; `fingerprint` is what an engine must share to use it."""

    n_past: int
    total_size: int
    model_alias: str
    model_hash: str
    model_path: str
    chunks: tuple[ManifestChunk, ...]
    fingerprint: str = ""
    session: str = ""
    pinned: bool = False


@dataclass(frozen=True)
class PutManifestAnswer:
    """With status PARTIAL `missing_hashes` are the chunks that the store does not hold, and nothing was written."""

    written: bool
    chunks: int
    n_past: int
    missing_hashes: tuple[str, ...] = ()


# --- slabs of a store, for processes of its host (0x71 to 0x74) -----------------------------------


@dataclass(frozen=True)
class ReserveBody:
    """The request's key is the logical key, or empty. With `hash` an object that is there already is found by it too."""

    size: int
    kind: str = "raw"
    hash: str | None = None


@dataclass(frozen=True)
class ReserveAnswer:
    """`present`: an object of that logical key or hash is there, `hash` says which, and nothing is to be written. Else `size`
    bytes at `offset` of the file `path` are the caller's under `ticket`, to be written before `expires` (CLOCK_BOOTTIME)."""

    present: bool
    size: int
    hash: str | None = None
    ticket: str | None = None
    path: str | None = None
    offset: int | None = None
    expires: float | None = None


@dataclass(frozen=True)
class CommitBody:
    """The request's key is the ticket. `hash` is the BLAKE3 digest of what was written, if the writer knows it."""

    hash: str | None = None


@dataclass(frozen=True)
class CommitAnswer:
    """`hash` names the object from now on. `stored` is False where it, or one of the same logical key, was there before."""

    stored: bool
    hash: str


@dataclass(frozen=True)
class LeaseBody:
    """Beside the request's key (a manifest's name, or empty): objects by hash or by logical key. With `ticket` a lease goes on
    instead. `lease_s` None: as the store is set."""

    hashes: tuple[str, ...] = ()
    logical_keys: tuple[str, ...] = ()
    ticket: str | None = None
    lease_s: float | None = None


@dataclass(frozen=True)
class Place:
    """`size` bytes at `offset` of the file `path`. `checksum` is that of engines/store/checksums.py in hexadecimal."""

    hash: str
    kind: str
    size: int
    path: str
    offset: int
    checksum: str
    logical_key: str | None = None


@dataclass(frozen=True)
class LeaseAnswer:
    """The objects stay in place until `expires` (CLOCK_BOOTTIME of the host) or RELEASE of the `ticket`. With status PARTIAL
    `missing` are the hashes and logical keys that are not there."""

    ticket: str
    expires: float
    places: tuple[Place, ...] = ()
    missing: tuple[str, ...] = ()


@dataclass(frozen=True)
class ReleaseAnswer:
    """`released`: the lease or reservation held until now. Where it did not, what was read under it must be thrown away."""

    released: bool


# --- what a store holds, for whoever keeps books of it (0x75) -------------------------------------


@dataclass(frozen=True)
class SnapshotsBody:
    """Beside the request's key (a prefix of names, or empty): only a `session`'s manifests, only names that sort behind `after`,
    at most `limit` of them."""

    session: str | None = None
    after: str = ""
    limit: int = 500


@dataclass(frozen=True)
class SnapshotEntry:
    """A manifest without its chunks. `modified` is when it was saved, in seconds since 1970."""

    name: str
    session: str
    n_past: int
    total_size: int
    fingerprint: str
    checkpoint: bool
    pinned: bool
    modified: float


@dataclass(frozen=True)
class SnapshotsAnswer:
    """The entries are the payload, a JSON list in the order of their names. `more`: ask again behind the last one."""

    count: int
    more: bool


# --- INFO of a store (0x41) -----------------------------------------------------------------------


@dataclass(frozen=True)
class StoreInfoAnswer:
    """`status` and `counts` are named as the series of /metrics."""

    engine: str
    version: str
    protocol: int
    instance: str
    capabilities: tuple[str, ...]
    max_object_bytes: int
    status: dict[str, float]
    counts: dict[str, int]
