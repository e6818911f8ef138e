"""What a build that nobody asked for would be made of: told cheaply, before anything is fetched.

A host asks for its own builds when it starts (hydra_site/native_builds.py), once for each of these names: a build that failed, or
that somebody cancelled, is not tried again before something has changed that may change the outcome.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import sys
from pathlib import Path

from engines.native_library import cpu_digest
from native import changes, llama_source, toolkits
from native.architectures import CPU
from native.compilation import FOLDER, version_line
from native.errors import BuildFailed

REQUIREMENTS = FOLDER.parent / "requirements" / "llama.txt"
# The names under which CMake looks for a C++ compiler, behind what CXX says.
COMPILERS = ("c++", "g++", "clang++")


def use_own_tools() -> None:
    """Puts the programs beside this Python first on PATH: CMake and Ninja come with Hydra's packages."""
    own = str(Path(sys.executable).parent)
    path = os.environ.get("PATH", os.defpath)
    if own not in path.split(os.pathsep):
        os.environ["PATH"] = os.pathsep.join((own, path))


def compiler_line() -> str:
    """The C++ compiler that CMake will take, as it calls itself. Raises BuildFailed where that or another tool is missing."""
    compiler = next(filter(None, (shutil.which(name) for name in (os.environ.get("CXX", ""), *COMPILERS))), None)
    if compiler is None:
        raise BuildFailed("there is no C++ compiler", "apt install build-essential")
    for tool, packages in (("cmake", "cmake ninja-build"), ("nm", "binutils")):
        if shutil.which(tool) is None:
            raise BuildFailed(f"there is no {tool}", f"apt install {packages}")
    return version_line(compiler)


def request_key(archs: tuple[str, ...]) -> str:
    """Names what builds for these architectures would be made of, with the tools that are here now. Raises BuildFailed."""
    found = toolkits.find_toolkits() if archs != (CPU,) else []
    parts = {
        "package": llama_source.pinned(REQUIREMENTS),
        "changes": changes.digest(),
        "cmake": [(FOLDER / name).read_text() for name in ("CMakeLists.txt", "CMakePresets.json")],
        "archs": archs,
        "compiler": compiler_line(),
        "toolkits": sorted(str(toolkit) for toolkit in found),
        "cpu": cpu_digest(),
    }
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:16]


def missing_toolkit(archs: tuple[str, ...]) -> str:
    """Why nothing here compiles for these cards, and what to do; "" where something does."""
    try:
        toolkits.choose([name for name in archs if name != CPU], toolkits.find_toolkits())
    except toolkits.ToolkitMissing as error:
        return str(error)
    return ""
