"""`python -m bench store`: bytes into the store and out of it, in place from another process and by sendfile over loopback, each
against copying the same bytes in the same round; and how much of growing and shared sessions is stored, against the ideal.

A put is whole when the store has proved the bytes by BLAKE3 and published them; a get in place when the reader has proved them
by its checksum; a get over the connection when all bytes are in the reader's buffer. The objects are random bytes of the sizes
that a dense and a hybrid model have.
"""

from __future__ import annotations

import argparse
import asyncio
import secrets
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import blake3
import numpy as np

from bench.errors import BenchError
from bench.measures import median
from bench.report import print_table
from bench.vocabulary import ROOT
from engines.store.client import StoreClient
from engines.store.config import MEMORY_FOLDER, StoreConfig
from engines.wire_store import Manifest, ManifestChunk, StoreInfoAnswer

MB = 1 << 20
START_TIMEOUT_S = 30.0
GROWING_SAVES = 12
SHARING_SESSIONS = 8


@dataclass(frozen=True)
class Shape:
    """Bytes of a block of `block_tokens` tokens, of a token in the tail, and of a checkpoint (0: the model has none)."""

    name: str
    block_tokens: int
    token_bytes: int
    checkpoint_bytes: int

    @property
    def block_bytes(self) -> int:
        return self.block_tokens * self.token_bytes


# A dense model of 8 GB cards with small blocks; and Qwen 3.6 35B-A3B's with K/V in q8_0, a tenth of its checkpoint.
SHAPES = (Shape("dense", 256, 12_288, 0), Shape("hybrid", 256, 10_880, 6_590_000))


@dataclass(frozen=True)
class Round:
    """GB/s of one round."""

    copy: float
    put: float
    get: float
    send_copy: float
    send: float


def add_arguments(command: argparse.ArgumentParser) -> None:
    command.add_argument("--object-mb", type=int, default=8, help="size of an object in the transfer rounds")
    command.add_argument("--objects", type=int, default=16, help="objects of a round")
    command.add_argument("--rounds", type=int, default=7)


def run(options: argparse.Namespace) -> dict[str, Any]:
    total = options.object_mb * MB * options.objects
    with serving_store(capacity_bytes=4 * total + 3 * (1 << 30)) as server:
        rounds = asyncio.run(_transfers(server.config, options))
        sizes = [asyncio.run(_dedup(server.config, shape)) for shape in SHAPES]
    print_table(
        f"{options.objects} objects of {options.object_mb} MiB, GB/s, medians of {options.rounds} rounds",
        ["copy", "put in place", "get in place", "recv of sent bytes", "get by sendfile"],
        [[f"{median([getattr(r, name) for r in rounds]):.2f}" for name in ("copy", "put", "get", "send_copy", "send")]],
    )
    print_table(
        f"{GROWING_SAVES} saves of a growing session, {SHARING_SESSIONS} sessions with one prefix",
        ["shape", "logical MB", "ideal MB", "stored MB", "ideal/stored", "bytes of an unchanged save"],
        [
            [s.shape, _mb(s.logical), _mb(s.ideal), _mb(s.stored), f"{s.ideal / s.stored:.3f}", str(s.resave)]
            for s in sizes
        ],
    )
    return {
        "put_vs_copy": _rounded(median([r.put / r.copy for r in rounds])),
        "get_vs_copy": _rounded(median([r.get / r.copy for r in rounds])),
        "sendfile_vs_copy": _rounded(median([r.send / r.send_copy for r in rounds])),
        "ideal_vs_stored": _rounded(min(s.ideal / s.stored for s in sizes)),
        "resave_bytes": max(s.resave for s in sizes),
    }


def _rounded(value: float | None) -> float:
    if value is None:
        raise BenchError("no round was measured")
    return round(value, 3)


def _mb(count: int) -> str:
    return f"{count / 1e6:.1f}"


# --- the store's process --------------------------------------------------------------------------


class StoreServer:
    """A store's process, which may be killed and started again on the memory that it left."""

    def __init__(self, config: StoreConfig, folder: Path) -> None:
        self.config = config
        self._path = folder / "store.json"
        self._path.write_text(config.to_json())
        self._log_path = folder / "store.log"
        self._start()

    def _start(self) -> None:
        with self._log_path.open("ab") as log:
            command = [sys.executable, "-m", "engines.store", "--config", str(self._path)]
            self._process = subprocess.Popen(command, cwd=ROOT, stdout=log, stderr=log)
        _wait(self._process, self.config.port, self._log_path)

    def restart(self) -> None:
        """As after a crash."""
        self._process.kill()
        self._process.wait()
        self._start()

    def stop(self) -> None:
        self._process.terminate()
        self._process.wait(timeout=START_TIMEOUT_S)


@contextmanager
def serving_store(**settings: Any) -> Iterator[StoreServer]:
    """A store of its own on tmpfs, until the end of the block."""
    folder = Path(tempfile.mkdtemp(prefix="bench-store-", dir=MEMORY_FOLDER))
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    values: dict[str, Any] = {"session_manifests": 4096, **settings}
    try:
        server = StoreServer(StoreConfig(directory=str(folder / "hydra-bench"), port=port, **values), folder)
        try:
            yield server
        finally:
            server.stop()
    finally:
        shutil.rmtree(folder)


def _wait(process: subprocess.Popen[bytes], port: int, log_path: Path) -> None:
    deadline = time.monotonic() + START_TIMEOUT_S
    while time.monotonic() < deadline:
        if process.poll() is not None:
            raise BenchError(f"the store did not start: {log_path.read_text(errors='replace').strip()}")
        try:
            socket.create_connection(("127.0.0.1", port), timeout=1).close()
            return
        except OSError:
            time.sleep(0.05)
    raise BenchError("the store did not start in time")


# --- transfers ------------------------------------------------------------------------------------


async def _transfers(config: StoreConfig, options: argparse.Namespace) -> list[Round]:
    size = options.object_mb * MB
    source = np.frombuffer(secrets.token_bytes(size * options.objects), dtype=np.uint8).copy()
    target = np.zeros_like(source)
    rounds = []
    async with (
        StoreClient("127.0.0.1", config.port, name="bench") as first,
        StoreClient("127.0.0.1", config.port, name="bench") as second,
    ):
        for number in range(options.rounds + 1):
            source[::size] = number  # other objects than the last round's
            rounds.append(await _round((first, second), source, target, size))
            if not np.array_equal(source, target):
                raise BenchError("what came back is not what was stored")
    return rounds[1:]  # the first one takes the pages


async def _round(clients: Sequence[StoreClient], source: np.ndarray, target: np.ndarray, size: int) -> Round:
    places = range(0, len(source), size)
    copy_s = _timed(lambda: [np.copyto(target[at : at + size], source[at : at + size]) for at in places])
    began = time.perf_counter()
    hashes = await _put_all(clients, [source[at : at + size] for at in places])
    put_s = time.perf_counter() - began
    client = clients[0]
    manifest = _manifest([(text, size, "block") for text in hashes])
    await client.put_manifest("bench/round", manifest)
    target[:] = 0
    began = time.perf_counter()
    async with client.held("bench/round") as held:
        for place, at in zip(held.places, places, strict=True):
            client.slabs.read_into(place, held.lease, memoryview(target[at : at + size]))
    get_s = time.perf_counter() - began
    send_copy_s = await asyncio.to_thread(_plain_copy_s, source, target)
    target[:] = 0
    began = time.perf_counter()
    async with client.get("bench/round") as incoming:
        await incoming.read_into(memoryview(target))
    send_s = time.perf_counter() - began
    return Round(*(len(source) / 1e9 / seconds for seconds in (copy_s, put_s, get_s, send_copy_s, send_s)))


async def _put_all(clients: Sequence[StoreClient], objects: Sequence[np.ndarray]) -> list[str]:
    """Two connections take turns, so that one object is written while the store proves another; an engine saves likewise."""
    hashes = [""] * len(objects)

    async def every_other(start: int) -> None:
        for place in range(start, len(objects), len(clients)):
            hashes[place] = await _put(clients[start], objects[place])

    await asyncio.gather(*(every_other(start) for start in range(len(clients))))
    return hashes


async def _put(client: StoreClient, data: np.ndarray) -> str:
    async with client.writing(len(data), "block") as writing:
        writing.view[:] = memoryview(data)
        return await writing.commit()


def _timed(work: Any) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


_SENDER = """
import socket, sys
connection = socket.create_connection(("127.0.0.1", int(sys.argv[1])))
data = memoryview(bytearray(int(sys.argv[2])))
data[:] = b"x" * len(data)
connection.recv(1)
connection.sendall(data)
"""


def _plain_copy_s(source: np.ndarray, target: np.ndarray) -> float:
    """The same number of bytes from another process's memory over loopback, by send and recv and nothing else."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        command = [sys.executable, "-c", _SENDER, str(server.getsockname()[1]), str(len(source))]
        with subprocess.Popen(command) as sender:
            connection, _ = server.accept()
            with connection:
                connection.sendall(b"!")
                began = time.perf_counter()
                view, done = memoryview(target), 0
                while done < len(view):
                    count = connection.recv_into(view[done:])
                    if not count:
                        raise BenchError(f"the sender ended with {sender.wait()}")
                    done += count
                return time.perf_counter() - began


# --- what is stored -------------------------------------------------------------------------------


@dataclass(frozen=True)
class Sizes:
    """Bytes: what the manifests name, each token and checkpoint once, what the slabs gave for them, what a re-save added."""

    shape: str
    logical: int
    ideal: int
    stored: int
    resave: int


class Writer:
    """Made-up sessions: token ranges whose bytes follow from their numbers."""

    def __init__(self, client: StoreClient, shape: Shape) -> None:
        self._client = client
        self._shape = shape
        self.ideal: dict[str, int] = {}

    async def save(self, name: str, session: str, shared: int, tokens: int, checkpoints: Sequence[int]) -> None:
        """`tokens` tokens, of which the first `shared` are the same in every session."""
        shape = self._shape
        whole = tokens // shape.block_tokens
        pieces: list[tuple[str, int, str]] = []
        for block in range(whole):
            owner = "all" if (block + 1) * shape.block_tokens <= shared else session
            pieces.append((f"{shape.name}/{owner}/{block}", shape.block_bytes, "block"))
        tail = tokens - whole * shape.block_tokens
        if tail:
            pieces.append((f"{shape.name}/{session}/tail/{tokens}", tail * shape.token_bytes, "tail"))
        pieces += [(f"{shape.name}/all/at/{at}", shape.checkpoint_bytes, "checkpoint") for at in checkpoints]
        self._count(session, shared, tokens, checkpoints)
        chunks = [(await self._piece(key, size, kind), size, kind) for key, size, kind in pieces]
        answer = await self._client.put_manifest(name, _manifest(chunks, n_past=tokens, session=session))
        if not answer.written:
            raise BenchError(f"{len(answer.missing_hashes)} objects of {name} went before it was saved")

    def _count(self, session: str, shared: int, tokens: int, checkpoints: Sequence[int]) -> None:
        self.ideal["all"] = max(self.ideal.get("all", 0), min(shared, tokens) * self._shape.token_bytes)
        own = max(0, tokens - shared) * self._shape.token_bytes
        self.ideal[session] = max(self.ideal.get(session, 0), own)
        self.ideal |= {f"at/{at}": self._shape.checkpoint_bytes for at in checkpoints}

    async def _piece(self, key: str, size: int, kind: str) -> str:
        async with self._client.writing(size, kind, blake3.blake3(key.encode()).hexdigest()) as writing:
            if not writing.present:
                seed = int.from_bytes(blake3.blake3(key.encode()).digest(8), "little")
                writing.view[:] = np.random.default_rng(seed).bytes(size)
            return await writing.commit()


async def _dedup(config: StoreConfig, shape: Shape) -> Sizes:
    async with StoreClient("127.0.0.1", config.port, name="bench") as client:
        for name in await client.list():
            await client.delete(name)
        before = await client.store_info()
        writer = Writer(client, shape)
        step = shape.block_tokens
        cut = [2 * step] if shape.checkpoint_bytes else []
        # One session that grows by an uneven number of tokens each time; only its last manifest is kept, as an engine does.
        for turn in range(GROWING_SAVES):
            await writer.save("bench/grown", "grown", 2 * step, 8 * step + turn * (step // 2 + 13), cut)
        for number in range(SHARING_SESSIONS):
            await writer.save(f"bench/{number}", f"s{number}", 8 * step, 10 * step + 31 * number, cut)
        after = await client.store_info()
        last = 8 * step + (GROWING_SAVES - 1) * (step // 2 + 13)
        await writer.save("bench/grown", "grown", 2 * step, last, cut)
        again = await client.store_info()
        return Sizes(
            shape.name,
            int(after.status["logical_bytes"]),
            sum(writer.ideal.values()),
            _used(after) - _used(before),
            _used(again) - _used(after),
        )


def _used(info: StoreInfoAnswer) -> int:
    """Bytes of slabs that are not free: objects in whole pages, and manifests."""
    return int(info.status["slab_bytes"] - info.status["free_bytes"])


def _manifest(chunks: Sequence[tuple[str, int, str]], n_past: int = 1, session: str = "") -> Manifest:
    rows = tuple(ManifestChunk(index, text, size, kind) for index, (text, size, kind) in enumerate(chunks))
    return Manifest(n_past, sum(row.size for row in rows), "bench", "", "", rows, session=session)
