"""Memory that two engines of a host share for a move: taken only by who sees the same file, and never by a path from outside."""

from __future__ import annotations

import asyncio
import os
import weakref
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from engines.errors import StateInvalid
from engines.runtime.arena import Arena
from engines.runtime.handoff_shelf import Offering, Shelves, SourceShelves
from engines.runtime.prefix_marks import longest_marked, marks_of
from engines.runtime.state_forms import checksum_of
from engines.runtime.state_snapshot import StatePiece
from engines.runtime.state_transfer import Delivery
from engines.wire_handoff import PrefixMark, ShelfOffer

SIZE_BYTES = 1 << 20


@pytest.fixture
def arena(tmp_path: Path) -> Iterator[Arena]:
    made = Arena(SIZE_BYTES, tmp_path)
    yield made
    made.close()


def test_what_is_written_on_a_shelf_is_read_by_who_took_it(arena: Arena, tmp_path: Path) -> None:
    shelves = Shelves(tmp_path)
    with Offering(arena) as offer:
        assert offer is not None
        shelf = shelves.take(offer)
    assert arena.free_bytes == arena.size_bytes
    assert shelf is not None
    buffer = arena.take_now(3)
    assert buffer is not None
    buffer.data[:] = [1, 2, 3]
    assert shelf.piece(buffer.offset, 3).tolist() == [1, 2, 3]
    assert not shelf.memory.flags.writeable
    for offset, size in ((-1, 2), (SIZE_BYTES - 1, 2), (0, SIZE_BYTES + 1)):
        with pytest.raises(StateInvalid):
            shelf.piece(offset, size)
    buffer.free()
    with Offering(arena) as again:
        assert again is not None
        assert shelves.take(again) is shelf


def test_a_flipped_bit_on_a_shelf_is_found(arena: Arena, tmp_path: Path) -> None:
    with Offering(arena) as offer:
        assert offer is not None
        shelf = Shelves(tmp_path).take(offer)
    assert shelf is not None
    buffer = arena.take_now(5000)
    assert buffer is not None
    buffer.data[:] = 7
    piece = StatePiece("block", 0, 8, 5000)
    there = Delivery(piece, shelf.piece(buffer.offset, 5000), buffer.free, checksum_of(buffer.data.data), checksum_of)
    there.check()
    buffer.data[4321] ^= 1
    with pytest.raises(StateInvalid, match="damaged"):
        there.check()


def test_an_offer_whose_file_has_gone_is_none(arena: Arena) -> None:
    assert arena.path is not None
    arena.path.unlink()
    with Offering(arena) as offer:
        assert offer is None
    assert arena.free_bytes == arena.size_bytes


def test_an_offer_that_is_not_this_very_file_is_declined(arena: Arena, tmp_path: Path) -> None:
    shelves = Shelves(tmp_path)
    assert arena.path is not None
    with Offering(arena) as offer:
        assert offer is not None
        wrong = [
            replace(offer, name=name)
            for name in (f"../{tmp_path.name}/{offer.name}", str(arena.path), "hydra-arena-1-deadbeef", "", "x" * 5000)
        ]
        wrong += [replace(offer, inode=offer.inode + 1), replace(offer, device=offer.device + 1)]
        wrong += [replace(offer, size_bytes=size) for size in (0, SIZE_BYTES // 2, 2 * SIZE_BYTES, 1 << 50)]
        wrong += [replace(offer, nonce="00" * 32), replace(offer, nonce=""), replace(offer, nonce_at=SIZE_BYTES - 1)]
        wrong += [replace(offer, nonce_at=-1), replace(offer, nonce="ü" * 64)]
        assert [shelves.take(one) for one in wrong] == [None] * len(wrong)
        link = tmp_path / "hydra-arena-2-deadbeef"
        link.symlink_to(arena.path)
        assert shelves.take(replace(offer, name=link.name)) is None
        arena.path.chmod(0o660)
        assert shelves.take(offer) is None
        arena.path.chmod(0o600)
        assert shelves.take(offer) is not None
    # The nonce is another's by then.
    taken = arena.take_now(32)
    assert taken is not None
    taken.data[:] = 0
    assert shelves.take(offer) is None


def test_a_fifo_in_the_place_of_a_shelf_holds_nobody_up(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "hydra-arena-3-deadbeef", 0o600)
    offer = ShelfOffer("hydra-arena-3-deadbeef", SIZE_BYTES, 0, 0, 0, "00" * 32)
    assert Shelves(tmp_path).take(offer) is None


def test_marks_tell_how_much_of_a_beginning_is_the_same() -> None:
    tokens = list(range(1000))
    marks = marks_of(tokens, 64)
    assert [mark.tokens for mark in marks] == list(range(64, 961, 64))
    assert longest_marked(tokens, marks) == 960
    assert longest_marked(tokens[:200], marks) == 192
    assert longest_marked([*tokens[:130], 7, *tokens[131:]], marks) == 128
    assert longest_marked([1, *tokens], marks) == 0
    assert longest_marked(tokens, ()) == 0
    assert longest_marked(tokens, (PrefixMark(64, marks[0].digest), PrefixMark(64, marks[0].digest))) == 0
    assert len(marks_of(list(range(100_000)), 64)) <= 256


async def test_the_memory_of_an_engine_that_has_ended_is_let_go_of(tmp_path: Path) -> None:
    shelves = Shelves(tmp_path)
    sources = SourceShelves(shelves)
    arena = Arena(SIZE_BYTES, tmp_path)
    with Offering(arena) as offer:
        shelf = await sources.take(offer)
    assert shelf is not None
    gone = asyncio.Event()
    weakref.finalize(shelf, asyncio.get_running_loop().call_soon_threadsafe, gone.set)
    sources._look_now()
    assert len(shelves) == 1
    arena.close()
    del shelf
    sources._look_now()
    assert len(shelves) == 0
    async with asyncio.timeout(60):
        await gone.wait()
    assert sources._look is None
    assert await sources.take(None) is None
