"""The second process of `python -m bench kv`: proves blocks in shared memory, and takes states into an engine of its own."""

from __future__ import annotations

import asyncio
import json
import mmap
import os
import socket
import struct
import sys
import time
from collections.abc import Generator
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import uvloop

from bench.kv import PROOFS, engine
from bench.kv_channel import PLACE
from bench.kv_copy import copies
from bench.kv_trace import Trace
from engines.config import EngineConfig
from engines.runtime.__main__ import SWITCH_INTERVAL_S
from engines.runtime.arena import pin
from engines.runtime.core import EngineCore
from engines.runtime.prefix import PrefixCache
from engines.runtime.state_desk import StateDesk
from engines.runtime.state_forms import Proof
from engines.runtime.state_layout import MAGIC, Bytes
from engines.runtime.state_snapshot import Manifest, StatePiece
from engines.runtime.state_transfer import Delivery


def mapped(path: str) -> Bytes:
    """The file's bytes, with its pages in this process's table already."""
    fd = os.open(path, os.O_RDWR)
    try:
        memory = mmap.mmap(fd, Path(path).stat().st_size, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE)
    finally:
        os.close(fd)
    return np.frombuffer(memory, dtype=np.uint8)


class SharedPieces:
    """Pieces that another process laid into shared memory."""

    def __init__(self, memory: Bytes, places: list[list[Any]], prove: Proof) -> None:
        self._memory, self._places, self._prove = memory, iter(places), prove

    async def deliver(self, piece: StatePiece) -> Delivery:
        offset, size, proof = next(self._places)
        return Delivery(piece, self._memory[offset : offset + size], lambda: None, bytes.fromhex(proof), self._prove)


def see_blocks(channel: socket.socket, memory: Bytes, prove: Proof, *, reread: bool) -> None:
    """Answers each block with +, or with - if it is not there or has another proof."""
    while True:
        offset, size, proof = PLACE.unpack(channel.recv(PLACE.size, socket.MSG_WAITALL))
        if not size:
            return
        block = memory[offset : offset + size]
        there = struct.unpack_from("<I", block.data)[0] == MAGIC
        there &= not reread or proof.startswith(prove(block.data))
        channel.sendall(b"+" if there else b"-")


class Shelf:
    """Memory in which the first process lays pieces, mapped once; page-locked too where a GPU takes them in."""

    def __init__(self, path: str, config: EngineConfig) -> None:
        self.memory = mapped(path)
        self.plain = copies(self.memory.nbytes, config.gpu_layers)
        if config.gpu_layers:
            pin(self.memory.ctypes.data, self.memory.nbytes, max(config.main_gpu, 0))


async def take_in(
    core: EngineCore, desk: StateDesk, order: dict[str, Any], shelf: Shelf, prove: Proof
) -> dict[str, Any]:
    """Into an empty slot: what an earlier round left there is dropped before the clock starts."""
    manifest = Manifest.from_json(order["manifest"].encode())
    await core.perform(_empty_first_slot)
    copy_s = shelf.plain.in_s(manifest.total_bytes, shelf.memory)
    trace = Trace()
    with trace.watching(core.codec) if order["trace"] else nullcontext():
        noted = trace.proof(prove) if order["trace"] else prove
        began = time.perf_counter()
        await desk.enter(0, manifest, SharedPieces(shelf.memory, order["places"], noted))
        import_s = time.perf_counter() - began
    proofs = [proof for _, _, proof in order["places"]]
    same = not order["look"] or await _is_there(desk, manifest, proofs, prove, order["block_tokens"])
    return {"import_s": import_s, "copy_s": copy_s, "same": same, "spans": trace.told()}


async def _is_there(desk: StateDesk, manifest: Manifest, proofs: list[str], prove: Proof, block_tokens: int) -> bool:
    """Whether every block that came in goes out again as the same bytes."""
    blocks = [piece for piece in manifest.pieces if piece.kind == "block"]
    async with await desk.export(0, block_tokens=block_tokens) as state:
        found = []
        async for exported in state.pieces(prove):
            exported.buffer.free()
            found.append((exported.piece, exported.proof.hex()))
    return found[: len(blocks)] == list(zip(blocks, proofs[: len(blocks)], strict=True))


def _empty_first_slot(cache: PrefixCache) -> Generator[None, None, None]:
    yield from ()
    cache.slots[0].sequence.clear()


async def main(channel: socket.socket, proof: str, config: EngineConfig) -> None:
    prove = PROOFS[proof]
    seen: dict[str, Bytes] = {}
    shelves: dict[str, Shelf] = {}
    async with engine(config) as (core, desk):
        await desk.meta(0)
        channel.sendall(b"R")
        while command := await asyncio.to_thread(channel.recv, 1):
            length = int.from_bytes(channel.recv(8, socket.MSG_WAITALL), "little")
            order = json.loads(channel.recv(length, socket.MSG_WAITALL))
            path = order["path"]
            if command == b"V":
                if path not in seen:
                    seen[path] = mapped(path)
                await asyncio.to_thread(partial(see_blocks, channel, seen[path], prove, reread=order["reread"]))
            else:
                if path not in shelves:
                    shelves = {path: Shelf(path, config)}
                answer = json.dumps(await take_in(core, desk, order, shelves[path], prove)).encode()
                channel.sendall(len(answer).to_bytes(8, "little") + answer)


if __name__ == "__main__":
    given = EngineConfig.from_json(sys.stdin.read())
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    uvloop.run(main(socket.socket(fileno=int(sys.argv[1])), sys.argv[2], given))
