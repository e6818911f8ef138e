"""Whom PostgreSQL runs as when Hydra is started by root, which PostgreSQL refuses.

The wrapper for it is `setpriv` of util-linux: it changes the user and then becomes the server, so that the server's pid
is the one we started. HYDRA_HOME and the Python environment may lie below directories that are closed to others
(a fresh temporary directory, root's home); instead of opening those, the server gets the one capability that lets it
pass. With `no_setuid_fixup` access(2) honours that capability too, by which initdb looks for its fellow programs.
"""

import os
import pwd
import shutil
import stat
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from hydra_site.supervisor.errors import ServerFailed, ServerMissing

CANDIDATES = ("postgres", "nobody")
# The smaller one first: reading and passing directories is all that is needed. Containers often keep only the second.
PASSING_CAPABILITIES = (("dac_read_search", 2), ("dac_override", 1))
SETPCAP_BIT = 8


@dataclass(frozen=True)
class Account:
    """A user and group the server runs as, instead of root."""

    uid: int
    gid: int

    def wrap(self, argv: Iterable[str], paths: Iterable[Path]) -> tuple[str, ...]:
        """`argv` run as this account, able to reach `paths`. Raises ServerMissing without setpriv."""
        setpriv = shutil.which("setpriv")
        if setpriv is None:
            raise ServerMissing(
                "PostgreSQL cannot run as root and `setpriv` is not installed",
                hint="apt install util-linux, or run as another user",
            )
        options = [f"--reuid={self.uid}", f"--regid={self.gid}", "--clear-groups"]
        if any(_is_closed(path) for path in paths):
            options += _passing_options()
        return (setpriv, *options, "--", *argv)

    def own(self, path: Path) -> None:
        """Give `path` itself (nothing below or above it) to this account."""
        os.chown(path, self.uid, self.gid)

    def own_tree(self, directory: Path) -> None:
        """Give `directory` and everything below it to this account."""
        for folder, _, names in os.walk(directory):
            for name in (".", *names):
                os.chown(Path(folder, name), self.uid, self.gid, follow_symlinks=False)


def for_data_dir(data_dir: Path) -> Account | None:
    """The account for the server of `data_dir`: None unless we are root, else the owner of the directory or, for a new
    one, `postgres` or `nobody`.
    """
    if os.geteuid() != 0:
        if data_dir.exists() and data_dir.stat().st_uid != os.geteuid():
            raise ServerFailed(f"{data_dir} belongs to another user", hint="start Hydra as that user or as root")
        return None
    if data_dir.exists() and (owner := data_dir.stat()).st_uid != 0:
        return Account(owner.st_uid, owner.st_gid)
    for name in CANDIDATES:
        try:
            entry = pwd.getpwnam(name)
        except KeyError:
            continue
        return Account(entry.pw_uid, entry.pw_gid)
    raise ServerMissing(
        f"PostgreSQL cannot run as root and there is no user {' or '.join(CANDIDATES)}", hint="run as another user"
    )


def _is_closed(path: Path) -> bool:
    """Whether a directory on the way to `path` keeps others out."""
    return any(not parent.stat().st_mode & stat.S_IXOTH for parent in path.resolve().parents if parent.exists())


def _passing_options() -> list[str]:
    """setpriv's options for the smallest capability of ours that passes closed directories; none if we have none."""
    ours = _permitted_capabilities()
    for name, bit in PASSING_CAPABILITIES:
        if ours >> bit & 1 and ours >> SETPCAP_BIT & 1:
            return [f"--inh-caps=+{name}", f"--ambient-caps=+{name}", "--securebits=+no_setuid_fixup"]
    return []


def _permitted_capabilities() -> int:
    status = Path("/proc/self/status").read_text(encoding="ascii", errors="replace")
    return next(int(line.split()[1], 16) for line in status.splitlines() if line.startswith("CapPrm:"))
