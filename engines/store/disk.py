"""The store's copy on disk: the last manifests and their objects, written behind, so that a reboot does not lose them.

    <directory>/objects/<hash>            an object's bytes
    <directory>/manifests/<digest>.json   a manifest with its name; there only after all of its objects

Every file is written under another name, synced and renamed. Blocking: used in a thread, one at a time.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import blake3

from engines.errors import InvalidRequest
from engines.store.errors import ManifestInvalid
from engines.store.manifests import Envelope, read_envelope

log = logging.getLogger("hydra.store.disk")

MAX_ENVELOPE_BYTES = 64 << 20


@dataclass(frozen=True)
class KeptManifest:
    path: Path
    envelope: Envelope
    modified: float


class DiskCopy:
    """One directory. Raises OSError from everything that writes."""

    def __init__(self, directory: Path, manifests: int, capacity_bytes: int) -> None:
        self._objects = directory / "objects"
        self._manifests = directory / "manifests"
        self._keep = manifests
        self._capacity_bytes = capacity_bytes
        for folder in (self._objects, self._manifests):
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            for draft in folder.glob("*.new"):
                draft.unlink()

    # --- writing --------------------------------------------------------------------------------

    def has_object(self, text: str, size: int) -> bool:
        path = self._objects / text
        return path.is_file() and path.stat().st_size == size

    def write_object(self, text: str, view: memoryview) -> None:
        _write(self._objects / text, view)

    def write_manifest(self, name: str, raw: bytes) -> None:
        """After its objects. Then the oldest beyond the bounds go."""
        _write(self._path(name), memoryview(raw))
        self.prune()

    def remove(self, name: str) -> None:
        self._path(name).unlink(missing_ok=True)
        self.prune()

    def prune(self) -> None:
        """Keeps the newest manifests that fit the bounds, and no object that none of them names."""
        wanted: dict[str, int] = {}
        total = 0
        for place, kept in enumerate(self.newest()):
            more = {c.hash: c.size for c in kept.envelope.manifest.chunks if c.hash not in wanted}
            if place >= self._keep or total + sum(more.values()) > self._capacity_bytes:
                kept.path.unlink()
                continue
            wanted |= more
            total += sum(more.values())
        for path in self._objects.iterdir():
            if path.name not in wanted:
                path.unlink()

    # --- reading --------------------------------------------------------------------------------

    def newest(self) -> Iterator[KeptManifest]:
        """What can be read, the last saved first; what cannot is removed."""
        found = []
        for path in self._manifests.glob("*.json"):
            try:
                status = path.stat()
                if status.st_size > MAX_ENVELOPE_BYTES:
                    raise ManifestInvalid(f"{status.st_size} bytes are too many")
                found.append(KeptManifest(path, read_envelope(path.read_bytes()), status.st_mtime))
            except (InvalidRequest, ManifestInvalid) as error:
                log.error("%s cannot be read and goes: %s", path, error)
                path.unlink(missing_ok=True)
        return iter(sorted(found, key=lambda kept: kept.modified, reverse=True))

    def read_object(self, text: str, target: memoryview) -> bool:
        """Fills `target`. False where the object is not there or not that long; its digest is the caller's to check."""
        try:
            with (self._objects / text).open("rb", buffering=0) as file:
                if os.fstat(file.fileno()).st_size != len(target):
                    return False
                done = 0
                while done < len(target):
                    count = file.readinto(target[done:])
                    if not count:
                        return False
                    done += count
        except FileNotFoundError:
            return False
        return True

    def _path(self, name: str) -> Path:
        return self._manifests / f"{blake3.blake3(name.encode()).hexdigest()}.json"


def _write(path: Path, view: memoryview) -> None:
    draft = path.with_name(f"{path.name}.new")
    try:
        fd = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        try:
            done = 0
            while done < len(view):
                done += os.write(fd, view[done:])
            os.fsync(fd)
        finally:
            os.close(fd)
        draft.rename(path)
    except OSError:
        draft.unlink(missing_ok=True)
        raise
    folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)
