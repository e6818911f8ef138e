"""A second opinion for a load that did not fit after all: llama.cpp's own plan, made on the engine's host with its library.

Headers tell nearly all; what they got wrong, the engine refused before it read any weights. Then its form is replaced by the
nearest one that llama.cpp says will fit, once; if there is none, the load is given up and its reason stands in the row. Of an
engine that a person set up nothing is changed but a micro-batch that was chosen for it: so it runs wherever it ran with 512.
"""

from __future__ import annotations

import json
import logging
import subprocess
import sys
from typing import Any

from engines import engine_rows, launch
from engines.engine_rows import EngineTask
from engines.process import write_private
from pools.ledger import USUAL_MICRO_BATCH_TOKENS

PLAN_TIMEOUT_S = 60.0
REFUSED = "does not fit"
# Fields of a form that an engine's row can hold.
ROW_FIELDS = frozenset(
    {"slots", "context_tokens", "kv_type_k", "kv_type_v", "checkpoints", "gpu_layers", "cpu_moe_layers"}
)
MICRO_BATCH, MICRO_BATCH_FIELD = "micro_batch_tokens", "placed_micro_batch_tokens"

logger = logging.getLogger(__name__)


def refitted(task: EngineTask) -> EngineTask | None:
    """The task as it can be launched; None when it was given up, or another command came in."""
    may_change = _changeable(task)
    if not may_change or REFUSED not in task.last_error:
        return task
    plan = exact_plan(task)
    if plan is None or plan["fits"]:
        return task
    change: dict[str, Any] = plan["nearest"] or {}
    if change and set(change) <= may_change:
        logger.info("engine %d takes the nearest form that fits: %s", task.engine_id, change)
        values = {MICRO_BATCH_FIELD if name == MICRO_BATCH else name: value for name, value in change.items()}
        return engine_rows.reshape(task.engine_id, task.epoch, {**values, "last_error": ""})
    if not task.on_demand:
        return task  # It says itself what would fit.
    engine_rows.give_up(task.engine_id, task.epoch, f"{REFUSED}: {plan['reason']}")
    return None


def _changeable(task: EngineTask) -> frozenset[str]:
    """The settings that nobody insisted on."""
    chosen = frozenset({MICRO_BATCH} if task.chose_micro_batch else ())
    if task.on_demand:
        return ROW_FIELDS | chosen
    return chosen if task.config.micro_batch_tokens > USUAL_MICRO_BATCH_TOKENS else frozenset()


def exact_plan(task: EngineTask) -> dict[str, Any] | None:
    """llama.cpp's plan of the engine's configuration (`engines.runtime.memory --plan`); None when it could not be made."""
    path = task.directory / "plan.json"
    command = [sys.executable, "-m", "engines.runtime.memory", "--plan", "--config", str(path)]
    try:
        task.directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        write_private(path, task.config.to_json())
        result = subprocess.run(
            command,
            capture_output=True,
            text=True,
            timeout=PLAN_TIMEOUT_S,
            check=True,
            env=launch.engine_environment(task.directory, task.config, task.card_uuid),
        )
        plan: dict[str, Any] = json.loads(result.stdout.splitlines()[-1])
    except (OSError, subprocess.SubprocessError, ValueError, IndexError) as error:
        logger.warning("engine %d could not be planned: %s", task.engine_id, error)
        return None
    return plan
