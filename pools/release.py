"""Which release of Hydra this process runs, so that a site and its hosts can tell that they differ.

`version` is the project's version and the beginning of a digest of its source, since a working copy's number rarely changes.
`schema` is a digest of the migrations' names: where it differs, rows differ. Free of Django.
"""

import hashlib
import tomllib
from dataclasses import dataclass
from functools import cache
from pathlib import Path

PROJECT_DIR = Path(__file__).resolve().parent.parent
PACKAGES = ("engines", "hydra_site", "pools", "sessions")
DIGEST_CHARS = 12


@dataclass(frozen=True)
class Release:
    """What a host says of its software. `schema` is the same where both know the same tables."""

    version: str
    schema: str


@cache
def this_release() -> Release:
    """The release of the source that this process was started from."""
    project = tomllib.loads((PROJECT_DIR / "pyproject.toml").read_text(encoding="utf-8"))
    sources = sorted(path for package in PACKAGES for path in (PROJECT_DIR / package).rglob("*.py"))
    source = hashlib.sha256()
    for path in sources:
        source.update(f"{path.relative_to(PROJECT_DIR)}\n".encode() + path.read_bytes())
    migrations = "\n".join(str(path.relative_to(PROJECT_DIR)) for path in sources if path.parent.name == "migrations")
    schema = hashlib.sha256(migrations.encode()).hexdigest()[:DIGEST_CHARS]
    return Release(f"{project['project']['version']}+{source.hexdigest()[:DIGEST_CHARS]}", schema)
