"""Engine processes as the head handles them: starting one, finding it again, asking it how it is, reading its log.

Everything about one lies in a directory of its own, as engines/detached.py has it. Knows nothing of the database.
"""

import http.client
import importlib.metadata
import json
import os
import secrets
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from signal import Signals

import psutil

from engines import detached, native_library
from engines.config import ConfigInvalid, EngineConfig
from engines.copy_environment import copy_environment
from engines.detached import Place, reap
from engines.ending import fault_of
from engines.errors import LaunchError
from engines.http_secret import http_secret
from engines.native_library import Build
from engines.process import ProcessRecord, write_private

__all__ = [
    "Launched",
    "LoadedBuild",
    "build_for",
    "end_engine",
    "engine_environment",
    "find",
    "fits",
    "has_library",
    "health",
    "installed_package",
    "last_words",
    "launch",
    "library_environment",
    "library_of",
    "loaded_build",
    "loaded_share",
    "native_fault",
    "read_config",
    "reap",
    "trim_log",
]

HEALTH_TIMEOUT_S = 2.0
STOP_GRACE_S = 10.0
MAX_HEALTH_BYTES = 1 << 16
RPC_SECRET_BYTES = 32
LOADED_BUILD = "build.json"


@dataclass(frozen=True)
class Launched:
    """A process that was just started, and all that it was told, its ports and secret included."""

    record: ProcessRecord
    config: EngineConfig


@dataclass(frozen=True)
class LoadedBuild:
    """Which of this host's builds of llama.cpp a process was told to load ("": the bindings' own library), in which state of that
    build, for which model's file."""

    pid: int
    start_time: float
    key: str
    built_at: str
    model: str

    def is_of(self, build: Build) -> bool:
        return (self.key, self.built_at) == (build.manifest.key, build.manifest.built_at)


def launch(config: EngineConfig, directory: Path, card_uuid: str = "") -> Launched:
    """Start an engine process on free ports; it loads its model meanwhile, on the card of this uuid ("": on the CPU alone).

    Whatever ran out of `directory` before is ended first. Raises LaunchError when no process could be made.
    """
    port = detached.free_port(config.host)
    rpc_secret = secrets.token_hex(RPC_SECRET_BYTES)
    told = replace(
        config,
        port=port,
        http_secret=http_secret(rpc_secret, config.host),
        rpc_port=detached.free_port(config.host, frozenset({port})),
        rpc_secret=rpc_secret,
    )
    home = directory.parent.parent
    try:
        with native_library.starting(home):
            build = build_for(home, config.card_arch, config.model_path)
            environment = {**_library(build), **_other_environment(card_uuid)}
            record = detached.start(_place(directory), told.to_json(), grace_s=STOP_GRACE_S, environment=environment)
            _remember(directory, record, build, config)
    except OSError as error:
        raise LaunchError(f"the process of {directory.name} could not be started: {error}") from error
    return Launched(record, told)


def own_environment(directory: Path, config: EngineConfig, card_uuid: str) -> dict[str, str]:
    """What an engine's environment has beside its head's."""
    home = directory.parent.parent
    return {**library_environment(home, config.card_arch, config.model_path), **_other_environment(card_uuid)}


def _other_environment(card_uuid: str) -> dict[str, str]:
    return {**card_environment(card_uuid), **copy_environment()}


def engine_environment(directory: Path, config: EngineConfig, card_uuid: str) -> dict[str, str]:
    """The whole environment of an engine, for what is asked of llama.cpp in its stead."""
    return {**os.environ, **own_environment(directory, config, card_uuid)}


def card_environment(card_uuid: str) -> dict[str, str]:
    """What makes an engine see its own card and no other: CUDA numbers cards in an order of its own, a uuid names one.

    Without a card it sees none, or llama.cpp would compute large batches there and take memory that nobody counted.
    """
    return {"CUDA_VISIBLE_DEVICES": card_uuid}


def library_environment(home: Path, card_arch: str, model: str = "") -> dict[str, str]:
    """What makes an engine load the llama.cpp that was built on this host for its card ("": for its CPU) and is trusted with its
    model's file ("": with any).

    Empty where there is none, or where somebody chose one for the head itself: the engine then takes that, or the bindings' own.
    """
    return _library(build_for(home, card_arch, model))


def build_for(home: Path, card_arch: str, model: str = "") -> Build | None:
    """The build that `library_environment` is about; None where that is empty."""
    if os.environ.get(native_library.LIBRARY_VARIABLE):
        return None
    package = installed_package()
    return native_library.choose(home, card_arch or native_library.CPU, package, model) if package else None


def installed_package() -> str:
    """The bindings that are installed here, as manifests name them; "" for none."""
    try:
        return f"llama-cpp-python=={importlib.metadata.version('llama-cpp-python')}"
    except importlib.metadata.PackageNotFoundError:
        return ""


def _library(build: Build | None) -> dict[str, str]:
    return {} if build is None else {native_library.LIBRARY_VARIABLE: str(build.library_path)}


def has_library(home: Path, card_arch: str, model: str = "") -> bool:
    """Whether an engine on this card gets another llama.cpp than the bindings' own, which has code for none."""
    return bool(os.environ.get(native_library.LIBRARY_VARIABLE) or library_environment(home, card_arch, model))


def _remember(directory: Path, record: ProcessRecord, build: Build | None, config: EngineConfig) -> None:
    """Write which build the process was told to load: once it has ended, nobody can ask it."""
    file = directory / LOADED_BUILD
    if os.environ.get(native_library.LIBRARY_VARIABLE):
        file.unlink(missing_ok=True)  # nobody's build, and nobody here answers for it
        return
    key, built_at = (build.manifest.key, build.manifest.built_at) if build else ("", "")
    loaded = LoadedBuild(record.pid, record.start_time, key, built_at, config.model_path)
    write_private(file, json.dumps(asdict(loaded)))


def loaded_build(directory: Path, pid: int) -> LoadedBuild | None:
    """Which build the process `pid` of this directory was told to load; None where nobody knows, or somebody chose a library."""
    try:
        loaded = LoadedBuild(**json.loads((directory / LOADED_BUILD).read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError):
        return None
    return loaded if loaded.pid == pid else None


def native_fault(directory: Path, loaded: LoadedBuild) -> Signals | None:
    """Which fault of native code ended this process of the directory; None for any other end, an abort for want of memory too."""
    return fault_of(detached.exit_code(loaded.pid, loaded.start_time), detached.log_tail(_place(directory)))


def library_of(process: ProcessRecord) -> str | None:
    """The folder of the llama.cpp that a running engine was told to load, "" for the bindings' own; None when nobody can tell."""
    try:
        return psutil.Process(process.pid).environ().get(native_library.LIBRARY_VARIABLE, "")
    except psutil.Error:
        return None


def find(directory: Path) -> ProcessRecord | None:
    """The living engine process of this directory; None when none runs."""
    return detached.find(_place(directory))


def end_engine(directory: Path) -> None:
    """End the engine process of this directory, if one runs: SIGTERM, STOP_GRACE_S of patience, SIGKILL."""
    detached.end_process(_place(directory), grace_s=STOP_GRACE_S)


def read_config(directory: Path) -> EngineConfig | None:
    """What the engine of this directory was told last, or None when that cannot be read any more."""
    try:
        return EngineConfig.from_json(_place(directory).config_file.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, ConfigInvalid):
        return None


def fits(told: EngineConfig, wanted: EngineConfig) -> bool:
    """Whether an engine that was told so is what is wanted. Ports and secrets, drawn at each start, do not count, nor does the
    micro-batch, which was chosen for what it found then: it makes prompts faster or slower, and nothing else."""
    return _undrawn(told) == _undrawn(wanted)


def _undrawn(config: EngineConfig) -> EngineConfig:
    return replace(config, port=0, http_secret="", rpc_port=0, rpc_secret="", micro_batch_tokens=512)


def health(port: int, address: str = "127.0.0.1") -> str | None:
    """What the engine on this port says of itself ("ok", "loading", "stopping"); None when it does not answer."""
    status = _health_values(port, address).get("status")
    return status if isinstance(status, str) else None


def loaded_share(port: int, address: str = "127.0.0.1") -> float | None:
    """How much of its model an engine that loads has read, 0 to 1; None when it does not say."""
    share = _health_values(port, address).get("progress")
    return float(share) if isinstance(share, int | float) else None


def _health_values(port: int, address: str) -> dict[str, object]:
    connection = http.client.HTTPConnection(address, port, timeout=HEALTH_TIMEOUT_S)
    try:
        connection.request("GET", "/health")
        values = json.loads(connection.getresponse().read(MAX_HEALTH_BYTES))
    except (OSError, http.client.HTTPException, ValueError):
        return {}
    finally:
        connection.close()
    return values if isinstance(values, dict) else {}


def last_words(directory: Path) -> str:
    """The last lines of the engine's log, for the row of an engine that died."""
    return detached.last_words(_place(directory))


def trim_log(directory: Path) -> None:
    """Keep a running engine's log bounded."""
    detached.trim_log(_place(directory))


def _place(directory: Path) -> Place:
    return Place(directory, "engines.runtime", f"engine-{directory.name}", "engine.log")
