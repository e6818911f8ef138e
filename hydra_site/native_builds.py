"""A host that starts asks for llama.cpp built for its own CPU and cards: on a CPU that is faster than the bindings' library, and
a card computes nothing without.

Asked once for what such a build would be made of (native/build_request.py), as a job that the panel shows. A build that failed or
was cancelled is asked for again only when a person does, or when compiler, toolkits, CPU or release are others.
"""

import json
import logging
import os
from collections.abc import Iterable
from pathlib import Path

from engines.native_library import FOLDER, LIBRARY_VARIABLE
from engines.process import write_private
from hydra_site import env
from native.architectures import ARCHITECTURES, CPU, checked
from native.build_request import missing_toolkit, request_key, use_own_tools
from native.errors import BuildFailed
from pools import jobs
from pools.choices import JobKind
from pools.readings import DeviceFacts

# Beside the builds: {"cpu": key, "sm_60 sm_86": key}, the last request for each.
RECORD = "asked.json"
MAX_RECORD_BYTES = 1 << 16

logger = logging.getLogger(__name__)


def ask_for_builds(host_name: str, home: Path, devices: Iterable[DeviceFacts]) -> list[str]:
    """Queue what was not asked for yet, and say so: a line for each, for whoever starts this host.

    Nothing where HYDRA_NATIVE_BUILDS is off, or where somebody chose a library for this host's engines himself.
    """
    if env.native_builds() == "off" or os.environ.get(LIBRARY_VARIABLE):
        return []
    use_own_tools()
    path = home / FOLDER / RECORD
    asked, told = _read(path), []
    for archs in _wanted(devices):
        subject = " ".join(archs)
        try:
            key = request_key(archs)
        except BuildFailed as error:
            told.append(f"llama.cpp cannot be built for {subject}: {error} ({error.hint})")
            continue
        if asked.get(subject) == key:
            continue
        job_id = jobs.enqueue(host_name, JobKind.BUILD, subject)
        asked[subject] = key
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        write_private(path, json.dumps(asked, indent=2, sort_keys=True))
        # The job is to fail then: it shows the reason to whoever looks at the panel, too.
        lacking = missing_toolkit(archs) if archs != (CPU,) else ""
        told.append(
            f"llama.cpp cannot be built for {subject} (job {job_id}): {lacking}"
            if lacking
            else f"llama.cpp is being built for {subject} in the background (job {job_id}); engines take it when idle"
        )
    for line in told:
        logger.info("%s", line)
    return told


def _wanted(devices: Iterable[DeviceFacts]) -> list[tuple[str, ...]]:
    """A library for the cards, one for the CPU, which has an engine on every host, and by themselves the cards for which there is
    no toolkit, so that the others do not wait for it."""
    cards = checked({device.arch for device in devices if device.kind == "cuda"} & ARCHITECTURES.keys())
    known = tuple(arch for arch in cards if not missing_toolkit((arch,)))
    unknown = tuple(arch for arch in cards if arch not in known)
    return [archs for archs in (known, unknown, (CPU,)) if archs]


def _read(path: Path) -> dict[str, str]:
    try:
        with path.open(encoding="utf-8") as file:
            values = json.loads(file.read(MAX_RECORD_BYTES))
    except (OSError, ValueError):
        return {}  # Then it is asked once more, which builds nothing that is there.
    return {str(name): str(key) for name, key in values.items()} if isinstance(values, dict) else {}
