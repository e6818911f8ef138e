"""The logs of children: appended to, kept within two files of ten megabytes each, and quoted when something fails."""

import os
import shutil
from pathlib import Path
from typing import BinaryIO

MAX_LOG_BYTES = 10 << 20
TAIL_LINES = 20
TAIL_BYTES = 8192


def open_for_append(path: Path) -> BinaryIO:
    """`path` opened for appending, mode 0600, after a full log moved aside."""
    if path.exists() and path.stat().st_size > MAX_LOG_BYTES:
        path.replace(path.with_name(path.name + ".1"))
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
    return os.fdopen(descriptor, "ab", buffering=0)


def trim(path: Path) -> None:
    """Move what a running child has written to `<name>.log.1` once it passes the bound; the child's descriptor stays
    valid.

    Lines written between the copy and the cut are lost, which is the price of not having to tell the child.
    """
    if path.exists() and path.stat().st_size > MAX_LOG_BYTES:
        shutil.copyfile(path, path.with_name(path.name + ".1"))
        os.truncate(path, 0)


def tail(path: Path, since: int = 0) -> str:
    """The last lines of `path` behind byte `since`, "" when there are none.

    A file shorter than `since` has been trimmed, so all of it counts.
    """
    try:
        with path.open("rb") as file:
            size_bytes = os.fstat(file.fileno()).st_size
            file.seek(max(since if since <= size_bytes else 0, size_bytes - TAIL_BYTES))
            text = file.read(TAIL_BYTES).decode("utf-8", errors="replace")
    except FileNotFoundError:
        return ""
    return "\n".join(text.splitlines()[-TAIL_LINES:])
