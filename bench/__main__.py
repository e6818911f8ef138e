"""`python -m bench engine|prefix|spec|kv|store|park|handoff|placement|router|model`: Hydra measured; the last line is JSON."""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path
from typing import Any

from bench import engine, handoff, kv, park, placement, prefix, router, spec, store
from bench.errors import BenchError
from bench.servers import model_path
from bench.vocabulary import ROOT
from engines.copy_environment import copy_environment


def _setting(text: str) -> tuple[str, Any]:
    name, _, value = text.partition("=")
    try:
        return name, json.loads(value)
    except ValueError:
        return name, value


def _add_server_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--peer", default=str(ROOT / "build" / "peer"), help="folder of `make peer`, or none")
    parser.add_argument("--threads", type=int, default=0, help="compute threads of both; 0: all cores but one")
    parser.add_argument("--gpu-layers", type=int, default=0, help="layers on the GPU in both; -1: all")
    parser.add_argument(
        "--set", type=_setting, action="append", default=[], metavar="KEY=VALUE", help="of EngineConfig"
    )
    parser.add_argument("--peer-argument", action="append", default=[], help="further one of llama-server, as =--flag")
    parser.add_argument("--logs", type=Path, default=ROOT / "build" / "bench-logs", help="folder of the servers' logs")


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    for name, module in (("engine", engine), ("prefix", prefix), ("spec", spec)):
        command = commands.add_parser(name, description=module.__doc__)
        _add_server_arguments(command)
        module.add_arguments(command)
    commands.choices["engine"].add_argument("--model", default="smollm2", help="smollm2, synthetic:NAME or a path")
    kv.add_arguments(commands.add_parser("kv", description=kv.__doc__))
    store.add_arguments(commands.add_parser("store", description=store.__doc__))
    parker = commands.add_parser("park", description=park.__doc__)
    _add_server_arguments(parker)
    park.add_arguments(parker)
    mover = commands.add_parser("handoff", description=handoff.__doc__)
    _add_server_arguments(mover)
    handoff.add_arguments(mover)
    router.add_arguments(commands.add_parser("router", description=router.__doc__))
    placing = commands.add_parser("placement", description=placement.__doc__)
    _add_server_arguments(placing)
    placement.add_arguments(placing)
    writer = commands.add_parser("model", description="Writes or fetches a model and prints its path.")
    writer.add_argument("name", help="smollm2, synthetic:NAME or a path")
    options = parser.parse_args(arguments)
    try:
        if options.command == "model":
            print(model_path(options.name))
            return 0
        if options.command == "kv":
            print(json.dumps(kv.run(options)), flush=True)
            return 0
        if options.command == "store":
            print(json.dumps(store.run(options)), flush=True)
            return 0
        if options.command == "park":
            print(json.dumps(park.run(options)), flush=True)
            return 0
        if options.command == "handoff":
            print(json.dumps(handoff.run(options)), flush=True)
            return 0
        if options.command == "router":
            print(json.dumps(router.run_bench(options)), flush=True)
            return 0
        if options.command == "placement":
            print(json.dumps(placement.run(options)), flush=True)
            return 0
        peer = None if options.peer == "none" else Path(options.peer).resolve()
        if options.command == "engine":
            answer = engine.run(options, model_path(options.model), peer)
        else:
            answer = (spec if options.command == "spec" else prefix).run(options, peer)
    except BenchError as error:
        print(f"bench: {error}", file=sys.stderr)
        return 1
    print(json.dumps(answer), flush=True)
    return 0


if __name__ == "__main__":
    if sys.argv[1:2] == ["kv"] and (added := copy_environment()):
        # This process is an engine then, and must be started as one.
        os.execve(sys.executable, [sys.executable, "-m", "bench", *sys.argv[1:]], {**os.environ, **added})
    sys.exit(main(sys.argv[1:]))
