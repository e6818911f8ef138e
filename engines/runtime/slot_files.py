"""Saved slots: one file each, in the stream form that states also travel in, so that every byte is checked on its way back.

A file is written under a temporary name and renamed when it is complete and on the disk. Runs beside the event loop.
"""

from __future__ import annotations

import asyncio
import errno
import fcntl
import logging
import os
import re
import stat
import uuid
from collections.abc import AsyncIterator
from io import FileIO
from pathlib import Path

from engines.errors import SlotFileFailed, SlotFileNotFound
from engines.runtime.state_desk import RestoredState, RestoreTerms, StateDesk

log = logging.getLogger("hydra.engine.state")

CHUNK_BYTES = 1 << 20
UNFINISHED = re.compile(r"\..+\.[0-9a-f]{32}")
# What opening says of a name that is no regular file of ours: none, a link, a folder, a socket.
NO_FILE = (errno.ENOENT, errno.ELOOP, errno.EISDIR, errno.ENXIO)


class SlotFiles:
    """The files of one folder. Names must have been checked: they are taken as they are."""

    def __init__(self, folder: Path, desk: StateDesk) -> None:
        self._folder = folder
        self._desk = desk
        remove_unfinished(folder)

    async def save(self, slot_id: int, name: str) -> tuple[int, int]:
        """Writes a slot's state. Returns its tokens and the file's bytes.

        Raises what the desk's `export` does (SlotNotFound, SlotBusy, SlotEmpty, StateSharingOff), and SlotFileFailed.
        """
        unfinished = self._folder / f".{name}.{uuid.uuid4().hex}"
        async with await self._desk.export(slot_id) as state:
            try:
                with await asyncio.to_thread(_create, unfinished) as file:
                    async for buffer in state:
                        await asyncio.to_thread(_write, file, buffer)
                    await asyncio.to_thread(os.fsync, file.fileno())
                await asyncio.to_thread(unfinished.rename, self._folder / name)
            except OSError as error:
                raise SlotFileFailed(f"Slot {slot_id} cannot be saved: {error.strerror}.") from error
            finally:
                unfinished.unlink(missing_ok=True)
            return state.meta.n_past, state.total_bytes

    async def restore(self, slot_id: int, name: str) -> tuple[RestoredState, int]:
        """Replaces a slot's content by a file's. Returns what the slot holds now and the file's bytes.

        Raises what the desk's `restore` does (StateInvalid for a damaged file), SlotFileNotFound and SlotFileFailed.
        """
        try:
            with await asyncio.to_thread(_open, self._folder / name) as file:
                size_bytes = os.fstat(file.fileno()).st_size
                terms = RestoreTerms(total_bytes=size_bytes)
                return await self._desk.restore(slot_id, terms, _chunks(file)), size_bytes
        except OSError as error:
            if error.errno in NO_FILE:
                raise SlotFileNotFound(f"There is no saved slot {name!r}.") from error
            raise SlotFileFailed(f"The saved slot {name!r} cannot be read: {error.strerror}.") from error


def _create(path: Path) -> FileIO:
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    file = FileIO(path, "xb", opener=_private)
    fcntl.flock(file.fileno(), fcntl.LOCK_EX | fcntl.LOCK_NB)  # held by the living; see remove_unfinished
    return file


def remove_unfinished(folder: Path) -> int:
    """Removes what an engine that died was writing: nobody holds its lock any more. Returns how many files."""
    removed = 0
    for path in folder.glob(".*"):
        if not UNFINISHED.fullmatch(path.name):
            continue
        try:
            with FileIO(path, "rb", opener=_private) as file:
                fcntl.flock(file.fileno(), fcntl.LOCK_EX | fcntl.LOCK_NB)
                path.unlink()
        except OSError as error:
            log.info("%s stays: %s", path, error.strerror)
        else:
            removed += 1
    return removed


def _open(path: Path) -> FileIO:
    """Only a regular file: a pipe would block, and a link may lead out of the folder."""
    file = FileIO(path, "rb", opener=_private)
    if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        file.close()
        raise FileNotFoundError(errno.ENOENT, "no regular file")
    return file


def _private(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK, 0o600)


def _write(file: FileIO, buffer: memoryview) -> None:
    """All of `buffer`: one call may take only a part of it."""
    while buffer:
        buffer = buffer[file.write(buffer) :]


async def _chunks(file: FileIO) -> AsyncIterator[bytes]:
    while chunk := await asyncio.to_thread(file.read, CHUNK_BYTES):
        yield chunk
