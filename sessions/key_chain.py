"""A conversation's beginnings as keys, without tokenising: one at each boundary between messages, each made from the one before.

Equal keys mean equal beginnings, so whoever computed one of them can go on from there. Pure.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from hashlib import blake2b

KEY_BYTES = 16
# Of a long conversation its first and its last boundaries: the shared system prompt, and where the next turn goes on.
FIRST_LINKS = 3
LAST_LINKS = 29
# A text without messages is cut so often, and where it is shorter a chain would tell nothing.
TEXT_PIECE_BYTES = 2048


@dataclass(frozen=True, slots=True)
class Link:
    """A beginning of a prompt: its key and its bytes."""

    key: str
    size_bytes: int


# What stands for a message, or before all of them, and how many bytes of text it is in the prompt.
Item = tuple[bytes, int]


def chain_of(base: Iterable[Item], items: Iterable[Item]) -> tuple[Link, ...]:
    """The links of a prompt, the shortest first. `base` is what stands before all messages: model, tools, system prompt."""
    digest, size_bytes, links = blake2b(digest_size=KEY_BYTES), 0, list[Link]()
    for part, part_bytes in base:
        _feed(digest, part)
        size_bytes += part_bytes
    for item, item_bytes in items:
        _feed(digest, item)
        size_bytes += item_bytes
        links.append(Link(digest.copy().hexdigest(), size_bytes))
    if len(links) > FIRST_LINKS + LAST_LINKS:
        links = links[:FIRST_LINKS] + links[-LAST_LINKS:]
    return tuple(links)


def pieces_of(text: str) -> Iterator[Item]:
    """A text without messages as items of a chain: whole pieces and the rest."""
    data = text.encode(errors="surrogatepass")
    for start in range(0, len(data), TEXT_PIECE_BYTES):
        piece = data[start : start + TEXT_PIECE_BYTES]
        yield piece, len(piece)


def _feed(digest: blake2b, part: bytes) -> None:
    # The length keeps parts apart: no two different lists of them feed the same bytes.
    digest.update(len(part).to_bytes(8, "little"))
    digest.update(part)
