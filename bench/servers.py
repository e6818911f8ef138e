"""Starts one server at a time, ours or llama-server, with the same model, slots, context, KV types and threads."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bench.errors import BenchError
from bench.load import MODEL_NAME
from bench.models import named_model
from bench.vocabulary import ROOT
from engines.config import EngineConfig
from engines.copy_environment import copy_environment

START_TIMEOUT_S = 300.0
END_TIMEOUT_S = 20.0
HYDRA = "hydra"
ALL_LAYERS = 999
CONTEXT_STEP_TOKENS = 256  # llama-server rounds a slot's context up to this


def _forms() -> dict[str, tuple[str, ...]]:
    """llama-server's flags by name: KV streams apart or unified, without checkpoints and host cache, sampling on the backend."""
    forms = {}
    for memory, memory_flags in (("unified", ("--kv-unified",)), ("default", ())):
        for bare in (True, False):
            for backend in (True, False):
                name = "+".join([memory, *["bare"] * bare, *["bs"] * backend])
                forms[name] = (*memory_flags, *(("-ctxcp", "0", "-cram", "0") * bare), *(("-bs",) * backend))
    return forms


FORMS = _forms()


@dataclass(frozen=True)
class ServerSettings:
    """What both servers get alike. `context_tokens` is one slot's; `engine` holds further fields of our EngineConfig."""

    model: Path
    slots: int
    context_tokens: int
    threads: int
    gpu_layers: int = 0
    peer: Path | None = None
    engine: dict[str, Any] = field(default_factory=dict)
    peer_arguments: tuple[str, ...] = ()


@dataclass(frozen=True)
class Running:
    base_url: str
    log_path: Path
    pid: int


def model_path(name: str) -> Path:
    """`smollm2`, `synthetic:NAME`, or a path. Fetches or writes what is not there yet."""
    if name == "smollm2":
        from pools.catalogue import ensure

        return ensure("smollm2-135m", ROOT / "build" / "models")
    if name.startswith("synthetic:"):
        return named_model(name.removeprefix("synthetic:"))
    if not Path(name).is_file():
        raise BenchError(f"{name} is no file; say smollm2, synthetic:NAME or the path of a GGUF")
    return Path(name).resolve()


def setting(text: str) -> tuple[str, Any]:
    """KEY=VALUE of a command line; the value is JSON, or text."""
    name, _, value = text.partition("=")
    try:
        return name, json.loads(value)
    except ValueError:
        return name, value


def compute_threads(wanted: int) -> int:
    """0: all cores but one, which the client and the HTTP side need."""
    return wanted or max(1, len(os.sched_getaffinity(0)) - 1)


def peer_binary(peer: Path, name: str) -> Path:
    """A program that `make peer` built. Raises BenchError if it is not there."""
    path = peer / "bin" / name
    if not path.exists():
        raise BenchError(f"{path} does not exist; run: make peer")
    return path


@contextlib.contextmanager
def serving(form: str, settings: ServerSettings, logs: Path) -> Iterator[Running]:
    """Starts `hydra` or llama-server in one of FORMS, waits until it is ready, and ends it afterwards."""
    port = free_port()
    with tempfile.TemporaryDirectory() as folder:
        command = _hydra_command(settings, port, Path(folder)) if form == HYDRA else _peer_command(form, settings, port)
        log_path = logs / f"{form}-{port}.log"
        with log_path.open("wb") as log:
            log.write((" ".join(command) + "\n").encode())
            log.flush()
            # Ours is started as a head starts it.
            env = {**os.environ, **(copy_environment() if form == HYDRA else {})}
            process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, cwd=ROOT, env=env)
        try:
            _wait_ready(process, port, log_path)
            yield Running(f"http://127.0.0.1:{port}", log_path, process.pid)
        finally:
            _end(process)


def _hydra_command(settings: ServerSettings, port: int, folder: Path) -> list[str]:
    config = EngineConfig(
        model_path=str(settings.model),
        model_name=MODEL_NAME,
        port=port,
        slots=settings.slots,
        context_tokens=settings.context_tokens,
        threads=settings.threads,
        gpu_layers=settings.gpu_layers,
        log_level="WARNING",
    )
    path = folder / "engine.json"
    path.write_text(dataclasses.replace(config, **settings.engine).to_json())
    return [sys.executable, "-m", "engines.runtime", "--config", str(path)]


def _peer_command(form: str, settings: ServerSettings, port: int) -> list[str]:
    assert settings.peer is not None
    layers = ALL_LAYERS if settings.gpu_layers < 0 else settings.gpu_layers
    values = {
        "--model": settings.model,
        "--alias": MODEL_NAME,
        "--port": port,
        "--parallel": settings.slots,
        "--ctx-size": settings.context_tokens * settings.slots,
        "--threads": settings.threads,
        "--threads-batch": settings.threads,
        "--n-gpu-layers": layers,
        "--flash-attn": "on",
        "--cache-type-k": "f16",
        "--cache-type-v": "f16",
        "--fit": "off",  # or it would shrink what we ask for
        "--reasoning-format": "none",  # text is text: neither side needs to take answers apart
    }
    flat = [str(part) for pair in values.items() for part in pair]
    return [str(peer_binary(settings.peer, "llama-server")), *flat, *FORMS[form], *settings.peer_arguments]


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _wait_ready(process: subprocess.Popen[bytes], port: int, log_path: Path) -> None:
    deadline = time.monotonic() + START_TIMEOUT_S
    while not _is_ready(port):
        if process.poll() is not None:
            raise BenchError(f"the server ended with {process.returncode} before it was ready:\n{_log_end(log_path)}")
        if time.monotonic() > deadline:
            raise BenchError(f"the server was not ready within {START_TIMEOUT_S:.0f} s:\n{_log_end(log_path)}")
        time.sleep(0.05)


def _is_ready(port: int) -> bool:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5) as health:
            return bool(health.status == 200)
    except (urllib.error.URLError, ConnectionError, TimeoutError):
        return False


def _log_end(path: Path) -> str:
    return path.read_text(errors="replace")[-2000:]


def _end(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    try:
        process.wait(END_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait(END_TIMEOUT_S)
