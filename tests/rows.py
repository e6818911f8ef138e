"""Rows that tests of several apps need, made through the services that make them in life."""

from __future__ import annotations

from pathlib import Path

from engines import services as engines
from engines.models import Engine
from pools import catalogue
from pools import services as pools
from pools.probe import GpuReading, HostReading
from pools.services import VariantView

HOST = HostReading("A CPU", 2, 8 << 30, 4 << 30, 0.5)
CPU = GpuReading(
    kind="cpu",
    index=0,
    uuid="cpu",
    name="A CPU",
    arch="x86-64",
    memory_total_bytes=8 << 30,
    memory_used_bytes=4 << 30,
    temperature_c=None,
    utilization_percent=1.0,
    power_w=None,
)


def add_model(path: Path, models_dir: Path, name: str = "tiny", **options: object) -> VariantView:
    """A model and its variant for a GGUF file."""
    model = catalogue.inspect(path, models_dir)
    return pools.register_gguf(name, model.header.path, header=model.header, content_digest=model.sha256, **options)


def add_engine(variant: VariantView, host_name: str = "here", name: str = "cpu-0", slots: int = 2) -> Engine:
    """An engine row of a probed host, wanted running and stopped."""
    host_id = pools.record_probe(host_name, HOST, [CPU])
    cpu = pools.cpu_of(host_name)
    assert cpu is not None
    engine_id = engines.ensure_engine(
        name, host_id=host_id, gpu_id=cpu[1], variant_id=variant.variant_id, slots=slots, context_tokens=256, threads=1
    )
    return Engine.objects.get(pk=engine_id)


def set_ready(engine: Engine, port: int, pid: int = 1) -> None:
    """The row of an engine whose process a test started itself."""
    Engine.objects.filter(pk=engine.pk).update(state="ready", pid=pid, pid_start_time=1.0, http_port=port)
