"""Builds llama.cpp's shared libraries for this machine's cards or its CPU: `python -m native.build_native --arch sm_86 ...`.

    --arch NAME        cpu, or a card's architecture (sm_60, sm_86, sm_90, sm_120, ...); give it several times for several.
                       Cards that one toolkit compiles for share one library.
    --home DIR         where builds lie: DIR/native/KEY/lib is what LLAMA_CPP_LIB_PATH points at (default: HYDRA_HOME, ./var)
    --source DIR       a tree of llama.cpp, built as it is, instead of the one inside the pinned sdist with our changes
    --toolkit DIR      a CUDA toolkit that is not where toolkits usually are; may be given several times
    --define NAME=VALUE  one more CMake variable, such as GGML_CUDA_FA_ALL_QUANTS=ON
    --kernels A.cu,B.cu  compile only these files of the CUDA backend, show what is inside, and install nothing
    --jobs N           compilers at once (default: one for each core, fewer where memory is short)
    --nice N           their niceness (default 10)
    --json             progress as one JSON object a line, for programs

Run from the project's folder; needs Python's standard library, CMake (Hydra's packages have it), a C++ compiler, and for cards a
CUDA toolkit. ccache is used if it is there. Nothing is built twice: a build is named after source, flags, toolkit, compiler and
CPU.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from engines import build_trust
from engines.native_library import CUDA_LIBRARY, FOLDER, MAX_MANIFEST_BYTES, Manifest, cpu_digest, images_of
from native import changes, llama_source, old_builds, toolkits, wheel_toolkit
from native.architectures import CPU, ArchitectureUnknown, checked
from native.build_request import REQUIREMENTS, compiler_line, use_own_tools
from native.compilation import Report, Wanted, compile_targets, configure, version_line
from native.compiler_memory import go_first, usual_jobs
from native.errors import BuildFailed
from native.library_checks import check_loads, check_symbols, list_images
from native.toolkits import Toolkit, ToolkitMissing

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = "llama-cpp-python==0.3.36"
NEEDED_BYTES = 3 << 30


# --- what to build -------------------------------------------------------------------------------


def plan(archs: tuple[str, ...], found: list[Toolkit]) -> list[tuple[tuple[str, ...], Toolkit | None]]:
    """The libraries for these architectures: one for the CPU, one for each toolkit that is needed. Raises ToolkitMissing."""
    parts: list[tuple[tuple[str, ...], Toolkit | None]] = [((CPU,), None)] if CPU in archs else []
    cards = [name for name in archs if name != CPU]
    return parts + [(names, toolkit) for toolkit, names in toolkits.choose(cards, found)]


def _source(given: Path | None, package: str, home: Path) -> Path:
    if given is not None:
        if not (given / "include" / "llama.h").is_file():
            raise BuildFailed(f"{given} is no source of llama.cpp")
        return given.resolve()
    # A tree with other changes is another tree: changes are not taken back, and an earlier Hydra's are not built upon.
    version = package.partition("==")[2]
    folder = home / FOLDER / f"source-{version}-{changes.digest()}"
    for tree in folder.glob("source/*/vendor/llama.cpp"):
        return _changed(tree)
    for earlier in (home / FOLDER).glob("source-*"):
        shutil.rmtree(earlier)
    with tempfile.TemporaryDirectory(prefix=".source-", dir=_made(home / FOLDER)) as scratch:
        try:
            llama_source.fetch_source(package, Path(scratch))
        except subprocess.SubprocessError as error:
            raise BuildFailed(f"pip could not fetch the source of {package}", "or name one with --source") from error
        shutil.rmtree(Path(scratch) / "sdist")
        Path(scratch).chmod(0o755)
        shutil.copytree(Path(scratch), folder, dirs_exist_ok=True)
    (tree,) = folder.glob("source/*/vendor/llama.cpp")
    return _changed(tree)


def _changed(tree: Path) -> Path:
    changes.apply(tree)
    return tree


def _made(folder: Path) -> Path:
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    return folder


# --- building -------------------------------------------------------------------------------------


def build(wanted: Wanted, home: Path, jobs: int, report: Report) -> tuple[Path, Manifest, bool]:
    """The folder of the finished build, its manifest, and whether it was built now. Raises BuildFailed.

    One process at a time builds a key; what a broken build left is taken up again. One that crashed engines is built anew.
    """
    target = home / FOLDER / wanted.key
    with _alone(_made(home / FOLDER) / f".{wanted.key}.lock"):
        if (manifest := _manifest(target)) is not None and not build_trust.read(target).is_marked:
            return target, manifest, False
        free_bytes = shutil.disk_usage(home).free
        if free_bytes < NEEDED_BYTES:
            raise BuildFailed(f"a build needs {NEEDED_BYTES >> 30} GiB in {home}; {free_bytes >> 20} MiB are free")
        started = time.monotonic()
        work = _work_folder(home / FOLDER / f".work-{wanted.key}", wanted)
        configure(wanted, work, report)
        compile_targets(wanted, work, ["hydra-libraries"], jobs, report)
        report("checking", 0, 1)
        draft = work / "draft"
        shutil.rmtree(draft, ignore_errors=True)
        _collect(work / "bin", draft / "lib")
        check_symbols(draft / "lib")
        if wanted.toolkit is None:  # one with CUDA wants the driver of a card, which a build does not
            check_loads(draft / "lib")
        images, images_by = list_images(draft / "lib" / CUDA_LIBRARY, wanted.toolkit)
        _check_images(wanted.archs, images)
        manifest = Manifest(
            key=wanted.key,
            package=wanted.package,
            source_sha256=wanted.source_sha256,
            archs=wanted.archs,
            images=images,
            images_by=images_by,
            toolkit=wanted.toolkit.version if wanted.toolkit else "",
            compiler=wanted.compiler,
            host_compiler=version_line(wanted.host_compiler) if wanted.host_compiler else "",
            flags=wanted.flags,
            cpu_sha256=cpu_digest(),
            build_s=round(time.monotonic() - started, 1),
            built_at=datetime.now(UTC).isoformat(timespec="seconds"),
            libraries=_digests(draft / "lib"),
        )
        (draft / "manifest.json").write_text(manifest.to_json())
        shutil.rmtree(work / "before", ignore_errors=True)
        with contextlib.suppress(FileNotFoundError):
            target.rename(work / "before")  # in one step: engines may be choosing right now
        draft.rename(target)
        shutil.rmtree(work, ignore_errors=True)
    return target, manifest, True


def _work_folder(folder: Path, wanted: Wanted) -> Path:
    """A folder for object files, which says what they are made of."""
    (_made(folder) / old_builds.SOURCE_NAME).write_text(wanted.source_sha256)
    return folder


def _check_images(archs: tuple[str, ...], images: tuple[str, ...]) -> None:
    inside = {capability for capability, _ in images_of(images).machine_code}
    lacking = [name for name in archs if name != CPU and int(name.removeprefix("sm_")) not in inside]
    if lacking:
        raise BuildFailed(
            f"the library was built, but has no code for {', '.join(lacking)}; inside: {', '.join(images)}"
        )


def _collect(built: Path, folder: Path) -> None:
    """Copies the libraries with their links."""
    folder.mkdir(parents=True)
    for path in built.glob("*.so*"):
        shutil.copy2(path, folder / path.name, follow_symlinks=False)
    if not (folder / "libllama.so").exists():
        raise BuildFailed(f"the build left no libllama.so in {built}")


def _digests(folder: Path) -> dict[str, str]:
    files = (path for path in sorted(folder.iterdir()) if not path.is_symlink())
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def _manifest(folder: Path) -> Manifest | None:
    try:
        with (folder / "manifest.json").open(encoding="utf-8") as file:
            return Manifest.from_json(file.read(MAX_MANIFEST_BYTES))
    except (OSError, ValueError, TypeError):
        return None


@contextlib.contextmanager
def _alone(lock: Path) -> Iterator[None]:
    with lock.open("w") as stream:
        try:
            fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise BuildFailed("another process builds the same library right now", "wait for it") from None
        yield


def compile_kernels(
    wanted: Wanted, files: list[str], home: Path, jobs: int, report: Report
) -> dict[str, tuple[str, ...]]:
    """Compiles single files of the CUDA backend and says what is inside each. For trying a toolkit out; installs nothing."""
    folder = "llama.cpp/ggml/src/ggml-cuda/CMakeFiles/ggml-cuda.dir"
    objects = [f"{folder}/{name}.o" for name in files]
    with _alone(_made(home / FOLDER) / f".{wanted.key}.lock"):
        work = _work_folder(home / FOLDER / f".kernels-{wanted.key}", wanted)
        configure(wanted, work, report)
        compile_targets(wanted, work, objects, jobs, report)
    return {name: list_images(work / path, wanted.toolkit)[0] for name, path in zip(files, objects, strict=True)}


# --- command line ---------------------------------------------------------------------------------


class Output:
    """Progress for a person, on one line of a terminal or at every tenth, or for a program as JSON."""

    def __init__(self, *, as_json: bool) -> None:
        self._as_json, self._started, self._shown = as_json, time.monotonic(), ("", -1)
        self._last = 0.0

    def progress(self, stage: str, done: int, total: int) -> None:
        elapsed_s = time.monotonic() - self._started
        if self._as_json:
            if (stage, 0) != (self._shown[0], 0) or elapsed_s - self._last >= 0.5 or done == total:
                self._last, self._shown = elapsed_s, (stage, done)
                self.say({"stage": stage, "done": done, "total": total})
            return
        tenth = done * 10 // max(total, 1)
        if sys.stdout.isatty():
            print(f"\r\x1b[K{stage}: {done}/{total}, {elapsed_s:.0f} s", end="\n" if done == total else "", flush=True)
        elif (stage, tenth) != self._shown:
            self._shown = (stage, tenth)
            print(f"{stage}: {done}/{total}, {elapsed_s:.0f} s", flush=True)

    def say(self, values: dict[str, object]) -> None:
        if self._as_json:
            print(json.dumps(values), flush=True)
        else:
            print("\n".join(f"{key:>9}: {value}" for key, value in values.items()), flush=True)


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m native.build_native", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    add_arguments(parser)
    return run(parser.parse_args(arguments))


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command line, which `manage.py build-native` shares."""
    parser.add_argument("--arch", action="append", required=True, metavar="NAME", help="cpu or sm_XX; several allowed")
    parser.add_argument("--home", type=Path, default=Path(os.environ.get("HYDRA_HOME", "") or ROOT / "var"))
    parser.add_argument("--source", type=Path, help="a tree of llama.cpp")
    parser.add_argument("--package", default=PACKAGE, help="the bindings that a --source fits")
    parser.add_argument("--toolkit", type=Path, action="append", default=[], help="a CUDA toolkit's folder")
    parser.add_argument("--define", action="append", default=[], metavar="NAME=VALUE", help="a CMake variable")
    parser.add_argument("--kernels", default="", help="compile only these files of the CUDA backend")
    parser.add_argument("--jobs", type=int, default=usual_jobs(), help="compilers at once")
    parser.add_argument("--nice", type=int, default=10, help="niceness of the compilers")
    parser.add_argument("--json", action="store_true", help="progress as JSON, for programs")


def run_options(values: Mapping[str, Any]) -> int:
    """`run` with the options as a mapping, which may hold others beside ours."""
    return run(argparse.Namespace(**values))


def run(options: argparse.Namespace) -> int:
    """Builds what the options ask for; the exit code: 0 built or there already, 1 failed, 2 asked wrongly."""
    output = Output(as_json=options.json)
    # The build tool and its compilers run in a group of their own, which is ended on the way out.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    try:
        os.nice(max(0, options.nice))
        go_first()
        use_own_tools()
        _all(options, output)
    except (ArchitectureUnknown, ToolkitMissing) as error:
        return _failed(output, options.json, str(error), "", 2)
    except BuildFailed as error:
        return _failed(output, options.json, str(error), error.hint, 1)
    except OSError as error:
        return _failed(output, options.json, f"{error}", "is the disk full?", 1)
    return 0


def _failed(output: Output, as_json: bool, message: str, hint: str, code: int) -> int:
    if as_json:
        output.say({"error": message, "hint": hint})
    else:
        print(f"build-native: {message}" + (f" ({hint})" if hint else ""), file=sys.stderr)
    return code


def _all(options: argparse.Namespace, output: Output) -> None:
    archs = checked(options.arch)
    found = toolkits.find_toolkits([path.resolve() for path in options.toolkit]) if archs != (CPU,) else []
    parts = plan(archs, found)  # before anything is fetched
    compiler = compiler_line()
    package = llama_source.pinned(REQUIREMENTS) if options.source is None and REQUIREMENTS.exists() else options.package
    home = options.home.resolve()
    source = _source(options.source, package, home)
    digest = llama_source.source_digest(source)
    for names, toolkit in parts:
        if toolkit is not None and wheel_toolkit.is_of_wheels(toolkit.root):
            folder = _made(home / FOLDER) / f"toolkit-{toolkit.version}"
            toolkit = replace(toolkit, root=wheel_toolkit.completed(toolkit.root, folder))
        host_compiler = toolkits.host_compiler(toolkit) if toolkit else None
        wanted = Wanted(names, toolkit, host_compiler, source, digest, package, tuple(options.define), compiler)
        if options.kernels:
            _show_kernels(wanted, options, home, output)
            continue
        folder, manifest, is_new = build(wanted, home, options.jobs, output.progress)
        output.say(
            {
                "archs": ", ".join(names),
                "library": str(folder / "lib"),
                "inside": ", ".join(manifest.images) or "no CUDA",
                "toolkit": manifest.toolkit or "none",
                "built": f"in {manifest.build_s:.0f} s" if is_new else "before",
            }
        )
    if not options.kernels:
        # A source that somebody named says nothing about what the pinned one's half-done builds are worth.
        of_source = digest if options.source is None else None
        removed = old_builds.remove_old(home, {package, options.package}, of_source)
        if removed and not options.json:
            output.say({"removed": ", ".join(removed)})


def _show_kernels(wanted: Wanted, options: argparse.Namespace, home: Path, output: Output) -> None:
    if wanted.toolkit is None:
        raise BuildFailed("--kernels is for cards")
    started = time.monotonic()
    inside = compile_kernels(wanted, options.kernels.split(","), home, options.jobs, output.progress)
    shown: dict[str, object] = {name: ", ".join(images) for name, images in inside.items()}
    output.say({**shown, "toolkit": str(wanted.toolkit), "compiled": f"in {time.monotonic() - started:.0f} s"})


if __name__ == "__main__":
    try:
        raise SystemExit(main(sys.argv[1:]))
    except KeyboardInterrupt:
        raise SystemExit(130) from None
