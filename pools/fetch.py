"""Brings a model file to this host, whatever names it, and proves it: `python -m pools.fetch REFERENCE MODELS_DIR`.

A process of its own, so that a download can be stopped at any moment and its memory and libraries are nobody else's. Progress
goes to standard output as one JSON object a line, {"stage", "done", "total"} in bytes; the last line is the result, or
{"error", "hint", "retryable"} with exit code 1. What a stopped download left is taken up again by the next.
"""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import hashlib
import json
import os
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from pools import catalogue, url_download
from pools.content_digest import content_digest
from pools.errors import CatalogueError, DigestMismatch, DiskFull, DownloadFailed, ModelUnknown, ReferenceUnusable
from pools.hub_catalogue import entry_of, known_names, lookup_hub
from pools.model_reference import (
    HubReference,
    NameReference,
    PathReference,
    Reference,
    ReferenceInvalid,
    UrlReference,
    parse_reference,
    without_query,
)

Report = Callable[[str, int, int], None]  # (stage, bytes done, bytes in all)

# What must stay free beside the file: the database and the engines write too.
SPARE_BYTES = 1 << 30
REPORT_EVERY_S = 0.5
REPORT_EVERY_BYTES = 8 << 20  # the next one may be long in coming
FOLDER = "hub"


@dataclass(frozen=True)
class Fetched:
    """A file that is here and whole. `verified`: its SHA-256 is the one that the hub or the catalogue told beforehand.

    `source` is a reference that leads to it again, on any host ("" for a file that was here), `name` is the catalogue's for it.
    """

    path: str
    sha256: str
    size_bytes: int
    source: str
    verified: bool
    name: str


def reference_of(text: str) -> Reference:
    """The text as a reference. Raises ReferenceUnusable."""
    try:
        return parse_reference(text)
    except ReferenceInvalid as error:
        raise ReferenceUnusable(str(error)) from error


def fetch(text: str, models_dir: Path, report: Report) -> Fetched:
    """Makes sure that the file is on this host and returns what is known of it; raises CatalogueError of some kind.

    A file that is here already is looked at, not fetched again; several processes that want the same file wait for one.
    """
    reference = reference_of(text)
    if isinstance(reference, PathReference):
        return _local(reference, models_dir, report)
    if isinstance(reference, UrlReference):
        return _from_url(reference, models_dir, report)
    if isinstance(reference, HubReference):
        return _from_hub(reference, models_dir, report)
    return _by_name(reference, models_dir, report)


def default_name(text: str) -> str:
    """The catalogue's name for what the text names, "" for what it does not know. Raises ReferenceUnusable."""
    reference = reference_of(text)
    if isinstance(reference, NameReference):
        return reference.name
    found = entry_of(reference) if isinstance(reference, HubReference) else None
    return found[0].name if found else ""


def is_known(text: str) -> bool:
    """Whether the catalogue's part that comes from a hub has what the text names."""
    try:
        reference = parse_reference(text)
        model = lookup_hub(reference.name) if isinstance(reference, NameReference) else None
        return model is not None and bool(model.variant(getattr(reference, "quant", "")))
    except (ReferenceInvalid, ModelUnknown):
        return False


def file_of(text: str, models_dir: Path) -> Path:
    """Where a file that `is_known` lies once it was fetched."""
    reference = parse_reference(text)
    assert isinstance(reference, NameReference)
    model = lookup_hub(reference.name)
    assert model is not None
    return models_dir / FOLDER / model.repo.replace("/", "--") / model.variant(reference.quant).file


def _by_name(reference: NameReference, models_dir: Path, report: Report) -> Fetched:
    model = lookup_hub(reference.name)
    if model is not None:
        return _from_hub(model.reference(model.variant(reference.quant)), models_dir, report)
    try:
        entry = catalogue.lookup(str(reference))
    except ModelUnknown as error:
        raise ModelUnknown(str(reference), (*error.known, *known_names())) from None
    path = catalogue.ensure_entry(entry, models_dir, lambda done, total: report("downloading", done, total))
    return Fetched(str(path), entry.sha256, entry.size_bytes, entry.name, True, entry.name)


def _local(reference: PathReference, models_dir: Path, report: Report) -> Fetched:
    model = catalogue.inspect(Path(reference.path), models_dir, lambda done, total: report("checking", done, total))
    return Fetched(str(model.header.path), model.sha256, model.header.size_bytes, "", False, "")


def _from_hub(reference: HubReference, models_dir: Path, report: Report) -> Fetched:
    from pools import hub  # huggingface_hub takes half a second to import, which nobody else should pay

    report("asking", 0, 0)
    file = hub.look_up(reference)
    known = entry_of(HubReference(file.repo, file.file))
    expected = file.sha256
    if known and known[1].sha256 and reference.revision == "main":
        if expected and expected != known[1].sha256:
            raise DigestMismatch(f"the hub says {expected} of {file.source}; the catalogue knows {known[1].sha256}")
        expected = known[1].sha256
    path = models_dir / FOLDER / file.repo.replace("/", "--") / file.file
    with _alone(path, file.source):
        if not _is_here(path, file.size_bytes, expected, models_dir):
            _check_space(path.parent, file.source, file.size_bytes - hub.partial_bytes(file, path))
            with _no_space_told(file.source, file.size_bytes):
                hub.fetch(file, path, lambda done: report("downloading", done, file.size_bytes))
        sha256 = _proven(path, expected, file.size_bytes, models_dir, report)
    return Fetched(str(path), sha256, file.size_bytes, file.source, bool(expected), known[0].name if known else "")


def _is_here(path: Path, size_bytes: int, expected: str, models_dir: Path) -> bool:
    """Whether the file lies there already; hashes it only if no digest of it is on record."""
    if not path.is_file() or path.stat().st_size != size_bytes:
        return False
    return not expected or content_digest(path, models_dir) == expected


def _from_url(reference: UrlReference, models_dir: Path, report: Report) -> Fetched:
    report("asking", 0, 0)
    file = url_download.look_up(reference.url)
    # Two servers may give different files the same name.
    folder = models_dir / FOLDER / f"url-{hashlib.sha256(reference.url.encode()).hexdigest()[:12]}"
    path = folder / reference.file_name
    partial = path.with_name(f"{path.name}.partial")
    shown = without_query(reference.url)
    with _alone(path, shown):
        if not _is_here(path, file.size_bytes, "", models_dir):
            _check_space(folder, shown, file.size_bytes - (partial.stat().st_size if partial.exists() else 0))
            with _no_space_told(shown, file.size_bytes):
                url_download.fetch(file, partial, lambda done: report("downloading", done, file.size_bytes))
            partial.replace(path)
        sha256 = _proven(path, "", file.size_bytes, models_dir, report)
    return Fetched(str(path), sha256, file.size_bytes, reference.url, False, "")


def _proven(path: Path, expected: str, size_bytes: int, models_dir: Path, report: Report) -> str:
    """The file's SHA-256. One that is not the expected one is removed: DigestMismatch."""
    sha256 = content_digest(path, models_dir, lambda done, total: report("checking", done, total))
    if path.stat().st_size != size_bytes or (expected and sha256 != expected):
        path.unlink()
        raise DigestMismatch(f"{path.name} arrived with the SHA-256 {sha256} instead of {expected or 'its size'}")
    return sha256


def _check_space(folder: Path, what: str, needed_bytes: int) -> None:
    """Raises DiskFull before anything is fetched."""
    free = shutil.disk_usage(folder).free
    if needed_bytes > 0 and free < needed_bytes + SPARE_BYTES:
        raise DiskFull(
            f"{what} needs {needed_bytes:,} more bytes in {folder}, and {SPARE_BYTES:,} must stay free; {free:,} are",
            needed_bytes + SPARE_BYTES,
        )


@contextlib.contextmanager
def _no_space_told(what: str, size_bytes: int) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if error.errno is None:
            raise
        if error.errno in (28, 122):  # ENOSPC, EDQUOT
            raise DiskFull(f"the disk became full while {what} was fetched", size_bytes + SPARE_BYTES) from error
        raise DownloadFailed(f"{what} cannot be written: {error}") from error


@contextlib.contextmanager
def _alone(path: Path, what: str) -> Iterator[None]:
    """Makes the file's folder, and lets one process at a time fetch it."""
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    with path.with_name(f".{path.name}.lock").open("w") as stream:
        try:
            fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise DownloadFailed(f"another process fetches {what} right now") from None
        yield


def main(arguments: list[str]) -> int:
    text, models_dir = arguments
    reported_at, shown = 0.0, ("", 0)

    def report(stage: str, done: int, total: int) -> None:
        nonlocal reported_at, shown
        now = time.monotonic()
        is_small_step = stage == shown[0] and done < total and done - shown[1] < REPORT_EVERY_BYTES
        if is_small_step and now - reported_at < REPORT_EVERY_S:
            return
        reported_at, shown = now, (stage, done)
        print(json.dumps({"stage": stage, "done": done, "total": total}), flush=True)

    try:
        fetched = fetch(text, Path(models_dir), report)
    except CatalogueError as error:
        print(json.dumps({"error": error.message, "hint": error.hint, "retryable": error.retryable}), flush=True)
        return 1
    print(json.dumps(dataclasses.asdict(fetched)), flush=True)
    return 0


if __name__ == "__main__":
    os.nice(5)
    raise SystemExit(main(sys.argv[1:]))
