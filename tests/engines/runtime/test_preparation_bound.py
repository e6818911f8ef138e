"""Requests that wait to be prepared are bounded, as all that waits."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable

import pytest

from engines.errors import QueueFull
from engines.runtime.preparation import LEAST_PENDING, Preparation
from tests.engines.runtime.test_core import running
from tests.synthetic_gguf import SyntheticModel


async def test_one_request_too_many_is_refused_and_room_comes_back(tiny_model: Callable[..., SyntheticModel]) -> None:
    async with running(tiny_model("llama"), slots=2, queue_limit=4) as core:
        preparation = Preparation(core.config, core)
        gate = threading.Event()
        waiting = [asyncio.ensure_future(preparation.run(gate.wait, 20)) for _ in range(LEAST_PENDING)]
        await asyncio.sleep(0)
        with pytest.raises(QueueFull, match=f"{LEAST_PENDING} requests are being prepared"):
            await preparation.run_aside(len, "abc")
        gate.set()
        assert all(await asyncio.gather(*waiting))
        assert await preparation.run_aside(len, "abc") == 3
        preparation.close()
