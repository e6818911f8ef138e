"""Measures one pair of quants and writes down what came of it; the states of the probe are thrown away everywhere."""

from __future__ import annotations

import asyncio
import logging

from engines import services as engines
from engines.errors import EngineError, NoEngineReady
from pools.db import in_db
from sessions import kv_losses, kv_probe, snapshots
from sessions.kv_losses import Measured, Pair

logger = logging.getLogger(__name__)


async def measure(pair: Pair) -> Measured | None:
    """The figures, or None where they could not be had; then the row says why."""
    sessions: list[str] = []
    try:
        prefill = await in_db(engines.engine_rpc, pair.prefill.engine_id)
        decode = await in_db(engines.engine_rpc, pair.decode.engine_id)
        if prefill is None or decode is None:
            raise NoEngineReady("One of the two engines does not serve any more.")
        async with asyncio.timeout(kv_losses.MEASURING_S):
            found = await kv_probe.measured(pair, prefill, decode, sessions)
    except TimeoutError:
        logger.warning("KV loss from %s to %s: it takes too long", pair.prefill.name, pair.decode.name)
        await in_db(kv_losses.fail, pair, f"it was not measured within {kv_losses.MEASURING_S:g} s")
        return None
    except EngineError as error:
        logger.warning("KV loss from %s to %s: %s", pair.prefill.name, pair.decode.name, error.message)
        await in_db(kv_losses.fail, pair, f"{error.code}: {error.message}")
        return None
    finally:
        await in_db(snapshots.forget_on_commit, sessions)
    await in_db(kv_losses.record, pair, found)
    logger.info(
        "KV of %s read by %s: KL %.5f nats in the mean, at most %.5f, %d of %d places keep their likeliest token",
        pair.prefill.name, pair.decode.name, found.kl_mean, found.kl_max, found.same_top, found.places,
    )  # fmt: skip
    return found
