"""What can go wrong with models and hardware, by what the caller does next.

PoolError
└── CatalogueError            a model cannot be named, fetched or read
    ├── ModelUnknown          the catalogue has no such name: choose another
    ├── ModelFileUnreadable   no regular, readable, stable file at that path: fix the path
    ├── GgufInvalid           the file is no GGUF that an engine could load: get another file
    ├── DownloadFailed        the package index did not deliver: try again
    ├── DigestMismatch        it delivered other bytes than the pinned ones: do not use them
    └── DiskFull              no room: free `bytes_needed` and try again
"""

from collections.abc import Iterable
from typing import ClassVar


class PoolError(Exception):
    """Base of the app's errors: `message` says what happened here, `hint` what to do about this kind of error.

    `code` is stable and meant for programs, `http_status` is what an HTTP edge answers, `retryable` says whether the
    same call may succeed later without anybody changing something.
    """

    code: ClassVar[str] = "pool_error"
    http_status: ClassVar[int] = 500
    retryable: ClassVar[bool] = False
    hint: ClassVar[str] = "Look at the message; this is the general case."

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.message = message


class CatalogueError(PoolError):
    """A model cannot be named, fetched or read."""

    code = "catalogue_error"
    hint = "Check the model's name or path."


class ModelUnknown(CatalogueError):
    """The catalogue has no model of this name; `known` lists the names it has."""

    code = "model_unknown"
    http_status = 404
    hint = "Use one of the listed names, or the path of a GGUF file."

    def __init__(self, name: str, known: Iterable[str]) -> None:
        self.name = name
        self.known = tuple(known)
        super().__init__(f"no model named {name!r} in the catalogue; known: {', '.join(self.known)}")


class ModelFileUnreadable(CatalogueError):
    """The path leads to no regular file that can be read, or the file changed while it was read."""

    code = "model_file_unreadable"
    http_status = 400
    hint = "Give the path of a GGUF file that this user may read and that nobody is writing to."


class GgufInvalid(CatalogueError):
    """The file is not a whole, single-part GGUF of a supported version."""

    code = "gguf_invalid"
    http_status = 400
    hint = "Fetch the file again, or use a complete single-file GGUF (version 2 or 3, little-endian)."


class DownloadFailed(CatalogueError):
    """The package index did not deliver the model; the message carries the end of the installer's own report."""

    code = "download_failed"
    http_status = 502
    retryable = True
    hint = "Check the network and the package index in use (`pip config list`), then pull again."


class DigestMismatch(CatalogueError):
    """The delivered content is not the pinned one; nothing of it was kept."""

    code = "digest_mismatch"
    http_status = 502
    hint = (
        "The index in use serves a different file under this version: use another index, or a local GGUF by its path."
    )


class DiskFull(CatalogueError):
    """The file system has no room for the model; `bytes_needed` is what must be free at the start of a pull."""

    code = "disk_full"
    http_status = 507
    hint = "Free the named number of bytes on the file system that holds the models, then pull again."

    def __init__(self, message: str, bytes_needed: int) -> None:
        super().__init__(message)
        self.bytes_needed = bytes_needed
