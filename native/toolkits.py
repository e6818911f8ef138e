"""CUDA toolkits on this machine: finding them, choosing one for each card, and the environment that makes CMake use it."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from native.architectures import ARCHITECTURES, Version, newest_gcc

ASK_TIMEOUT_S = 60
_RELEASE = re.compile(r"release (\d+)\.(\d+), V(\S+)")
_ROOT_VARIABLES = ("CUDAToolkit_ROOT", "CUDA_HOME", "CUDA_PATH")
_USUAL_ROOTS = ("usr/local/cuda", "usr/lib/nvidia-cuda-toolkit", "usr/lib/cuda", "opt/cuda")
_DEBIAN = "Debian's is 11.8: apt install nvidia-cuda-toolkit g++-11 (section non-free)"
_FROM_NVIDIA = "get one from NVIDIA and name its folder with --toolkit"


class ToolkitMissing(RuntimeError):
    """No toolkit here can compile for a card; the message says what is needed, what was found and what to do."""


@dataclass(frozen=True)
class Toolkit:
    """A toolkit: its folder, the version as `nvcc` tells it ("13.0.88"), and whether cuBLAS' headers are there."""

    root: Path
    version: str
    has_cublas: bool

    @property
    def release(self) -> Version:
        major, minor = self.version.split(".")[:2]
        return int(major), int(minor)

    @property
    def bin(self) -> Path:
        return self.root / "bin"

    @property
    def bins(self) -> tuple[Path, ...]:
        """Where its programs lie: Debian keeps nvcc and its front end apart from ptxas and cuobjdump."""
        return (self.bin, self.root.parent.parent / "bin") if _is_debian(self.root) else (self.bin,)

    def __str__(self) -> str:
        lack = "" if self.has_cublas else ", without cuBLAS' headers"
        return f"CUDA {self.version} ({self.root}{lack})"


def parse_version(text: str) -> str | None:
    """The version in what `nvcc --version` prints, or None."""
    match = _RELEASE.search(text)
    return match[3].rstrip(",") if match else None


def find_toolkits(given: Sequence[Path] = (), environ: Mapping[str, str] = os.environ) -> list[Toolkit]:
    """The toolkits of this machine: those given first, then those named in the environment, on PATH and in usual places."""
    roots = [*given]
    roots += [Path(environ[name]) for name in _ROOT_VARIABLES if environ.get(name)]
    roots += _roots_on_path(environ)
    roots += [Path("/") / name for name in _USUAL_ROOTS]
    roots += sorted(Path("/usr/local").glob("cuda-*"), reverse=True)
    roots += [Path(folder) / "nvidia" / f"cu{major}" for folder in sys.path for major in (13,)]
    found: dict[Path, Toolkit] = {}
    for root in roots:
        toolkit = look_at(root)
        if toolkit is not None:
            found.setdefault((root / "bin" / "nvcc").resolve(), toolkit)
    return list(found.values())


def look_at(root: Path) -> Toolkit | None:
    """The toolkit in this folder; None if there is none, or its nvcc does not answer."""
    nvcc = root / "bin" / "nvcc"
    if not nvcc.is_file() or not _has_header(root, "cuda_runtime.h"):
        return None
    try:
        answer = subprocess.run(
            [nvcc, "--version"], capture_output=True, text=True, timeout=ASK_TIMEOUT_S, check=True
        ).stdout
    except (OSError, subprocess.SubprocessError):
        return None
    version = parse_version(answer)
    return None if version is None else Toolkit(root, version, _has_header(root, "cublas_v2.h"))


def choose(wanted: Iterable[str], toolkits: Sequence[Toolkit]) -> list[tuple[Toolkit, tuple[str, ...]]]:
    """Which toolkit compiles for which of the wanted cards (sm_XX), with as few toolkits as can be; raises ToolkitMissing.

    A toolkit that was found earlier wins among equals, so one that was given by name counts first.
    """
    usable = [toolkit for toolkit in toolkits if toolkit.has_cublas]
    left = list(wanted)
    for name in left:
        if not any(ARCHITECTURES[name].is_known_to(toolkit.release) for toolkit in usable):
            raise ToolkitMissing(missing_line(name, toolkits))
    chosen: list[tuple[Toolkit, tuple[str, ...]]] = []
    while left:
        reach = [tuple(name for name in left if ARCHITECTURES[name].is_known_to(toolkit.release)) for toolkit in usable]
        best = max(range(len(usable)), key=lambda index: len(reach[index]))
        chosen.append((usable[best], reach[best]))
        left = [name for name in left if name not in reach[best]]
    return chosen


def missing_line(name: str, toolkits: Sequence[Toolkit]) -> str:
    """One line that says why nothing here compiles for `name`."""
    arch = ARCHITECTURES[name]
    here = ", ".join(str(toolkit) for toolkit in toolkits) or "no toolkit"
    if any(arch.is_known_to(toolkit.release) for toolkit in toolkits):
        return f"{name} ({arch.cards}) needs cuBLAS' headers beside nvcc; here is {here}. Install the whole toolkit."
    advice = _DEBIAN if arch.is_known_to((11, 8)) else f"Debian's 11.8 is too old; {_FROM_NVIDIA}"
    return f"{name} ({arch.cards}) needs {arch.needs}; here is {here}. {advice}"


def host_compiler(toolkit: Toolkit) -> str | None:
    """The C++ compiler for the host's part of CUDA files, where the usual one is too new for the toolkit; None: the usual one.

    Raises ToolkitMissing if none here is old enough.
    """
    newest = newest_gcc(toolkit.release)
    usual = shutil.which("g++")
    if usual and _gcc_major(usual) <= newest:
        return None
    for major in range(newest, 5, -1):
        if found := shutil.which(f"g++-{major}"):
            return found
    raise ToolkitMissing(f"{toolkit} takes GCC up to {newest} as host compiler; apt install g++-{newest}")


def environment(toolkit: Toolkit | None, environ: Mapping[str, str] = os.environ) -> dict[str, str]:
    """The environment of a build: the toolkit's bin first on PATH, since a newer ptxas found earlier breaks an older nvcc."""
    values = {name: value for name, value in environ.items() if name not in (*_ROOT_VARIABLES, "CUDACXX")}
    if toolkit is not None:
        values["PATH"] = os.pathsep.join([*map(str, toolkit.bins), values.get("PATH", os.defpath)])
        values["CUDAToolkit_ROOT"] = str(toolkit.root)
        values["CUDACXX"] = str(toolkit.bin / "nvcc")
    return values


def _roots_on_path(environ: Mapping[str, str]) -> list[Path]:
    nvcc = shutil.which("nvcc", path=environ.get("PATH"))
    # A link leads to the toolkit; a script of a distribution does not, and its folder is among the usual ones.
    return [Path(nvcc).resolve().parent.parent] if nvcc else []


def _has_header(root: Path, name: str) -> bool:
    """Whether the toolkit has a header; Debian keeps them among the system's."""
    places = [root / "include", root / "targets" / "x86_64-linux" / "include"]
    if _is_debian(root):
        places.append(root.parent.parent / "include")
    return any((place / name).is_file() for place in places)


def _is_debian(root: Path) -> bool:
    return root.parts[-3:] == ("usr", "lib", "nvidia-cuda-toolkit")


def _gcc_major(compiler: str) -> int:
    answer = subprocess.run([compiler, "-dumpversion"], capture_output=True, text=True, timeout=ASK_TIMEOUT_S)
    match = re.match(r"\d+", answer.stdout)
    return int(match[0]) if match else 0
