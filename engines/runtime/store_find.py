"""The longest prefix of a prompt that a store has, and its way into a slot.

What is found is believed by its keys only as far as to look at it: a snapshot's tokens are compared one by one, pieces must
have the sizes and the order that they have here, and each is proved by its checksum before llama.cpp sees it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from engines.errors import RpcNotFound, StateInvalid
from engines.runtime.cells import common_prefix
from engines.runtime.origin import Origin
from engines.runtime.state_dock import Dock
from engines.runtime.state_forms import checksum_of
from engines.runtime.state_layout import HEADER_BYTES, Bytes, StateLayout
from engines.runtime.state_order import require_order
from engines.runtime.state_snapshot import Manifest, StatePiece
from engines.runtime.state_terms import SharingTerms
from engines.runtime.state_transfer import Delivery
from engines.runtime.state_whole import WholeState
from engines.runtime.store_keys import NAME_PREFIX, KeyChain, SnapshotName
from engines.runtime.store_save import KIND_OF_DRAFT, KIND_OF_PART, KIND_OF_STATE
from engines.store.client import Held, StoreClient
from engines.store.in_place import confirm
from engines.wire_store import LeaseBody, ManifestChunk, Place, SnapshotsBody
from engines.wire_store import Manifest as StoreManifest

# Blocks that are asked for at once; what lies behind them is not looked for.
MAX_BLOCKS = 8192
# Whole blocks back from the last one that is there, at each of which snapshots are looked for.
MAX_DEPTHS = 16
LOOK_LEASE_S = 2.0
# Snapshots of a session that are looked at, and what one must have more than blocks alone give.
MAX_OF_SESSION, MIN_GAIN_TOKENS = 8, 16
_PIECE_KINDS = {"block": "block", "tail": "block", KIND_OF_PART: "part", KIND_OF_DRAFT: "draft"}


@dataclass(frozen=True)
class FoundPrefix:
    """The first `tokens` tokens of a prompt, as pieces in their order and the objects that hold them. `manifest` None: they are
    blocks of no certain snapshot. `last_tokens`: those of the last object, which holds more rows than are wanted of it."""

    tokens: int
    pieces: tuple[StatePiece, ...]
    hashes: tuple[str, ...]
    name: SnapshotName | None = None
    manifest: StoreManifest | None = None
    last_tokens: tuple[int, ...] = ()

    @property
    def size_bytes(self) -> int:
        return sum(piece.size_bytes for piece in self.pieces)


class PrefixFinder:
    """Looks for prefixes of states that fit here. `whole_only`: a state cannot be cut, so only snapshots are of use."""

    def __init__(self, terms: SharingTerms) -> None:
        self._terms = terms
        self._whole_only = terms.layout.has_part

    async def find(self, client: StoreClient, chain: KeyChain, prompt: list[int], origin: Origin) -> FoundPrefix | None:
        """In the store of this host. Raises what its client does, and StateInvalid for a snapshot that contradicts itself."""
        blocks, found = await self._blocks(client, chain, prompt)
        name = await self.name(client, chain, prompt, blocks, origin.system_cut)
        manifest = await client.get_manifest(name.text) if name is not None else None
        if name is not None and manifest is not None:
            snapshot = self._read(name, manifest)
            state = await self._state(client, manifest, snapshot)
            if list(state.tokens[: name.tokens]) != prompt[: name.tokens]:
                raise StateInvalid("A snapshot holds other tokens than its name says.")
            found = _shortened(snapshot, list(state.tokens), name.tokens, self._terms.layout)
        if origin.session and not self._whole_only:
            return await self._of_session(client, chain, prompt, origin.session, found)
        return found

    async def _of_session(
        self, client: StoreClient, chain: KeyChain, prompt: list[int], session: str, found: FoundPrefix | None
    ) -> FoundPrefix | None:
        """What the session's own snapshots have beyond that, where the prompt leaves them in the middle of a piece."""
        least = (found.tokens if found else 0) + MIN_GAIN_TOKENS
        entries, _ = await client.snapshots(SnapshotsBody(session=session, limit=MAX_OF_SESSION), NAME_PREFIX)
        for entry in sorted(entries, key=lambda entry: entry.n_past, reverse=True):
            name = SnapshotName.parse(entry.name)
            if name is None or name.tokens < least or entry.fingerprint != chain.fingerprint:
                continue
            manifest = await client.get_manifest(entry.name)
            if manifest is None:
                continue
            whole = self._read(name, manifest)
            tokens = list((await self._state(client, manifest, whole)).tokens)
            length = min(common_prefix(tokens, prompt), len(prompt) - 1)
            # The name tells whose tokens they are: another tenant's would have another one.
            if length >= least and await self._terms.dock.in_thread(_is_of, name, chain, tokens, session):
                return _shortened(whole, tokens, length, self._terms.layout)
        return found

    async def blocks(self, client: StoreClient, chain: KeyChain, prompt: list[int]) -> int:
        """How many whole blocks of the prompt, from its beginning, a store has."""
        return (await self._blocks(client, chain, prompt))[0]

    async def _blocks(self, client: StoreClient, chain: KeyChain, prompt: list[int]) -> tuple[int, FoundPrefix | None]:
        count = min((len(prompt) - 1) // chain.block_tokens, MAX_BLOCKS)
        keys = [chain.block_key(index) for index in range(count)]
        try:
            if not keys:
                return 0, None
            lease = await client.lease("", LeaseBody(logical_keys=tuple(keys), lease_s=LOOK_LEASE_S))
        except RpcNotFound:
            return 0, None
        await client.release(lease.ticket)
        places = {place.logical_key: place for place in lease.places}
        there = next((index for index, key in enumerate(keys) if key not in places), count)
        size_bytes, tokens = self._terms.layout.block_bytes(chain.block_tokens), chain.block_tokens
        if not there or self._whole_only or any(places[key].size != size_bytes for key in keys[:there]):
            return there, None
        pieces = (StatePiece("block", at * tokens, (at + 1) * tokens, size_bytes) for at in range(there))
        return there, FoundPrefix(there * tokens, tuple(pieces), tuple(places[key].hash for key in keys[:there]))

    async def name(
        self, client: StoreClient, chain: KeyChain, prompt: list[int], blocks: int, system_cut: int
    ) -> SnapshotName | None:
        """The longest snapshot of the prompt's beginning that goes beyond what blocks alone give, in any store."""
        most = len(prompt) - 1
        least = 0 if self._whole_only else blocks * chain.block_tokens
        for depth in range(blocks, max(-1, blocks - MAX_DEPTHS), -1):
            names = [SnapshotName.parse(text) for text in await client.list(SnapshotName.behind(chain.chain(depth)))]
            fits = [n for n in names if n and least < n.tokens <= most and n.point == chain.point(n.tokens)]
            if fits:
                return max(fits, key=lambda name: name.tokens)
            if not self._whole_only:
                return None
        if least < system_cut <= most:
            name = chain.name(system_cut)
            return name if await client.stat(name.text) else None
        return None

    async def name_of_session(
        self, client: StoreClient, chain: KeyChain, prompt: list[int], session: str, least: int
    ) -> SnapshotName | None:
        """The session's longest snapshot in another host's store whose whole blocks are the prompt's, where it may have more than
        `least` tokens of it: how much, its tokens tell once they are here. None for states that cannot be cut."""
        if self._whole_only or not session:
            return None
        entries, _ = await client.snapshots(SnapshotsBody(session=session, limit=MAX_OF_SESSION), NAME_PREFIX)
        own = chain.name(0, session).session
        for entry in sorted(entries, key=lambda entry: entry.n_past, reverse=True):
            name = SnapshotName.parse(entry.name)
            if name is None or name.session != own or min(name.tokens, len(prompt) - 1) < least + MIN_GAIN_TOKENS:
                continue
            # A chain's key holds the tenant and the fingerprint as well.
            blocks = name.tokens // chain.block_tokens
            if blocks <= len(chain) and name.chain == chain.chain(blocks):
                return name
        return None

    # --- what may be believed -------------------------------------------------------------------

    def _read(self, name: SnapshotName, manifest: StoreManifest) -> FoundPrefix:
        if manifest.fingerprint != self._terms.fingerprint or manifest.n_past != name.tokens:
            raise StateInvalid(f"{name.text} is a snapshot of another kind or length than its name says.")
        rows = [chunk for chunk in manifest.chunks if chunk.kind in _PIECE_KINDS]
        pieces = tuple(StatePiece(_piece_kind(c), c.start, c.end, c.size) for c in rows)
        return FoundPrefix(name.tokens, pieces, tuple(chunk.hash for chunk in rows), name, manifest)

    async def _state(self, client: StoreClient, manifest: StoreManifest, found: FoundPrefix) -> Manifest:
        """What a snapshot says of itself, which must be what the store's manifest says of it."""
        chunk = _state_of(manifest)
        async with client.held(hashes=[chunk.hash]) as held:
            raw = bytes(client.slabs.prove(held.places[0], held.lease))
        state = await self._terms.dock.in_thread(Manifest.from_json, raw)
        ends = max((piece.end for piece in found.pieces), default=0)
        if state.pieces != found.pieces or state.fingerprint != manifest.fingerprint or len(state.tokens) != ends:
            raise StateInvalid("A snapshot has other pieces, or is of another kind, than its manifest says.")
        return state


def _is_of(name: SnapshotName, chain: KeyChain, tokens: list[int], session: str) -> bool:
    """Whether a snapshot of these tokens has this name with the chain's tenant."""
    own = KeyChain(chain.fingerprint, chain.tenant, chain.block_tokens, tokens[: name.tokens])
    return own.name(name.tokens, session) == name


def _piece_kind(chunk: ManifestChunk) -> str:
    kind = _PIECE_KINDS[chunk.kind]
    return "hidden" if kind == "draft" and (chunk.logical_key or "").startswith("h") else kind


def _shortened(found: FoundPrefix, tokens: list[int], length: int, layout: StateLayout) -> FoundPrefix:
    """Its first `length` tokens: whole pieces, and the beginning of another one."""
    pieces, hashes = [], []
    last: tuple[int, ...] = ()
    for piece, text in zip(found.pieces, found.hashes, strict=True):
        # What stands behind the rows is of no use for another length.
        if piece.start < length and (piece.kind == "block" or length == found.tokens):
            hashes.append(text)
            if piece.kind == "block" and piece.end > length:
                last = tuple(tokens[piece.start : piece.end])
                piece = StatePiece("block", piece.start, length, layout.block_bytes(length - piece.start))
            pieces.append(piece)
    require_order(tuple(pieces), length, layout)
    return replace(found, tokens=length, pieces=tuple(pieces), hashes=tuple(hashes), last_tokens=last)


def _state_of(manifest: StoreManifest) -> ManifestChunk:
    found = [chunk for chunk in manifest.chunks if chunk.kind == KIND_OF_STATE]
    if len(found) != 1:
        raise StateInvalid(f"A snapshot has {len(found)} descriptions of itself.")
    return found[0]


class PlacePieces:
    """Pieces as they lie in the host's store, leased; each is proved by its checksum before it is taken in."""

    def __init__(self, client: StoreClient, held: Held, found: FoundPrefix, dock: Dock) -> None:
        self._client = client
        self._held = held
        self._dock = dock
        self._found = found
        # Of which only the beginning may be wanted.
        self._last = max((piece for piece in found.pieces if piece.kind == "block"), key=lambda piece: piece.end)
        places = {place.hash: place for place in held.places}
        self._places = {piece: places[text] for piece, text in zip(found.pieces, found.hashes, strict=True)}

    async def deliver(self, piece: StatePiece) -> Delivery:
        place = self._places[piece]
        confirm(self._held.lease)
        data = np.frombuffer(self._client.slabs.read_only(place), dtype=np.uint8)
        if piece.kind == "block" and piece is self._last and self._found.last_tokens:
            return Delivery(piece, await self._dock.in_thread(self._beginning, piece, place, data), _nothing)
        return Delivery(piece, data, _nothing, bytes.fromhex(place.checksum), checksum_of)

    def _beginning(self, piece: StatePiece, place: Place, data: Bytes) -> Bytes:
        """The rows of the last piece out of an object that has more, which is proved and checked as a whole."""
        layout, tokens = self._dock.codec.layout, list(self._found.last_tokens)
        if checksum_of(memoryview(data.data)) != bytes.fromhex(place.checksum):
            raise StateInvalid(f"The block of positions {piece.start} to {piece.end - 1} was damaged.")
        layout.check_block(data, piece.start, tokens)
        order = np.argsort(layout.attention.cells(data[HEADER_BYTES:], len(tokens))["pos"], kind="stable")
        return WholeState(layout, tokens, data, order).block(0, piece.tokens)


def _nothing() -> None:
    """The lease is what is given back."""
