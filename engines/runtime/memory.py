"""Memory of an engine: known before anything is loaded, refused if it cannot fit, measured after loading.

`python -m engines.runtime.memory --config PATH` loads the model, computes one batch and prints both as one line of JSON; with
`--plan` it loads nothing and prints what would be taken, whether it fits, and if not the nearest form that does.
"""

from __future__ import annotations

import argparse
import json
import logging
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import llama_cpp
from prometheus_client import CollectorRegistry, Gauge

from engines.config import ConfigInvalid, EngineConfig
from engines.errors import DoesNotFit, ModelLoadFailed
from engines.runtime import ggml, llama_log, memory_probe
from engines.runtime.host_memory import Room, process_anonymous_bytes, process_resident_bytes
from engines.runtime.memory_fit import nearest_form
from engines.runtime.memory_need import HOST, DeviceNeed, MemoryNeed, shortages, sized
from engines.runtime.memory_probe import Simulation
from engines.runtime.placement import Placement, place

log = logging.getLogger("hydra.engine.memory")

__all__ = ["DeviceNeed", "LoadWatch", "MemoryNeed", "MemoryReport", "export", "plan", "refuse_if_too_big"]


def plan(config: EngineConfig) -> MemoryNeed:
    """What an engine of `config` will take of each device, without loading weights (10 to 500 ms, mostly vocabulary).

    Raises ModelLoadFailed for what llama.cpp could not load either.
    """
    with Simulation(config) as simulation:
        return simulation.need(config)


def refuse_if_too_big(config: EngineConfig, need: MemoryNeed, rooms: Mapping[str, Room]) -> None:
    """Raises DoesNotFit if a device cannot hold its part of `need`, and says in one line what of `config` would fit."""
    short = shortages(need, rooms)
    if not short:
        return
    nearest = nearest_form(config, rooms, [shortage.device for shortage in short])
    advice = f"nearest form that fits: {nearest}" if nearest else "no smaller form of this configuration fits"
    raise DoesNotFit(f"{Path(config.model_path).name} does not fit: {'; '.join(map(str, short))}; {advice}")


@dataclass(frozen=True)
class MemoryReport:
    """Predicted and measured needs of a loaded engine.

    `measured` is llama.cpp's account of what it allocated. `taken` is seen from outside: by how much the process's resident
    memory grew and the devices' free memory fell while loading, whatever for.
    """

    predicted: MemoryNeed
    measured: MemoryNeed
    taken: Mapping[str, int]

    def error_share(self, device: str) -> float:
        """How far the prediction for a device lies from what was measured there, as a share of the latter."""
        predicted = self.predicted.devices.get(device, DeviceNeed()).loaded_bytes
        measured = self.measured.devices.get(device, DeviceNeed()).loaded_bytes
        return abs(predicted - measured) / measured if measured else float(predicted > 0)


class LoadWatch:
    """Stands around the loading of a model: refuses it beforehand, reports on it afterwards.

    Making one raises ModelLoadFailed for what cannot be loaded, and its subclass DoesNotFit for what has no room.
    """

    def __init__(self, config: EngineConfig) -> None:
        self._placement = place(config)
        rooms = memory_probe.rooms(self._placement)
        self.predicted = plan(config)
        refuse_if_too_big(config, self.predicted, rooms)
        host = self.predicted.host
        if host.total_bytes > rooms[HOST].free_bytes:
            log.warning(
                "weights are read from disk again and again: %s of host memory is wanted, %s is available",
                sized(host.total_bytes),
                sized(rooms[HOST].free_bytes),
            )
        self._shares = memory_probe.row_shares(config, self._placement)
        self._before = self._outside_view()

    def report(self, model: Any, context: Any, lines: list[str], draft_context: Any = None) -> MemoryReport:
        """Measures a loaded model and its contexts; `lines` is what llama.cpp logged while it made the first."""
        measured = memory_probe.measured(model, context, lines, self._shares, draft_context)
        now = self._outside_view()
        taken = {device: max(now[device] - before, 0) for device, before in self._before.items()}
        report = MemoryReport(self.predicted, measured, taken)
        for device, part in measured.devices.items():
            parts = ", ".join(f"{kind} {sized(size)}" for kind, size in part.by_kind().items())
            log.info(
                "%s memory: %s (%s), predicted %s", device, sized(part.loaded_bytes), parts,
                sized(self.predicted.devices.get(device, DeviceNeed()).loaded_bytes),
            )  # fmt: skip
        return report

    def _outside_view(self) -> dict[str, int]:
        return outside_view(self._placement)


def outside_view(placement: Placement) -> dict[str, int]:
    """Bytes held: by this process on the host, by everybody on the model's devices."""
    view = {HOST: process_resident_bytes()}
    for device in placement.devices:
        free_bytes, total_bytes = ggml.device_memory(device.handle)
        view[device.name] = total_bytes - free_bytes
    return view


def export(report: MemoryReport, registry: CollectorRegistry) -> None:
    """Adds the report as gauges; `kind="taken"` is the view from outside."""
    gauge = Gauge(
        "hydra_engine_memory_bytes",
        "Memory by device and purpose, as predicted before loading and as measured after it",
        ["device", "kind", "source"],
        registry=registry,
    )
    for source, need in (("predicted", report.predicted), ("measured", report.measured)):
        for device, part in need.devices.items():
            for kind, size_bytes in part.by_kind().items():
                gauge.labels(device, kind, source).set(size_bytes)
    for device, size_bytes in report.taken.items():
        gauge.labels(device, "taken", "measured").set(size_bytes)


def main(arguments: list[str]) -> int:
    """Exit codes as those of the engine: 2 for a bad configuration, 3 for a model that cannot be loaded."""
    parser = argparse.ArgumentParser(
        prog="python -m engines.runtime.memory", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument("--config", type=Path, required=True, help="JSON file of an EngineConfig")
    parser.add_argument("--plan", action="store_true", help="load nothing")
    options = parser.parse_args(arguments)
    try:
        config = EngineConfig.from_json(options.config.read_text())
        print(json.dumps(planned(config) if options.plan else measured_once(config)))
    except (ConfigInvalid, OSError) as error:
        print(f"memory: {error}", file=sys.stderr)
        return 2
    except ModelLoadFailed as error:
        print(f"memory: {error}", file=sys.stderr)
        return 3
    return 0


def planned(config: EngineConfig) -> dict[str, Any]:
    """What an engine of `config` would take by device and kind, and whether it fits; `nearest` changes what does not."""
    llama_log.install()
    llama_cpp.llama_backend_init()
    rooms = memory_probe.rooms(place(config))
    need = plan(config)
    short = shortages(need, rooms)
    nearest = nearest_form(config, rooms, [shortage.device for shortage in short]) if short else None
    return {
        "predicted": _listed(need),
        "estimated": need.estimated,
        "rooms": {device: [room.free_bytes, room.total_bytes] for device, room in rooms.items()},
        "fits": not short,
        "reason": "; ".join(map(str, short)),
        "nearest": dict(nearest.change) if nearest else None,
    }


def measured_once(config: EngineConfig) -> dict[str, Any]:
    """Loads, computes one whole batch so that every buffer has been touched, and lists bytes by device and kind."""
    from engines.runtime.draft_model import DraftModel
    from engines.runtime.llama import Batch, Llama

    anonymous_bytes = process_anonymous_bytes()
    llama = Llama(config, config.threads or 1, lambda _share: None)
    drafts: DraftModel | None = None
    try:
        if config.wants_draft_head and llama_cpp.llama_model_n_layer_nextn(llama.model):
            drafts = DraftModel(llama, config, config.threads or 1)
        tokens = min(config.pooled_step_tokens, llama.context_train_tokens) if config.pooling else config.batch_tokens
        batch = Batch(tokens)
        batch.add(0, 0, [1] * tokens, outputs=1)
        if llama.decode(batch) != 0:
            raise ModelLoadFailed("llama.cpp refused the first batch")
        report = llama.memory_report
        after = outside_view(place(config))
        return {
            "predicted": _listed(report.predicted),
            "measured": _listed(report.measured),
            "taken_at_load": dict(report.taken),
            "held_after_batch": after,
            "anonymous_grown": process_anonymous_bytes() - anonymous_bytes,
            "error_share": {device: round(report.error_share(device), 4) for device in report.measured.devices},
            "estimated": report.predicted.estimated,
        }
    finally:
        if drafts is not None:
            drafts.close()
        llama.close()


def _listed(need: MemoryNeed) -> dict[str, dict[str, int]]:
    return {device: {**part.by_kind(), "loaded": part.loaded_bytes} for device, part in need.devices.items()}


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
