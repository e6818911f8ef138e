"""The one place where a slot's state leaves or enters this engine: HTTP and RPC stand on it, the core's thread works behind it.

Everything here runs on the event loop. A state leaves as a stream of buffers whose total length is known up front, and enters
from a stream of chunks of any size. While one of both goes on the slot is taken: no generation runs in it, and a second
transfer of the same slot is refused (SlotBusy).
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
from array import array
from collections.abc import AsyncIterable, Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial

import numpy as np
from numpy.typing import NDArray

from engines.config import EngineConfig
from engines.errors import (
    EngineError,
    EngineLoading,
    EngineStopping,
    InvalidRequest,
    StateIncompatible,
    StateInvalid,
    StateSharingOff,
    StateTooLarge,
)
from engines.runtime import state_transfer
from engines.runtime.arena import FOLDER, Arena, ArenaFull
from engines.runtime.core import EngineCore
from engines.runtime.fingerprint import Fingerprint
from engines.runtime.origin import NOBODY, Origin
from engines.runtime.state_codec import StateCodec
from engines.runtime.state_dock import LEAST_QUEUED_PIECES, Dock, to_its_end
from engines.runtime.state_export import ExportedState, StateMeta, planned, total_bytes
from engines.runtime.state_forms import FORMS, ChunkReader, form_of, largest_foreign_bytes, read_stream_head
from engines.runtime.state_identity import NO_DIGEST, StateIdentity
from engines.runtime.state_import import PieceSource, StreamPieces, WholePieces, received, with_patience
from engines.runtime.state_layout import StateLayout
from engines.runtime.state_metrics import StateMetrics
from engines.runtime.state_order import require_order
from engines.runtime.state_sizes import kept_block_tokens, last_block_tokens, moved_block_tokens
from engines.runtime.state_snapshot import Manifest, StatePiece
from engines.runtime.state_terms import SharingTerms
from engines.runtime.state_transfer import Departure, SlotLook
from engines.runtime.state_whole import WholeState, read_v2

__all__ = ["FORMS", "ExportedState", "RestoreTerms", "RestoredState", "StateDesk", "StateMeta"]

log = logging.getLogger("hydra.engine.state")

THREADS = 2
# Threads that prove pieces: one more than there are cores beside the core's thread would only take turns with it.
MOST_PROVERS = 4
# With fewer a thread for it would take turns with the core's thread, the event loop and whoever is at the other end, and would
# have to fetch what the core's thread has in its caches.
LEAST_PROVING_CORES = 4
ARENA_BYTES = 64 << 20


@dataclass(frozen=True)
class RestoreTerms:
    """What a sender says beside the bytes. `total_bytes` None: unknown until the stream ends.

    `fingerprint` is needed by forms that carry none (v2, raw). `erase_existing` False refuses a slot that holds tokens.
    `origin`: whose conversation it is.
    """

    total_bytes: int | None = None
    fingerprint: str | None = None
    erase_existing: bool = True
    origin: Origin = NOBODY


@dataclass(frozen=True)
class RestoredState:
    """What a slot holds after `restore`. `model_match` is exact, or family (another quant of a declared family)."""

    slot_id: int
    n_past: int
    state_bytes: int
    form: str
    model_match: str


class StateDesk:
    """See the module's text. One per engine; made with the core, usable once the core is ready."""

    def __init__(self, core: EngineCore, least_arena_bytes: int = ARENA_BYTES) -> None:
        self._core = core
        self._least_arena_bytes = least_arena_bytes
        self._config: EngineConfig = core.config
        self._threads = ThreadPoolExecutor(THREADS, thread_name_prefix="state")
        cores = len(os.sched_getaffinity(0))
        provers = min(MOST_PROVERS, max(1, cores - 1))
        self._proves_apart = cores >= LEAST_PROVING_CORES
        self._provers = ThreadPoolExecutor(provers, thread_name_prefix="state-proof")
        self._metrics = StateMetrics(core.metrics.registry, lambda: float(core.codec is not None))
        self._arena: Arena | None = None
        self._arena_lock = asyncio.Lock()
        self._foreign = asyncio.Lock()
        self._identity = StateIdentity(core)

    def begin(self) -> None:
        """Starts to read the model's file for its digest, which takes a while the first time; `export` waits for it."""
        self._identity.begin()

    def close(self) -> None:
        """Calling it twice is harmless."""
        self._identity.close()
        self._threads.shutdown(wait=False, cancel_futures=True)
        self._provers.shutdown(wait=False, cancel_futures=True)
        if self._arena is not None:
            self._arena.close()

    async def terms(self) -> SharingTerms:
        """What pieces are made by here; waits for the model's digest. Raises StateSharingOff, EngineLoading, EngineStopping."""
        codec = self._codec()
        await self._identity.known()
        identity, tokens = self._identity, kept_block_tokens(self._config, codec.layout)
        fingerprint = identity.fingerprint(codec.layout, identity.model_sha256).text
        return SharingTerms(
            await self._dock(codec), fingerprint, self._config.model_name, identity.model_sha256, tokens
        )

    async def meta(self, slot_id: int, form: str = "stream") -> StateMeta:
        """Raises InvalidRequest for an unknown form, SlotNotFound, StateSharingOff, EngineLoading."""
        codec = self._codec(form)
        look: SlotLook = await self._core.perform(lambda cache: state_transfer.look(cache, codec, slot_id))
        self.begin()
        return (await self._described(slot_id, look, form))[0]

    async def export(self, slot_id: int, form: str = "stream", *, block_tokens: int = 0) -> ExportedState:
        """Takes the slot; its state leaves in blocks of so many tokens (0: the engine's own). Raises as `meta`, and SlotBusy and
        SlotEmpty."""
        codec = self._codec(form)
        await self._identity.known()
        dock = await self._dock(codec)
        departure = await dock.take(
            lambda cache: state_transfer.depart(cache, codec, slot_id), lambda taken: lambda cache: taken.end()
        )
        try:
            meta, manifest = await self._described(slot_id, departure.look, form, block_tokens)
            await dock.in_thread(lambda: departure.ids)
        except BaseException:
            await dock.perform(lambda cache: departure.end())
            raise
        return ExportedState(meta, manifest, dock, departure, self._metrics)

    def leaving(self, departure: Departure, dock: Dock, block_tokens: int = 0) -> ExportedState:
        """As `export` in pieces, of a slot that was taken before."""
        meta, manifest = self._describe(departure.slot.index, departure.look, "stream", block_tokens, in_pieces=True)
        return ExportedState(meta, manifest, dock, departure, self._metrics)

    async def restore(self, slot_id: int, terms: RestoreTerms, chunks: AsyncIterable[bytes]) -> RestoredState:
        """Replaces the slot's content by the state in `chunks`; after any failure the slot is empty and free.

        Raises SlotNotFound, SlotBusy, SlotOccupied, StateInvalid (damaged), StateIncompatible (another model or layout),
        StateTooLarge, NoCellsFree, DeadlineExceeded (a silent sender), StateSharingOff, EngineLoading.
        """
        began_at = time.monotonic()
        try:
            state = await self._restored(slot_id, terms, chunks)
        except EngineError as error:
            self._metrics.transfers.labels("restore", error.code).inc()
            raise
        except asyncio.CancelledError:
            self._metrics.transfers.labels("restore", "broken_off").inc()
            raise
        self._metrics.transfers.labels("restore", "ok").inc()
        self._metrics.bytes.labels("restore").inc(state.state_bytes)
        self._metrics.seconds.labels("restore").observe(time.monotonic() - began_at)
        return state

    async def _restored(self, slot_id: int, terms: RestoreTerms, chunks: AsyncIterable[bytes]) -> RestoredState:
        codec = self._codec()
        await self._identity.known()
        dock = await self._dock(codec)
        reader = ChunkReader(with_patience(chunks))
        begun = await reader.read(4)
        form = form_of(begun)

        async def complete() -> None:
            await reader.expect_end()
            if terms.total_bytes not in (None, reader.read_bytes):
                raise StateInvalid(f"The state has {reader.read_bytes} bytes; {terms.total_bytes} were announced.")

        enter = partial(self._enter, dock, slot_id, erase_existing=terms.erase_existing, origin=terms.origin)
        if form == "stream":
            manifest = await read_stream_head(begun, reader)
            match = await enter(manifest, StreamPieces(reader, dock), complete)
        else:
            # A foreign form is put together in memory, so one at a time.
            async with self._foreign:
                whole = await self._whole(form, begun, reader, codec.layout)
                manifest = self._manifest_of(whole, terms.fingerprint)
                match = await enter(manifest, WholePieces(whole, dock), complete)
        return RestoredState(slot_id, len(manifest.tokens), reader.read_bytes, form, match)

    async def enter(self, slot_id: int, manifest: Manifest, source: PieceSource) -> RestoredState:
        """Replaces the slot's content by pieces that lie in memory already, as those of another process of this host.

        Raises as `restore`.
        """
        codec = self._codec()
        await self._identity.known()

        async def complete() -> None:
            """Nothing follows the pieces."""

        match = await self._enter(await self._dock(codec), slot_id, manifest, source, complete, erase_existing=True)
        return RestoredState(slot_id, len(manifest.tokens), manifest.total_bytes, "pieces", match)

    async def _enter(
        self,
        dock: Dock,
        slot_id: int,
        manifest: Manifest,
        source: PieceSource,
        complete: Callable[[], Awaitable[None]],
        *,
        erase_existing: bool,
        origin: Origin = NOBODY,
    ) -> str:
        """Takes the slot, takes the pieces in, and gives it back once `complete` has found nothing wrong."""
        match, ids = self._require_fit(manifest, dock.codec.layout, dock.arena)
        tokens = list(manifest.tokens)
        arrival = await dock.take(
            lambda cache: state_transfer.arrive(cache, slot_id, tokens, erase_existing=erase_existing, origin=origin),
            lambda taken: lambda cache: taken.abort(dock.codec),
        )
        arrival.ids = ids
        try:
            await received(dock, arrival, manifest.pieces, source, complete)
        except BaseException:
            await self._abort(dock, arrival)
            raise
        return match

    async def _abort(self, dock: Dock, arrival: state_transfer.Arrival) -> None:
        try:
            await dock.perform(lambda cache: arrival.abort(dock.codec))
        except EngineStopping:
            log.debug("the core has ended, and the slot with it")

    # --- what a state is ------------------------------------------------------------------------

    async def _described(
        self, slot_id: int, look: SlotLook, form: str, block_tokens: int = 0
    ) -> tuple[StateMeta, Manifest]:
        """In a thread: the tokens of a long slot take milliseconds to write down."""
        work = partial(self._describe, slot_id, look, form, block_tokens)
        return await to_its_end(asyncio.get_running_loop().run_in_executor(self._threads, work))

    def _describe(
        self, slot_id: int, look: SlotLook, form: str, block_tokens: int, *, in_pieces: bool = False
    ) -> tuple[StateMeta, Manifest]:
        """With `in_pieces` its bytes are those of its pieces, which takes no time to find out."""
        layout = self._codec().layout
        if not block_tokens and look.others_run:
            block_tokens = kept_block_tokens(self._config, layout)
        last_tokens = 0 if block_tokens else last_block_tokens(self._config, layout)
        block_tokens = block_tokens or moved_block_tokens(self._config, layout, len(look.tokens))
        ours, drafts = form == "stream", self._codec().drafts if form == "stream" else None
        pieces: tuple[StatePiece, ...] = ()
        if look.tokens:
            pieces = planned(look, layout, block_tokens, checkpoints=ours, last_tokens=last_tokens, drafts=drafts)
        sha256 = self._identity.model_sha256
        digest = sha256 or NO_DIGEST
        fingerprint = self._identity.fingerprint(layout, digest).text
        manifest = Manifest(fingerprint, self._config.model_name, digest, tuple(look.tokens), pieces)
        state_bytes = 0
        if look.tokens:
            state_bytes = manifest.total_bytes if in_pieces else total_bytes(manifest, layout, form)
        meta = StateMeta(
            slot_id=slot_id,
            n_past=len(look.tokens),
            state_bytes=state_bytes,
            is_processing=look.is_processing,
            is_transferring=bool(look.operation),
            operation=look.operation,
            model_name=self._config.model_name,
            model_sha256=sha256,
            fingerprint=fingerprint if sha256 else "",
            form=form,
        )
        return meta, manifest

    def known_fingerprint(self) -> str:
        """What engines must share to share state, as a digest; "" while the file is being read, or where none is shared."""
        return self._identity.digest()

    def _manifest_of(self, whole: WholeState, fingerprint: str | None) -> Manifest:
        """The manifest that a foreign form lacks. Raises StateIncompatible without the sender's fingerprint."""
        if not fingerprint:
            raise StateIncompatible(
                "A state of this form does not say which model it is of.",
                hint="Send its fingerprint along (X-Hydra-Fingerprint), or send form stream, which carries it.",
            )
        layout = whole.layout
        look = SlotLook(whole.tokens, whole.part().nbytes if layout.has_part else 0, (), False, "")
        pieces = planned(look, layout, kept_block_tokens(self._config, layout), checkpoints=False)
        model = Fingerprint.parse(fingerprint).model
        sha256 = model.removeprefix("sha256:") if model.startswith("sha256:") else ""
        return Manifest(fingerprint, "", sha256, tuple(whole.tokens), pieces)

    async def _whole(self, form: str, begun: bytes, reader: ChunkReader, layout: StateLayout) -> WholeState:
        """A foreign form, read to its end and checked. Raises StateInvalid or StateIncompatible."""
        assert self._core.llama is not None
        vocabulary = self._core.llama.vocabulary.size
        could_be = largest_foreign_bytes(layout, self._config.context_tokens, vocabulary)
        most_bytes = min(self._config.max_state_bytes, could_be)
        data = await reader.read_rest(most_bytes, begun)
        threads = asyncio.get_running_loop()
        if form == "raw":
            raw = np.frombuffer(data, dtype=np.uint8)
            return await threads.run_in_executor(self._threads, WholeState.checked, layout, None, raw)
        tokens, rows = read_v2(data, vocabulary, layout)
        return await threads.run_in_executor(self._threads, WholeState.checked, layout, tokens, rows)

    # --- what may enter -------------------------------------------------------------------------

    def _require_fit(self, manifest: Manifest, layout: StateLayout, arena: Arena) -> tuple[str, NDArray[np.int32]]:
        """Checks all that a manifest says. Returns how the models match, and the tokens; raises a StateError."""
        here = self._identity.fingerprint(layout, self._identity.model_sha256)
        here.require(Fingerprint.parse(manifest.fingerprint))
        assert self._core.llama is not None
        tokens = manifest.tokens
        if not tokens:
            raise StateInvalid("The state has no tokens.")
        if len(tokens) > self._config.context_tokens:
            raise StateTooLarge(f"The state has {len(tokens)} tokens; the context holds {self._config.context_tokens}.")
        try:
            every = np.frombuffer(array("i", manifest.all_tokens), dtype=np.int32)
        except OverflowError:
            raise StateInvalid("The state has tokens beyond all vocabularies.") from None
        if every.min() < 0 or every.max() >= self._core.llama.vocabulary.size:
            raise StateInvalid("The state has tokens beyond the vocabulary.")
        require_order(manifest.pieces, len(tokens), layout)
        largest = max(piece.size_bytes for piece in manifest.pieces)
        if largest > arena.size_bytes:
            raise StateTooLarge(f"The state has a piece of {largest} bytes; here one may have {arena.size_bytes}.")
        return ("exact" if manifest.model_sha256 == self._identity.model_sha256 else "family"), every[: len(tokens)]

    # --- means ----------------------------------------------------------------------------------

    def _codec(self, form: str = "stream") -> StateCodec:
        if form not in FORMS:
            raise InvalidRequest(
                f"There is no form {form[:40]!r} of a state; there are {', '.join(FORMS)}.", param="form"
            )
        if self._core.state == "loading":
            raise EngineLoading("The model is being loaded.")
        if self._core.codec is None:
            if self._core.state != "ready":
                raise EngineStopping("The engine is shutting down.")
            raise StateSharingOff(f"This engine shares no state: {self._core.sharing_refusal}.")
        return self._core.codec

    async def _dock(self, codec: StateCodec) -> Dock:
        async with self._arena_lock:
            if self._arena is None:
                self._arena = await to_its_end(
                    asyncio.get_running_loop().run_in_executor(self._threads, self._make_arena)
                )
        return Dock(self._core, codec, self._arena, self._threads, self._provers, proves_apart=self._proves_apart)

    def _make_arena(self) -> Arena:
        codec = self._codec()
        block_bytes = codec.capacity_bytes(moved_block_tokens(self._config, codec.layout))
        # By a card as many lie on a shelf, for a target to read, as are under way out of it.
        blocks = 2 * LEAST_QUEUED_PIECES if codec.queues else 4
        size_bytes = max(self._least_arena_bytes, blocks * block_bytes) + self._largest_part_bytes(codec.layout)
        device = max(self._config.main_gpu, 0) if self._config.gpu_layers else None
        try:
            return Arena(size_bytes, FOLDER, device)
        except ArenaFull as error:
            log.warning("%s: states pass through private memory", error)
            return Arena(size_bytes, None, device)

    def _largest_part_bytes(self, layout: StateLayout) -> int:
        assert self._core.llama is not None
        return layout.part_bytes(min(self._core.llama.window_tokens, self._config.context_tokens))
