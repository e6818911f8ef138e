"""The other processes of `python -m bench placement`: one that loads a model and measures, one that stands in for a card.

A machine without a card lends itself one: ggml's RPC server on loopback, whose device takes layers and experts like a card's,
so that splits between a card and its host can be measured there, if not their speed.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import sys
from pathlib import Path
from typing import Any

import llama_cpp

from engines.config import EngineConfig
from engines.errors import ModelLoadFailed
from engines.runtime import ggml, memory

_FOLDER = os.environ.get("LLAMA_CPP_LIB_PATH") or Path(llama_cpp.__file__).parent / "lib"
LIBRARY = Path(_FOLDER) / "libggml-rpc.so"


def serve(endpoint: str, threads: int) -> None:
    """Serves this machine's CPU as a device, until it is ended."""
    llama_cpp.llama_backend_init()
    host = ggml.device(ggml.HOST)
    assert host is not None
    devices = (ctypes.c_void_p * 1)(host.handle)
    start = ctypes.CDLL(str(LIBRARY)).ggml_backend_rpc_start_server
    start.argtypes = [ctypes.c_char_p, ctypes.c_char_p, ctypes.c_size_t, ctypes.c_size_t, ctypes.c_void_p]
    start(endpoint.encode(), None, threads, 1, devices)


def register(endpoint: str) -> None:
    """Makes the peer's device one of this process's."""
    add = ctypes.CDLL(str(LIBRARY)).ggml_backend_rpc_add_server
    add.restype, add.argtypes = ctypes.c_void_p, [ctypes.c_char_p]
    registry = add(endpoint.encode())
    if not registry:
        raise ModelLoadFailed(f"no peer answers at {endpoint}")
    ggml.function("ggml_backend_register", None, ctypes.c_void_p)(registry)


def measured(config: EngineConfig, peer: str | None) -> dict[str, Any]:
    """Bytes by device, by llama.cpp's plan and as it took them."""
    llama_cpp.llama_backend_init()
    if peer is not None:
        register(peer)
    return memory.measured_once(config)


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.placement_probe", description=__doc__)
    parser.add_argument("--serve", metavar="HOST:PORT")
    parser.add_argument("--config", type=Path)
    parser.add_argument("--peer", metavar="HOST:PORT")
    options = parser.parse_args(arguments)
    if options.serve:
        serve(options.serve, threads=1)
        return 0
    try:
        print(json.dumps(measured(EngineConfig.from_json(options.config.read_text()), options.peer)), flush=True)
    except ModelLoadFailed as error:
        print(f"placement: {error}", file=sys.stderr)
        return 3
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
