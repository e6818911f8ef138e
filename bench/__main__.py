"""`python -m bench engine|prefix|spec|step|kv|kv-host|store|park|handoff|pd|placement|router|model`: Hydra measured.

The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench import engine, handoff, kv, kv_host, library, park, pd, placement, prefix, router, spec, step, store
from bench.errors import BenchError
from bench.servers import model_path, setting
from bench.vocabulary import ROOT
from engines.copy_environment import copy_environment


def _add_server_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--peer", default=str(ROOT / "build" / "peer"), help="folder of `make peer`, or none")
    parser.add_argument("--threads", type=int, default=0, help="compute threads of both; 0: all cores but one")
    parser.add_argument("--gpu-layers", type=int, default=0, help="layers on the GPU in both; -1: all")
    parser.add_argument("--library", default=library.AUTO, metavar="NAME|FOLDER", help=library.HELP)
    parser.add_argument("--set", type=setting, action="append", default=[], metavar="KEY=VALUE", help="of EngineConfig")
    parser.add_argument("--peer-argument", action="append", default=[], help="further one of llama-server, as =--flag")
    parser.add_argument("--logs", type=Path, default=ROOT / "build" / "bench-logs", help="folder of the servers' logs")


@dataclass(frozen=True)
class Bench:
    """One command: the module that says its arguments and measures, and what it wants from its command line."""

    module: Any
    run: Callable[[argparse.Namespace], Any]
    has_servers: bool = True


def _peer(options: argparse.Namespace) -> Path | None:
    return None if options.peer == "none" else Path(options.peer).resolve()


BENCHES = {
    "engine": Bench(engine, lambda options: engine.run(options, model_path(options.model), _peer(options))),
    "prefix": Bench(prefix, lambda options: prefix.run(options, _peer(options))),
    "spec": Bench(spec, lambda options: spec.run(options, _peer(options))),
    "step": Bench(step, step.run, has_servers=False),
    "kv": Bench(kv, kv.run, has_servers=False),
    "kv-host": Bench(kv_host, kv_host.run, has_servers=False),
    "store": Bench(store, store.run, has_servers=False),
    "park": Bench(park, park.run),
    "handoff": Bench(handoff, handoff.run),
    "pd": Bench(pd, pd.run),
    "placement": Bench(placement, placement.run),
    "router": Bench(router, router.run_bench, has_servers=False),
}


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m bench", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    for name, bench in BENCHES.items():
        command = commands.add_parser(name, description=bench.module.__doc__)
        if bench.has_servers:
            _add_server_arguments(command)
        bench.module.add_arguments(command)
    commands.choices["engine"].add_argument("--model", default="smollm2", help="smollm2, synthetic:NAME or a path")
    writer = commands.add_parser("model", description="Writes or fetches a model and prints its path.")
    writer.add_argument("name", help="smollm2, synthetic:NAME or a path")
    return parser


def main(arguments: list[str]) -> int:
    options = _parser().parse_args(arguments)
    try:
        if options.command == "model":
            print(model_path(options.name))
            return 0
        if BENCHES[options.command].has_servers:
            library.use_library(options.library, options.gpu_layers)
            print(f"library of our engine: {library.library_in_use()}", file=sys.stderr, flush=True)
        answer = BENCHES[options.command].run(options)
    except BenchError as error:
        print(f"bench: {error}", file=sys.stderr)
        return 1
    print(json.dumps(answer), flush=True)
    return 0


if __name__ == "__main__":
    if sys.argv[1:2] in (["kv"], ["kv-host"]) and (added := copy_environment()):
        # This process is an engine then, and must be started as one.
        os.execve(sys.executable, [sys.executable, "-m", "bench", *sys.argv[1:]], {**os.environ, **added})
    sys.exit(main(sys.argv[1:]))
