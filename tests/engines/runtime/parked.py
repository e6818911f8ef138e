"""Engines of this process with a store of their host beside them, for the tests of parking."""

from __future__ import annotations

import asyncio
import shutil
import tempfile
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engines.runtime.core import EngineCore
from engines.runtime.generation import Generation
from engines.runtime.parking import Parking
from engines.runtime.state_desk import StateDesk
from engines.store.client import StoreClient
from engines.store.config import StoreConfig
from engines.store.server import StoreServer
from engines.wire_store import StoreInfoAnswer
from tests.engine_process import free_port
from tests.engines.runtime.test_core import finished, generation, running
from tests.engines.store.store_process import StoreProcess
from tests.synthetic_gguf import SyntheticModel

BLOCK_TOKENS = 64


@dataclass
class ParkingEngine:
    """One engine's core, desk and parking."""

    core: EngineCore
    desk: StateDesk
    parking: Parking

    async def ask(
        self, prompt: list[int], count: int = 20, *, stores: tuple[tuple[str, int], ...] = (), **fields: Any
    ) -> Generation:
        """As a request comes in: the store is asked first."""
        work = generation(prompt, count, **fields)
        await self.parking.look_up([work], stores)
        self.core.submit(work)
        last = await finished(work)
        assert last.error is None, last.error
        return work

    def count(self, name: str, **labels: str) -> float:
        return self.core.metrics.registry.get_sample_value(f"hydra_engine_{name}_total", labels) or 0.0


@asynccontextmanager
async def parking_engine(
    model: SyntheticModel, store: StoreProcess | StoreHere | None, *, by_itself: bool = False, **settings: Any
) -> AsyncIterator[ParkingEngine]:
    """`by_itself`: it also saves and parks what is idle without being asked."""
    port = store.config.port if store else 0
    values: dict[str, Any] = {"store_port": port, "kv_block_tokens": BLOCK_TOKENS, "context_tokens": 1024}
    async with running(model, **{**values, **settings}) as core:
        desk = StateDesk(core)
        parking = Parking(core.config, core, desk)
        # Tiny models compute their prompts as fast as any store could answer: here restores pay, however fast the machine is.
        parking.rates.fixed_s = 0.0
        parking.rates.restore_bytes_per_s = parking.rates.first_link_bytes_per_s = 1e12
        if by_itself:
            parking.begin()
        else:
            await parking.ready()
        try:
            yield ParkingEngine(core, desk, parking)
        finally:
            await parking.close()
            desk.close()


@dataclass(frozen=True)
class StoreHere:
    """A store in the test's own process and loop, which takes no time to start; it cannot be killed."""

    config: StoreConfig


@asynccontextmanager
async def store_here(**settings: Any) -> AsyncIterator[StoreHere]:
    folder = Path(tempfile.mkdtemp(prefix="test-store-", dir="/dev/shm"))
    values = {"capacity_bytes": 64 << 20, "slab_bytes": 8 << 20, "sweep_s": 0.1, **settings}
    config = StoreConfig(port=free_port(), directory=str(folder / "hydra-here"), **values)
    try:
        server = StoreServer(config)
        try:
            await server.start()
            yield StoreHere(config)
        finally:
            await server.close()
    finally:
        shutil.rmtree(folder)


@asynccontextmanager
async def client_of(store: StoreProcess | StoreHere) -> AsyncIterator[StoreClient]:
    client = StoreClient("127.0.0.1", store.config.port, name="test")
    try:
        yield client
    finally:
        await client.close()


async def info_of(store: StoreProcess | StoreHere) -> StoreInfoAnswer:
    async with client_of(store) as client:
        return await client.store_info()


async def until(condition: Any, timeout_s: float = 20.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline
        await asyncio.sleep(0.05)
