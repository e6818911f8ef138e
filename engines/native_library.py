"""Libraries of llama.cpp that were built for this machine's cards: what their manifests say, and which one a card gets.

They lie in HYDRA_HOME/native, one folder each, named after what went into it: `lib/` is what LLAMA_CPP_LIB_PATH points at,
`manifest.json` says what it is. Written by native/build_native.py; read by the head, which starts engines with them. Standard
library only, so that the build runs anywhere.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import platform
import re
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path

from engines import build_trust
from engines.build_trust import Trust
from engines.cuda_images import CudaImages, capability
from engines.file_lock import locked

CPU = "cpu"
FOLDER = "native"
LIBRARY_VARIABLE = "LLAMA_CPP_LIB_PATH"
CUDA_LIBRARY = "libggml-cuda.so"
MAX_MANIFEST_BYTES = 1 << 20
MAX_BUILDS = 256
# Held by whoever starts an engine, from choosing its build until its process names it; and by whoever removes builds.
LOCK = ".starts.lock"
LOCK_WAIT_S = 60.0


@dataclass(frozen=True)
class Manifest:
    """What a build is. `archs` were asked for, `images` are really inside; digests are SHA-256 in hexadecimal digits."""

    key: str
    package: str  # the bindings that it fits: llama-cpp-python==0.3.36
    source_sha256: str
    archs: tuple[str, ...]
    images: tuple[str, ...]
    images_by: str  # who listed them: cuobjdump, or the reader of fat binaries
    toolkit: str  # version of CUDA; "" for none
    compiler: str
    host_compiler: str  # of CUDA files, where it is another one
    flags: tuple[str, ...]
    cpu_sha256: str
    build_s: float
    built_at: str
    libraries: dict[str, str]

    def to_json(self) -> str:
        return json.dumps(dataclasses.asdict(self), indent=2, sort_keys=True) + "\n"

    @classmethod
    def from_json(cls, text: str) -> Manifest:
        """Raises ValueError for what is no manifest."""
        values = json.loads(text)
        names = {field.name for field in dataclasses.fields(cls)}
        if not isinstance(values, dict) or set(values) != names:
            raise ValueError("it is no manifest of a native build")
        lists = ("archs", "images", "flags")
        if not all(isinstance(values[name], list) for name in lists) or not isinstance(values["libraries"], dict):
            raise ValueError("its lists are no lists")
        return cls(**{**values, **{name: tuple(map(str, values[name])) for name in lists}})

    def fits(self, arch: str) -> bool:
        """Whether a device of this architecture (sm_86; anything else is a CPU) can run it.

        A CPU gets a library for the CPU alone: one with CUDA would take memory on every card for nothing.
        """
        wanted = capability(arch)
        if wanted is None:
            return self.archs == (CPU,)
        return images_of(self.images).runs_on(wanted)


@dataclass(frozen=True)
class Build:
    """A build as it lies on the disk."""

    folder: Path
    manifest: Manifest

    @property
    def library_path(self) -> Path:
        return self.folder / "lib"

    @property
    def trust(self) -> Trust:
        return build_trust.read(self.folder)


def images_of(names: tuple[str, ...]) -> CudaImages:
    """The images that names such as sm_86, sm_120a and compute_90 stand for; others are left out."""
    kinds: dict[str, set[tuple[int, bool]]] = {"sm": set(), "compute": set()}
    for name in names:
        if match := re.fullmatch(r"(sm|compute)_(\d+)([af]?)", name):
            kinds[match[1]].add((int(match[2]), match[3] == "a"))
    return CudaImages(frozenset(kinds["sm"]), frozenset(kinds["compute"]))


def builds(home: Path) -> list[Build]:
    """The builds of this home, newest first. What cannot be read is none."""
    found = []
    for path in sorted(home.joinpath(FOLDER).glob("*/manifest.json"))[:MAX_BUILDS]:
        try:
            with path.open(encoding="utf-8") as file:
                build = Build(path.parent, Manifest.from_json(file.read(MAX_MANIFEST_BYTES)))
        except (OSError, ValueError, TypeError):
            continue
        if build.library_path.is_dir():
            found.append(build)
    return sorted(found, key=lambda build: build.manifest.built_at, reverse=True)


def fitting(home: Path, arch: str, package: str) -> list[Build]:
    """The builds here that fit the device, the installed bindings and this machine's CPU, newest first.

    Bindings of another version describe other structures, and a library compiled for another CPU stops at its first instruction
    that this one lacks.
    """
    cpu = cpu_digest()
    found = (build for build in builds(home) if (build.manifest.package, build.manifest.cpu_sha256) == (package, cpu))
    return [build for build in found if build.manifest.fits(arch)]


def choose(home: Path, arch: str, package: str, model: str = "") -> Build | None:
    """The newest build that fits and is trusted with this model (its file's path; "": any); None if there is none.

    A CPU has the bindings' own library to fall back on. A card has nothing else, so what crashed only other models is tried there
    before its engine is refused.
    """
    found = fitting(home, arch, package)
    chosen = next((build for build in found if build.trust.serves(model)), None)
    if chosen is None and capability(arch) is not None:
        chosen = next((build for build in found if model not in build.trust.given_up_for), None)
    return chosen


def starting(home: Path) -> AbstractContextManager[None]:
    """No build is removed meanwhile. Nothing to hold where there is none. Raises TimeoutError, OSError."""
    if not home.joinpath(FOLDER).is_dir():
        return nullcontext()
    return locked(home / FOLDER / LOCK, LOCK_WAIT_S, shared=True)


def removing(home: Path) -> AbstractContextManager[None]:
    """No engine is started meanwhile. Raises TimeoutError, OSError."""
    return locked(home / FOLDER / LOCK, LOCK_WAIT_S)


def cpu_digest(cpuinfo: str | None = None) -> str:
    """Names what this machine's compiler would compile for: its architecture and its CPU's features."""
    if cpuinfo is None:
        cpuinfo = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    match = re.search(r"^(?:flags|Features)\s*:\s*(.*)$", cpuinfo, re.MULTILINE)
    features = " ".join(sorted(match[1].split())) if match else ""
    return hashlib.sha256(f"{platform.machine()} {features}".encode()).hexdigest()


def refusal(arch: str, images: CudaImages | None, library: Path) -> tuple[str, str] | None:
    """Why a card cannot use a library, and what to do about it; None if it can. `images` is None for one without CUDA."""
    wanted = capability(arch)
    if wanted is None or (images is not None and images.runs_on(wanted)):
        return None
    if images is None:
        message = f"The card is {arch}, and llama.cpp in {library} was built without CUDA"
    else:
        message = f"The card is {arch}, and llama.cpp in {library} has code for {', '.join(images.names) or 'no card'}"
    return message, f"Build one on this host: manage.py build-native --arch {arch}"
