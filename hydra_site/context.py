"""What every page of the panel shows besides its own content."""

from __future__ import annotations

import tomllib
from functools import lru_cache

from django.conf import settings
from django.http import HttpRequest
from django.urls import reverse

from hydra_site.env import PROJECT_DIR


@lru_cache(maxsize=1)
def installed_version() -> str:
    """The version that pyproject.toml declares; a checkout is run in place, so no installed package tells it."""
    return str(tomllib.loads((PROJECT_DIR / "pyproject.toml").read_text())["project"]["version"])


def panel(request: HttpRequest) -> dict[str, str]:
    """Context processor: the version and the address of the source, which the AGPL asks to offer to every user."""
    return {"hydra_version": installed_version(), "hydra_source_url": settings.HYDRA_SOURCE_URL or reverse("source")}
