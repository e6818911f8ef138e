"""Fetch one model of the catalogue: `python -m hydra_site.supervisor.pull NAME MODELS_DIR`.

A process of its own, so that stopping the supervisor also stops the download. Progress goes to standard output as one
JSON object per line, {"done_bytes", "total_bytes"}; a failure is a last line {"error"} and exit code 1.
"""

import json
import sys
import time
from collections.abc import Callable
from pathlib import Path

from pools import fetch
from pools.catalogue import ensure
from pools.errors import CatalogueError, ModelUnknown

REPORT_EVERY_S = 0.5


def main(arguments: list[str]) -> int:
    """Fetch the model named by `arguments` and return the exit code."""
    name, models_dir = arguments
    reported_at = 0.0

    def report(done_bytes: int, total_bytes: int) -> None:
        nonlocal reported_at
        if done_bytes < total_bytes and time.monotonic() - reported_at < REPORT_EVERY_S:
            return
        reported_at = time.monotonic()
        print(json.dumps({"done_bytes": done_bytes, "total_bytes": total_bytes}), flush=True)

    try:
        ensure(name, Path(models_dir), report)
    except ModelUnknown:
        if fetch.is_known(name):
            return _from_hub(name, Path(models_dir), report)
        # It may be a GGUF that was registered by its path; bootstrap knows those and tells if this is none.
        print(f"{name} is not in the catalogue", file=sys.stderr)
    except CatalogueError as error:
        print(json.dumps({"error": f"{error}. {error.hint}"}), flush=True)
        return 1
    return 0


def _from_hub(name: str, models_dir: Path, report: Callable[[int, int], None]) -> int:
    """Fetch a model of the catalogue that a hub has; once it is here, a start asks no hub any more."""
    if fetch.file_of(name, models_dir).is_file():
        return 0
    try:
        fetch.fetch(
            name, models_dir, lambda stage, done, total: report(done, total) if stage == "downloading" else None
        )
    except CatalogueError as error:
        print(json.dumps({"error": f"{error}. {error.hint}"}), flush=True)
        return 1
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
