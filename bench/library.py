"""Which llama.cpp the engines of a measurement load: that with which a head would start them, unless one is named."""

from __future__ import annotations

import importlib.metadata
import os
from pathlib import Path

from bench.errors import BenchError
from bench.vocabulary import ROOT
from engines import launch
from engines.native_library import LIBRARY_VARIABLE
from engines.runtime.card_code import visible_archs

AUTO, WHEEL = "auto", "wheel"
HELP = (
    f"llama.cpp of our engine: {AUTO} = what a head would give it (LLAMA_CPP_LIB_PATH, else the newest build for the device in"
    f" HYDRA_HOME, else the bindings' own), {WHEEL} = the bindings' own, or a folder"
)


def use_library(choice: str, gpu_layers: int) -> None:
    """Makes the engines that this process starts load it. Raises BenchError for a folder without libraries."""
    if choice == AUTO:
        archs = visible_archs() if gpu_layers else []
        home = Path(os.environ.get("HYDRA_HOME") or ROOT / "var")
        os.environ |= launch.library_environment(home, archs[0] if archs else "")
        return
    os.environ.pop(LIBRARY_VARIABLE, None)
    if choice == WHEEL:
        return
    folder = Path(choice).resolve()
    if not any(folder.glob("libllama.*")):
        raise BenchError(f"there is no libllama in {folder}")
    os.environ[LIBRARY_VARIABLE] = str(folder)


def library_in_use() -> str:
    """The library for a person: a build's folder, or the bindings' version."""
    folder = os.environ.get(LIBRARY_VARIABLE)
    return folder or f"the bindings' own ({importlib.metadata.version('llama-cpp-python')})"
