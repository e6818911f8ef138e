"""Files of a hub (Hugging Face's, or another that speaks its protocol: HF_ENDPOINT): what they are, and fetching one of them.

The hub's wire (names, access, redirects, retries within a transfer) is huggingface_hub's. Its own downloads begin anew in every
process, so the partial file is ours: named after the content it is part of, and taken up again by the next download. Free of
Django; made to run in a process of its own, since huggingface_hub reads its settings when it is imported.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")
os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")

import httpx2
from huggingface_hub import HfApi, get_hf_file_metadata, hf_hub_url
from huggingface_hub.errors import (
    EntryNotFoundError,
    GatedRepoError,
    HfHubHTTPError,
    HFValidationError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)
from huggingface_hub.file_download import http_get
from huggingface_hub.utils._headers import build_hf_headers

from pools.errors import DownloadFailed, HubFileUnknown
from pools.model_reference import HubReference, is_plain_path

BytesDone = Callable[[int], None]

ASK_TIMEOUT_S = 20.0
MAX_FILES = 10_000
_SHA256 = re.compile(r"[0-9a-f]{64}")
_PART = re.compile(r"-(\d{5})-of-(\d{5})\.gguf$")


@dataclass(frozen=True)
class HubFile:
    """One file at one commit. `etag` names its content; `sha256` is that where the hub tells it, "" where it does not."""

    repo: str
    file: str
    commit: str
    size_bytes: int
    etag: str

    @property
    def sha256(self) -> str:
        return self.etag if _SHA256.fullmatch(self.etag) else ""

    @property
    def source(self) -> str:
        """Where it comes from, for the row of its variant."""
        return f"hf:{self.repo}/{self.file}@{self.commit}"


def look_up(reference: HubReference) -> HubFile:
    """The file that the reference names, as the hub has it now. Raises HubFileUnknown, DownloadFailed."""
    with _told_plainly(str(reference)):
        name = reference.file or _file_of_quant(reference)
        if not is_plain_path(name):
            # A hub may list what it likes; the file is written where its name says.
            raise HubFileUnknown(f"{name!r} is no name that a file can have here")
        if _PART.search(name):
            raise HubFileUnknown(f"{name} is a part of a model that was split; Hydra takes whole files")
        url = hf_hub_url(reference.repo, name, revision=reference.revision)
        found = get_hf_file_metadata(url, timeout=ASK_TIMEOUT_S)
    if found.commit_hash is None or found.size is None or not found.etag:
        raise DownloadFailed(f"the hub does not tell commit, size and content of {reference}")
    return HubFile(reference.repo, name, found.commit_hash, found.size, found.etag)


def fetch(file: HubFile, path: Path, on_bytes: BytesDone) -> None:
    """Puts the file at `path`. `on_bytes` gets the number of bytes that are here. Raises DownloadFailed, OSError of the disk.

    One process at a time may do this for a path.
    """
    partial = _partial(file, path)
    for leftover in path.parent.glob(f"{path.name}.*.partial"):
        if leftover != partial:
            leftover.unlink()
    url = hf_hub_url(file.repo, file.file, revision=file.commit)
    with _told_plainly(file.source), partial.open("ab") as target:
        if target.tell() > file.size_bytes:
            target.truncate(0)
        http_get(
            url,
            target,
            resume_size=target.tell(),
            headers=build_hf_headers(),
            expected_size=file.size_bytes,
            tqdm_class=_reporting(on_bytes),
        )
        target.flush()
        os.fsync(target.fileno())
    partial.replace(path)


def partial_bytes(file: HubFile, path: Path) -> int:
    """How much of the file an earlier download left here."""
    partial = _partial(file, path)
    return partial.stat().st_size if partial.exists() else 0


def _partial(file: HubFile, path: Path) -> Path:
    name = re.sub(r"[^\w-]", "_", file.etag)[:64]
    return path.with_name(f"{path.name}.{name}.partial")


def _file_of_quant(reference: HubReference) -> str:
    """The one GGUF of a repository whose name carries the quant; of a repository with one GGUF, that. Raises HubFileUnknown."""
    listed = HfApi().list_repo_tree(reference.repo, revision=reference.revision, recursive=True)
    names = [entry.path for entry, _ in zip(listed, range(MAX_FILES), strict=False) if entry.path.endswith(".gguf")]
    names = [name for name in names if "mmproj" not in name.lower()]
    fitting = [name for name in names if carries_quant(name, reference.quant)]
    if len(fitting) == 1:
        return fitting[0]
    shown = ", ".join(sorted(fitting or names)[:20]) or "no GGUF"
    raise HubFileUnknown(
        f"{reference} names {len(fitting) or 'no'} file{'s' if len(fitting) != 1 else ''}; there: {shown}"
    )


def carries_quant(file_name: str, quant: str) -> bool:
    """Whether a file's name says this quant: Q4_K_M is in …-Q4_K_M.gguf, and not in …-UD-Q4_K_M.gguf; "" is in all."""
    stem = file_name.rpartition("/")[2].removesuffix(".gguf").lower()
    wanted = quant.lower()
    return not wanted or (stem.endswith((f"-{wanted}", f".{wanted}")) and not stem.endswith(f"ud-{wanted}"))


def _reporting(on_bytes: BytesDone) -> type[Any]:
    """What huggingface_hub takes for a progress bar; resumed downloads begin at `initial`."""

    class Reporting:
        def __init__(self, *_: Any, initial: int = 0, total: int | None = None, **__: Any) -> None:
            self.n, self.total = initial, total
            on_bytes(initial)

        def update(self, count: float | None = 1) -> None:
            self.n += int(count or 0)
            on_bytes(self.n)

        def __enter__(self) -> Reporting:
            return self

        def __exit__(self, *_: object) -> None:
            return

        def __getattr__(self, name: str) -> Callable[..., None]:
            if name.startswith("_") or name == "update_transfer":
                raise AttributeError(name)
            return lambda *_, **__: None  # what only draws

    return Reporting


class _told_plainly:
    """Turns the hub's errors into ours, which say what to do."""

    def __init__(self, subject: str) -> None:
        self._subject = subject

    def __enter__(self) -> None:
        return

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, GatedRepoError):
            raise HubFileUnknown(
                f"{self._subject} is only given to those who agreed to its terms; log in with HF_TOKEN"
            )
        if isinstance(error, (RepositoryNotFoundError, RevisionNotFoundError, EntryNotFoundError)):
            raise HubFileUnknown(f"the hub has no {self._subject}") from error
        if isinstance(error, HfHubHTTPError):
            status = error.response.status_code if error.response is not None else "no"
            raise DownloadFailed(f"the hub answered {status} for {self._subject}") from error
        if isinstance(error, OfflineModeIsEnabled):
            raise DownloadFailed("HF_HUB_OFFLINE is set") from error
        if isinstance(error, HFValidationError):
            raise HubFileUnknown(f"{self._subject} is no name that a hub could have: {error}") from error
        # An OSError with a number is the disk's, one without is how huggingface_hub tells of a file of the wrong size.
        if isinstance(error, httpx2.HTTPError) or (isinstance(error, OSError) and error.errno is None):
            raise DownloadFailed(f"{self._subject} did not arrive: {error}") from error
