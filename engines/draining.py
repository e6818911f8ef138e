"""An engine that makes way, as its head sees it: whether requests still run there.

It takes nothing new since its row says so, and a site remembers ready engines for a second: until that has passed, and whatever
was on its way has come, nobody may call it idle.
"""

from __future__ import annotations

import http.client
import json
import time
from datetime import datetime
from typing import Any

from engines import loading, services
from engines.choices import EngineState, StopReason
from engines.http_secret import http_secret
from engines.models import Engine
from engines.reconcile import DRAIN_DEADLINE_S
from pools.db import database_now

SETTLE_S = 2.5
LOOK_EVERY_S = 0.3
BETWEEN_LOOKS_S = 0.1
SLOTS_TIMEOUT_S = 2.0
MAX_SLOTS_BYTES = 1 << 20


def may_stop(engine_id: int, epoch: int) -> bool | None:
    """Whether a draining engine has nothing left to do, or has had its time; None when it is not to drain any more."""
    engine = Engine.objects.select_related("host").filter(pk=engine_id, epoch=epoch, state=EngineState.DRAINING).first()
    if engine is None:
        return None
    age_s = _age_s(engine.state_since)
    if age_s > DRAIN_DEADLINE_S:
        return True
    if age_s <= SETTLE_S or _is_held(engine) or running(engine_id):
        return False
    # Twice: between two steps a request may have left the line and not yet a slot.
    time.sleep(BETWEEN_LOOKS_S)
    return not running(engine_id)


def unload_idle(host_name: str) -> int:
    """Drain this host's engines that nobody has asked for longer than their models' `idle_unload_s`; returns how many."""
    drained = 0
    for engine_id in loading.idle_overdue(host_name):
        if running(engine_id):
            loading.touch(engine_id)
        else:
            drained += services.drain(engine_id, StopReason.IDLE)
    return drained


def running(engine_id: int) -> int:
    """Requests that run on an engine of this host; 0 for one that does not answer, whose requests have ended with it."""
    try:
        slots = slots_of(engine_id)
    except ConnectionRefusedError:
        return 0
    # One that does not tell may be at work and slow; its deadline bounds that.
    return 1 if slots is None else sum(bool(slot["is_processing"]) for slot in slots)


def slots_of(engine_id: int) -> list[dict[str, Any]] | None:
    """What an engine of this host says of its slots: none for one without a process, None for one that does not tell.

    Raises ConnectionRefusedError where its process is gone.
    """
    engine = Engine.objects.select_related("host").filter(pk=engine_id, http_port__isnull=False).first()
    if engine is None:
        return []
    connection = http.client.HTTPConnection(engine.host.address, engine.http_port, timeout=SLOTS_TIMEOUT_S)
    secret = http_secret(engine.rpc_secret, engine.host.address)
    try:
        connection.request("GET", "/slots", headers={"Authorization": f"Bearer {secret}"} if secret else {})
        slots = json.loads(connection.getresponse().read(MAX_SLOTS_BYTES))
        return [{key: slot[key] for key in ("is_processing", "cached_tokens")} for slot in slots]
    except ConnectionRefusedError:
        raise
    except (OSError, http.client.HTTPException, ValueError, KeyError, TypeError):
        return None
    finally:
        connection.close()


def _is_held(engine: Engine) -> bool:
    """Whether its conversations are still on their way to other engines."""
    return engine.held_until is not None and engine.held_until > database_now()


def _age_s(since: datetime) -> float:
    return (database_now() - since).total_seconds()
