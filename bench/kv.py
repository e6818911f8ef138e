"""`python -m bench kv`: a slot's state out of one engine until a second process can read every proved block, and into an engine
there, against copying the same bytes in the same rounds; and what a stream beside it feels.

Blocks pass through tmpfs, each with a 128-bit checksum that is made when it is written and looked at when it is taken in, as a
store does; "reread" is the export with the other process computing every checksum again before the next block counts.
`--proof blake3` takes the digest that names blocks beyond a host, `none` shows what the way alone takes. On a GPU the copy is one
between it and page-locked memory. The state is made up (finite random rows), so that a gigabyte takes no prefill. Of all rounds
the best time counts, on both sides: on a machine with other work the rest says how busy that was.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import sys
import time
from collections import deque
from collections.abc import AsyncIterator, Generator
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import uvloop

from bench.errors import BenchError
from bench.kv_channel import PLACE, OtherProcess
from bench.kv_copy import Copies, copies
from bench.kv_forge import forge
from bench.kv_trace import Span, Trace, print_figures
from bench.measures import median, percentile
from bench.report import print_table
from bench.servers import compute_threads, model_path
from engines.config import EngineConfig
from engines.runtime.__main__ import SWITCH_INTERVAL_S
from engines.runtime.arena import ALIGNMENT_BYTES, Arena, Buffer
from engines.runtime.core import EngineCore
from engines.runtime.generation import Generation, Mailbox
from engines.runtime.metrics import EngineMetrics
from engines.runtime.prefix import PrefixCache
from engines.runtime.sampler import SamplingParams
from engines.runtime.state_desk import ARENA_BYTES, StateDesk
from engines.runtime.state_export import ExportedPiece, ExportedState
from engines.runtime.state_forms import Proof, checksum_of, digest_of
from engines.runtime.state_snapshot import Manifest


def no_proof(_data: memoryview) -> bytes:
    """What the way itself takes: nothing is proved."""
    return b""


PROOFS: dict[str, Proof] = {"xxh3": checksum_of, "blake3": digest_of, "none": no_proof}
NEIGHBOUR_TOKENS = 150
NEIGHBOUR_ROUNDS = 3
# Buffers for blocks of this many tokens, whatever the model: four of them are under way.
SMALLEST_BLOCK_TOKENS, LARGEST_BLOCK_TOKENS = 64, 4096
COLUMNS = ("export_vs_copy", "import_vs_copy", "reread_vs_copy", "neighbour_p99_ratio")
RATES = ("export_gb_s", "import_gb_s", "copy_gb_s", "import_copy_gb_s")


@dataclass(frozen=True)
class Round:
    """Seconds of one round; `import_s` and `import_copy_s` were measured in the other process."""

    export_s: float
    reread_s: float
    import_s: float
    copy_s: float
    import_copy_s: float


@dataclass(frozen=True)
class Case:
    """A state in blocks of `block_tokens` (0: the engine's own)."""

    model: str
    kv_type: str
    tokens: int
    block_tokens: int


@dataclass(frozen=True)
class Pair:
    """What the cases of one model and K/V type share on this side. States lie on the `shelf` for the other one."""

    core: EngineCore
    desk: StateDesk
    prove: Proof
    plain: Copies
    shelf: Arena
    traced: list[dict[str, Any]] | None
    """What one more round of each case looked like, where that is asked for."""


def add_arguments(command: argparse.ArgumentParser) -> None:
    command.add_argument("--model", default="synthetic:kv", help="smollm2, synthetic:NAME or a path; several by commas")
    command.add_argument("--kv-types", default="f16", help="f16, q8_0, or both by commas")
    command.add_argument("--state-mb", type=int, default=128, help="about how large the state is")
    command.add_argument("--contexts", default="", help="tokens of the state instead, several by commas")
    command.add_argument(
        "--blocks", default="0,64,256,1024", help="tokens of a block, several by commas; 0: the engine's own"
    )
    command.add_argument("--proof", choices=sorted(PROOFS), default="xxh3", help="how blocks are proved")
    command.add_argument("--rounds", type=int, default=7)
    command.add_argument("--threads", type=int, default=0, help="compute threads of each engine; 0: all cores but one")
    command.add_argument("--gpu-layers", type=int, default=0, help="layers on the GPU in both; -1: all")
    command.add_argument("--budget-s", type=float, default=float("inf"), help="no case is begun after this")
    command.add_argument("--trace", type=Path, help="file for when each piece was copied, proved and handed on")
    command.add_argument("--out", type=Path, help="file for the answer, besides the last line")


def run(options: argparse.Namespace) -> dict[str, Any]:
    usual_s = sys.getswitchinterval()
    sys.setswitchinterval(SWITCH_INTERVAL_S)  # as an engine's process does
    try:
        traced: list[dict[str, Any]] | None = [] if options.trace else None
        cases = uvloop.run(_measure_all(options, time.monotonic() + options.budget_s, traced))
    finally:
        sys.setswitchinterval(usual_s)
    if not cases:
        raise BenchError("there was no time for a single case")
    shown = ("model", "kv_type", "tokens", "block_tokens", *COLUMNS, *RATES, "state_mb")
    rows = [[f"{case[key]:.2f}" if isinstance(case[key], float) else str(case[key]) for key in shown] for case in cases]
    print_table(f"State in blocks, proved by {options.proof}", [key.replace("_", " ") for key in shown], rows)
    if traced:
        print_figures(traced)
        options.trace.write_text(json.dumps(traced))
    first = {key: round(cases[0][key], 3) for key in COLUMNS}
    answer = {**first, "proof": options.proof, "blocks": cases}
    if options.out:
        options.out.write_text(json.dumps(answer))
    return answer


async def _measure_all(
    options: argparse.Namespace, ends_at: float, traced: list[dict[str, Any]] | None
) -> list[dict[str, Any]]:
    found = []
    for model in options.model.split(","):
        path = str(model_path(model))
        for kv_type in options.kv_types.split(","):
            if time.monotonic() < ends_at:
                found += await _measure_pair(options, model, path, kv_type, ends_at, traced)
    return found


async def _measure_pair(
    options: argparse.Namespace,
    model: str,
    path: str,
    kv_type: str,
    ends_at: float,
    traced: list[dict[str, Any]] | None,
) -> list[dict[str, Any]]:
    """All contexts and blocks of one model and K/V type, on two engines that stay."""
    config = EngineConfig(
        path, "bench", slots=2, threads=options.threads, gpu_layers=options.gpu_layers, kv_type_k=kv_type,
        kv_type_v=kv_type, put_away_idle=False, host_cache_bytes=0, log_level="WARNING",
    )  # fmt: skip
    contexts = [int(text) for text in options.contexts.split(",") if text]
    if not contexts:
        async with engine(replace(config, context_tokens=512)) as (core, _):
            contexts = [max(256, options.state_mb * 1_000_000 // _token_bytes(core))]
    longest, found = max(contexts), []
    config = replace(config, context_tokens=longest, cache_tokens=longest + 2 * NEIGHBOUR_TOKENS + 512)
    async with engine(config) as (core, desk):
        shelf = Arena(await _most_bytes(core, desk, longest))
        pair = Pair(core, desk, PROOFS[options.proof], copies(shelf.size_bytes, options.gpu_layers), shelf, traced)
        try:
            with OtherProcess(config, options.proof) as other:
                for tokens in contexts:
                    await forge(core, tokens)
                    for block_tokens in (int(text) for text in options.blocks.split(",")):
                        if time.monotonic() < ends_at:
                            case = Case(model, kv_type, tokens, block_tokens)
                            found.append(await _measure(case, options.rounds, pair, other))
        finally:
            pair.plain.close()
            shelf.close()
    return found


async def _most_bytes(core: EngineCore, desk: StateDesk, tokens: int) -> int:
    """What a state of so many tokens takes in pieces, however small."""
    await forge(core, tokens)
    return (await desk.meta(0)).state_bytes + (tokens // SMALLEST_BLOCK_TOKENS + 3) * 2 * ALIGNMENT_BYTES


async def _measure(case: Case, count: int, pair: Pair, other: OtherProcess) -> dict[str, Any]:
    async with await pair.desk.export(0, block_tokens=case.block_tokens) as state:
        manifest = state.manifest
    size = manifest.total_bytes
    await _round(case, pair, other, look=True)
    rounds = [await _round(case, pair, other) for _ in range(count)]
    if pair.traced is not None:
        pair.traced.extend(await _traced_round(case, pair, other))
    best = {name: min(getattr(one, name) for one in rounds) for name in Round.__dataclass_fields__}
    return {
        "model": case.model.removeprefix("synthetic:"),
        "kv_type": case.kv_type,
        "tokens": case.tokens,
        "block_tokens": max(piece.tokens for piece in manifest.pieces if piece.kind == "block"),
        "export_vs_copy": best["copy_s"] / best["export_s"],
        "import_vs_copy": best["import_copy_s"] / best["import_s"],
        "reread_vs_copy": best["copy_s"] / best["reread_s"],
        "neighbour_p99_ratio": await _neighbour_ratio(
            pair.core, pair.desk, case.block_tokens, min(count, NEIGHBOUR_ROUNDS)
        ),
        "export_vs_copy_median": median([one.copy_s / one.export_s for one in rounds]) or 0.0,
        "import_vs_copy_median": median([one.import_copy_s / one.import_s for one in rounds]) or 0.0,
        **{key: size / 1e9 / best[key.replace("_gb_s", "_s")] for key in RATES},
        "state_mb": size / 1e6,
    }


# --- an engine in this process -------------------------------------------------------------------


@asynccontextmanager
async def engine(config: EngineConfig) -> AsyncIterator[tuple[EngineCore, StateDesk]]:
    core = EngineCore(config, compute_threads(config.threads), asyncio.get_running_loop(), EngineMetrics())
    core.start()
    desk: StateDesk | None = None
    try:
        while core.state == "loading":
            await core.changed.wait()
            core.changed.clear()
        if core.state != "ready" or core.codec is None:
            raise BenchError(f"the engine cannot share state: {core.failure or core.sharing_refusal}")
        largest_bytes = min(LARGEST_BLOCK_TOKENS, config.context_tokens) * _token_bytes(core)
        desk = StateDesk(core, max(ARENA_BYTES, 4 * largest_bytes))
        yield core, desk
    finally:
        core.stop()
        if desk is not None:
            desk.close()
        await asyncio.to_thread(core.join, 20)


def _token_bytes(core: EngineCore) -> int:
    assert core.codec is not None
    return core.codec.layout.attention.token_bytes


# --- the measurements ----------------------------------------------------------------------------


async def _round(case: Case, pair: Pair, other: OtherProcess, *, look: bool = False) -> Round:
    """`look`: what the other engine took in must be what left this one. Raises BenchError."""
    async with await pair.desk.export(0, block_tokens=case.block_tokens) as state:
        copy_s = pair.plain.out_s(state.manifest.total_bytes)
        export_s = await _exported(state, other, pair.prove, reread=False)
        reread_s = await _exported(state, other, pair.prove, reread=True)
        pieces = state.pieces(pair.prove)
        import_s, import_copy_s = await _imported(case, state.manifest, pieces, pair.shelf, other, look=look)
    return Round(export_s, reread_s, import_s, copy_s, import_copy_s)


async def _traced_round(case: Case, pair: Pair, other: OtherProcess) -> list[dict[str, Any]]:
    name = f"{case.model.removeprefix('synthetic:')} {case.kv_type} {case.tokens}"
    async with await pair.desk.export(0, block_tokens=case.block_tokens) as state:
        with Trace().watching(pair.core.codec) as out:
            out_s = await _exported(state, other, out.proof(pair.prove), reread=False, trace=out)
        pieces = state.pieces(pair.prove)
        answer = await _taken_in(case, state.manifest, pieces, pair.shelf, other, look=False, trace=True)
    into = Trace(Span(**span) for span in answer["spans"])
    count = len(state.manifest.pieces)
    return [
        {"case": name, "way": way, "figures": trace.figures(elapsed_s, count), "spans": trace.told()}
        for way, trace, elapsed_s in (("export", out, out_s), ("import", into, float(answer["import_s"])))
    ]


async def _exported(
    state: ExportedState, other: OtherProcess, prove: Proof, *, reread: bool, trace: Trace | None = None
) -> float:
    """Seconds until the other process has seen every block, of which a few are on their way at a time."""
    other.begin(b"V", {"path": str(state.arena.path), "reread": reread})
    began = time.perf_counter()
    kept: deque[Buffer] = deque()
    async for exported in state.pieces(prove):
        other.send(PLACE.pack(exported.buffer.offset, exported.data.nbytes, exported.proof))
        kept.append(exported.buffer)
        if trace:
            trace.note("hand on", exported.data, time.perf_counter())
        for _ in range(await other.seen()):
            kept.popleft().free()
    other.send(PLACE.pack(0, 0, b""))
    await other.all_seen()
    elapsed_s = time.perf_counter() - began
    for buffer in kept:
        buffer.free()
    return elapsed_s


async def _imported(
    case: Case,
    manifest: Manifest,
    pieces: AsyncIterator[ExportedPiece],
    shelf: Arena,
    other: OtherProcess,
    *,
    look: bool,
) -> tuple[float, float]:
    answer = await _taken_in(case, manifest, pieces, shelf, other, look=look)
    return float(answer["import_s"]), float(answer["copy_s"])


async def _taken_in(
    case: Case,
    manifest: Manifest,
    pieces: AsyncIterator[ExportedPiece],
    shelf: Arena,
    other: OtherProcess,
    *,
    look: bool,
    trace: bool = False,
) -> dict[str, Any]:
    """Lays all pieces into tmpfs, as a store would hold them, and has the other process take them in."""
    places: list[Buffer] = []
    proofs = []
    async for exported in pieces:
        with exported.buffer:
            place = await shelf.take(exported.data.nbytes)
            place.data[:] = exported.data
            places.append(place)
            proofs.append(exported.proof.hex())
    order = {
        "path": str(shelf.path),
        "look": look,
        "trace": trace,
        "block_tokens": case.block_tokens,
        "manifest": manifest.to_json().decode(),
        "places": [(place.offset, place.data.nbytes, proof) for place, proof in zip(places, proofs, strict=True)],
    }
    answer = await asyncio.to_thread(other.ask, b"I", order)
    for place in places:
        place.free()
    if not answer["same"]:
        raise BenchError("the other engine holds other bytes than it was given")
    return answer


async def _neighbour_ratio(core: EngineCore, desk: StateDesk, block_tokens: int, rounds: int) -> float:
    """The 99th percentile of a stream's gaps while states leave all the time, over that without; in turns, so that other
    work of the machine falls on both."""
    await _gaps(core)  # the first answer of a fresh engine is slower
    alone: list[float] = []
    beside: list[float] = []
    for _ in range(rounds):
        alone += await _gaps(core)
        stop = asyncio.Event()
        exports = asyncio.ensure_future(_export_on(desk, block_tokens, stop))
        beside += await _gaps(core)
        stop.set()
        await exports
    return percentile(beside, 0.99) / percentile(alone, 0.99)


async def _export_on(desk: StateDesk, block_tokens: int, stop: asyncio.Event) -> None:
    while not stop.is_set():
        async with await desk.export(0, block_tokens=block_tokens) as state:
            async for exported in state.pieces(checksum_of):
                exported.buffer.free()
                if stop.is_set():
                    break


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
