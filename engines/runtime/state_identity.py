"""Whose states an engine's are: the digest of its model's file, which is read once, and the fingerprint made of it."""

from __future__ import annotations

import asyncio
import logging

from engines.errors import StateSharingOff
from engines.runtime.core import EngineCore
from engines.runtime.fingerprint import Fingerprint, fingerprint_of, model_sha256
from engines.runtime.state_layout import StateLayout
from pools.errors import ModelFileUnreadable, PoolError

log = logging.getLogger("hydra.engine.state")

# Stands in for a digest until the file was read: what is made with it has the right length already.
NO_DIGEST = "0" * 64


class StateIdentity:
    """Used on the event loop; `fingerprint` by any thread."""

    def __init__(self, core: EngineCore) -> None:
        self._core = core
        self.model_sha256 = ""
        self._fingerprints: dict[str, Fingerprint] = {}
        self._hashing: asyncio.Task[str] | None = None
        self._closed = False

    def begin(self) -> None:
        """Starts to read the model's file, which takes a while the first time."""
        if self._hashing is None or (self._hashing.done() and not self.model_sha256):
            self._hashing = asyncio.ensure_future(self._hash_model())

    def close(self) -> None:
        self._closed = True

    async def known(self) -> None:
        """Waits until the model's file was read. Raises StateSharingOff when it cannot be."""
        if not self.model_sha256:
            self.begin()
            assert self._hashing is not None
            await asyncio.wait((self._hashing,))
        if not self.model_sha256:
            raise StateSharingOff("The model's file could not be read for its digest.")

    def fingerprint(self, layout: StateLayout, model_sha256: str) -> Fingerprint:
        """Made once for a digest: a large vocabulary takes a tenth of a second."""
        if model_sha256 not in self._fingerprints:
            assert self._core.llama is not None
            self._fingerprints[model_sha256] = fingerprint_of(self._core.config, self._core.llama, layout, model_sha256)
        return self._fingerprints[model_sha256]

    def digest(self) -> str:
        """What engines must share to share state; "" while the file is being read, or where none is shared."""
        codec = self._core.codec
        if codec is None:
            return ""
        self.begin()
        return self.fingerprint(codec.layout, self.model_sha256).digest if self.model_sha256 else ""

    async def _hash_model(self) -> str:
        try:
            sha256 = await asyncio.to_thread(model_sha256, self._core.config, self._go_on)
            codec = self._core.codec
            if codec is None:
                raise ModelFileUnreadable("the engine shares no state any more")
            await asyncio.to_thread(self.fingerprint, codec.layout, sha256)
            self.model_sha256 = sha256
        except PoolError as error:
            log.error("this engine will not share state: %s", error)
        return self.model_sha256

    def _go_on(self, _done_bytes: int, _all_bytes: int) -> None:
        """Ends the reading of a large file when the engine stops."""
        if self._closed:
            raise ModelFileUnreadable("the engine stops")
