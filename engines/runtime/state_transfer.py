"""What a transfer does on the core's thread: takes a slot, moves pieces of its state, gives the slot back.

Each function makes an errand (errands.py), whose slices are one piece long. A slot that is taken runs no generation and is
not emptied for others; whatever ends a transfer must give it back (`end`, `finish` or `abort`).
"""

from __future__ import annotations

import time
from array import array
from collections.abc import Callable, Generator
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from engines.errors import (
    NoCellsFree,
    SlotBusy,
    SlotEmpty,
    SlotNotFound,
    SlotOccupied,
    StateError,
    StateHasImages,
    StateInvalid,
    StateTooLarge,
)
from engines.runtime.checkpoint_order import Checkpoint
from engines.runtime.checkpoint_pieces import HeldCut, held_cuts
from engines.runtime.origin import NOBODY, Origin
from engines.runtime.prefix import PrefixCache
from engines.runtime.slots import Slot
from engines.runtime.state_codec import StateCodec
from engines.runtime.state_draft import DraftLook
from engines.runtime.state_forms import Proof, digest_of, is_quick
from engines.runtime.state_layout import Bytes, Tokens
from engines.runtime.state_snapshot import StatePiece
from engines.runtime.state_windows import earlier_cut, enter_window, held_window, window_bytes

DRAFT_KINDS = ("draft", "hidden")

T = TypeVar("T")
Slices = Generator[None, None, T]


@dataclass(frozen=True)
class SlotLook:
    """A slot between two steps. `tokens` are its own where it is stopped, which only its end changes."""

    tokens: list[int]
    part_bytes: int
    checkpoints: tuple[tuple[int, int], ...]
    """Cut and bytes of each; of a windowed model the window before the last one."""
    is_processing: bool
    operation: str
    draft: DraftLook | None = None
    others_run: bool = False
    """Whether some generation runs in the engine."""


@dataclass(frozen=True, eq=False)
class Delivery:
    """A piece that enters. Its bytes stay as they are until `free` is called. `proof` is what `prove` must give (None: none)."""

    piece: StatePiece
    data: Bytes
    free: Callable[[], None]
    proof: bytes | None = None
    prove: Proof = digest_of

    @property
    def is_quick(self) -> bool:
        return self.proof is None or is_quick(self.prove)

    def check(self) -> None:
        """Raises StateInvalid for bytes with another digest."""
        if self.proof is not None and self.prove(memoryview(self.data.data)) != self.proof:
            piece = self.piece
            raise StateInvalid(
                f"The {piece.kind} of positions {piece.start} to {piece.end - 1} was damaged: it has another digest."
            )


@dataclass
class Departure:
    """A taken slot whose state leaves; `look` is what it held when it was taken."""

    slot: Slot
    look: SlotLook
    cuts: dict[int, HeldCut]
    """By where they are."""
    window: Checkpoint | None = None
    """The one of them that is there only for this."""

    @cached_property
    def ids(self) -> NDArray[np.int32]:
        """The tokens of `look`."""
        return np.frombuffer(array("i", self.look.tokens), dtype=np.int32)

    def take(self, codec: StateCodec, piece: StatePiece, buffer: Bytes) -> Bytes:
        """Writes the piece into `buffer`, for `finished`, once it is there: where the codec queues, after its next call. On the
        core's thread.

        Raises StateError when the engine lost the slot's state meanwhile.
        """
        sequence = self.slot.sequence
        if len(sequence) < piece.end:
            raise StateError("The engine lost the slot's state while it left.")
        if piece.kind == "checkpoint":
            return buffer[: self.cuts[piece.end].take(codec, buffer, queued=codec.queues)]
        if piece.kind == "block":
            return buffer[: codec.take_block(sequence, piece.start, piece.end, buffer, queued=codec.queues)]
        if piece.kind in DRAFT_KINDS:
            return self._take_draft(codec, piece, buffer)
        return buffer[: codec.take_part(sequence, buffer, queued=codec.queues)]

    def _take_draft(self, codec: StateCodec, piece: StatePiece, buffer: Bytes) -> Bytes:
        sequence, drafts = self.slot.sequence, codec.drafts
        assert drafts is not None
        assert sequence.draft is not None
        if drafts.look(sequence.draft, len(sequence)) != self.look.draft:
            raise StateError("The engine lost what its draft head held of the slot while it left.")
        if piece.kind == "draft":
            return buffer[: drafts.take_block(sequence.index, piece.start, piece.end, buffer)]
        buffer[:] = sequence.draft.hidden().view(np.uint8).ravel()
        return buffer

    def finished(self, codec: StateCodec, piece: StatePiece, prove: Proof, taken: Bytes) -> tuple[Bytes, bytes]:
        """The piece, checked, and what `prove` makes of it. On any thread."""
        if piece.kind == "block":
            # Of a long conversation all of them take a millisecond, which a stop has no use for.
            tokens = self.ids if "ids" in vars(self) else self.look.tokens
            exported = codec.finished_block(taken, piece.start, tokens[piece.start : piece.end])
        elif piece.kind == "draft":
            assert codec.drafts is not None
            exported = codec.drafts.finished_block(taken, piece.start, self.look.tokens[piece.start : piece.end])
        elif piece.kind == "hidden":
            exported = taken
        else:
            exported = codec.finished_part(taken, piece.end)
        if exported.nbytes != piece.size_bytes:
            raise StateError(f"A piece of the state has {exported.nbytes} bytes, not {piece.size_bytes} as announced.")
        return exported, prove(memoryview(exported.data))

    def end(self) -> Slices[None]:
        yield from ()
        for cut in self.cuts.values():
            if cut.checkpoint is not None:
                cut.checkpoint.leaving = False
        if self.window is not None:
            self.window.sequence.clear()
        self.slot.transfer = ""


@dataclass
class Arrival:
    """A taken, emptied slot that a state of `tokens` enters."""

    slot: Slot
    tokens: list[int]
    adopted: list[Checkpoint] = field(default_factory=list)
    drafted: tuple[int, int] | None = (0, 0)
    """Positions of which the draft context has rows; None: drafts begin anew."""
    ids: Tokens | None = None
    """The same as `tokens` from `ids_from` on, where somebody has them as an array."""
    ids_from: int = 0
    others_run: bool = False
    """Whether some generation ran in the engine when it began."""
    is_in: bool = False
    """The slot is no transfer's any more."""
    is_doubtful: bool = False
    """Some of it entered before it was proved."""

    def is_usable_with(self, piece: StatePiece) -> bool:
        """Whether somebody may use what is there once the piece has entered: until then the proofs of blocks may be under way."""
        return piece.kind != "block" or piece.end >= len(self.tokens)

    def check(self, codec: StateCodec, piece: StatePiece, data: Bytes) -> None:
        """Raises StateInvalid or StateIncompatible for what must not reach llama.cpp. On any thread."""
        if piece.kind == "block":
            tokens, begin = (self.tokens, 0) if self.ids is None else (self.ids, self.ids_from)
            codec.layout.check_block(data, piece.start, tokens[piece.start - begin : piece.end - begin])
        elif piece.kind in DRAFT_KINDS:
            if piece.kind == "draft" and self._takes_drafts(codec, piece):
                assert codec.drafts is not None
                codec.drafts.layout.check_block(data, piece.start, self.tokens[piece.start : piece.end])
        else:
            codec.layout.check_part(data, piece.end)

    def enter(
        self, cache: PrefixCache, codec: StateCodec, piece: StatePiece, data: Bytes, *, completes: bool = True
    ) -> None:
        """Takes one checked piece in, in the order of the manifest. On the core's thread; `data` must not change meanwhile, where
        the codec queues until after its next call.

        From the last block or part on others find the tokens in the slot; with `completes` False only from `finish` on.
        """
        sequence = self.slot.sequence
        if piece.kind == "block":
            codec.enter_block(sequence, piece.start, piece.tokens, data, queued=codec.queues)
            self.slot.awaited_cells -= piece.tokens
        elif piece.kind == "part":
            codec.enter_part(sequence, data, queued=codec.queues)
        elif piece.kind in DRAFT_KINDS:
            self._enter_draft(codec, piece, data)
        elif codec.layout.recurrent is None:
            enter_window(cache, codec, sequence, piece.end, data)
        else:
            self._adopt(cache, codec, piece, data)
        is_whole = self.slot.awaited_cells == 0 and (piece.kind == "part" or not codec.layout.has_part)
        if completes and is_whole and not sequence.tokens:
            codec.complete(sequence, self.tokens)

    def _takes_drafts(self, codec: StateCodec, piece: StatePiece) -> bool:
        """False where this engine has no draft head, or one whose state is another."""
        fits = codec.drafts is not None and codec.drafts.fits(piece.kind, piece.tokens, piece.size_bytes)
        return fits and self.slot.sequence.draft is not None

    def _enter_draft(self, codec: StateCodec, piece: StatePiece, data: Bytes) -> None:
        drafts, rows = codec.drafts, self.slot.sequence.draft
        if drafts is None or rows is None or self.drafted is None or not self._takes_drafts(codec, piece):
            self._forget_drafts(codec)
            return
        start, end = self.drafted
        if piece.kind == "draft":
            entered = drafts.enter_block(rows, piece.start, piece.tokens, data)
            self.drafted = (start if end else piece.start, piece.end) if entered else None
        else:
            drafts.resume(rows, DraftLook(start, end, piece.start, piece.end), data)

    def _forget_drafts(self, codec: StateCodec) -> None:
        self.drafted = None
        if codec.drafts is not None and self.slot.sequence.draft is not None:
            codec.drafts.forget(self.slot.sequence.draft)

    def _adopt(self, cache: PrefixCache, codec: StateCodec, piece: StatePiece, data: Bytes) -> None:
        others = [c for c in cache.checkpoints if not c.leaving and c not in self.adopted]
        place = cache.checkpoint_place() if others else None
        if place is None:
            return  # fewer places than the sender had
        self.adopted.append(place)
        place.sequence.share_prefix(self.slot.sequence, piece.end)
        codec.enter_part(place.sequence, data, queued=codec.queues)

    def finish(self, codec: StateCodec | None = None) -> Slices[None]:
        """`codec`: where the last piece may have entered without completing the state."""
        yield from ()
        if codec is not None and not self.slot.sequence.tokens:
            codec.complete(self.slot.sequence, self.tokens)
        if self.slot.sequence.tokens != self.tokens:
            raise StateError("The engine lost the state while it came in.")
        self.slot.used_at = time.monotonic()
        self.is_in = True
        self._give_back()

    def abort(self, codec: StateCodec) -> Slices[None]:
        """Leaves nothing of what came in, unless it is all there."""
        yield from ()
        if self.is_in:
            return
        try:
            self._forget_drafts(codec)
            for checkpoint in self.adopted:
                checkpoint.sequence.clear()
            codec.abandon(self.slot.sequence, doubtful=self.is_doubtful)
        finally:
            self._give_back()

    def _give_back(self) -> None:
        self.slot.awaited_cells = 0
        self.slot.transfer = ""


def slot_of(cache: PrefixCache, slot_id: int) -> Slot:
    if not 0 <= slot_id < len(cache.slots):
        raise SlotNotFound(f"There is no slot {slot_id}; this engine has slots 0 to {len(cache.slots) - 1}.")
    return cache.slots[slot_id]


def look(cache: PrefixCache, codec: StateCodec, slot_id: int) -> Slices[SlotLook]:
    slot = slot_of(cache, slot_id)
    # Idle conversations may lie in host memory meanwhile; whoever asks for the slot means what it held.
    yield from cache.bring_back(slot)
    return slot_look(cache, codec, slot)


def depart(cache: PrefixCache, codec: StateCodec, slot_id: int) -> Slices[Departure]:
    """Takes the slot for an export. Raises SlotNotFound, SlotBusy or SlotEmpty."""
    slot = slot_of(cache, slot_id)
    yield from cache.bring_back(slot)
    _require_free(slot)
    if not len(slot.sequence):
        raise SlotEmpty(f"Slot {slot_id} holds no tokens.")
    seen = slot_look(cache, codec, slot)
    cuts = held_cuts(cache, codec, slot.sequence)
    window = held_window(cache, slot.sequence)
    for checkpoint in (cut.checkpoint for cut in cuts if cut.checkpoint is not None):
        checkpoint.leaving = True
    if window is not None:
        cuts = [HeldCut(len(window.sequence), codec.part_bytes(window.sequence), window)]
    if codec.layout.recurrent is None:
        seen = replace(seen, checkpoints=tuple((cut.length, cut.size_bytes) for cut in cuts))
    slot.transfer = "export"
    return Departure(slot, seen, {cut.length: cut for cut in cuts}, window)


def arrive(
    cache: PrefixCache, slot_id: int, tokens: list[int], *, erase_existing: bool, origin: Origin = NOBODY
) -> Slices[Arrival]:
    """Takes and empties the slot for a restore; what it held goes to host memory as before a new prompt.

    Raises SlotNotFound, SlotBusy, SlotOccupied, StateTooLarge or NoCellsFree.
    """
    slot = slot_of(cache, slot_id)
    _require_free(slot)
    if len(slot.sequence) and not erase_existing:
        raise SlotOccupied(f"Slot {slot_id} holds {len(slot.sequence)} tokens.")
    count = len(tokens)
    if count > cache.ledger.count:
        raise StateTooLarge(f"The state has {count} tokens; the cache has {cache.ledger.count} cells.")
    promised = cache.promised_cells()
    if promised + count > cache.ledger.count:
        raise NoCellsFree(f"Of {cache.ledger.count} cells {promised} are promised to others; the state needs {count}.")
    arrival = Arrival(slot, tokens)
    slot.transfer, slot.awaited_cells = "restore", count
    try:
        yield from cache.emptied(slot, count)
    except BaseException:
        arrival._give_back()
        raise
    slot.sequence.origin = origin
    return arrival


def _require_free(slot: Slot) -> None:
    if slot.generation is not None:
        raise SlotBusy(f"Slot {slot.index} runs a request.")
    if slot.transfer:
        raise SlotBusy(f"The state of slot {slot.index} is in another transfer ({slot.transfer}).")


def slot_look(cache: PrefixCache, codec: StateCodec, slot: Slot, *, holds_still: bool = False) -> SlotLook:
    """`holds_still`: nothing comes to the slot's tokens until the look is of no more use. Raises StateHasImages."""
    if slot.sequence.spans:
        # Rows of images are no tokens and may share positions; the forms of states know neither.
        raise StateHasImages(f"Slot {slot.index} holds a conversation with images, whose state stays here.")
    cuts = tuple((cut.length, cut.size_bytes) for cut in held_cuts(cache, codec, slot.sequence))
    part_bytes, sequence = codec.part_bytes(slot.sequence), slot.sequence
    if cut := earlier_cut(cache, sequence):
        cuts = ((cut, window_bytes(codec, sequence, cut)),)
    draft = codec.drafts.look(sequence.draft, len(sequence)) if codec.drafts and len(sequence) else None
    runs = slot.generation is not None
    tokens = sequence.tokens if holds_still else list(sequence.tokens)
    return SlotLook(tokens, part_bytes, cuts, runs, slot.transfer, draft, bool(cache.busy))
