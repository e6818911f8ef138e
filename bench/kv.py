"""`python -m bench kv`: a slot's state out of one engine until a second process can read every proved block, and into an engine
there, against copying the same bytes in the same round; and what a stream beside it feels.

Blocks pass through tmpfs, each with a 128-bit checksum that is made when it is written and looked at when it is taken in, as a
store does; "reread" is the export with the other process computing every checksum again before the next block counts.
`--proof blake3` takes the digest that names blocks beyond a host. The state is made up (finite random rows), so that a
gigabyte takes no prefill.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import socket
import struct
import subprocess
import sys
import time
from collections import deque
from collections.abc import AsyncIterator, Generator
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import uvloop

from bench.errors import BenchError
from bench.measures import median, percentile
from bench.report import print_table
from bench.servers import compute_threads, model_path
from bench.vocabulary import ROOT
from engines.config import EngineConfig
from engines.runtime.__main__ import SWITCH_INTERVAL_S
from engines.runtime.arena import Arena, Buffer
from engines.runtime.core import EngineCore
from engines.runtime.generation import Generation, Mailbox
from engines.runtime.metrics import EngineMetrics
from engines.runtime.prefix import PrefixCache
from engines.runtime.sampler import SamplingParams
from engines.runtime.state_desk import StateDesk
from engines.runtime.state_export import ExportedPiece, ExportedState
from engines.runtime.state_forms import Proof, checksum_of, digest_of
from engines.runtime.state_layout import HEADER_BYTES, MAGIC, TENSOR_HEAD_BYTES, Bytes, StateLayout
from engines.runtime.state_snapshot import Manifest
from engines.runtime.state_transfer import arrive

PROOFS: dict[str, Proof] = {"xxh3": checksum_of, "blake3": digest_of}
NEIGHBOUR_TOKENS = 300
POOL_BYTES = 1 << 20
UNSEEN_BLOCKS = 1
# One block on the channel to the other process: where it lies, how long it is, its proof. A size of 0 ends the list.
PLACE = struct.Struct("<QQ32s")
_READY_TIMEOUT_S = 120.0


@dataclass(frozen=True)
class Round:
    """Seconds of one round; `import_copy_s` was measured in the other process."""

    state_bytes: int
    export_s: float
    reread_s: float
    import_s: float
    copy_s: float
    import_copy_s: float


def add_arguments(command: argparse.ArgumentParser) -> None:
    command.add_argument("--model", default="synthetic:kv", help="smollm2, synthetic:NAME or a path")
    command.add_argument("--state-mb", type=int, default=128, help="about how large the state is")
    command.add_argument(
        "--blocks", default="0,64,256,1024", help="tokens of a block, several by commas; 0: the engine's own"
    )
    command.add_argument("--proof", choices=sorted(PROOFS), default="xxh3", help="how blocks are proved")
    command.add_argument("--rounds", type=int, default=7)
    command.add_argument("--threads", type=int, default=0, help="compute threads of each engine; 0: all cores but one")
    command.add_argument("--gpu-layers", type=int, default=0, help="layers on the GPU in both; -1: all")


def run(options: argparse.Namespace) -> dict[str, Any]:
    rows, answers = [], []
    for block_tokens in (int(text) for text in options.blocks.split(",")):
        usual_s = sys.getswitchinterval()
        sys.setswitchinterval(SWITCH_INTERVAL_S)  # as an engine's process does
        try:
            found = uvloop.run(_measure(options, block_tokens))
        finally:
            sys.setswitchinterval(usual_s)
        rows.append([str(found["block_tokens"]), *(f"{found[key]:.2f}" for key in list(found)[1:])])
        answers.append(found)
    columns = ["tokens a block", *(key.replace("_", " ") for key in list(answers[0])[1:])]
    print_table(f"State in blocks, proved by {options.proof}", columns, rows)
    first = answers[0]
    keys = ("export_vs_copy", "import_vs_copy", "neighbour_p99_ratio", "reread_vs_copy")
    return {**{key: round(first[key], 3) for key in keys}, "proof": options.proof, "blocks": answers}


async def _measure(options: argparse.Namespace, block_tokens: int) -> dict[str, Any]:
    path = str(model_path(options.model))
    config = EngineConfig(
        path, "bench", slots=2, threads=options.threads, gpu_layers=options.gpu_layers, kv_block_tokens=block_tokens,
        put_away_idle=False, host_cache_bytes=0, log_level="WARNING",
    )  # fmt: skip
    async with engine(replace(config, context_tokens=512)) as (core, _):
        token_bytes = _layout(core).attention.token_bytes
    tokens = max(256, options.state_mb * 1_000_000 // token_bytes)
    config = replace(config, context_tokens=tokens, cache_tokens=tokens + 2 * NEIGHBOUR_TOKENS + 512)
    async with engine(config) as (core, desk):
        await _forge(core, tokens)
        with OtherProcess(config, options.proof) as other:
            rounds = [await _round(desk, other, PROOFS[options.proof]) for _ in range(options.rounds + 1)][1:]
        ratio = await _neighbour_ratio(core, desk)
        meta = await desk.meta(0)
        async with await desk.export(0) as state:
            used = max(piece.tokens for piece in state.manifest.pieces if piece.kind == "block")
    size = rounds[0].state_bytes
    return {
        "block_tokens": used,
        "export_vs_copy": median([r.copy_s / r.export_s for r in rounds]) or 0.0,
        "reread_vs_copy": median([r.copy_s / r.reread_s for r in rounds]) or 0.0,
        "import_vs_copy": median([r.import_copy_s / r.import_s for r in rounds]) or 0.0,
        "neighbour_p99_ratio": ratio,
        "export_gb_s": size / 1e9 / (median([r.export_s for r in rounds]) or 1),
        "import_gb_s": size / 1e9 / (median([r.import_s for r in rounds]) or 1),
        "copy_gb_s": size / 1e9 / (median([r.copy_s for r in rounds]) or 1),
        "state_mb": meta.state_bytes / 1e6,
    }


# --- an engine in this process -------------------------------------------------------------------


@asynccontextmanager
async def engine(config: EngineConfig) -> AsyncIterator[tuple[EngineCore, StateDesk]]:
    core = EngineCore(config, compute_threads(config.threads), asyncio.get_running_loop(), EngineMetrics())
    desk = StateDesk(core)
    core.start()
    try:
        while core.state == "loading":
            await core.changed.wait()
            core.changed.clear()
        if core.state != "ready" or core.codec is None:
            raise BenchError(f"the engine cannot share state: {core.failure or core.sharing_refusal}")
        yield core, desk
    finally:
        core.stop()
        desk.close()
        await asyncio.to_thread(core.join, 20)


def _layout(core: EngineCore) -> StateLayout:
    assert core.codec is not None
    return core.codec.layout


async def _forge(core: EngineCore, tokens: int) -> None:
    """Fills slot 0 with rows that were never computed."""
    layout, codec = _layout(core), core.codec
    assert codec is not None and core.llama is not None
    if layout.has_part:
        raise BenchError("a state can be made up for models without recurrent state and windows only")
    rng = np.random.default_rng(0)
    ids = rng.integers(0, core.llama.vocabulary.size, tokens).tolist()
    pool = rng.standard_normal(POOL_BYTES // 2).astype(np.float16).view(np.uint8)

    def work(cache: PrefixCache) -> Generator[None, None, None]:
        arrival = yield from arrive(cache, 0, ids, erase_existing=True)
        for start in range(0, tokens, 256):
            inside = ids[start : start + 256]
            codec.import_block(arrival.slot.sequence, start, inside, forged_block(layout, start, inside, pool))
            yield
        codec.complete(arrival.slot.sequence, ids)
        yield from arrival.finish()

    await core.perform(work)


def forged_block(layout: StateLayout, start: int, tokens: list[int], pool: Bytes) -> Bytes:
    """A block whose rows are taken from `pool`, over and over."""
    attention, count = layout.attention, len(tokens)
    block = np.zeros(layout.block_bytes(count), dtype=np.uint8)
    struct.pack_into("<IiII", block.data, 0, MAGIC, 0, 1, count)
    cells = attention.cells(block[HEADER_BYTES:], count)
    cells["pos"], cells["n_seq"] = np.arange(start, start + count), 1
    if attention.wide_cells:
        cells["token"] = tokens
    struct.pack_into("<II", block.data, HEADER_BYTES + 8 + cells.nbytes, 0, attention.layers)
    for tensor, offset in zip(attention.tensors, attention.head_offsets(count), strict=True):
        at = HEADER_BYTES + int(offset) + TENSOR_HEAD_BYTES
        block[at - TENSOR_HEAD_BYTES : at] = np.frombuffer(tensor.head, np.uint8)
        block[at : at + count * tensor.row_bytes] = np.resize(pool, count * tensor.row_bytes)
    return block


# --- the measurements ----------------------------------------------------------------------------


async def _round(desk: StateDesk, other: OtherProcess, prove: Proof) -> Round:
    async with await desk.export(0) as state:
        size = state.manifest.total_bytes
        copy_s = copy_seconds(size)
        export_s = await _exported(state, other, prove, reread=False)
        reread_s = await _exported(state, other, prove, reread=True)
        import_s, import_copy_s = await _imported(state.manifest, state.pieces(prove), other)
    return Round(size, export_s, reread_s, import_s, copy_s, import_copy_s)


async def _exported(state: ExportedState, other: OtherProcess, prove: Proof, *, reread: bool) -> float:
    """Seconds until the other process has seen every block, of which a few are on their way at a time."""
    other.begin(b"V", {"path": str(state.arena.path), "reread": reread})
    began = time.perf_counter()
    kept: deque[Buffer] = deque()
    async for exported in state.pieces(prove):
        other.send(PLACE.pack(exported.buffer.offset, exported.data.nbytes, exported.proof))
        kept.append(exported.buffer)
        for _ in range(await other.seen()):
            kept.popleft().free()
    other.send(PLACE.pack(0, 0, b""))
    await other.all_seen()
    elapsed_s = time.perf_counter() - began
    for buffer in kept:
        buffer.free()
    return elapsed_s


async def _imported(
    manifest: Manifest, pieces: AsyncIterator[ExportedPiece], other: OtherProcess
) -> tuple[float, float]:
    """Lays all pieces into tmpfs, as a store would hold them, and has the other process take them in."""
    shelf = Arena(manifest.total_bytes + 4096 * len(manifest.pieces))
    try:
        places = []
        async for exported in pieces:
            with exported.buffer:
                place = await shelf.take(exported.data.nbytes)
                place.data[:] = exported.data
                places.append((place.offset, exported.data.nbytes, exported.proof.hex()))
        order = {"path": str(shelf.path), "manifest": manifest.to_json().decode(), "places": places}
        answer = await asyncio.to_thread(other.ask, b"I", order)
    finally:
        shelf.close()
    return float(answer["import_s"]), float(answer["copy_s"])


def copy_seconds(size_bytes: int, source: Bytes | None = None) -> float:
    """One copy of so many bytes between memory that was touched before."""
    origin = np.ones(size_bytes, dtype=np.uint8) if source is None else source
    target = np.ones(size_bytes, dtype=np.uint8)
    began = time.perf_counter()
    np.copyto(target, origin[:size_bytes])
    return time.perf_counter() - began


async def _neighbour_ratio(core: EngineCore, desk: StateDesk) -> float:
    """The 99th percentile of a stream's gaps while states leave all the time, over that without."""
    await _gaps(core)  # the first answer of a fresh engine is slower
    alone = await _gaps(core)
    stop = asyncio.Event()

    async def export_on() -> None:
        while not stop.is_set():
            async with await desk.export(0) as state:
                async for exported in state.pieces(checksum_of):
                    exported.buffer.free()
                    if stop.is_set():
                        break

    exports = asyncio.ensure_future(export_on())
    beside = await _gaps(core)
    stop.set()
    await exports
    return percentile(beside, 0.99) / percentile(alone, 0.99)


async def _gaps(core: EngineCore) -> list[float]:
    """Seconds between a stream's tokens."""
    assert core.llama is not None
    params = SamplingParams(
        temperature=0, logit_bias=tuple((t, float("-inf")) for t in core.llama.vocabulary.end_tokens)
    )
    stream = Generation(
        "bench", [5, 6, 7], params, (), NEIGHBOUR_TOKENS, Mailbox(), time.monotonic() + 600, reuse_prefix=False
    )
    core.submit(stream)
    arrivals: list[float] = []
    while True:
        for piece in await stream.mailbox.take(60):
            if piece.error is not None:
                raise BenchError(f"the stream beside the states failed: {piece.error}")
            arrivals.append(time.perf_counter())
            if piece.is_last:
                await core.perform(_free_other_slots)
                return [later - earlier for earlier, later in itertools.pairwise(arrivals)]


def _free_other_slots(cache: PrefixCache) -> Generator[None, None, None]:
    """Or the next stream would take the slot that holds the state."""
    yield from ()
    for slot in cache.slots[1:]:
        slot.sequence.clear()


# --- the other process ---------------------------------------------------------------------------


class OtherProcess:
    """`python -m bench.kv_peer` at the other end of a socket."""

    def __init__(self, config: EngineConfig, proof: str) -> None:
        self._sent = self._seen = 0
        self._socket, theirs = socket.socketpair()
        command = [sys.executable, "-m", "bench.kv_peer", str(theirs.fileno()), proof]
        self._process = subprocess.Popen(command, pass_fds=(theirs.fileno(),), cwd=ROOT, stdin=subprocess.PIPE)
        theirs.close()
        assert self._process.stdin is not None
        self._process.stdin.write(config.to_json().encode())
        self._process.stdin.close()

    def __enter__(self) -> OtherProcess:
        self._socket.settimeout(_READY_TIMEOUT_S)
        if self._socket.recv(1) != b"R":
            self.__exit__()
            raise BenchError("the other process did not get ready")
        return self

    def __exit__(self, *_: object) -> None:
        self._socket.close()
        try:
            self._process.wait(20)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def begin(self, command: bytes, order: dict[str, Any]) -> None:
        raw = json.dumps(order).encode()
        self._socket.setblocking(True)
        self._socket.sendall(command + len(raw).to_bytes(8, "little") + raw)
        self._socket.setblocking(command != b"V")
        self._sent = self._seen = 0

    def ask(self, command: bytes, order: dict[str, Any]) -> dict[str, Any]:
        self.begin(command, order)
        length = int.from_bytes(self._socket.recv(8, socket.MSG_WAITALL), "little")
        return dict(json.loads(self._socket.recv(length, socket.MSG_WAITALL)))

    def send(self, place: bytes) -> None:
        self._socket.sendall(place)
        self._sent += 1

    async def seen(self) -> int:
        """How many more blocks the other process has seen; waits for one when several are on their way."""
        return await self._count() if self._sent - self._seen > UNSEEN_BLOCKS else 0

    async def all_seen(self) -> None:
        while self._seen < self._sent - 1:
            await self._count()

    async def _count(self) -> int:
        answers = await asyncio.get_running_loop().sock_recv(self._socket, 64)
        if not answers or answers.strip(b"+"):
            raise BenchError("the other process found a damaged block, or ended")
        self._seen += len(answers)
        return len(answers)
