"""What to do about an engine whose row is not what is wanted: a pure decision over one view of it, no database, no clock."""

from dataclasses import dataclass
from enum import Enum

COMMAND_EXPIRES_S = 30.0
LOAD_DEADLINE_S = 300.0
# On top of it: a model of 25 GB on a slow disk or over a network takes longer to be read than many take to load.
SLOWEST_READ_BYTES_PER_S = 20e6
# A start that never got as far as a process: its task was lost or its worker died in the middle.
LAUNCH_DEADLINE_S = 45.0
UNHEALTHY_DEADLINE_S = 30.0
STOP_DEADLINE_S = 30.0
MAX_RESTARTS = 8
LONGEST_BACKOFF_S = 60.0
STEADY_S = 120.0
# How long an engine that makes way may finish what it has; what runs then is cut off.
DRAIN_DEADLINE_S = 600.0
# How long requests may run on while their host is being emptied.
LEAVING_DEADLINE_S = 600.0


class Step(Enum):
    """START, STOP and DRAIN send a command; FAIL_* give a stuck attempt up; LOSE marks a lost host's engine; STEADY forgives."""

    START = "start"
    STOP = "stop"
    DRAIN = "drain"
    FAIL_LAUNCH = "it did not come up: no process was started in time"
    FAIL_LOAD = "it did not come up: the model was not loaded in time"
    FAIL_SILENT = "it stopped answering its health check"
    LOSE = "its host is lost"
    STEADY = "steady"


@dataclass(frozen=True)
class EngineFacts:
    """What the decision needs. Ages in seconds; `commanded_age_s` is None if no command was ever sent.

    `leaving_age_s` is since when its host is being emptied (None: it is not), `is_idle` that no request is known to run on it,
    `waits_for_others` that it must not start before others have made way, `weights_bytes` how large its model's file is.
    """

    wanted: str
    state: str
    host_lost: bool
    has_process: bool
    state_age_s: float
    commanded_age_s: float | None
    restarts: int
    leaving_age_s: float | None = None
    is_idle: bool = False
    waits_for_others: bool = False
    weights_bytes: int = 0


def backoff_s(restarts: int) -> float:
    """Seconds to wait after the n-th failure in a row before the next start: none, then 2, 4, 8 … 60."""
    return 0.0 if restarts <= 1 else min(LONGEST_BACKOFF_S, 2.0 ** (restarts - 1))


def load_deadline_s(weights_bytes: int) -> float:
    """How long a model of that size may take from its process's start until it serves."""
    return LOAD_DEADLINE_S + weights_bytes / SLOWEST_READ_BYTES_PER_S


def decide(facts: EngineFacts) -> Step | None:
    """The one step that brings this engine closer to what is wanted, or None: all is well, or patience is due."""
    if facts.host_lost:
        return Step.LOSE if facts.state in ("ready", "starting") else None
    if stuck := _stuck(facts):
        return stuck
    # The last command may still be on its way; after its expiry it can no longer run.
    waiting = facts.commanded_age_s is not None and facts.commanded_age_s < COMMAND_EXPIRES_S
    if facts.state == "stopping":
        # Whatever is wanted by now, a stop that was begun is brought to its end first.
        return Step.STOP if facts.state_age_s > STOP_DEADLINE_S and not waiting else None
    if facts.state == "draining":
        if facts.state_age_s > DRAIN_DEADLINE_S:
            return Step.STOP if not waiting else None
        return Step.DRAIN if not waiting else None
    if facts.leaving_age_s is not None and facts.wanted == "running":
        may_end = facts.is_idle or facts.state == "unhealthy" or facts.leaving_age_s > LEAVING_DEADLINE_S
        return Step.STOP if facts.state in ("ready", "unhealthy") and may_end and not waiting else None
    if facts.wanted == "stopped":
        return Step.STOP if facts.state in ("starting", "ready", "unhealthy") and not waiting else None
    if facts.waits_for_others:
        return None
    if facts.state == "stopped" and not waiting:
        return Step.START
    if facts.state == "failed" and facts.restarts <= MAX_RESTARTS and not waiting:
        return Step.START if facts.state_age_s >= backoff_s(facts.restarts) else None
    if facts.state == "ready" and facts.restarts and facts.state_age_s > STEADY_S:
        return Step.STEADY
    return None


def _stuck(facts: EngineFacts) -> Step | None:
    if facts.state == "starting":
        if not facts.has_process:
            return Step.FAIL_LAUNCH if facts.state_age_s > LAUNCH_DEADLINE_S else None
        return Step.FAIL_LOAD if facts.state_age_s > load_deadline_s(facts.weights_bytes) else None
    if facts.state == "unhealthy" and facts.state_age_s > UNHEALTHY_DEADLINE_S:
        return Step.FAIL_SILENT
    return None
