"""All that a store's process needs to start alone, as a frozen dataclass read from one JSON file."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from engines.browser_guard import is_loopback
from engines.config import MIN_SECRET_BYTES
from engines.config_fields import ConfigInvalid, check_bounds, read_fields

MEMORY_FOLDER = "/dev/shm"
PREFIX = "hydra-"
MIN_SLAB_BYTES = 1 << 20
# Lock and owner's record.
OVERHEAD_BYTES = 1 << 16


_BOUNDS: Mapping[str, tuple[float, float]] = {
    "capacity_bytes": (MIN_SLAB_BYTES + OVERHEAD_BYTES, 1 << 46),
    "slab_bytes": (MIN_SLAB_BYTES, 1 << 36),
    "abandoned_s": (0, 30 * 86400),
    "port": (0, 65535),
    "connections": (1, 4096),
    "idle_s": (1, 86400),
    "stall_s": (0.1, 3600),
    "http_port": (0, 65535),
    "lease_s": (0.1, 3600),
    "max_lease_s": (0.1, 3600),
    "preempt_s": (0.1, 3600),
    "reclaim_s": (0.1, 86400),
    "orphan_s": (0.1, 86400),
    "sweep_s": (0.05, 60),
    "pinned_share": (0, 1),
    "pin_s": (1, 366 * 86400),
    "session_manifests": (1, 4096),
    "session_checkpoints": (1, 4096),
    "max_manifests": (1, 1 << 22),
    "disk_manifests": (0, 1 << 16),
    "disk_bytes": (0, 1 << 46),
    "disk_delay_s": (0, 3600),
}


@dataclass(frozen=True)
class StoreConfig:
    """`instance` names the store; its memory lies in `directory`, by default /dev/shm/hydra-<instance>.

    `capacity_bytes` bounds all that it takes there, headers included; it grows by slabs of `slab_bytes` (also the largest
    object) and keeps what it took until it stops. `keep` leaves the directory in place after a clean stop. `abandoned_s` after
    the last sign of life of another store whose process is gone, its directory is removed by whoever starts.
    `port` is the binary protocol's, open to whoever has `secret`; without one it is served on loopback and nowhere else.
    `http_port` serves /metrics, /health and /debug on `http_host`, 0: not at all.
    A lease lasts `lease_s` unless its owner asks for up to `max_lease_s`. A reservation may be pre-empted after `preempt_s` when
    room is needed and is reclaimed after `reclaim_s`; an object that no manifest names is given up after `orphan_s`.
    Manifests marked as pinned are not evicted until `pin_s` after their last use, since whoever pinned them may be gone; together
    they may name `pinned_share` of the capacity. A session keeps at most `session_manifests` manifests and `session_checkpoints`
    of them with a checkpoint.
    `disk_directory` (empty: none) gets a copy of the last `disk_manifests` manifests and their objects, at most `disk_bytes`,
    `disk_delay_s` after they were saved; after a reboot those are read back.
    """

    instance: str = "default"
    directory: str = ""
    capacity_bytes: int = 4 << 30
    slab_bytes: int = 256 << 20
    keep: bool = False
    abandoned_s: float = 600.0
    host: str = "127.0.0.1"
    port: int = 9500
    secret: str = dataclasses.field(default="", repr=False)
    connections: int = 128
    idle_s: float = 600.0
    stall_s: float = 30.0
    http_host: str = "127.0.0.1"
    http_port: int = 0
    lease_s: float = 30.0
    max_lease_s: float = 300.0
    preempt_s: float = 30.0
    reclaim_s: float = 600.0
    orphan_s: float = 600.0
    sweep_s: float = 1.0
    pinned_share: float = 0.5
    pin_s: float = 3600.0
    session_manifests: int = 4
    session_checkpoints: int = 4
    max_manifests: int = 65536
    disk_directory: str = ""
    disk_manifests: int = 64
    disk_bytes: int = 16 << 30
    disk_delay_s: float = 5.0
    log_level: str = "INFO"

    def __post_init__(self) -> None:
        check_bounds(self, _BOUNDS)
        if not re.fullmatch(r"[A-Za-z0-9][\w.-]{0,63}", self.instance):
            raise ConfigInvalid(
                f"instance is {self.instance!r}; it must be a short name of letters, digits, '.', '_', '-'"
            )
        if self.lease_s > self.max_lease_s or self.preempt_s > self.reclaim_s:
            raise ConfigInvalid("lease_s may not exceed max_lease_s, nor preempt_s reclaim_s")
        if 0 < len(self.secret.encode()) < MIN_SECRET_BYTES:
            raise ConfigInvalid(f"secret has fewer than {MIN_SECRET_BYTES} bytes; make one of random bytes")

    def refuse_open_port(self) -> None:
        """Raises ConfigInvalid for a port that strangers could reach and that asks them for nothing; HTTP never asks.

        Not part of making one, since the secret may still come from the environment.
        """
        if not self.secret and not is_loopback(self.host):
            raise ConfigInvalid(
                f"port {self.port} on {self.host} needs a secret: without one it is served on loopback only"
            )

        if self.http_port and not is_loopback(self.http_host):
            raise ConfigInvalid(f"http_host is {self.http_host}: the HTTP pages are served on loopback only")

    @property
    def folder(self) -> Path:
        return Path(self.directory or f"{MEMORY_FOLDER}/{PREFIX}{self.instance}")

    @property
    def slab_room_bytes(self) -> int:
        """What slabs may take together."""
        return self.capacity_bytes - OVERHEAD_BYTES

    def to_json(self) -> str:
        return json.dumps(dataclasses.asdict(self), indent=2, sort_keys=True)

    @classmethod
    def from_json(cls, text: str) -> StoreConfig:
        """Raises ConfigInvalid for malformed JSON, unknown keys and wrong types."""
        return cls(**read_fields(cls, text))
