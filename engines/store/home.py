"""The directory that a store's memory lies in: whose it is, and whether that process still lives.

A lock that the kernel drops with its process decides ownership; the owner's record beside it is for people and tells of another
boot. The lock file's time is a sign of life, so that a store that is just being restarted does not lose its memory to a
neighbour that starts first.
"""

from __future__ import annotations

import fcntl
import logging
import os
import shutil
import stat
import sys
import time
from pathlib import Path

from engines.process import ProcessRecord, boot_id
from engines.store.config import PREFIX, StoreConfig
from engines.store.errors import StoreUnusable

log = logging.getLogger("hydra.store.home")

LOCK = "store.lock"
OWNER = "owner.json"


class Home:
    """The directory of one running store. Raises StoreUnusable when it cannot be had."""

    def __init__(self, config: StoreConfig) -> None:
        self.folder = config.folder
        self._keep = config.keep
        try:
            self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            _require_own(self.folder)
            self._lock = _locked(self.folder / LOCK)
            # Leases and marks count from a boot; what an older one left cannot be trusted about its readers.
            former = ProcessRecord.from_file(self.folder / OWNER)
            self.same_boot = former is None or former.boot_id == boot_id()
            ProcessRecord.of(os.getpid(), f"store {config.instance}", sys.argv).to_file(self.folder / OWNER)
        except OSError as error:
            raise StoreUnusable(f"{self.folder} cannot be used: {error.strerror or error}") from error

    def show_life(self) -> None:
        os.utime(self._lock)

    def close(self, *, clean: bool = True) -> None:
        """Removes the directory after a clean stop, unless it is to be kept; else leaves it to the next start."""
        if clean and not self._keep:
            shutil.rmtree(self.folder, ignore_errors=True)
        os.close(self._lock)


def remove_memory(config: StoreConfig) -> bool:
    """Removes what a store that was to keep its directory has left; False where there is nothing, or its process still lives."""
    lock = config.folder / LOCK
    if not lock.is_file() or not _is_own(config.folder):
        return False
    try:
        fd = _locked(lock)
    except (OSError, StoreUnusable):
        return False
    shutil.rmtree(config.folder, ignore_errors=True)
    os.close(fd)
    return True


def remove_abandoned(config: StoreConfig) -> list[str]:
    """Removes the directories of other stores beside ours whose process is gone for long enough; returns their names."""
    removed = []
    own = config.folder
    for folder in sorted(own.parent.glob(f"{PREFIX}*")):
        lock = folder / LOCK
        if folder == own or not _is_own(folder) or not lock.is_file():
            continue
        try:
            if time.time() - lock.stat().st_mtime < config.abandoned_s:
                continue
            fd = _locked(lock)
        except (OSError, StoreUnusable):
            continue  # it lives, or went just now
        shutil.rmtree(folder, ignore_errors=True)
        os.close(fd)
        removed.append(folder.name)
        log.warning("removed %s, whose store is gone", folder)
    return removed


def _locked(path: Path) -> int:
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        os.close(fd)
        raise StoreUnusable(f"{path.parent} belongs to another running store") from error
    return fd


def _is_own(folder: Path) -> bool:
    status = folder.lstat()
    return stat.S_ISDIR(status.st_mode) and status.st_uid == os.geteuid()


def _require_own(folder: Path) -> None:
    """Where everybody may write (/dev/shm) a stranger may have made the directory first."""
    if not _is_own(folder):
        raise StoreUnusable(f"{folder} is not a directory of this user")
    if stat.S_IMODE(folder.stat().st_mode) & 0o077:
        folder.chmod(0o700)
