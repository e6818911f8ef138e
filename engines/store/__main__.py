"""`python -m engines.store --config FILE`: one store, from a configuration file.

Exit codes: 0 after SIGTERM or SIGINT; 2 bad configuration; 3 the directory cannot be used; 4 a port is taken; 1 anything else.
Each failure is one line on stderr.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import logging
import os
import sys
from pathlib import Path

from engines.config import ConfigInvalid
from engines.ending import stop_asked, tell_of_crashes
from engines.store.config import StoreConfig
from engines.store.errors import StoreUnusable
from engines.store.server import StoreServer

SECRET_VARIABLE = "HYDRA_STORE_SECRET"
log = logging.getLogger("hydra.store")


def parse_config(arguments: list[str]) -> StoreConfig:
    """Raises ConfigInvalid. The secret may come from the environment, never from a flag, which `ps` shows."""
    parser = argparse.ArgumentParser(prog="python -m engines.store", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--config", type=Path, required=True, help="JSON file of a StoreConfig")
    path: Path = parser.parse_args(arguments).config
    try:
        config = StoreConfig.from_json(path.read_text())
    except OSError as error:
        raise ConfigInvalid(f"cannot read {path}: {error.strerror}") from error
    if not config.secret:
        config = dataclasses.replace(config, secret=os.environ.get(SECRET_VARIABLE, ""))
    config.refuse_open_port()
    return config


async def serve(config: StoreConfig) -> int:
    """Runs until a signal. Returns the exit code."""
    stop = stop_asked(log)
    server = StoreServer(config)
    try:
        await server.start()
    except OSError as error:
        server.release()
        log.error("cannot listen on %s:%d or %d: %s", config.host, config.port, config.http_port, error.strerror)
        return 4
    status = server.store.status()
    log.info(
        "listening on %s:%d, %s holds %d objects and %d manifests",
        config.host,
        config.port,
        config.folder,
        status.objects,
        status.manifests,
    )
    ends = {asyncio.ensure_future(stop.wait()), asyncio.ensure_future(server.until_broken())}
    _, others = await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
    for other in others:
        other.cancel()
    await server.close(clean=stop.is_set())
    return 0 if stop.is_set() else 1


def main(arguments: list[str]) -> int:
    tell_of_crashes()
    logging.basicConfig(format="%(asctime)s %(levelname)s %(name)s: %(message)s", level="INFO")
    try:
        config = parse_config(arguments)
        logging.getLogger().setLevel(config.log_level)
        # Not uvloop, which the engine runs on: it has no sendfile.
        return asyncio.run(serve(config))
    except ConfigInvalid as error:
        log.error("bad configuration: %s", error)
        return 2
    except StoreUnusable as error:
        log.error("%s", error)
        return 3


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
