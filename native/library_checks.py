"""What a library must be before it counts as built: code for the right cards inside, and nothing of libstdc++ outside."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

from engines.cuda_images import read_images
from engines.native_library import images_of
from native.errors import BuildFailed
from native.toolkits import Toolkit

ASK_TIMEOUT_S = 120
# Of libstdc++ itself: a library that exports them and is not libstdc++ breaks the process's own.
STANDARD_LIBRARY = ("_ZNSt6localeC1Ev", "_ZNSt6localeD1Ev", "_ZNSt6locale7classicEv")


def check_loads(folder: Path) -> None:
    """Raises BuildFailed where the libraries that engines load cannot be loaded, in a process of their own."""
    script = "import ctypes, sys; [ctypes.CDLL(path) for path in sys.argv[1:]]"
    paths = [str(path) for path in (folder / "libllama.so", folder / "libmtmd.so") if path.exists()]
    command = [sys.executable, "-c", script, *paths]
    done = subprocess.run(command, capture_output=True, text=True, timeout=ASK_TIMEOUT_S, check=False)
    if done.returncode:
        said = done.stderr.strip().splitlines() or [f"the process that tried ended with {done.returncode}"]
        raise BuildFailed(f"the library was built, but cannot be loaded: {said[-1]}")


def check_symbols(folder: Path) -> None:
    """Raises BuildFailed if a library exports the C++ standard library: it would crash the engine that loads it."""
    for library in sorted(path for path in folder.glob("*.so") if path.exists()):
        listed = subprocess.run(
            ["nm", "-D", "--defined-only", str(library)],
            capture_output=True,
            text=True,
            timeout=ASK_TIMEOUT_S,
            check=True,
        )
        if exported := exported_standard_library(listed.stdout):
            raise BuildFailed(
                f"{library.name} exports libstdc++ itself ({exported}), which crashes the process that loads it",
                "use a toolchain that links libstdc++ dynamically (CXX=g++), or one that honours -Wl,--exclude-libs,ALL",
            )


def exported_standard_library(listing: str) -> str | None:
    """The first of libstdc++'s own symbols that `nm -D --defined-only` lists; None if the library is clean."""
    names = {line.split()[-1].partition("@")[0] for line in listing.splitlines() if line.strip()}
    return next((name for name in STANDARD_LIBRARY if name in names), None)


def list_images(library: Path, toolkit: Toolkit | None) -> tuple[tuple[str, ...], str]:
    """What a library (or object file) has code for, and who says so. Raises BuildFailed if two readers disagree."""
    if not library.exists():
        return (), ""
    own = read_images(library)
    tool = _cuobjdump(toolkit)
    if tool is None:
        return own.names, "fat binary headers"
    listed: set[str] = set()
    for option, kind in (("--list-elf", "sm"), ("--list-ptx", "compute")):
        answer = subprocess.run([tool, option, str(library)], capture_output=True, text=True, timeout=ASK_TIMEOUT_S)
        listed |= parse_cuobjdump(answer.stdout, kind)
    if images_of(tuple(listed)) != own:
        raise BuildFailed(f"cuobjdump lists {', '.join(sorted(listed))} in {library.name}; its headers say {own.names}")
    return own.names, "cuobjdump"


def parse_cuobjdump(text: str, kind: str) -> set[str]:
    """Architectures in what `cuobjdump --list-elf` (kind "sm") or `--list-ptx` ("compute") prints."""
    lines = re.findall(r"^(?:ELF|PTX) file\s+\d+: .*sm_(\d+[af]?)\.(?:cubin|ptx)\s*$", text, re.MULTILINE)
    return {f"{kind}_{capability.removesuffix('f')}" for capability in lines}


def _cuobjdump(toolkit: Toolkit | None) -> str | None:
    path = os.pathsep.join([*(map(str, toolkit.bins) if toolkit else ()), os.environ.get("PATH", os.defpath)])
    return shutil.which("cuobjdump", path=path)
