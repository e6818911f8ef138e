"""What became of engines that ran with a build of llama.cpp: who came up with it, whom it crashed, and whether it is trusted yet.

`trust.json` beside the build's manifest.json; a rebuild begins without one. Two native faults speak against a build, but may be
their model's fault: one that other models' engines came up with stays trusted for those, and so does one whose faults came with
another library, too. For the model itself it is given up either way. Standard library only, so that the build runs anywhere.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from engines.file_lock import locked
from engines.process import write_private

RECORD = "trust.json"
LOCK = ".trust.lock"
LOCK_WAIT_S = 10.0
MAX_RECORD_BYTES = 1 << 20
# So many native faults are no accident.
MAX_FAULTS = 2
# Those that are further apart than this have nothing to do with one another.
FAULTS_WITHIN = timedelta(days=1)
KEPT_FAULTS = 32
KEPT_MODELS = 256
MAX_SAID_CHARS = 300


@dataclass(frozen=True)
class Fault:
    """One crash. `model` is its file's path, `process` names the very process; `elsewhere`: the model crashed another library's
    engine, too."""

    at: str
    signal: str
    engine: str
    model: str
    process: str
    said: str = ""
    elsewhere: bool = False


@dataclass(frozen=True)
class Trust:
    """All that is known of one build."""

    faults: tuple[Fault, ...] = ()
    proven_by: tuple[str, ...] = ()  # models whose engines came up with it

    @property
    def is_distrusted(self) -> bool:
        """Whether nobody is to be started with it, whatever the model."""
        counted = [fault for fault in self.faults if not fault.elsewhere]
        crashed = {fault.model for fault in self.faults}
        return len(counted) >= MAX_FAULTS and not set(self.proven_by) - crashed

    @property
    def given_up_for(self) -> frozenset[str]:
        """The models that it is not used for any more."""
        models = [fault.model for fault in self.faults]
        return frozenset(model for model in models if models.count(model) >= MAX_FAULTS)

    @property
    def is_marked(self) -> bool:
        return self.is_distrusted or bool(self.given_up_for)

    def serves(self, model: str) -> bool:
        """Whether an engine of this model ("": of none that is known) is to be started with it."""
        return not self.is_distrusted and model not in self.given_up_for

    def told(self) -> str:
        """What happened, in one line."""
        last = self.faults[-1]
        said = f": {last.said}" if last.said else ""
        return f"{len(self.faults)} native faults, the last {last.signal} at {last.at} in engine {last.engine}{said}"


def read(folder: Path) -> Trust:
    """What is known of the build in this folder. A record that cannot be read says nothing."""
    try:
        with folder.joinpath(RECORD).open(encoding="utf-8") as file:
            values: dict[str, Any] = json.loads(file.read(MAX_RECORD_BYTES))
        faults = tuple(Fault(**fault) for fault in values["faults"])
        return Trust(faults, tuple(map(str, values["proven_by"])))
    except (OSError, ValueError, KeyError, TypeError):
        return Trust()


def prove(folder: Path, model: str) -> None:
    """An engine of this model came up with the build. Raises OSError."""
    if model not in read(folder).proven_by:
        _change(folder, lambda trust: dataclasses.replace(trust, proven_by=(*trust.proven_by, model)[-KEPT_MODELS:]))


def blame(folder: Path, fault: Fault) -> Trust:
    """Count a crash against the build, once for each process; what is known of it then. Raises OSError."""

    def counted(trust: Trust) -> Trust:
        if any(known.process == fault.process for known in trust.faults):
            return trust
        since = (datetime.now(UTC) - FAULTS_WITHIN).isoformat(timespec="seconds")
        kept = trust.faults if trust.is_marked else tuple(known for known in trust.faults if known.at >= since)
        said = dataclasses.replace(fault, said=fault.said[:MAX_SAID_CHARS])
        return dataclasses.replace(trust, faults=(*kept, said)[-KEPT_FAULTS:])

    return _change(folder, counted)


def excuse(folder: Path, model: str) -> None:
    """The model crashed an engine with another library, too: its faults are hardly this one's. Raises OSError."""
    if any(fault.model == model and not fault.elsewhere for fault in read(folder).faults):
        _change(
            folder,
            lambda trust: dataclasses.replace(
                trust,
                faults=tuple(
                    dataclasses.replace(fault, elsewhere=True) if fault.model == model else fault
                    for fault in trust.faults
                ),
            ),
        )


def _change(folder: Path, change: Callable[[Trust], Trust]) -> Trust:
    # Two engines of one build may end in the same moment.
    with locked(folder.parent / LOCK, LOCK_WAIT_S):
        trust = change(read(folder))
        write_private(folder / RECORD, json.dumps(dataclasses.asdict(trust), indent=2, sort_keys=True) + "\n")
    return trust
