"""llama.cpp's own account of its memory, of a loaded model and of one that is only simulated.

With `no_alloc` llama.cpp reads a file's metadata, plans every buffer and allocates none but the recurrent state and the
output rows, so a simulation costs milliseconds and comes out at the bytes that loading will take. Its account is one C++
function that returns a std::map; the node layout read here is that of libstdc++, in which every build of ours is linked.
"""

from __future__ import annotations

import ctypes
import re
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any

import llama_cpp

from engines.config import EngineConfig
from engines.errors import ModelLoadFailed
from engines.runtime import ggml, host_memory, llama_log
from engines.runtime.context_params import ContextParams, DraftContextParams
from engines.runtime.host_memory import Room
from engines.runtime.media_memory import projector_bytes
from engines.runtime.memory_need import HOST, DeviceNeed, MemoryNeed
from engines.runtime.placement import Placement, place

_BREAKDOWN = "_Z26llama_get_memory_breakdownPK13llama_context"
_TENSORS = "_Z29llama_internal_get_tensor_mapB5cxx11PK11llama_model"
_BUFFER_TYPES_LIMIT = 256
# The recurrent state of a simulated context is really allocated; beyond this, fewer sequences are simulated.
SIMULATED_STATE_BYTES = 1 << 30
# So is its table of cells, some 60 bytes each; beyond this, fewer cells are simulated.
SIMULATED_CELLS = 1 << 20
# A context that only shows whether the model keeps what it reads.
PROBED_TOKENS = 32
_SIZE_LINE = re.compile(r"(\S+)\s+(RS|output) buffer size = +([\d.]+) MiB")


class _Node(ctypes.Structure):
    pass


_Node._fields_ = [
    ("color", ctypes.c_int),
    ("parent", ctypes.c_void_p),
    ("left", ctypes.POINTER(_Node)),
    ("right", ctypes.POINTER(_Node)),
    ("buffer_type", ctypes.c_void_p),
    ("model", ctypes.c_size_t),
    ("context", ctypes.c_size_t),
    ("compute", ctypes.c_size_t),
]


class _Map(ctypes.Structure):
    _fields_ = [
        ("compare", ctypes.c_size_t),
        ("color", ctypes.c_int),
        ("root", ctypes.POINTER(_Node)),
        ("first", ctypes.c_void_p),
        ("last", ctypes.c_void_p),
        ("count", ctypes.c_size_t),
    ]


class _NamedTensor(ctypes.Structure):
    """std::pair<std::string, ggml_tensor *>."""

    _fields_ = [("name", ctypes.c_char * 32), ("tensor", ctypes.c_void_p)]


class _TensorVector(ctypes.Structure):
    _fields_ = [("begin", ctypes.c_void_p), ("end", ctypes.c_void_p), ("capacity_end", ctypes.c_void_p)]


class _TensorFront(ctypes.Structure):
    """The first two fields of ggml_tensor."""

    _fields_ = [("type", ctypes.c_int), ("buffer", ctypes.c_void_p)]


@dataclass(frozen=True)
class Buffers:
    """All buffers of one type: weights, cells (KV and recurrent state) and compute, in bytes."""

    buffer_type: int
    weights_bytes: int
    cells_bytes: int
    compute_bytes: int


def buffers(context: Any) -> list[Buffers]:
    """llama.cpp's account of a context and its model. Raises ModelLoadFailed if this libllama does not give it."""
    account = _Map()
    # A class with a destructor is returned through a pointer that comes before the arguments. Its few nodes, some dozen
    # bytes each, are not freed: their operator delete is that of the C++ runtime libllama was linked to.
    _cxx_function(_BREAKDOWN, None, ctypes.POINTER(_Map), ctypes.c_void_p)(ctypes.byref(account), context)
    if account.count > _BUFFER_TYPES_LIMIT:
        raise ModelLoadFailed("libllama's memory account has a layout that is not known here")
    found, waiting = [], [account.root]
    while waiting:
        node = waiting.pop()
        if node:
            entry = node.contents
            found.append(Buffers(entry.buffer_type, entry.model, entry.context, entry.compute))
            waiting += [entry.left, entry.right]
    return found


def _cxx_function(name: str, result: Any, *arguments: Any) -> Any:
    try:
        return ggml.function(name, result, *arguments)
    except AttributeError as error:
        raise ModelLoadFailed(
            f"libllama has no {name}; build it from the llama.cpp that the bindings vendor"
        ) from error


def mapped_weights(model: Any) -> int:
    """Bytes of a loaded model's tensors that lie in a mapped file.

    The mapped buffers themselves span from their first to their last tensor, and with them what lies between and was
    copied to a device: pages that nobody reads again.
    """
    size_of = ggml.function("ggml_nbytes", ctypes.c_size_t, ctypes.c_void_p)
    name_of = ggml.function("ggml_backend_buffer_name", ctypes.c_char_p, ctypes.c_void_p)
    total_bytes = 0
    for handle in _tensors(model):
        buffer = _TensorFront.from_address(handle).buffer
        if buffer and name_of(buffer).endswith(b"_Mapped"):
            total_bytes += size_of(handle)
    return total_bytes


def tensor_names(model: Any) -> set[str]:
    """The names of a loaded model's tensors, as its GGUF has them."""
    name_of = ggml.function("ggml_get_name", ctypes.c_char_p, ctypes.c_void_p)
    return {name_of(handle).decode("utf-8", "replace") for handle in _tensors(model)}


def _tensors(model: Any) -> set[int]:
    vector = _cxx_function(_TENSORS, ctypes.POINTER(_TensorVector), ctypes.c_void_p)(model).contents
    count = ((vector.end or 0) - (vector.begin or 0)) // ctypes.sizeof(_NamedTensor)
    tensors = (_NamedTensor * count).from_address(vector.begin) if count else ()
    return {entry.tensor for entry in tensors}


class Simulation:
    """A model that llama.cpp has planned but not loaded; contexts of it can be planned in milliseconds.

    Opening it reads the file's metadata and vocabulary (0.1 to 0.5 s for 152k tokens). Raises ModelLoadFailed, with
    llama.cpp's own reason, for what could not be loaded either.
    """

    def __init__(self, config: EngineConfig) -> None:
        self._cleanup = ExitStack()
        self._placement: Placement = place(config)
        params = type(self._placement.native).from_buffer_copy(self._placement.native)
        params.no_alloc = True
        params.load_mode = llama_cpp.LLAMA_LOAD_MODE_NONE
        with llama_log.collected(forward=False) as log:
            self._model = llama_cpp.llama_model_load_from_file(config.model_path.encode(), params)
        if not self._model:
            raise ModelLoadFailed(
                f"llama.cpp could not load {config.model_path}: {log.reason or 'it is no complete, supported GGUF'}"
            )
        self._cleanup.callback(llama_cpp.llama_model_free, self._model)
        self.layers: int = llama_cpp.llama_model_n_layer(self._model)
        self.draft_layers: int = llama_cpp.llama_model_n_layer_nextn(self._model)
        self.has_recurrent_state = bool(
            llama_cpp.llama_model_is_recurrent(self._model) or llama_cpp.llama_model_is_hybrid(self._model)
        )
        self.experts: int = _cxx_function("_Z20llama_model_n_expertPK11llama_model", ctypes.c_int, ctypes.c_void_p)(
            self._model
        )
        if not config.pooling and not self._writes_text():
            self.close()
            raise ModelLoadFailed(
                f"{config.model_path} reads text and writes none, as models for embeddings (pooling mean, cls or last)"
                " and for scores (pooling rank) do"
            )

    def _writes_text(self) -> bool:
        """Whether it goes on from what it has read. Of others llama.cpp aborts the process once few rows have results."""
        if llama_cpp.llama_model_has_encoder(self._model):
            return False
        if self.has_recurrent_state:
            return True
        params = llama_cpp.llama_context_default_params()
        params.n_ctx = params.n_batch = params.n_ubatch = params.n_outputs_max = PROBED_TOKENS
        params.flash_attn_type = llama_cpp.LLAMA_FLASH_ATTN_TYPE_DISABLED
        with llama_log.collected(forward=False):
            context = llama_cpp.llama_init_from_model(self._model, params)
        if not context:
            return True  # the context that is wanted will tell why
        has_memory = bool(llama_cpp.llama_get_memory(context))
        llama_cpp.llama_free(context)
        return has_memory

    def __enter__(self) -> Simulation:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Frees the planned model. Calling it twice is harmless."""
        self._cleanup.close()

    def need(self, config: EngineConfig) -> MemoryNeed:
        """What an engine of `config` takes; it may differ from the simulation's own in everything but the placement.

        Raises ModelLoadFailed if llama.cpp refuses to make such a context.
        """
        known = int(llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(self._model)))
        if config.samples_on_device and config.device_candidates > known:
            raise ModelLoadFailed(
                f"device_candidates is {config.device_candidates}; the model has {known} tokens in all"
            )
        sequences, cells = config.sequences, config.cells
        few = min(sequences, self._affordable_sequences(config)) if self.has_recurrent_state else sequences
        some = min(cells, SIMULATED_CELLS)
        parts = self._simulate(config, few, some)
        grown = parts
        if few < sequences:
            fewer = few // 2
            below = self._simulate(config, fewer, some) if fewer else _without_sequences(parts)
            grown = _added(grown, _difference(parts, below), (sequences - few) / (few - fewer))
        if some < cells:
            grown = _added(
                grown, _difference(parts, self._simulate(config, few, some // 2)), (cells - some) / (some // 2)
            )
        # The rows begin at one per sequence and grow to what a step may ask for.
        rows = max(config.outputs, sequences)
        host = grown.get(HOST, DeviceNeed())
        cache_bytes = 0 if config.pooling else config.host_cache_bytes
        host = replace(host, output_bytes=host.output_bytes * rows // sequences, cache_bytes=cache_bytes)
        needs = {**grown, HOST: host}
        for name, size_bytes in projector_bytes(config).items():
            needs[name] = needs.get(name, DeviceNeed()) + DeviceNeed(projector_bytes=size_bytes)
        return MemoryNeed(needs, estimated=few < sequences or some < cells)

    def _affordable_sequences(self, config: EngineConfig) -> int:
        """How many sequences' recurrent state may be allocated for a simulation, from what one takes."""
        one = self._simulate(config, 1, min(config.cells, SIMULATED_CELLS))
        state_bytes = sum(part.recurrent_bytes for part in one.values())
        bound_bytes = min(SIMULATED_STATE_BYTES, host_memory.host_room().free_bytes // 4)
        return max(1, bound_bytes // state_bytes) if state_bytes else config.sequences

    def _simulate(self, config: EngineConfig, sequences: int, cells: int) -> dict[str, DeviceNeed]:
        """Needs by device of a context like that of `config`, but for its number of sequences and cells."""
        with ExitStack() as stack:
            params = ContextParams(config, threads=1)  # anew each time: a sampler chain is attached once in its life
            stack.callback(params.close)
            params.native.n_ctx = cells
            params.native.n_seq_max = sequences
            params.native.n_samplers = min(params.native.n_samplers, sequences)
            with llama_log.collected(forward=False) as log:
                context = llama_cpp.llama_init_from_model(self._model, params.native)
            if not context:
                raise ModelLoadFailed(f"llama.cpp could not make a context of {config.cells} cells: {log.reason}")
            stack.callback(llama_cpp.llama_free, context)
            parts = _Account(log.lines, row_shares(config, self._placement))
            for entry in buffers(context):
                # Weights that are repacked for the CPU's kernels leave the file and get memory of their own.
                mapped = config.mmap and ggml.is_host_buffer_type(entry.buffer_type)
                parts.add(entry, mapped_bytes=entry.weights_bytes if mapped else 0)
            if config.wants_draft_head and self.draft_layers:
                parts.add_context(self._draft_context(stack, config, context, sequences, cells))
            return parts.devices

    def _draft_context(self, stack: ExitStack, config: EngineConfig, target: Any, sequences: int, cells: int) -> Any:
        params = DraftContextParams(config, 1, target)
        stack.callback(params.close)
        params.native.n_ctx += cells - config.cells
        params.native.n_seq_max = sequences
        params.native.n_samplers = min(params.native.n_samplers, sequences)
        with llama_log.collected(forward=False) as log:
            context = llama_cpp.llama_init_from_model(self._model, params.native)
        if not context:
            raise ModelLoadFailed(f"llama.cpp could not make a context for the draft head: {log.reason}")
        stack.callback(llama_cpp.llama_free, context)
        return context


def measured(
    model: Any, context: Any, lines: list[str], shares: Mapping[str, float], draft_context: Any = None
) -> MemoryNeed:
    """What a loaded model and its contexts hold, by llama.cpp's account; `lines` are those of making the first."""
    parts = _Account(lines, shares)
    for entry in buffers(context):
        if ggml.buffer_type_name(entry.buffer_type).endswith("_Mapped"):
            entry = replace(entry, weights_bytes=mapped_weights(model))
            parts.add(entry, mapped_bytes=entry.weights_bytes)
        else:
            parts.add(entry, mapped_bytes=0)
    if draft_context is not None:
        parts.add_context(draft_context)
    return MemoryNeed(parts.devices)


def row_shares(config: EngineConfig, placement: Placement) -> dict[str, float]:
    """Each device's share of tensors that are split by rows: as configured, else by the devices' sizes."""
    shares = dict(zip((device.name for device in placement.devices), config.tensor_split, strict=False))
    if not shares:
        shares = {device.name: float(ggml.device_memory(device.handle)[1]) for device in placement.devices}
    total = sum(shares.values())
    return {name: share / total for name, share in shares.items()} if total else {}


def rooms(placement: Placement) -> dict[str, Room]:
    """Free and total memory of the host and of every device the model may use."""
    found = {device.name: Room(*ggml.device_memory(device.handle)) for device in placement.devices}
    return {HOST: host_memory.host_room(), **found}


class _Account:
    """Sums buffers up by device. KV and recurrent state are one figure in llama.cpp's account; its log tells the latter."""

    def __init__(self, lines: list[str], shares: Mapping[str, float]) -> None:
        self.devices: dict[str, DeviceNeed] = {}
        self._shares = shares
        self._recurrent = _logged_sizes(lines, "RS")
        for name, size_bytes in _logged_sizes(lines, "output").items():
            self._add(name, DeviceNeed(output_bytes=size_bytes))

    def add(self, entry: Buffers, *, mapped_bytes: int) -> None:
        name = ggml.buffer_type_device(entry.buffer_type)
        recurrent_bytes = min(self._recurrent.get(name, 0), entry.cells_bytes)
        if "_Split" in ggml.buffer_type_name(entry.buffer_type) and self._shares:
            for device, share in self._shares.items():
                self._add(device, DeviceNeed(weights_bytes=int(entry.weights_bytes * share)))
            return
        need = DeviceNeed(
            weights_bytes=entry.weights_bytes,
            kv_bytes=entry.cells_bytes - recurrent_bytes,
            recurrent_bytes=recurrent_bytes,
            compute_bytes=entry.compute_bytes,
            mapped_bytes=mapped_bytes,
        )
        self._add(name, need)

    def add_context(self, context: Any) -> None:
        """A further context of the same model, whose weights are counted already."""
        for entry in buffers(context):
            need = DeviceNeed(kv_bytes=entry.cells_bytes, compute_bytes=entry.compute_bytes)
            self._add(ggml.buffer_type_device(entry.buffer_type), need)

    def _add(self, device: str, need: DeviceNeed) -> None:
        self.devices[device] = self.devices.get(device, DeviceNeed()) + need


def _logged_sizes(lines: list[str], kind: str) -> dict[str, int]:
    """Bytes by device name of the buffers of a kind (RS, output) that llama.cpp logged, exact to 5 KiB."""
    sizes: dict[str, int] = {}
    for line in lines:
        match = _SIZE_LINE.search(line)
        if match and match[2] == kind:
            device = ggml.device(match[1])
            name = device.name if device and device.kind in (ggml.GPU, ggml.INTEGRATED_GPU) else HOST
            sizes[name] = sizes.get(name, 0) + int(float(match[3]) * 2**20)
    return sizes


def _without_sequences(parts: Mapping[str, DeviceNeed]) -> dict[str, DeviceNeed]:
    """The needs as if all that grows with sequences began at nothing, for when not even two could be simulated."""
    return {name: replace(part, recurrent_bytes=0, compute_bytes=0, output_bytes=0) for name, part in parts.items()}


def _difference(more: Mapping[str, DeviceNeed], less: Mapping[str, DeviceNeed]) -> dict[str, DeviceNeed]:
    return {name: part - less.get(name, DeviceNeed()) for name, part in more.items()}


def _added(parts: Mapping[str, DeviceNeed], growth: Mapping[str, DeviceNeed], times: float) -> dict[str, DeviceNeed]:
    """Continues the line: `growth` once more for each of `times`."""
    return {name: part + growth.get(name, DeviceNeed()) * times for name, part in parts.items()}
