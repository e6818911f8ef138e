"""Removes what earlier builds left and nobody needs: libraries of llama.cpp, and the object files of builds that broke off.

Of the libraries these stay: those that a process of this machine was told to load, and for each architecture the newest that fits
the bindings and this CPU and the one before it, to fall back on. One that crashed engines is no fallback.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

from engines import native_library
from engines.native_library import FOLDER, LIBRARY_VARIABLE
from native.architectures import ARCHITECTURES, CPU

# In a folder of object files: the digest of what they are made of.
SOURCE_NAME = "source.sha256"
KEPT_BUILDS = 2
# What an unpacking left that was killed.
OLD_SCRATCH_S = 86_400.0
_KEY = re.compile(r"[0-9a-f]{16}")
_WORK = re.compile(r"\.(?:work|kernels)-([0-9a-f]{16})")


def remove_old(home: Path, packages: set[str], source_sha256: str | None) -> list[str]:
    """Removes what nobody needs, and returns the names of the builds among it.

    `packages` are the bindings in use here; object files of another source than `source_sha256` go, too (None: they stay).

    What cannot be removed is told on stderr and tried again behind the next build.
    """
    removed: list[str] = []
    try:
        with native_library.removing(home):
            for folder in _superseded(home, packages):
                # From here on nobody chooses it; what is left of it is no build.
                if _try(folder, lambda path: (path / "manifest.json").unlink()):
                    removed.append(folder.name)
    except OSError as error:
        _complain(home / FOLDER, error)
    for folder in sorted((home / FOLDER).iterdir()):
        if (_KEY.fullmatch(folder.name) or folder.name in removed) and folder.is_dir():
            _try(folder, partial(_remove_rest, home))
        elif work := _WORK.fullmatch(folder.name):
            if source_sha256 not in (None, _source_of(folder)):
                _try(folder, partial(_remove_work, home, work[1]))
        elif folder.name.startswith(".source-"):
            _try(folder, _remove_scratch)
    return removed


def _remove_rest(home: Path, folder: Path) -> None:
    with _alone(home, folder.name) as is_mine:
        if is_mine and not (folder / "manifest.json").exists():
            shutil.rmtree(folder)


def _remove_work(home: Path, key: str, folder: Path) -> None:
    with _alone(home, key) as is_mine:
        if is_mine:
            shutil.rmtree(folder)


def _remove_scratch(folder: Path) -> None:
    if time.time() - folder.stat().st_mtime > OLD_SCRATCH_S:
        shutil.rmtree(folder)


def _superseded(home: Path, packages: set[str]) -> list[Path]:
    kept = _loaded()
    for package in packages:
        for arch in (CPU, *ARCHITECTURES):
            fitting = native_library.fitting(home, arch, package)
            sound = [build for build in fitting if not build.trust.is_marked]
            kept.update(build.folder.resolve() for build in (*fitting[:1], *sound[:KEPT_BUILDS]))
    return [build.folder for build in native_library.builds(home) if build.folder.resolve() not in kept]


def _loaded() -> set[Path]:
    """The folders of the builds that processes here were told to load. Of other users' processes nobody can tell."""
    found = set()
    name = f"{LIBRARY_VARIABLE}=".encode()
    for environ in Path("/proc").glob("[0-9]*/environ"):
        with contextlib.suppress(OSError):
            for entry in environ.read_bytes().split(b"\0"):
                if entry.startswith(name):
                    found.add(Path(os.fsdecode(entry.removeprefix(name))).parent.resolve())
    return found


def _source_of(work: Path) -> str:
    try:
        return (work / SOURCE_NAME).read_text(encoding="ascii")
    except (OSError, ValueError):
        return ""  # of an earlier Hydra


@contextlib.contextmanager
def _alone(home: Path, key: str) -> Iterator[bool]:
    """Whether no other process builds this key meanwhile."""
    with (home / FOLDER / f".{key}.lock").open("w") as stream:
        try:
            fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            yield False
            return
        yield True


def _try(path: Path, remove: Callable[[Path], object]) -> bool:
    try:
        remove(path)
    except OSError as error:
        _complain(path, error)
        return False
    return True


def _complain(path: Path, error: OSError) -> None:
    print(f"build-native: {path} is not needed any more and could not be removed: {error}", file=sys.stderr)
