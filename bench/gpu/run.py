"""Builds for the card, writes the model and runs the benches, stage by stage; `run.sh` sets up Python and calls this.

    bash run.sh [--limit-s 560] [--out DIR] [--tiny] [--model NAME] [--binaries DIR [--library DIR]] STAGE...

Stages (what an earlier call left in the work folder is used again):
  prepare       build llama.cpp for the card, then once more what native/changes.py changes of it, for our engine;
                the model is written meanwhile
  short-greedy  1, 8, 32 streams, contexts of 128 tokens, greedy, next to batched-bench
  short-topk    the same with top-k/top-p sampling
  long-greedy   contexts of 8,192 tokens
  long-topk
  prefix        five-turn conversations
  step          where the time of a step goes, operation by operation
  spec          drafts of the model's own head, on a model of the same shape whose text is foreseeable
  handoff       conversations between two engines on the card, while they write and idle, hybrid and dense, 8k to 64k tokens
  pd            prompts that one engine on the card computes and another one answers
  placement     memory of twenty-two placements, predicted and taken
  kv            states out of an engine and into another against page-locked copies, hybrid and dense, 8k and 64k tokens

No stage begins or goes on past --limit-s; what was measured until then counts. After every stage results.json, tables.txt
and logs.tar.xz are written to --out ($OUT), and at the end one table of all that the work folder holds.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import shutil
import subprocess
import sys
import tarfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from bench.gpu import results
from bench.vocabulary import ROOT
from engines.native_library import LIBRARY_VARIABLE
from native import build_peer, changes

PEER = ROOT / "build" / "peer"
OURS = PEER / "ours"  # libraries of our engine
LEAST_STAGE_S = 20.0
END_S = 15.0
LOCALE_SYMBOLS = ("_ZNSt6localeC1Ev", "_ZNSt6localeD1Ev", "_ZNSt6locale7classicEv")  # of libstdc++ itself
# The short grid tries more of llama-server's forms; the long one, whose rounds take minutes, the two that can win there.
# The default form, which copies checkpoints for every short prompt, came last in every cell and took half of the time.
SHORT_FORMS = "unified+bare+bs,default+bare+bs,unified+bare"
LONG_FORMS = "unified+bare+bs,default+bare+bs"
SHORT = ["--streams", "1,8,32", "--context", "128", "--new-tokens", "128", "--rounds", "2", "--peer-forms", SHORT_FORMS]
LONG = ["--streams", "1,8,32", "--context", "8192", "--new-tokens", "64", "--rounds", "1", "--peer-forms", LONG_FORMS]
TINY = ["--streams", "1,2", "--context", "48", "--new-tokens", "8", "--rounds", "1", "--peer-forms", LONG_FORMS]
BENCHES: dict[str, list[str]] = {
    "short-greedy": ["engine", *SHORT, "--sampling", "greedy", "--ceiling"],
    "short-topk": ["engine", *SHORT, "--sampling", "topk"],
    "long-greedy": ["engine", *LONG, "--sampling", "greedy", "--ceiling"],
    "long-topk": ["engine", *LONG, "--sampling", "topk"],
    "prefix": ["prefix", "--rounds", "1"],
    "step": ["step", "--streams", "1,8,32"],
    "spec": ["spec", "--rounds", "2", "--new-tokens", "256", "--peer-form", "default+bare"],
    "handoff": ["handoff", "--model", "synthetic:35b-a3b-kv", "--model", "synthetic:kv", "--rounds", "1"],
    # An answer has to last until it has moved: a card writes 64 tokens of these small weights in the time that takes.
    "pd": ["pd", "--model", "synthetic:35b-a3b-kv", "--rounds", "2", "--answer", "512"],
    "placement": ["placement"],
    "kv": ["kv", "--model", "synthetic:35b-a3b-kv,synthetic:kv", "--kv-types", "f16,q8_0", "--rounds", "4"],
}
KV = ["--contexts", "8192,65536", "--blocks", "0,1024", "--gpu-layers=-1", "--threads", "8"]
KV_BUDGET_S = 85.0
TWO_ENGINES = {"handoff": "8192,32768,65536", "pd": "8192,32768"}  # with their contexts
TWO_ENGINES_BUDGET_S = 60.0
ON_A_CARD = ["--gpu-layers=-1", "--threads", "8", "--set", "batch_tokens=4096", "--set", "micro_batch_tokens=2048"]


@dataclass(frozen=True)
class Call:
    """One call of the script: where everything lies, and when it must be over."""

    bundle: Path
    work: Path
    out: Path | None
    model: str
    tiny: bool
    binaries: Path | None
    library: Path | None
    ends_at: float
    compute_capability: str | None

    @property
    def left_s(self) -> float:
        return self.ends_at - time.monotonic()

    @property
    def results(self) -> Path:
        return self.work / "results"

    @property
    def logs(self) -> Path:
        return self.work / "logs"


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="run.sh", description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("stages", nargs="+", choices=["prepare", *BENCHES], metavar="STAGE")
    parser.add_argument("--bundle", type=Path, required=True)
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--limit-s", type=float, default=560, help="time for this call")
    parser.add_argument("--out", type=Path, default=os.environ.get("OUT"), help="folder for results (default $OUT)")
    parser.add_argument("--model", default="synthetic:35b-a3b")
    parser.add_argument("--tiny", action="store_true", help="cells of a second, to try the script out")
    parser.add_argument(
        "--binaries", type=Path, help="folder of built binaries and libraries to use instead of building"
    )
    parser.add_argument("--library", type=Path, help="folder of our engine's libraries beside them (default: the same)")
    options = parser.parse_args(arguments)
    call = Call(
        options.bundle,
        options.work,
        Path(options.out) if options.out else None,
        options.model,
        options.tiny,
        options.binaries,
        options.library,
        time.monotonic() + options.limit_s,
        compute_capability(),
    )
    call.results.mkdir(exist_ok=True)
    call.logs.mkdir(exist_ok=True)
    card = f"compute capability {call.compute_capability}" if call.compute_capability else "CPU only"
    print(f"{card}; stages: {', '.join(options.stages)}; {options.limit_s:.0f} s", flush=True)
    outcomes = [_stage(name, call) for name in options.stages]
    results.print_all(call.results, call.model, BENCHES)
    return 0 if all(outcomes) else 1


def _stage(name: str, call: Call) -> bool:
    """Runs one stage if there is time; says how it went."""
    if call.left_s < LEAST_STAGE_S:
        print(f"== {name}: not begun, {call.left_s:.0f} s left", flush=True)
        return False
    started = time.monotonic()
    print(f"== {name}", flush=True)
    done = prepare(call) if name == "prepare" else bench(name, call)
    print(f"== {name}: {'done' if done else 'FAILED or cut short'} in {time.monotonic() - started:.0f} s", flush=True)
    if call.out is not None:
        results.hand_over(call.results, call.logs, call.out)
    return done


# --- prepare ----------------------------------------------------------------------------------------


def compute_capability() -> str | None:
    """Of the first card, as 9.0; None where there is no card."""
    if shutil.which("nvidia-smi") is None:
        return None
    query = ["nvidia-smi", "--query-gpu=compute_cap", "--format=csv,noheader"]
    result = subprocess.run(query, capture_output=True, text=True, timeout=60)
    lines = result.stdout.split()
    return lines[0] if result.returncode == 0 and lines else None


def prepare(call: Call) -> bool:
    """Source, binaries and model; the build and the model's writer run side by side."""
    unpack(call)
    if call.binaries is not None:
        _link(PEER / "bin", call.binaries.resolve())
    if call.library is not None:
        _link(OURS, call.library.resolve())
    (PEER / "bin").mkdir(parents=True, exist_ok=True)
    _link(call.work / "site" / "llama_cpp" / "lib", PEER / "bin")
    with _running(_writer(call.model), call.logs / "model.log") as writer:
        built = call.binaries is not None or (build(call) and build_ours(call))
        written = _wait(writer, call) == 0
    for name, done in (("build", built), ("model", written)):
        if not done:
            print((call.logs / f"{name}.log").read_text(errors="replace")[-3000:])
    return built and written


def _writer(model: str) -> list[str]:
    """Without the rest of `bench`, which imports the bindings: their libraries are not there yet. A path names a file."""
    if not model.startswith("synthetic:"):
        return [sys.executable, "-c", "import sys; open(sys.argv[1]).close()", model]
    code = "import sys; from bench.models import named_model; named_model(sys.argv[1])"
    return [sys.executable, "-c", code, model.removeprefix("synthetic:")]


def unpack(call: Call) -> None:
    """llama.cpp to where `make peer` would put it, its bindings beside the wheels."""
    source = PEER / "source" / "bundle" / "vendor"
    if (source / "llama.cpp").exists():
        return
    with tarfile.open(call.bundle / "source.tar.xz") as archive:
        archive.extractall(source, filter="data")
    shutil.move(source / "llama_cpp", call.work / "site" / "llama_cpp")


def build(call: Call) -> bool:
    """llama.cpp as it is, for llama-server and its benches."""
    if (PEER / "built").exists():
        return True
    if _compiled(call, "build", PEER) and all((PEER / "bin" / name).exists() for name in build_peer.TARGETS):
        (PEER / "built").write_text(" ".join(_flags(call)))
        return True
    return False


def build_ours(call: Call) -> bool:
    """Our engine's libraries. Those of other changes are not built upon."""
    stamp = PEER / "ours.for"
    if stamp.exists() and stamp.read_text() != changes.digest():
        print(f"{OURS} was built with other changes; begin with an empty work folder")
        return False
    if (OURS / "libllama.so").exists() and stamp.exists():
        return True
    if not _compiled(call, "build_changed", PEER, OURS):
        return False
    stamp.write_text(changes.digest())
    return True


def _compiled(call: Call, name: str, *folders: Path) -> bool:
    """Compiles in a process of its own, so that its output lands in a log and its time is bounded."""
    code = f"import sys; from pathlib import Path; from native.build_peer import {name}; "
    code += f"{name}(*map(Path, sys.argv[1:{2 + len(folders)}]), tuple(sys.argv[{2 + len(folders)}:]))"
    source = PEER / "source" / "bundle" / "vendor" / "llama.cpp"
    command = [sys.executable, "-c", code, str(source), *map(str, folders), *_flags(call)]
    with _running(command, call.logs / "build.log") as process:
        return _wait(process, call) == 0


def _flags(call: Call) -> tuple[str, ...]:
    if not call.compute_capability:
        return ()
    return ("-DGGML_CUDA=ON", f"-DCMAKE_CUDA_ARCHITECTURES={call.compute_capability.replace('.', '')}")


def _link(path: Path, target: Path) -> None:
    if path.is_symlink():
        path.unlink()
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.symlink_to(target)


# --- benches ----------------------------------------------------------------------------------------


def bench(name: str, call: Call) -> bool:
    """One `python -m bench …`, its output shown and kept, its details in results/NAME.json as far as it came."""
    if name == "kv":
        return bench_kv(call)
    if name in TWO_ENGINES:
        return bench_two_engines(name, call)
    if name == "step":
        return bench_step(call)
    model = f"{call.model}-drafts" if name == "spec" else call.model
    command = [sys.executable, "-m", "bench", *BENCHES[name], "--model", model, "--logs", str(call.logs / name)]
    command += ["--out", str(call.results / f"{name}.json")]
    command += ON_A_CARD if call.compute_capability else []
    if BENCHES[name][0] == "engine":
        # a server that begins late would be cut off in its cells
        command += ["--budget-s", str(max(1.0, call.left_s * 0.8))]
        command += TINY if call.tiny else []
    elif name == "placement":
        command += ["--budget-s", str(max(1.0, call.left_s - END_S * 2))]
        command += ["--only", "dense"] if call.tiny else []
    elif name == "spec":
        command += ["--acceptance", "1.0", "--new-tokens", "16"] if call.tiny else []
    elif call.tiny:
        command += ["--conversations", "1", "--system-words", "200", "--answer-tokens", "4"]
    return _benched(name, command, call)


def bench_kv(call: Call) -> bool:
    """On models of its own, whose weights are small: only their states matter."""
    command = [sys.executable, "-m", "bench", *BENCHES["kv"], "--out", str(call.results / "kv.json")]
    command += KV if call.compute_capability else ["--threads", "1"]
    command += ["--contexts", "512", "--blocks", "0", "--rounds", "1"] if call.tiny else []
    command += ["--budget-s", str(min(KV_BUDGET_S, max(1.0, call.left_s * 0.8)))]
    return _benched("kv", command, call)


def bench_step(call: Call) -> bool:
    command = [sys.executable, "-m", "bench", *BENCHES["step"], "--model", call.model]
    command += ["--gpu-layers=-1", "--threads", "8"] if call.compute_capability else ["--threads", "1"]
    command += ["--streams", "1", "--steps", "1"] if call.tiny else []
    return _benched("step", command, call)


def bench_two_engines(name: str, call: Call) -> bool:
    """On one card, on the models of `kv`."""
    command = [sys.executable, "-m", "bench", *BENCHES[name], "--out", str(call.results / f"{name}.json")]
    command += ["--logs", str(call.logs / name), "--contexts", "512,1024" if call.tiny else TWO_ENGINES[name]]
    command += ON_A_CARD if call.compute_capability else ["--threads", "1"]
    command += ["--budget-s", str(min(TWO_ENGINES_BUDGET_S, max(1.0, call.left_s * 0.8)))]
    return _benched(name, command, call)


def _benched(name: str, command: list[str], call: Call) -> bool:
    text = call.results / f"{name}.txt"
    (call.results / f"{name}.json").unlink(missing_ok=True)  # of an earlier call: must not pass for this one's
    environment = {**os.environ, **standard_library_environment()}
    if (OURS / "libllama.so").exists():
        environment[LIBRARY_VARIABLE] = str(OURS)
    with _running(command, text, environment) as process:
        code = _wait(process, call)
    print(text.read_text(errors="replace")[-6000:], flush=True)
    return code == 0


def standard_library_environment() -> dict[str, str]:
    """Libraries that carry libstdc++ inside and export it clash with the process's own; loading that one first helps."""
    if shutil.which("nm"):
        # Seen on a card: libggml-cuda.so and libggml-rpc.so exported it, libllama.so did not, and the engine crashed.
        folders = [folder for folder in (PEER / "bin", OURS) if folder.exists()]
        libraries = [path for folder in folders for path in (folder / "libllama.so", *folder.glob("libggml*.so"))]
        listed = subprocess.run(["nm", "-D", "--defined-only", *libraries], capture_output=True, text=True, check=True)
        if not any(f" {name}\n" in listed.stdout for name in LOCALE_SYMBOLS):
            return {}
    own = subprocess.run(["c++", "-print-file-name=libstdc++.so.6"], capture_output=True, text=True).stdout.strip()
    found = [path for path in (own, "/usr/lib/x86_64-linux-gnu/libstdc++.so.6") if path and Path(path).is_file()]
    print(f"llama.cpp's libraries export libstdc++; LD_PRELOAD={found[0] if found else 'nothing found'}", flush=True)
    return {"LD_PRELOAD": found[0]} if found else {}


# --- processes ---------------------------------------------------------------------------------------


@contextlib.contextmanager
def _running(command: list[str], log: Path, environment: dict[str, str] | None = None) -> Any:
    """A process that ends with the block, and with it all that it started."""
    with log.open("wb") as output:
        process = psutil.Popen(command, stdin=subprocess.DEVNULL, stdout=output, stderr=output, env=environment)
        try:
            yield process
        finally:
            _end(process)


def _end(process: psutil.Popen) -> None:
    """Compilers and servers too: some of them leave their parent's process group."""
    if not process.is_running():
        return
    family = [process, *process.children(recursive=True)]
    for member in family:
        with contextlib.suppress(psutil.NoSuchProcess):
            member.terminate()
    for member in psutil.wait_procs(family, timeout=3)[1]:
        with contextlib.suppress(psutil.NoSuchProcess):
            member.kill()
    process.wait(10)


def _wait(process: psutil.Popen, call: Call) -> int | None:
    """The exit code, or None once the call's time is nearly over."""
    try:
        code: int | None = process.wait(max(1.0, call.left_s - END_S))
    except (psutil.TimeoutExpired, subprocess.TimeoutExpired):
        return None
    return code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
