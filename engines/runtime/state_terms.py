"""What whoever moves pieces of state by himself must know of this engine."""

from __future__ import annotations

from dataclasses import dataclass

from engines.runtime.state_dock import Dock
from engines.runtime.state_layout import StateLayout


@dataclass(frozen=True)
class SharingTerms:
    """`fingerprint` is what two engines must share; blocks have `block_tokens` tokens, the last one of a state fewer."""

    dock: Dock
    fingerprint: str
    model_name: str
    model_sha256: str
    block_tokens: int

    @property
    def layout(self) -> StateLayout:
        return self.dock.codec.layout
