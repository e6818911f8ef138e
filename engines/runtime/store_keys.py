"""What a prefix's pieces are called in a store, known before they exist. Pure.

Blocks of `block_tokens` tokens form a chain: each key is a digest of the one before it and of the block's tokens, and the
first follows from the fingerprint, the block size and the tenant's salt. So equal keys mean equal prefixes of one tenant, and
nobody finds what another tenant's tokens gave. Whatever else there is of a prefix (rows behind the last whole block, recurrent
state) is named by its *point*: the digest of the chain and the rest of the tokens.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

import blake3
import numpy as np

_LEAD = b"hydra-kv-chain-1"
_DIGEST_BYTES = 20
_SESSION_DIGITS = 8
NAME_PREFIX = "kv/"
_NAME = re.compile(rf"{NAME_PREFIX}([0-9a-f]{{40}})/(\d{{1,8}})-([0-9a-f]{{40}})(?:-([0-9a-f]{{8}}))?")


@dataclass(frozen=True)
class SnapshotName:
    """`chain` is the key of the last whole block, `tokens` how many the snapshot holds. `session` "": nobody's own."""

    chain: str
    tokens: int
    point: str
    session: str = ""

    @property
    def text(self) -> str:
        return f"{NAME_PREFIX}{self.chain}/{self.tokens}-{self.point}" + (f"-{self.session}" if self.session else "")

    @classmethod
    def parse(cls, text: str) -> SnapshotName | None:
        """None for what is no snapshot of an engine."""
        found = _NAME.fullmatch(text)
        return cls(found[1], int(found[2]), found[3], found[4] or "") if found else None

    @classmethod
    def behind(cls, chain: str) -> str:
        """What the names of all snapshots begin with whose last whole block this is."""
        return f"{NAME_PREFIX}{chain}/"


class KeyChain:
    """The keys of one list of tokens. Making one digests all of its whole blocks."""

    def __init__(self, fingerprint: str, tenant: str, block_tokens: int, tokens: list[int]) -> None:
        root = blake3.blake3(_LEAD)
        for part in (fingerprint, tenant, str(block_tokens)):
            root.update(len(part).to_bytes(4, "little") + part.encode())
        self.fingerprint, self.tenant, self.block_tokens = fingerprint, tenant, block_tokens
        self._tokens = np.array(tokens, dtype="<i4")
        self._chain = [root.digest(_DIGEST_BYTES)]
        for start in range(0, len(tokens) - block_tokens + 1, block_tokens):
            self._chain.append(_digest(self._chain[-1], self._tokens[start : start + block_tokens]))

    def __len__(self) -> int:
        """Whole blocks."""
        return len(self._chain) - 1

    def chain(self, blocks: int) -> str:
        """The key of the first so many blocks together."""
        return self._chain[blocks].hex()

    def block_key(self, index: int) -> str:
        return f"b{self._chain[index + 1].hex()}"

    def point(self, tokens: int) -> str:
        """The digest of the first `tokens` tokens."""
        blocks = tokens // self.block_tokens
        return _digest(self._chain[blocks] + b".", self._tokens[blocks * self.block_tokens : tokens]).hex()

    def piece_key(self, kind: str, tokens: int) -> str:
        """Of what a prefix of so many tokens has beside whole blocks: its tail, its checkpoint, its state."""
        return f"{kind[0]}{self.point(tokens)}"

    def name(self, tokens: int, session: str = "") -> SnapshotName:
        own = blake3.blake3(session.encode()).hexdigest()[:_SESSION_DIGITS] if session else ""
        return SnapshotName(self.chain(tokens // self.block_tokens), tokens, self.point(tokens), own)


def _digest(before: bytes, tokens: np.ndarray) -> bytes:
    return blake3.blake3(before + tokens.tobytes()).digest(_DIGEST_BYTES)
