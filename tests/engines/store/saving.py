"""Saves a manifest of one object in a running store, as an engine would."""

from __future__ import annotations

import asyncio

from engines.store.client import StoreClient
from engines.wire_store import Manifest, ManifestChunk


def save_one(
    address: str,
    port: int,
    secret: str,
    name: str,
    data: bytes,
    *,
    session: str = "",
    kind: str = "block",
    n_past: int = 1,
) -> None:
    async def saved() -> None:
        async with StoreClient(address, port, secret=secret) as store:
            async with store.writing(len(data), kind) as writing:
                if not writing.present:
                    writing.view[:] = data
                digest = await writing.commit()
            chunk = ManifestChunk(0, digest, len(data), kind)
            manifest = Manifest(n_past, len(data), "m", "", "", (chunk,), fingerprint="f", session=session)
            answer = await store.put_manifest(name, manifest)
            assert answer.written

    asyncio.run(saved())
