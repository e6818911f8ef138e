"""The running site's own source as an archive, so that the footer's link keeps the AGPL's promise on a changed copy too."""

from __future__ import annotations

import io
import tarfile
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path

from django.contrib.auth.decorators import login_not_required
from django.http import HttpRequest, HttpResponse
from django.views.decorators.http import require_safe

from hydra_site.env import PROJECT_DIR

# What a checkout consists of; state, environments and caches lie beside these names and stay out.
SOURCE_NAMES = (
    "hydra_site", "pools", "sessions", "engines", "native", "templates", "static", "tests", "docs", "deploy", "bench",
    "requirements", ".ci", "manage.py", "pyproject.toml", "Makefile", "README.md", "LICENSE", "THIRD_PARTY_NOTICES.md",
    ".gitignore",
)  # fmt: skip
MAX_ARCHIVE_BYTES = 64 << 20


@require_safe
@login_not_required
def source_archive(request: HttpRequest) -> HttpResponse:
    """`/source.tar.gz`, for every user of the site, logged in or not (AGPL section 13)."""
    response = HttpResponse(_archive(), content_type="application/gzip")
    response["Content-Disposition"] = 'attachment; filename="hydra-source.tar.gz"'
    return response


@lru_cache(maxsize=1)
def _archive() -> bytes:
    """Packed once: a running process does not change its code. Raises ValueError beyond MAX_ARCHIVE_BYTES."""
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w:gz") as archive:
        for path in source_files(PROJECT_DIR):
            archive.add(path, arcname=str(Path("hydra") / path.relative_to(PROJECT_DIR)), recursive=False)
            if packed.tell() > MAX_ARCHIVE_BYTES:
                raise ValueError(
                    f"the source archive is larger than {MAX_ARCHIVE_BYTES} bytes; something strange lies in it"
                )
    return packed.getvalue()


def source_files(root: Path) -> Iterator[Path]:
    """All files of the checkout at `root`, in a fixed order; no links, no compiled files."""
    for name in SOURCE_NAMES:
        top = root / name
        candidates = [top] if top.is_file() else sorted(top.rglob("*"))
        for path in candidates:
            if path.is_file() and not path.is_symlink() and "__pycache__" not in path.parts:
                yield path
