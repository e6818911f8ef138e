"""NVIDIA's wheels as a toolkit: compiler, headers and libraries that pip put below `nvidia/cu13`, shaped as CMake expects.

    pip install nvidia-cuda-nvcc nvidia-nvvm nvidia-cuda-crt nvidia-cuda-runtime nvidia-cuda-cccl nvidia-cublas

all of one release. The wheels lack what a linker asks for: names without version, lib64, and a stand-in for the driver's
library. A folder of links adds these.
"""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

LINK_TIMEOUT_S = 60
_DRIVER = "libcuda.so.1"


def is_of_wheels(root: Path) -> bool:
    """Whether the folder is what wheels leave: libraries in `lib`, none by the plain name that a linker wants."""
    return (root / "lib").is_dir() and not (root / "lib64").exists() and root.parent.name == "nvidia"


def completed(root: Path, folder: Path) -> Path:
    """A toolkit at `folder` made of links into the wheels at `root`; the same every time. Raises OSError, CalledProcessError."""
    shutil.rmtree(folder, ignore_errors=True)
    (folder / "lib64" / "stubs").mkdir(parents=True)
    (folder / "bin").mkdir()
    for program in (root / "bin").iterdir():
        # nvcc looks for its parts beside itself, where the link is followed; so the programs are copies.
        if program.is_dir():
            shutil.copytree(program, folder / "bin" / program.name)
        else:
            shutil.copy(program, folder / "bin" / program.name)
            (folder / "bin" / program.name).chmod(0o755)
    for name in ("include", "nvvm"):
        (folder / name).symlink_to(root / name)
    for library in (root / "lib").iterdir():
        (folder / "lib64" / library.name).symlink_to(library)
        plain = library.name.partition(".so.")[0]
        if plain != library.name:
            (folder / "lib64" / f"{plain}.so").symlink_to(library)
    # Whoever loads the result has a driver; only its name is needed to link against it. Compilers that link what is needed alone
    # (Ubuntu's) drop a library without the functions that are called, and then the result finds none of them where it is loaded.
    command = ["cc", "-shared", "-fPIC", "-fno-builtin", "-x", "c", "-", f"-Wl,-soname,{_DRIVER}"]
    stub = folder / "lib64" / "stubs" / "libcuda.so"
    functions = "".join(f"void {name}(void) {{}}\n" for name in _driver_functions(root))
    subprocess.run(
        [*command, "-o", str(stub)], input=functions.encode(), check=True, timeout=LINK_TIMEOUT_S, capture_output=True
    )
    (folder / "lib").symlink_to("lib64")
    return folder


def _driver_functions(root: Path) -> list[str]:
    """All that the driver's header may name a function, with the versions that it stands for (`cuMemAlloc_v2`)."""
    header = root / "include" / "cuda.h"
    return sorted(set(re.findall(r"\bcu[A-Z]\w*", header.read_text(errors="replace")))) if header.is_file() else []
