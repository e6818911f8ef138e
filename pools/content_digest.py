"""Content digests of model files, remembered between runs.

A digest names a model's bytes wherever they lie. Hashing gigabytes takes a while, so each result is kept in one small
JSON file beside the models, under the file's identity (device, inode, modification time, size). A file that was
written to since has another identity and is hashed again. The JSON is a cache: losing it costs time only.
"""

import fcntl
import hashlib
import json
import logging
import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from pools.errors import ModelFileUnreadable
from pools.gguf_reader import open_model_file

Progress = Callable[[int, int], None]  # (bytes done, bytes in all)

CHUNK_BYTES = 4 * 2**20
REMEMBERED_FILES = 4096
_CACHE_NAME = "digests.json"
_HEX_DIGITS = 64

log = logging.getLogger(__name__)


def content_digest(path: Path, cache_dir: Path, on_progress: Progress | None = None) -> str:
    """The SHA-256 of the file's content as 64 hex digits; from the cache in `cache_dir` if it was computed before.

    `on_progress` is called after every chunk that is really hashed. Raises ModelFileUnreadable if no regular file can
    be read there or it changed meanwhile.
    """
    known = recorded_digest(path, cache_dir)
    if known is not None:
        return known
    digest = hashlib.sha256()
    with open_model_file(path) as fd:
        before = os.fstat(fd)
        done_bytes = 0
        try:
            # no further than the size at the start: a file that somebody appends to would never end
            while done_bytes < before.st_size and (chunk := os.read(fd, CHUNK_BYTES)):
                digest.update(chunk)
                done_bytes += len(chunk)
                if on_progress is not None:
                    on_progress(done_bytes, max(done_bytes, before.st_size))
        except OSError as error:
            raise ModelFileUnreadable(f"cannot read {path}: {error.strerror}") from error
        if _identity(before) != _identity(os.fstat(fd)):
            raise ModelFileUnreadable(f"{path} changed while it was read")
    _remember(_identity(before), digest.hexdigest(), cache_dir)
    return digest.hexdigest()


def recorded_digest(path: Path, cache_dir: Path) -> str | None:
    """The digest recorded for the file as it is now, without reading it; None if there is none."""
    try:
        identity = _identity(path.stat())
    except OSError as error:
        raise ModelFileUnreadable(f"cannot read {path}: {error.strerror}") from error
    return _load(cache_dir / _CACHE_NAME).get(identity)


def record_digest(path: Path, sha256: str, cache_dir: Path) -> None:
    """Remembers `sha256` for the file as it is now; for a caller that hashed the bytes while it wrote them."""
    _remember(_identity(path.stat()), sha256, cache_dir)


def _identity(status: os.stat_result) -> str:
    return f"{status.st_dev}:{status.st_ino}:{status.st_mtime_ns}:{status.st_size}"


def _remember(identity: str, sha256: str, cache_dir: Path) -> None:
    """Writes the digest down; on a full or read-only disk it is only logged that this file will be hashed again."""
    cache = cache_dir / _CACHE_NAME
    try:
        cache_dir.mkdir(parents=True, exist_ok=True, mode=0o700)
        with _exclusive(cache_dir / f".{_CACHE_NAME}.lock"):
            digests = _load(cache)
            digests.pop(identity, None)
            digests[identity] = sha256
            newest = dict(list(digests.items())[-REMEMBERED_FILES:])
            _write_atomically(cache, json.dumps(newest, indent=0))
    except OSError as error:
        log.warning("cannot remember a digest in %s: %s", cache, error)


def _load(cache: Path) -> dict[str, str]:
    """The remembered digests; empty if the cache is absent or damaged, since it can be computed again."""
    try:
        content = json.loads(cache.read_text())
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, RecursionError) as error:
        log.warning("the digest cache %s cannot be used and starts anew: %s", cache, error)
        return {}
    if not isinstance(content, dict):
        return {}
    return {key: value for key, value in content.items() if isinstance(value, str) and len(value) == _HEX_DIGITS}


@contextmanager
def _exclusive(lock: Path) -> Iterator[None]:
    """Holds the lock file; its holders only rewrite a small file, so waiting for them is short."""
    with lock.open("w") as stream:
        fcntl.flock(stream, fcntl.LOCK_EX)
        yield


def _write_atomically(path: Path, text: str) -> None:
    fd, name = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    temporary = Path(name)
    try:
        with os.fdopen(fd, "w") as stream:
            stream.write(text)
            stream.flush()
            os.fsync(stream.fileno())
        temporary.replace(path)
    except BaseException:
        temporary.unlink()
        raise
