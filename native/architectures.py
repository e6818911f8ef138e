"""Which CUDA toolkit can compile for which card, and who takes which host compiler. Facts of NVIDIA's release notes."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

CPU = "cpu"
Version = tuple[int, int]


@dataclass(frozen=True)
class Architecture:
    """A compute capability: cards that have it, and the first and last toolkit (major, minor) that compile for it."""

    name: str
    cards: str
    first: Version
    last: Version | None = None

    def is_known_to(self, toolkit: Version) -> bool:
        return self.first <= toolkit and (self.last is None or toolkit <= self.last)

    @property
    def needs(self) -> str:
        """The toolkits that will do, for a person."""
        first = f"{self.first[0]}.{self.first[1]}"
        return f"CUDA {first} to {self.last[0]}.{self.last[1]}" if self.last else f"CUDA {first} or newer"


ARCHITECTURES = {
    arch.name: arch
    for arch in (
        Architecture("sm_60", "Tesla P100", (8, 0), (12, 9)),
        Architecture("sm_61", "GeForce 10, Tesla P40", (8, 0), (12, 9)),
        Architecture("sm_70", "V100", (9, 0), (12, 9)),
        Architecture("sm_75", "RTX 20, T4", (10, 0)),
        Architecture("sm_80", "A100", (11, 0)),
        Architecture("sm_86", "RTX 30", (11, 1)),
        Architecture("sm_89", "RTX 40, L4, L40", (11, 8)),
        Architecture("sm_90", "H100, H200", (11, 8)),
        Architecture("sm_100", "B200", (12, 8)),
        Architecture("sm_120", "RTX 50", (12, 8)),
    )
}
# The newest GCC that a toolkit accepts as host compiler, by the first toolkit that does.
_NEWEST_GCC: tuple[tuple[Version, int], ...] = (
    ((13, 0), 15),
    ((12, 8), 14),
    ((12, 4), 13),
    ((12, 1), 12),
    ((11, 4), 11),
    ((11, 1), 10),
    ((11, 0), 9),
    ((10, 1), 8),
)
_OLDEST_GCC = 6


class ArchitectureUnknown(ValueError):
    """A name that is neither `cpu` nor a card's; the message lists those there are."""


def checked(names: Iterable[str]) -> tuple[str, ...]:
    """The names without doubles, `cpu` first, then by capability. Raises ArchitectureUnknown."""
    wanted = set(names)
    unknown = sorted(wanted - {CPU, *ARCHITECTURES})
    if unknown:
        known = ", ".join([CPU, *ARCHITECTURES])
        raise ArchitectureUnknown(f"no architecture is called {', '.join(unknown)}; known: {known}")
    return tuple(name for name in (CPU, *ARCHITECTURES) if name in wanted)


def newest_gcc(toolkit: Version) -> int:
    """The newest major version of GCC that the toolkit takes."""
    return next((gcc for first, gcc in _NEWEST_GCC if toolkit >= first), _OLDEST_GCC)
