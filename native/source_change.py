"""One place of llama.cpp's source that our builds change."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Change:
    """`old` stands once in the file `path`, relative to llama.cpp's folder, and becomes `new`."""

    path: str
    old: str
    new: str
