"""The nearest form of a configuration that fits: which single change, or which few, cost least.

Every setting that can be changed is an axis of steps, each a little further from what was asked. A form counts as fitting
only after llama.cpp has planned it.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from engines.config import EngineConfig
from engines.errors import ModelLoadFailed
from engines.runtime.host_memory import Room
from engines.runtime.memory_need import HOST, shortages
from engines.runtime.memory_probe import Simulation

SHORTEST_CONTEXT_TOKENS = 2048
SHORTEST_POOLED_STEP_TOKENS = 64
# Below, steps of many streams and images would be cut, too.
LEAST_MICRO_BATCH_TOKENS = 512
PLANS_LIMIT = 120
_COMPACT_KV = "q8_0"
_WIDER_KV = ("f16", "bf16", "f32")


@dataclass(frozen=True)
class Step:
    """One change of a configuration; `cost` ranks it against others (1: half the slots or half the context)."""

    change: Mapping[str, Any]
    cost: float


@dataclass(frozen=True)
class NearestForm:
    """What would fit: the changed settings, and the whole configuration with them."""

    config: EngineConfig
    change: Mapping[str, Any]

    def __str__(self) -> str:
        return ", ".join(f"{name} {value}" for name, value in self.change.items())


def nearest_form(config: EngineConfig, rooms: Mapping[str, Room], short_devices: Sequence[str]) -> NearestForm | None:
    """The cheapest form of `config` that fits into `rooms`; None if even the smallest does not, or none is found in time."""
    with _Planner(config, rooms) as planner:
        axes = list(_axes(config, planner.simulation, short_devices))
        single = [step for axis in axes if (step := _first_fitting(planner, {}, axis)) is not None]
        if single:
            return _form(config, min(single, key=lambda step: step.cost).change)
        return _several(planner, config, sorted(axes, key=lambda axis: axis[-1].cost))


def _several(planner: _Planner, config: EngineConfig, axes: Sequence[Sequence[Step]]) -> NearestForm | None:
    """Takes axes to their ends, cheapest first, until it fits; then takes back what was too much, dearest first."""
    taken: list[Sequence[Step]] = []
    for axis in axes:
        taken.append(axis)
        if planner.fits(_merged([axis[-1] for axis in taken])):
            break
    else:
        return None
    chosen = [axis[-1] for axis in taken]
    for index in reversed(range(len(taken))):
        others = _merged([step for position, step in enumerate(chosen) if position != index])
        without = Step({}, 0.0)
        step = without if planner.fits(others) else _first_fitting(planner, others, taken[index])
        chosen[index] = step or chosen[index]
    return _form(config, _merged(chosen))


def _first_fitting(planner: _Planner, others: Mapping[str, Any], axis: Sequence[Step]) -> Step | None:
    """The smallest step of an axis with which it fits, by halving: memory only falls along an axis."""
    if not planner.fits({**others, **axis[-1].change}):
        return None
    low, high = 0, len(axis) - 1
    while low < high:
        middle = (low + high) // 2
        if planner.fits({**others, **axis[middle].change}):
            high = middle
        else:
            low = middle + 1
    return axis[low]


def _merged(steps: Sequence[Step]) -> dict[str, Any]:
    return {name: value for step in steps for name, value in step.change.items()}


def _form(config: EngineConfig, change: Mapping[str, Any]) -> NearestForm:
    return NearestForm(dataclasses.replace(config, **change), change)


def _axes(config: EngineConfig, simulation: Simulation, short_devices: Sequence[str]) -> Iterator[list[Step]]:
    """The axes along which the short devices' need can fall, each with at least one step."""
    if config.pooling:
        candidates = [_context(config), _pooled_steps(config)]
    else:
        candidates = [_micro_batches(config), _slots(config), _context(config), _kv_types(config), _drafts(config)]
        if simulation.has_recurrent_state:
            candidates.append(_checkpoints(config))
        if HOST in short_devices:
            candidates.append(_host_cache(config))
    if any(device != HOST for device in short_devices):
        if simulation.experts:
            candidates.append(_expert_layers(config, simulation.layers))
        candidates.append(_device_layers(config, simulation.layers))
    yield from (axis for axis in candidates if axis)


def _slots(config: EngineConfig) -> list[Step]:
    return [Step({"slots": slots}, math.log2(config.slots / slots)) for slots in range(config.slots - 1, 0, -1)]


def _micro_batches(config: EngineConfig) -> list[Step]:
    """Fewer tokens at once take smaller compute buffers and masks, and only make long prompts slower: the first to go."""
    steps, now = [], min(config.micro_batch_tokens, max(config.batch_tokens, config.outputs))
    tokens = now // 2
    while tokens >= LEAST_MICRO_BATCH_TOKENS:
        steps.append(Step({"micro_batch_tokens": tokens}, 0.005 * math.log2(now / tokens)))
        tokens //= 2
    return steps


def _drafts(config: EngineConfig) -> list[Step]:
    """Shorter drafts take less recurrent state; without any the draft head goes too."""
    longest = config.longest_draft
    shorter = [Step({"draft_tokens": left}, 0.2 * (longest - left) / longest) for left in range(longest - 1, 0, -1)]
    return [*shorter, Step({"speculation": "none"}, 0.3)] if longest else []


def _context(config: EngineConfig) -> list[Step]:
    steps, tokens = [], config.context_tokens // 2
    while tokens >= SHORTEST_CONTEXT_TOKENS:
        change = {"context_tokens": tokens}
        if config.cache_tokens:
            change["cache_tokens"] = config.cache_tokens * tokens // config.context_tokens
        steps.append(Step(change, math.log2(config.context_tokens / tokens)))
        tokens //= 2
    return steps


def _pooled_steps(config: EngineConfig) -> list[Step]:
    """A step's rows of output are most of what a pooling engine takes beside its weights; they bound an input, too."""
    steps, tokens = [], config.pooled_step_tokens // 2
    while tokens >= SHORTEST_POOLED_STEP_TOKENS:
        steps.append(Step({"micro_batch_tokens": tokens}, math.log2(config.pooled_step_tokens / tokens)))
        tokens //= 2
    return steps


def _kv_types(config: EngineConfig) -> list[Step]:
    change = {name: _COMPACT_KV for name in ("kv_type_k", "kv_type_v") if getattr(config, name) in _WIDER_KV}
    return [Step(change, 0.5)] if change else []


def _checkpoints(config: EngineConfig) -> list[Step]:
    total = config.kept_checkpoints
    return [Step({"checkpoints": left}, 0.1 + 0.3 * (total - left) / total) for left in range(total - 1, -1, -1)]


def _host_cache(config: EngineConfig) -> list[Step]:
    size_bytes = config.host_cache_bytes
    return [Step({"host_cache_bytes": size_bytes * left // 4}, 0.1) for left in (3, 2, 1, 0)] if size_bytes else []


def _expert_layers(config: EngineConfig, layers: int) -> list[Step]:
    moved = range(config.cpu_moe_layers + 1, layers + 1)
    return [Step({"cpu_moe_layers": count}, 0.4 + (count - config.cpu_moe_layers) / layers) for count in moved]


def _device_layers(config: EngineConfig, layers: int) -> list[Step]:
    """Layers on devices count the output layer as one more; a negative number means all."""
    now = min(config.gpu_layers, layers + 1) if config.gpu_layers >= 0 else layers + 1
    return [Step({"gpu_layers": count}, 0.5 + 2 * (now - count) / (layers + 1)) for count in range(now - 1, -1, -1)]


class _Planner:
    """Tries forms of one configuration, with one simulation open at a time and a bound on how many are tried."""

    def __init__(self, config: EngineConfig, rooms: Mapping[str, Room]) -> None:
        self.simulation = Simulation(config)
        self._config = self._simulated = config
        self._rooms = rooms
        self._left = PLANS_LIMIT

    def __enter__(self) -> _Planner:
        return self

    def __exit__(self, *_: object) -> None:
        self.simulation.close()

    def fits(self, change: Mapping[str, Any]) -> bool:
        """Whether llama.cpp plans this form and every device has room for it; False when the bound is used up."""
        if self._left == 0:
            return False
        self._left -= 1
        config = dataclasses.replace(self._config, **change)
        try:
            self._place(config)
            need = self.simulation.need(config)
        except ModelLoadFailed:
            return False  # a form that llama.cpp refuses (a KV type and a head length that do not go together)
        return not shortages(need, self._rooms)

    def _place(self, config: EngineConfig) -> None:
        """The simulation of the form's placement: weights move, so the model is planned anew."""
        if (config.gpu_layers, config.cpu_moe_layers) != (self._simulated.gpu_layers, self._simulated.cpu_moe_layers):
            placed = Simulation(config)
            self.simulation.close()
            self.simulation, self._simulated = placed, config
