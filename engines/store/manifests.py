"""Manifests: what a store knows of snapshots. Their bytes lie in slabs like objects, so that a restart finds them there."""

from __future__ import annotations

import json
import re
from bisect import bisect_left, bisect_right, insort
from collections import OrderedDict
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from itertools import islice, takewhile

from engines.errors import InvalidRequest
from engines.store.errors import ManifestInvalid
from engines.store.objects import DIGEST_BYTES, StoredObject
from engines.store.records import KINDS, MAX_LOGICAL_KEY_BYTES
from engines.wire_json import read_json
from engines.wire_store import Manifest

MAX_NAME_BYTES = 1024
MAX_CHUNKS = 1 << 17
OBJECT_PREFIX = "objects/"
_HASH = re.compile(r"[0-9a-f]{64}")


def check_name(name: str) -> str:
    """A manifest's name as it may come from outside. Raises InvalidRequest."""
    if not name or len(name.encode()) > MAX_NAME_BYTES:
        raise InvalidRequest(f"The key must have 1 to {MAX_NAME_BYTES} bytes.", param="key")
    if name.startswith("/") or ".." in name or not name.isprintable():
        raise InvalidRequest("The key may not begin with '/', contain '..' or what cannot be printed.", param="key")
    return name


def digest_from(text: str) -> bytes:
    """A digest as the wire writes it. Raises InvalidRequest."""
    if not _HASH.fullmatch(text):
        raise InvalidRequest(
            f"A hash has {DIGEST_BYTES * 2} lower-case hexadecimal digits, not {text[:80]!r}.", param="hash"
        )
    return bytes.fromhex(text)


def check_kind(kind: str) -> str:
    if kind not in KINDS:
        raise InvalidRequest(f"A kind is one of {', '.join(KINDS)}, not {kind[:40]!r}.", param="kind")
    return kind


def check_logical_key(key: str) -> str:
    if len(key.encode()) > MAX_LOGICAL_KEY_BYTES:
        raise InvalidRequest(f"A logical key has at most {MAX_LOGICAL_KEY_BYTES} bytes.", param="logical_key")
    return key


def check_manifest(manifest: Manifest) -> None:
    """Raises ManifestInvalid where it contradicts itself: such a one must never take the place of a good one."""
    if len(manifest.chunks) > MAX_CHUNKS:
        raise ManifestInvalid(f"A manifest has at most {MAX_CHUNKS} chunks.")
    for place, chunk in enumerate(manifest.chunks):
        digest_from(chunk.hash)
        check_kind(chunk.kind)
        check_logical_key(chunk.logical_key or "")
        if chunk.index != place or chunk.size <= 0:
            raise ManifestInvalid(f"Chunk {place} has the index {chunk.index} and {chunk.size} bytes.")
    total = sum(chunk.size for chunk in manifest.chunks)
    if total != manifest.total_size:
        raise ManifestInvalid(f"total_size is {manifest.total_size}; the chunks have {total} bytes.")
    if manifest.n_past < 0 or (manifest.n_past > 0 and not manifest.chunks):
        raise ManifestInvalid(f"n_past is {manifest.n_past} with {len(manifest.chunks)} chunks.")


@dataclass(eq=False)
class StoredManifest:
    """One snapshot: `objects` in the manifest's order, `record` its own bytes."""

    name: str
    manifest: Manifest
    objects: tuple[StoredObject, ...]
    record: StoredObject

    @property
    def session(self) -> str:
        return self.manifest.session or self.name

    @property
    def modified(self) -> float:
        return self.record.name.modified

    @property
    def has_checkpoint(self) -> bool:
        return any(chunk.kind == "checkpoint" for chunk in self.manifest.chunks)

    @property
    def distinct(self) -> frozenset[StoredObject]:
        return frozenset(self.objects)


def write_envelope(name: str, manifest: Manifest) -> bytes:
    """The bytes that lie in the slab, and on disk: the same manifest gives the same bytes."""
    envelope = {"name": name, "manifest": asdict(manifest)}
    return json.dumps(envelope, ensure_ascii=False, separators=(",", ":"), sort_keys=True, allow_nan=False).encode()


@dataclass(frozen=True)
class Envelope:
    name: str
    manifest: Manifest


def read_envelope(raw: bytes) -> Envelope:
    """Raises InvalidRequest, ManifestInvalid."""
    envelope = read_json(Envelope, raw, "a stored manifest")
    check_name(envelope.name)
    check_manifest(envelope.manifest)
    return envelope


class Manifests:
    """By name, the least recently used first; and each object's count of manifests that name it."""

    def __init__(self) -> None:
        self._by_name: OrderedDict[str, StoredManifest] = OrderedDict()
        # In their order, so that what begins alike is found without a look at all of them.
        self._names: list[str] = []
        self._sessions: dict[str, list[StoredManifest]] = {}

    def __len__(self) -> int:
        return len(self._by_name)

    def __iter__(self) -> Iterator[StoredManifest]:
        """The least recently used first. Over a copy, so that the caller may remove some."""
        return iter(list(self._by_name.values()))

    @property
    def sessions(self) -> int:
        return len(self._sessions)

    def get(self, name: str) -> StoredManifest | None:
        return self._by_name.get(name)

    def use(self, stored: StoredManifest) -> None:
        self._by_name.move_to_end(stored.name)

    def of_session(self, session: str) -> list[StoredManifest]:
        """The oldest save first."""
        return list(self._sessions.get(session, ()))

    def names(self, prefix: str) -> list[str]:
        return list(self._beginning(prefix, ""))

    def _beginning(self, prefix: str, after: str) -> Iterator[str]:
        start = bisect_right(self._names, after) if after >= prefix else bisect_left(self._names, prefix)
        return takewhile(lambda name: name.startswith(prefix), islice(self._names, start, None))

    def page(self, prefix: str, session: str | None, after: str, limit: int) -> list[StoredManifest]:
        """The first `limit` by name behind `after`, of those that a prefix and perhaps a session name."""
        if session is None:
            return [self._by_name[name] for name in islice(self._beginning(prefix, after), limit)]
        wanted = (s for s in self.of_session(session) if s.name > after and s.name.startswith(prefix))
        return sorted(wanted, key=lambda stored: stored.name)[:limit]

    def of(self, objects: Iterable[StoredObject]) -> list[StoredManifest]:
        wanted = set(objects)
        return [stored for stored in self if not wanted.isdisjoint(stored.objects)]

    def add(self, stored: StoredManifest) -> StoredManifest | None:
        """Takes it in; returns the one of the same name that it replaces, whose objects have one reference less now."""
        for found in stored.distinct:
            found.refs += 1
        former = self.remove(stored.name)
        self._by_name[stored.name] = stored
        insort(self._names, stored.name)
        self._sessions.setdefault(stored.session, []).append(stored)
        return former

    def remove(self, name: str) -> StoredManifest | None:
        stored = self._by_name.pop(name, None)
        if stored is None:
            return None
        del self._names[bisect_left(self._names, name)]
        siblings = self._sessions[stored.session]
        siblings.remove(stored)
        if not siblings:
            del self._sessions[stored.session]
        for found in stored.distinct:
            found.refs -= 1
        return stored
