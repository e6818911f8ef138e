"""One library on its way: what goes into it, and the tools that make it, run so that they can be followed and ended."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import shutil
import subprocess
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from engines.native_library import cpu_digest
from native import toolkits
from native.architectures import CPU
from native.errors import BuildFailed
from native.toolkits import Toolkit

FOLDER = Path(__file__).resolve().parent
BUILD_TIMEOUT_S = 6 * 3600.0
ASK_TIMEOUT_S = 120
TAIL_LINES = 25
STEP = re.compile(r"^\[\s*(\d+)/(\d+)\] ")
PERCENT = re.compile(r"^\[\s*(\d+)%\] ")
Report = Callable[[str, int, int], None]  # (stage, steps done, steps in all)


@dataclass(frozen=True)
class Wanted:
    """One library to build: for which architectures, with which toolkit and host compiler, out of which source."""

    archs: tuple[str, ...]
    toolkit: Toolkit | None
    host_compiler: str | None
    source: Path
    source_sha256: str
    package: str
    defines: tuple[str, ...]
    compiler: str

    @property
    def flags(self) -> tuple[str, ...]:
        """The arguments of CMake beside the preset's; they name the build too."""
        found = [f"-D{define}" for define in self.defines]
        if self.toolkit is not None:
            found.append(f"-DCMAKE_CUDA_ARCHITECTURES={';'.join(_cuda_architectures(self.archs))}")
        return tuple(found)

    @property
    def key(self) -> str:
        """Names the build by all that goes into it."""
        parts = {
            "source": self.source_sha256,
            "package": self.package,
            "archs": self.archs,
            "flags": self.flags,
            "presets": hashlib.sha256((FOLDER / "CMakePresets.json").read_bytes()).hexdigest(),
            "lists": hashlib.sha256((FOLDER / "CMakeLists.txt").read_bytes()).hexdigest(),
            "toolkit": self.toolkit.version if self.toolkit else "",
            "compiler": self.compiler,
            "host_compiler": version_line(self.host_compiler) if self.host_compiler else "",
            "cpu": cpu_digest(),
        }
        return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:16]


def _cuda_architectures(archs: tuple[str, ...]) -> list[str]:
    presets = json.loads((FOLDER / "CMakePresets.json").read_text())["configurePresets"]
    values = {preset["name"]: preset.get("cacheVariables", {}) for preset in presets}
    return [values[name]["CMAKE_CUDA_ARCHITECTURES"] for name in archs]


def version_line(compiler: str) -> str:
    answer = subprocess.run([compiler, "--version"], capture_output=True, text=True, timeout=ASK_TIMEOUT_S, check=True)
    return answer.stdout.splitlines()[0].strip()


def configure(wanted: Wanted, work: Path, report: Report) -> None:
    """Runs CMake with the preset and this build's own flags. Raises BuildFailed."""
    report("configuring", 0, 1)
    preset = "cuda" if wanted.toolkit else CPU
    command = ["cmake", "--preset", preset, "-S", str(FOLDER), "-B", str(work), *wanted.flags]
    if shutil.which("ninja") is None:
        command += ["-G", "Unix Makefiles"]
    if wanted.host_compiler:
        command.append(f"-DCMAKE_CUDA_HOST_COMPILER={wanted.host_compiler}")
    if cache := shutil.which("ccache"):
        command.append("-DGGML_CCACHE=OFF")  # ours serves all of the tree
        languages = ("C", "CXX", "CUDA") if wanted.toolkit else ("C", "CXX")
        command += [f"-DCMAKE_{language}_COMPILER_LAUNCHER={cache}" for language in languages]
    _run(command, wanted, work, lambda line: None)


def compile_targets(wanted: Wanted, work: Path, targets: list[str], jobs: int, report: Report) -> None:
    """Runs the build tool and tells how far it is. Raises BuildFailed."""

    def follow(line: str) -> None:
        if step := STEP.match(line):
            report("compiling", int(step[1]), int(step[2]))
        elif percent := PERCENT.match(line):
            report("compiling", int(percent[1]), 100)

    _run(["cmake", "--build", str(work), "-j", str(jobs), "--target", *targets], wanted, work, follow)


def _run(command: list[str], wanted: Wanted, work: Path, follow: Callable[[str], None]) -> None:
    """Runs a tool, keeps what it prints in build.log, and raises BuildFailed with the end of it if it fails."""
    environ = {**toolkits.environment(wanted.toolkit), "HYDRA_LLAMA_SOURCE": str(wanted.source), "LC_ALL": "C"}
    last: deque[str] = deque(maxlen=TAIL_LINES)
    deadline = time.monotonic() + BUILD_TIMEOUT_S
    with (work / "build.log").open("a", encoding="utf-8", buffering=1) as log:
        process = subprocess.Popen(
            command,
            env=environ,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            start_new_session=True,
        )
        try:
            assert process.stdout is not None
            _step_back(process.pid)
            for line in process.stdout:
                log.write(line)
                last.append(line.rstrip())
                follow(line)
                if time.monotonic() > deadline:
                    raise BuildFailed(f"the build did not end within {BUILD_TIMEOUT_S / 3600:.0f} h")
            code = process.wait()
        finally:
            _end(process)
    if code:
        raise BuildFailed(
            "\n".join([*last, f"{command[0]} {command[1]} failed ({code}); the whole log is {work / 'build.log'}"]),
            "if the compiler was killed, memory ran out: --jobs 1",
        )


def _step_back(session: int) -> None:
    """Lets our niceness count for a tool in a session of its own also where the kernel groups processes by their sessions."""
    with contextlib.suppress(OSError):  # It does not, or the tool has ended already.
        Path(f"/proc/{session}/autogroup").write_text(str(max(0, os.getpriority(os.PRIO_PROCESS, 0))))


def _end(process: subprocess.Popen[str]) -> None:
    """Ends the tool and all that it started, if it still runs."""
    if process.poll() is None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, 15)
        try:
            process.wait(timeout=10)
        except subprocess.TimeoutExpired:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, 9)
            process.wait()
    if process.stdout is not None:
        process.stdout.close()
