"""A prefix's state into the host's store: only the pieces that are not there, then a manifest of all of them.

Pieces are looked for by their keys and stay leased until the manifest names them. They are written where they will lie, by two
connections in turn: one piece is taken while the store proves another.
"""

from __future__ import annotations

import asyncio
from collections import deque
from contextlib import AsyncExitStack
from dataclasses import dataclass

import blake3

from engines.errors import RpcNotFound
from engines.runtime.state_snapshot import Manifest, StatePiece
from engines.runtime.state_terms import SharingTerms
from engines.runtime.store_keys import KeyChain, SnapshotName
from engines.runtime.store_link import StoreLink
from engines.runtime.store_pieces import PieceMaker, Prefix
from engines.store.client import StoreClient
from engines.store.errors import StoreError
from engines.wire_store import Manifest as StoreManifest
from engines.wire_store import ManifestChunk

# What may be evicted while a save is under way is written once more, not for ever.
TRIES = 2
KIND_OF_STATE, KIND_OF_PART, KIND_OF_DRAFT = "state", "checkpoint", "draft"


@dataclass(frozen=True)
class SavedSnapshot:
    """One prefix as the store has it now. Of `total_bytes` the save wrote `written_bytes`."""

    name: SnapshotName
    session: str
    tokens: int
    total_bytes: int
    written_bytes: int
    fingerprint: str
    checkpoint: bool
    chain: KeyChain


@dataclass(frozen=True)
class _Chunk:
    """A piece to be stored under a logical key."""

    kind: str
    key: str
    piece: StatePiece


class SnapshotSaver:
    """Saves for one engine. For the event loop."""

    def __init__(self, terms: SharingTerms, link: StoreLink) -> None:
        self._terms = terms
        self._link = link

    def chain(self, tokens: list[int], tenant: str) -> KeyChain:
        """Takes about a millisecond for ten thousand tokens."""
        return KeyChain(self._terms.fingerprint, tenant, self._terms.block_tokens, tokens)

    async def save(self, prefix: Prefix, maker: PieceMaker) -> SavedSnapshot:
        """Raises StoreAway, RpcRefused (the store is full), PrefixGone, StateError, StoreError."""
        chain = await self._terms.dock.in_thread(self.chain, prefix.rows, prefix.origin.tenant)
        chunks = self._chunks(chain, prefix, await maker.rest())
        # It names all pieces, so that it is another one where they are others.
        pieces = blake3.blake3("".join(chunk.key for chunk in chunks).encode()).hexdigest()[:16]
        state_key = f"{chain.piece_key(KIND_OF_STATE, len(prefix.tokens))}{pieces}"
        state = _Chunk(KIND_OF_STATE, state_key, StatePiece(KIND_OF_STATE, 0, len(prefix.tokens), 0))
        written = 0
        for _ in range(TRIES):
            async with self._link.client() as first, self._link.client() as second, AsyncExitStack() as stack:
                known = await self._known(stack, first, [chunk.key for chunk in (*chunks, state)])
                written += await self._write(first, second, chunks, known, maker)
                written += await self._write_state(first, state, prefix, chunks, known)
                name = chain.name(len(prefix.tokens), prefix.session)
                # A system prompt that is saved once more stays pinned, whichever engine pinned it.
                former = await first.get_manifest(name.text) if prefix.shared else None
                pinned = former is not None and former.pinned
                manifest = self._manifest(prefix, [*chunks, state], known, pinned=pinned)
                if (await first.put_manifest(name.text, manifest)).written:
                    return SavedSnapshot(
                        name=name,
                        session=prefix.session,
                        tokens=manifest.n_past,
                        total_bytes=manifest.total_size,
                        written_bytes=written,
                        fingerprint=manifest.fingerprint,
                        checkpoint=any(chunk.kind == KIND_OF_PART for chunk in chunks),
                        chain=chain,
                    )
        raise StoreError("The store gave up parts of a snapshot while it was being saved.")

    def _chunks(self, chain: KeyChain, prefix: Prefix, rest: tuple[StatePiece, ...]) -> list[_Chunk]:
        layout, size, count = self._terms.layout, self._terms.block_tokens, len(prefix.tokens)
        chunks = []
        for start in range(0, count, size):
            end = min(start + size, len(prefix.rows))
            piece = StatePiece("block", start, end, layout.block_bytes(end - start))
            if end - start == size:
                chunks.append(_Chunk("block", chain.block_key(start // size), piece))
            else:
                chunks.append(_Chunk("tail", chain.piece_key("tail", end), piece))
        for piece in rest:
            key = chain.piece_key(piece.kind, piece.end)
            if piece.kind == "part":
                chunks.append(_Chunk(KIND_OF_PART, key, piece))
            else:
                chunks.append(_Chunk(KIND_OF_DRAFT, f"{key}{piece.start}", piece))
        return chunks

    async def _known(self, stack: AsyncExitStack, client: StoreClient, keys: list[str]) -> dict[str, tuple[str, int]]:
        """Hash and size of what is there, by key, leased until the stack is left."""
        try:
            held = await stack.enter_async_context(client.held(logical_keys=keys))
        except RpcNotFound:
            return {}
        return {place.logical_key or "": (place.hash, place.size) for place in held.places}

    async def _write(
        self,
        first: StoreClient,
        second: StoreClient,
        chunks: list[_Chunk],
        known: dict[str, tuple[str, int]],
        maker: PieceMaker,
    ) -> int:
        missing = deque(chunk for chunk in chunks if chunk.key not in known)
        written = 0

        async def take_turns(client: StoreClient) -> None:
            nonlocal written
            while missing:
                chunk = missing.popleft()
                async with client.writing(chunk.piece.size_bytes, chunk.kind, chunk.key) as writing:
                    if not writing.present:
                        await maker.fill(chunk.piece, writing)
                    known[chunk.key] = (await writing.commit(), writing.size)
                    written += writing.size if writing.stored else 0

        turns = [asyncio.ensure_future(take_turns(client)) for client in (first, second)]
        try:
            await asyncio.gather(*turns)
        finally:
            for turn in turns:
                turn.cancel()
            for turn in (await asyncio.wait(turns))[0]:
                if not turn.cancelled():
                    turn.exception()  # looked at: the first one is raised already
        return written

    async def _write_state(
        self,
        client: StoreClient,
        chunk: _Chunk,
        prefix: Prefix,
        chunks: list[_Chunk],
        known: dict[str, tuple[str, int]],
    ) -> int:
        """The engine's own manifest, by which a reader proves the tokens: all that the pieces have rows of."""
        key = chunk.key
        if key in known:
            return 0
        pieces = tuple(StatePiece(c.piece.kind, c.piece.start, c.piece.end, known[c.key][1]) for c in chunks)
        terms = self._terms
        tokens = tuple(prefix.rows[: max(piece.end for piece in pieces)])
        state = Manifest(terms.fingerprint, terms.model_name, terms.model_sha256, tokens, pieces)
        raw = await terms.dock.in_thread(state.to_json)
        async with client.writing(len(raw), KIND_OF_STATE, key) as writing:
            if not writing.present:
                writing.view[:] = raw
            known[key] = (await writing.commit(), writing.size)
            return writing.size if writing.stored else 0

    def _manifest(
        self, prefix: Prefix, chunks: list[_Chunk], known: dict[str, tuple[str, int]], *, pinned: bool
    ) -> StoreManifest:
        rows = tuple(
            ManifestChunk(index, *known[c.key], kind=c.kind, logical_key=c.key, start=c.piece.start, end=c.piece.end)
            for index, c in enumerate(chunks)
        )
        terms = self._terms
        return StoreManifest(
            n_past=len(prefix.tokens),
            total_size=sum(row.size for row in rows),
            model_alias=terms.model_name,
            model_hash=terms.model_sha256,
            model_path="",
            chunks=rows,
            fingerprint=terms.fingerprint,
            session=prefix.session,
            pinned=pinned,
        )
