"""What a model can do, in the words that people filter by: tools, thinking, vision, MTP. Read from file and template."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pools.errors import GgufInvalid
from pools.gguf_reader import read_front

TOOLS, THINKING, VISION, AUDIO, MTP, MOE, HYBRID = "tools", "thinking", "vision", "audio", "MTP", "MoE", "hybrid"
_PROJECTOR_ARCHITECTURE = "clip"


def tags(header: Mapping[str, Any], abilities: list[str], *, sees: bool) -> tuple[str, ...]:
    """The tags of a model: of its file's header (as rows keep it), its template's abilities, and whether a projector is set."""
    ssm = header.get("ssm")
    facts = {
        TOOLS: "tools" in abilities,
        THINKING: "reasoning" in abilities,
        VISION: sees,
        MTP: bool(header.get("nextn_layers")),
        MOE: bool(header.get("expert_count")),
        HYBRID: bool(isinstance(ssm, Mapping) and ssm.get("inner_size")),
    }
    return tuple(tag for tag, is_so in facts.items() if is_so)


def is_projector(path: Path) -> bool:
    """Whether a GGUF is a projector (mmproj). Raises ModelFileUnreadable, GgufInvalid for what is no GGUF."""
    return read_front(path).metadata.get("general.architecture") == _PROJECTOR_ARCHITECTURE


def projector_tags(path: Path) -> tuple[str, ...]:
    """What a projector lets a model take in: vision, audio. Raises ModelFileUnreadable, GgufInvalid for what is none."""
    metadata = read_front(path).metadata
    if metadata.get("general.architecture") != _PROJECTOR_ARCHITECTURE:
        raise GgufInvalid(f"{path} is no projector")
    found = [tag for tag in (VISION, AUDIO) if metadata.get(f"clip.has_{tag}_encoder") is True]
    if not found:
        raise GgufInvalid(f"{path} is a projector that says neither vision nor audio of itself")
    return tuple(found)
