"""`python -m engines.runtime`: one engine, from a configuration file or from flags.

Exit codes: 0 after SIGTERM or SIGINT; 2 bad configuration; 3 the model could not be loaded; 4 the port is taken;
1 anything else. Each failure is one line on stderr.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import gc
import logging
import os
import sys
from pathlib import Path

import uvloop
from aiohttp import web

from engines.config import ConfigInvalid, EngineConfig
from engines.ending import stop_asked, tell_of_crashes
from engines.errors import ModelLoadFailed, TemplateBroken
from engines.rpc_serving import RpcServer
from engines.runtime.card_code import require_card_code
from engines.runtime.core import EngineCore
from engines.runtime.device_chains import with_sound_sampling
from engines.runtime.embedding_core import EmbeddingCore
from engines.runtime.embedding_metrics import EmbeddingMetrics
from engines.runtime.http import EngineServer
from engines.runtime.http_embeddings import PoolingServer
from engines.runtime.metrics import EngineMetrics
from engines.runtime.preparation import Preparation
from engines.runtime.rpc_handoffs import HandoffOperations
from engines.runtime.rpc_server import engine_rpc
from engines.runtime.template_process import require_compiles

SHUTDOWN_S = 4.0
SECRET_VARIABLE = "HYDRA_RPC_SECRET"
STORE_SECRET_VARIABLE = "HYDRA_STORE_SECRET"
HTTP_SECRET_VARIABLE = "HYDRA_HTTP_SECRET"
SWITCH_INTERVAL_S = 0.0002
log = logging.getLogger("hydra.engine")


def parse_config(arguments: list[str]) -> EngineConfig:
    """Flags override the file. Raises ConfigInvalid."""
    parser = argparse.ArgumentParser(prog="python -m engines.runtime", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--config", type=Path, help="JSON file of an EngineConfig")
    parser.add_argument("--model", dest="model_path", help="path of the GGUF")
    parser.add_argument(
        "--projector", dest="projector_path", help="path of the model's projector (mmproj), to see images"
    )
    parser.add_argument("--model-name", help="name that requests use (default: the file's name)")
    parser.add_argument("--host", help="address to bind (default 127.0.0.1)")
    for name, text in (
        ("port", "HTTP port"),
        ("rpc-port", "port of the binary protocol, 0: off"),
        ("slots", "requests served at once"),
        ("threads", "compute threads, 0: all cores but one"),
        ("gpu-layers", "layers on the GPU, -1: all"),
    ):
        parser.add_argument(f"--{name}", type=int, help=text)
    parser.add_argument("--context", dest="context_tokens", type=int, help="tokens of one request, answer included")
    given = vars(parser.parse_args(arguments))
    path: Path | None = given.pop("config")
    flags = {key: value for key, value in given.items() if value is not None}
    if path is not None:
        try:
            text = path.read_text()
        except OSError as error:
            raise ConfigInvalid(f"cannot read {path}: {error.strerror}") from error
        return _with_secret(dataclasses.replace(EngineConfig.from_json(text), **flags))
    if "model_path" not in flags:
        raise ConfigInvalid("give --config or --model")
    flags.setdefault("model_name", Path(flags["model_path"]).stem)
    return _with_secret(EngineConfig(**flags))


def _with_secret(config: EngineConfig) -> EngineConfig:
    """The secrets from the environment, where the file has none; never from a flag, which `ps` shows."""
    if not config.rpc_secret:
        config = dataclasses.replace(config, rpc_secret=os.environ.get(SECRET_VARIABLE, ""))
    if not config.store_secret:
        config = dataclasses.replace(config, store_secret=os.environ.get(STORE_SECRET_VARIABLE, ""))
    if not config.http_secret:
        config = dataclasses.replace(config, http_secret=os.environ.get(HTTP_SECRET_VARIABLE, ""))
    config.refuse_open_rpc()
    config.refuse_open_http()
    return config


def compute_threads(wanted: int) -> int:
    """0 leaves one core to the rest: two busy processes on as many spinning threads cost tenfold."""
    return wanted or max(1, len(os.sched_getaffinity(0)) - 1)


async def serve(config: EngineConfig) -> int:
    """Runs until a signal, a load failure or the core's end. Returns the exit code."""
    loop = asyncio.get_running_loop()
    core, server = _engine(config, loop)
    runner = web.AppRunner(
        server.app(), handler_cancellation=True, access_log=None, shutdown_timeout=SHUTDOWN_S / 2, keepalive_timeout=75
    )
    await runner.setup()
    rpc = _rpc(config, server)
    listeners = [(config.port, web.TCPSite(runner, config.host, config.port).start)]
    listeners += [(config.rpc_port, rpc.start)] if rpc else []
    for port, listen in listeners:
        try:
            await listen()
        except OSError as error:
            await runner.cleanup()
            log.error("cannot listen on %s:%d: %s", config.host, port, error.strerror)
            return 4
    stop = stop_asked(log)
    core.start()
    log.info("listening on http://%s:%d, loading %s", config.host, config.port, config.model_path)
    await _until_stopped(core, stop, server.preparation if isinstance(server, EngineServer) else None)
    if isinstance(server, EngineServer):
        await server.parking.stop()
        await server.preparation.stop()
    core.stop()
    await asyncio.gather(runner.cleanup(), *([rpc.close()] if rpc else []))
    server.close()
    await asyncio.to_thread(core.join, SHUTDOWN_S)
    if core.is_alive():
        log.error("the core is still inside llama.cpp after %.0f s; leaving it", SHUTDOWN_S)
        return 1
    return _exit_code(core)


def _engine(
    config: EngineConfig, loop: asyncio.AbstractEventLoop
) -> tuple[EngineCore, EngineServer] | tuple[EmbeddingCore, PoolingServer]:
    threads = compute_threads(config.threads)
    if config.pooling:
        pooling = EmbeddingCore(config, threads, loop, EmbeddingMetrics())
        return pooling, PoolingServer(config, pooling)
    core = EngineCore(config, threads, loop, EngineMetrics())
    return core, EngineServer(config, core)


def _rpc(config: EngineConfig, server: EngineServer | PoolingServer) -> RpcServer | None:
    """The server of the binary protocol, which moves states; an engine that only embeds has none."""
    if not config.rpc_port or not isinstance(server, EngineServer):
        return None
    return engine_rpc(config, server.preparation, server.desk, HandoffOperations(server.arriving, server.leaving))


async def _until_stopped(
    core: EngineCore | EmbeddingCore, stop: asyncio.Event, preparation: Preparation | None
) -> None:
    """Returns on a signal or when the core ended by itself."""
    stopped, is_frozen = asyncio.ensure_future(stop.wait()), False
    while not stop.is_set() and core.state in ("loading", "ready"):
        if core.state == "ready" and not is_frozen:
            if preparation is not None:
                warming = asyncio.create_task(preparation.warm_up())
                await asyncio.wait((stopped, warming), return_when=asyncio.FIRST_COMPLETED)
            # Modules and vocabulary stay until the end; a collection that walks over them holds up every stream's next token.
            gc.collect()
            gc.freeze()
            is_frozen = True
        changed = asyncio.ensure_future(core.changed.wait())
        await asyncio.wait((stopped, changed), return_when=asyncio.FIRST_COMPLETED)
        changed.cancel()
        core.changed.clear()
    stopped.cancel()


def _exit_code(core: EngineCore | EmbeddingCore) -> int:
    if isinstance(core.failure, ModelLoadFailed):
        return 3
    return 1 if core.failure is not None else 0


def main(arguments: list[str]) -> int:
    tell_of_crashes()
    try:
        config = parse_config(arguments)
        logging.basicConfig(level=config.log_level, format="%(asctime)s %(levelname)s %(name)s %(message)s")
        if config.chat_template:
            require_compiles(config.chat_template)
    except (ConfigInvalid, TemplateBroken, ValueError) as error:
        print(f"engine: {error}", file=sys.stderr)
        return 2
    try:
        require_card_code(config)
        config = with_sound_sampling(config)
    except ModelLoadFailed as error:
        print(f"engine: {error}", file=sys.stderr)
        return 3
    # The core's thread wants the interpreter back when a step ends; five milliseconds of waiting would be half a step.
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    return uvloop.run(serve(config))


if __name__ == "__main__":
    code = main(sys.argv[1:])
    logging.shutdown()
    # Not sys.exit: a core thread stuck in native code must not keep the process alive.
    sys.stdout.flush()
    os._exit(code)
