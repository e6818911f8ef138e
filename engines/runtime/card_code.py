"""Whether this process's llama.cpp has code for the card that it shall use, asked before a model is loaded.

A library without it loads, lists the card, takes its memory, and fails in the first kernel with "no kernel image is available".
"""

from __future__ import annotations

import ctypes
import os
from pathlib import Path

import llama_cpp

from engines.config import EngineConfig
from engines.cuda_images import CudaImages, ImagesUnreadable, read_images
from engines.errors import LibraryUnfit
from engines.native_library import CUDA_LIBRARY, LIBRARY_VARIABLE, refusal

_CAPABILITY_MAJOR, _CAPABILITY_MINOR = 75, 76  # CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_…
MAX_CARDS = 64


def library_folder() -> Path:
    """Where the llama.cpp of this process lies."""
    given = os.environ.get(LIBRARY_VARIABLE)
    return Path(given) if given else Path(llama_cpp.__file__).parent / "lib"


def require_card_code(config: EngineConfig, folder: Path | None = None) -> None:
    """Raises LibraryUnfit if the library has no code for the configuration's card, or for one that this process sees.

    An engine that puts no layers on a card needs none, unless `card_arch` says that it is meant for one.
    """
    folder = folder or library_folder()
    archs = [config.card_arch] if config.card_arch else visible_archs() if config.gpu_layers else []
    if not archs:
        return
    images = _images(folder / CUDA_LIBRARY)
    if images is None and not config.card_arch:
        return  # a library for the CPU, and nobody said that it has to be another one
    for arch in archs:
        refused = refusal(arch, images, folder)
        if refused is not None:
            raise LibraryUnfit(*refused)


def _images(library: Path) -> CudaImages | None:
    try:
        return read_images(library)
    except FileNotFoundError:
        return None
    except (OSError, ImagesUnreadable) as error:
        raise LibraryUnfit(f"{library} cannot be read: {error}", "Build it again: manage.py build-native") from error


def visible_archs() -> list[str]:
    """The architectures (sm_86) of the cards that CUDA shows this process; empty without a driver."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return []
    count = ctypes.c_int()
    if driver.cuInit(0) or driver.cuDeviceGetCount(ctypes.byref(count)):
        return []
    found = []
    for index in range(min(count.value, MAX_CARDS)):
        card, major, minor = ctypes.c_int(), ctypes.c_int(), ctypes.c_int()
        failed = driver.cuDeviceGet(ctypes.byref(card), index)
        failed = failed or driver.cuDeviceGetAttribute(ctypes.byref(major), _CAPABILITY_MAJOR, card)
        failed = failed or driver.cuDeviceGetAttribute(ctypes.byref(minor), _CAPABILITY_MINOR, card)
        if not failed:
            found.append(f"sm_{major.value}{minor.value}")
    return found
