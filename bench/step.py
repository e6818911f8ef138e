"""Where a step's time goes: `python -m bench step`.

One context of our engine's own form, one row for each stream, no sampling. llama.cpp shows its graph's operations one by one
while it computes them, so each is waited for alone: kernels that would run as one, and a graph that would be replayed, are not.
That costs every operation the same few microseconds (the cheapest one tells how many), and what an operation takes above that
stands by its own. The step as it runs when nobody looks stands in the first line. llama.cpp is LLAMA_CPP_LIB_PATH's.
"""

from __future__ import annotations

import argparse
import ctypes
import re
import statistics
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import llama_cpp
import numpy as np

from bench.errors import BenchError
from bench.report import print_table
from bench.servers import compute_threads, model_path
from engines.config import EngineConfig
from engines.runtime import ggml, llama_log
from engines.runtime.context_params import ContextParams
from engines.runtime.llama import Batch
from engines.runtime.placement import place

# They move nothing, and are no work of a device.
VIEWS = frozenset({"NONE", "VIEW", "RESHAPE", "PERMUTE", "TRANSPOSE"})
WARM_UP_STEPS = 4
SHOWN_PARTS = 24


class Tensor(ctypes.Structure):
    """The beginning of ggml.h's `ggml_tensor`."""

    _fields_ = [
        ("type", ctypes.c_int),
        ("buffer", ctypes.c_void_p),
        ("ne", ctypes.c_int64 * 4),
        ("nb", ctypes.c_size_t * 4),
        ("op", ctypes.c_int),
        ("op_params", ctypes.c_int32 * 16),
        ("flags", ctypes.c_int32),
        ("src", ctypes.c_void_p * 10),
    ]


@dataclass
class Watch:
    """What llama.cpp calls before and after each operation. While it is off, a graph is computed as a whole."""

    on: bool = False
    # By part: seconds of each of its operations, one after another.
    seconds: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    _names: dict[int, str | None] = field(default_factory=dict)
    _began_at: float = 0.0

    def seen(self, address: int, is_question: bool, _user_data: object) -> bool:
        if not self.on:
            return False
        part = self._part(address)
        if not is_question:
            if part is not None:
                self.seconds[part].append(time.perf_counter() - self._began_at)
            return True
        self._began_at = time.perf_counter()
        return part is not None

    def _part(self, address: int) -> str | None:
        """The operation and what it works with, the same for all layers; None for one that moves nothing."""
        if address not in self._names:
            operation = text_of("ggml_op_desc", address)
            weights = Tensor.from_address(address).src[0]
            name = text_of("ggml_get_name", weights) if weights else ""
            if not name.endswith(".weight"):
                name = text_of("ggml_get_name", address)
            name = re.sub(r"^blk\.\d+\.|\.weight$|-\d+|_l\d+|node_\d+|leaf_\d+| \(.*\)$", "", name)
            self._names[address] = None if operation in VIEWS else f"{operation} {name}".strip()
        return self._names[address]

    def begin(self) -> None:
        """A graph that is built anew may have other tensors at the same places."""
        self._names.clear()


def text_of(function: str, address: int) -> str:
    raw: bytes = ggml.function(function, ctypes.c_char_p, ctypes.c_void_p)(address)
    return raw.decode("utf-8", "replace")


class Stepper:
    """A context whose streams all hold as many random tokens, and take one more with each step."""

    def __init__(self, context: Any, streams: int, vocabulary: int, batch_tokens: int) -> None:
        self._context, self._streams, self._vocabulary = context, streams, vocabulary
        self._batch = Batch(max(batch_tokens, streams))
        self._random = np.random.default_rng(0)
        self._length = 0

    def _tokens(self, count: int) -> list[int]:
        return [int(token) for token in self._random.integers(0, self._vocabulary, count)]

    def fill(self, tokens: int) -> None:
        for stream in range(self._streams):
            for start in range(0, tokens, self._batch.capacity):
                self._batch.clear()
                part = self._tokens(min(self._batch.capacity, tokens - start))
                self._batch.add(stream, start, part, outputs=0)
                self._decode()
        self._length = tokens

    def step(self) -> float:
        """Seconds until the device is done."""
        self._batch.clear()
        for stream, token in enumerate(self._tokens(self._streams)):
            self._batch.add(stream, self._length, [token], outputs=1)
        began_at = time.perf_counter()
        self._decode()
        self._length += 1
        return time.perf_counter() - began_at

    def _decode(self) -> None:
        status = llama_cpp.llama_decode(self._context, self._batch.native)
        llama_cpp.llama_synchronize(self._context)
        if status:
            raise BenchError(f"llama.cpp refused a step: {status}")


def add_arguments(command: argparse.ArgumentParser) -> None:
    command.add_argument("--model", default="synthetic:hybrid", help="smollm2, synthetic:NAME or a path")
    command.add_argument("--streams", default="1,8,32", help="rows of a step, by commas")
    command.add_argument("--context", type=int, default=128, help="tokens that each stream holds before")
    command.add_argument("--steps", type=int, default=16, help="steps that are looked at, and as many that are not")
    command.add_argument("--threads", type=int, default=0, help="compute threads; 0: all cores but one")
    command.add_argument("--gpu-layers", type=int, default=0, help="layers on the GPU; -1: all")


def run(options: argparse.Namespace) -> dict[str, Any]:
    """Prints a table for each number of streams, and returns the object of the last line: milliseconds of a step as it runs, and
    of its dearest parts."""
    llama_log.install()
    llama_cpp.llama_backend_init()
    path = str(model_path(options.model))
    counts = [int(count) for count in options.streams.split(",")]
    answer: dict[str, Any] = {"step_ms": {}, "parts_ms": {}}
    with _loaded(_config(options, path, max(counts))) as model:
        for streams in counts:
            whole_s, watch = _measured(options, _config(options, path, streams), model, streams)
            parts = _parts(watch, options.steps)
            _print(streams, options.context, whole_s, parts)
            answer["step_ms"][str(streams)] = round(1e3 * whole_s, 3)
            dearest = sorted(parts.items(), key=lambda item: -item[1].total_s)[:8]
            answer["parts_ms"][str(streams)] = {name: round(1e3 * part.total_s, 3) for name, part in dearest}
    return answer


def _config(options: argparse.Namespace, path: str, streams: int) -> EngineConfig:
    context_tokens = options.context + 2 * options.steps + 2 * WARM_UP_STEPS
    return EngineConfig(
        model_path=path,
        model_name="step",
        slots=streams,
        context_tokens=context_tokens,
        gpu_layers=options.gpu_layers,
        threads=compute_threads(options.threads),
    )


@contextmanager
def _loaded(config: EngineConfig) -> Iterator[Any]:
    placement = place(config)  # llama.cpp reads its arrays as long as the model lives
    model = llama_cpp.llama_model_load_from_file(config.model_path.encode(), placement.native)
    if not model:
        raise BenchError(f"llama.cpp could not load {config.model_path}")
    try:
        yield model
    finally:
        llama_cpp.llama_model_free(model)


def _measured(options: argparse.Namespace, config: EngineConfig, model: Any, streams: int) -> tuple[float, Watch]:
    watch = Watch()
    kind = ctypes.CFUNCTYPE(ctypes.c_bool, ctypes.c_void_p, ctypes.c_bool, ctypes.c_void_p)
    seen = kind(watch.seen)
    params = ContextParams(config, config.threads)
    params.native.cb_eval = ctypes.cast(seen, type(params.native.cb_eval))
    context = llama_cpp.llama_init_from_model(model, params.native)
    if not context:
        raise BenchError(f"llama.cpp could not make a context for {streams} streams")
    try:
        vocabulary = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(model))
        stepper = Stepper(context, streams, vocabulary, config.micro_batch_tokens)
        stepper.fill(options.context)
        taken = [stepper.step() for _ in range(WARM_UP_STEPS + options.steps)][WARM_UP_STEPS:]
        watch.on = True
        for index in range(WARM_UP_STEPS + options.steps):
            watch.begin()
            if index == WARM_UP_STEPS:
                watch.seconds.clear()
            stepper.step()
        return statistics.median(taken), watch
    finally:
        llama_cpp.llama_free(context)
        params.close()


@dataclass(frozen=True)
class Part:
    """One kind of operation in a step: how many there are, what they take together, and above what the cheapest one takes."""

    count: float
    total_s: float
    above_s: float


def _parts(watch: Watch, steps: int) -> dict[str, Part]:
    floor_s = min(statistics.median(taken) for taken in watch.seconds.values())
    return {
        name: Part(len(taken) / steps, sum(taken) / steps, sum(max(0.0, one - floor_s) for one in taken) / steps)
        for name, taken in watch.seconds.items()
    }


def _print(streams: int, context_tokens: int, whole_s: float, parts: dict[str, Part]) -> None:
    ordered = sorted(parts.items(), key=lambda item: -item[1].above_s)
    watched = Part(*(sum(getattr(part, name) for _, part in ordered) for name in ("count", "total_s", "above_s")))
    rows = [
        _row("as it runs", "", whole_s, None),
        _row("looked at", f"{watched.count:.0f}", watched.total_s, watched.above_s),
    ]
    rows += [_row(name, f"{part.count:.0f}", part.total_s, part.above_s) for name, part in ordered[:SHOWN_PARTS]]
    title = f"{streams} streams of {context_tokens} tokens: a step"
    print_table(title, ["part", "operations", "ms", "ms above the cheapest"], rows)


def _row(name: str, count: str, total_s: float, above_s: float | None) -> Sequence[str]:
    return [name, count, f"{1e3 * total_s:.3f}", "" if above_s is None else f"{1e3 * above_s:.3f}"]
