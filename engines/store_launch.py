"""A host's store process as its head handles it: what it is told, starting it, finding it again, ending it.

Everything about it lies in HYDRA_HOME/store, as engines/detached.py has it; its memory on tmpfs is kept over restarts and
removed by the supervisor's last stop. Knows nothing of the database.
"""

import hashlib
import logging
import secrets
from dataclasses import replace
from pathlib import Path

from engines import detached
from engines.config import ConfigInvalid
from engines.detached import Place
from engines.process import ProcessRecord
from engines.store.config import StoreConfig
from engines.store.home import remove_memory

# A store that copies to disk may take FLUSH_PATIENCE_S of engines/store/server.py for what waits.
STOP_GRACE_S = 8.0
SECRET_BYTES = 32
LARGEST_SLAB_BYTES = 256 << 20
SMALLEST_SLAB_BYTES = 8 << 20
SLABS = 16
MAX_HOST_NAME_CHARS = 40

logger = logging.getLogger(__name__)


def wanted_config(
    directory: Path,
    host_name: str,
    address: str,
    *,
    capacity_bytes: int,
    disk_bytes: int,
    log_level: str,
    secret: str = "",
) -> StoreConfig:
    """What the store of this directory is to be told, apart from its ports.

    Homes on one machine have stores of their own, also where their hosts bear the same name.
    """
    digest = hashlib.sha256(str(directory.resolve()).encode()).hexdigest()[:12]
    slab_bytes = max(SMALLEST_SLAB_BYTES, min(LARGEST_SLAB_BYTES, capacity_bytes // SLABS)) >> 20 << 20
    return StoreConfig(
        instance=f"{host_name[:MAX_HOST_NAME_CHARS]}-{digest}",
        capacity_bytes=capacity_bytes,
        slab_bytes=slab_bytes,
        keep=True,
        host=address,
        port=0,
        secret=secret,
        disk_directory=str(directory / "disk") if disk_bytes else "",
        disk_bytes=disk_bytes,
        log_level=log_level,
    )


def launch(wanted: StoreConfig, directory: Path) -> tuple[ProcessRecord, StoreConfig]:
    """Start the store; returns its record and all that it was told. Its ports stay what they were, unless somebody else has
    taken one.

    Whatever ran there before is ended first. Raises LaunchError when no process could be made.
    """
    place = _place(directory)
    detached.end_process(place, grace_s=STOP_GRACE_S)
    if memory_bytes(directory) > wanted.capacity_bytes:
        # Slabs are never given back one by one.
        logger.warning("the store's memory is more than it may have now, and is given back")
        forget_memory(directory)
    told = read_config(directory) or StoreConfig(port=0)
    port = _kept(wanted.host, told.port) or detached.free_port(wanted.host)
    http_port = _kept(wanted.http_host, told.http_port) or detached.free_port(wanted.http_host, frozenset({port}))
    telling = replace(wanted, port=port, http_port=http_port)
    return detached.start(place, telling.to_json(), grace_s=STOP_GRACE_S), telling


def proposed_secret(directory: Path) -> str:
    """What this directory's store asked for until now, or a new one."""
    told = read_config(directory)
    return (told.secret if told else "") or secrets.token_hex(SECRET_BYTES)


def _kept(address: str, port: int) -> int:
    return port if port and detached.is_free(address, port) else 0


def fits(told: StoreConfig, wanted: StoreConfig) -> bool:
    """Whether a store that was told so is what is wanted. Ports do not count, nor the secret before the pool has one."""
    secret = wanted.secret or told.secret
    return replace(told, port=0, http_port=0) == replace(wanted, port=0, http_port=0, secret=secret)


def find(directory: Path) -> ProcessRecord | None:
    """The living store process of this directory; None when none runs."""
    return detached.find(_place(directory))


def end_store(directory: Path) -> None:
    """End the store process of this directory, if one runs. Its memory stays, for the next one."""
    detached.end_process(_place(directory), grace_s=STOP_GRACE_S)


def memory_bytes(directory: Path) -> int:
    """What this directory's store, running or not, takes on tmpfs."""
    told = read_config(directory)
    if told is None or not told.folder.is_dir():
        return 0
    return sum(entry.stat().st_blocks * 512 for entry in told.folder.iterdir())


def forget_memory(directory: Path) -> bool:
    """Give the memory of this directory's store back to the machine, once its process is gone; False where there is none."""
    told = read_config(directory)
    return told is not None and remove_memory(told)


def read_config(directory: Path) -> StoreConfig | None:
    """What the store of this directory was told last, or None when that cannot be read any more."""
    try:
        return StoreConfig.from_json(_place(directory).config_file.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, ConfigInvalid):
        return None


def last_words(directory: Path) -> str:
    """The last lines of the store's log."""
    return detached.last_words(_place(directory))


def trim_log(directory: Path) -> None:
    """Keep a running store's log bounded."""
    detached.trim_log(_place(directory))


def _place(directory: Path) -> Place:
    return Place(directory, "engines.store", "store", "store.log")
