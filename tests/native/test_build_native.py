"""The build itself, on a source with llama.cpp's shape and one line in each file; and its checks, on what real tools printed."""

from __future__ import annotations

import json
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path

import pytest

from engines import build_trust
from engines.native_library import builds, choose
from native import build_native, llama_source
from native.errors import BuildFailed
from native.library_checks import check_symbols, exported_standard_library, list_images, parse_cuobjdump
from native.toolkits import Toolkit
from tests.cuda_library import write_library
from tests.native.small_source import write_source

ROOT = Path(__file__).resolve().parent.parent.parent
CUOBJDUMP_ELF = """ELF file    1: k1.1.sm_86.cubin
ELF file    2: k1.2.sm_120a.cubin
ELF file    3: k1.3.sm_90a.cubin
"""
CUOBJDUMP_PTX = "PTX file    1: k1.1.sm_90.ptx\n"
# Of a library built by a toolchain that links libstdc++ statically, and of one that does not.
NM_BAD = """00000000000a8c20 T _ZNSt6locale5_Impl16_M_install_cacheEPKNS_5facetEm
000000000009dd40 T _ZNSt6localeC1Ev
"""
NM_GOOD = """0000000000024330 T _Z18rpc_transport_initv
000000000001a4b0 T _ZN10rpc_server10get_tensorERK22rpc_msg_get_tensor_reqRSt6vectorIhSaIhEE
"""


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return write_source(tmp_path / "llama.cpp")


def run(home: Path, source: Path, *arguments: str) -> tuple[int, list[dict[str, object]], str]:
    """The command as a process: its exit code, what it told as JSON, its stderr."""
    command = [sys.executable, "-m", "native.build_native", "--json", "--nice", "0", "--home", str(home)]
    ended = subprocess.run(
        [*command, "--source", str(source), *arguments], capture_output=True, text=True, cwd=ROOT, timeout=120
    )
    return ended.returncode, [json.loads(line) for line in ended.stdout.splitlines()], ended.stderr


def test_a_build_is_made_once_and_found_by_the_head(tmp_path: Path, source: Path) -> None:
    code, told, _ = run(tmp_path, source, "--arch", "cpu")
    assert code == 0
    stages = [line["stage"] for line in told if "stage" in line]
    assert stages[0] == "configuring" and "compiling" in stages and stages[-1] == "checking"
    assert told[-1]["built"] != "before"
    (build,) = builds(tmp_path)
    assert str(build.library_path) == told[-1]["library"]
    assert (build.library_path / "libllama.so").is_file() and (build.library_path / "libmtmd.so").is_file()
    assert build.manifest.archs == ("cpu",) and build.manifest.images == ()
    assert build.manifest.source_sha256 == llama_source.source_digest(source)
    assert set(build.manifest.libraries) == {"libllama.so", "libmtmd.so"}
    assert choose(tmp_path, "cpu", build_native.PACKAGE) == build
    assert [path.name for path in (tmp_path / "native").iterdir() if not path.name.endswith(".lock")] == [
        build.folder.name
    ]
    again = run(tmp_path, source, "--arch", "cpu")[1]
    assert again[-1]["built"] == "before"
    # Another source is another build, and leaves the first one where it is.
    (source / "src" / "llama.cpp").write_text('extern "C" int llama_answer() { return 44; }\n')
    assert run(tmp_path, source, "--arch", "cpu")[1][-1]["built"] != "before"
    assert len(builds(tmp_path)) == 2
    # Of a third one's predecessors only the last one stays.
    (source / "src" / "llama.cpp").write_text('extern "C" int llama_answer() { return 45; }\n')
    assert run(tmp_path, source, "--arch", "cpu")[1][-1]["built"] != "before"
    assert len(builds(tmp_path)) == 2 and not build.folder.exists()


def test_a_build_that_crashed_engines_is_made_anew_under_the_same_name(tmp_path: Path, source: Path) -> None:
    library = run(tmp_path, source, "--arch", "cpu")[1][-1]["library"]
    (build,) = builds(tmp_path)
    for number in (1, 2):
        at = datetime.now(UTC).isoformat(timespec="seconds")
        build_trust.blame(build.folder, build_trust.Fault(at, "SIGSEGV", "1", "model", str(number)))
    assert choose(tmp_path, "cpu", build_native.PACKAGE) is None
    told = run(tmp_path, source, "--arch", "cpu")[1][-1]
    assert told["library"] == library and told["built"] != "before"
    again = choose(tmp_path, "cpu", build_native.PACKAGE)
    assert again is not None and again.trust == build_trust.Trust()
    assert (again.library_path / "libllama.so").is_file()


def test_a_source_that_does_not_compile_shows_the_compilers_words(tmp_path: Path, source: Path) -> None:
    (source / "src" / "llama.cpp").write_text("int x = ;\n")
    code, told, _ = run(tmp_path, source, "--arch", "cpu")
    assert code == 1
    assert "error: expected primary-expression" in str(told[-1]["error"])
    assert "--jobs 1" in str(told[-1]["hint"])
    assert builds(tmp_path) == []


def test_a_library_that_cannot_be_loaded_is_no_build(tmp_path: Path, source: Path) -> None:
    (source / "src" / "llama.cpp").write_text(
        'extern "C" int nowhere(); extern "C" int llama_answer() { return nowhere(); }'
    )
    code, told, _ = run(tmp_path, source, "--arch", "cpu")
    assert (code, "cannot be loaded" in str(told[-1]["error"]), "nowhere" in str(told[-1]["error"])) == (1, True, True)
    assert builds(tmp_path) == []


def test_what_cannot_be_built_is_told_before_anything_is_fetched(tmp_path: Path) -> None:
    code, told, _ = run(tmp_path, tmp_path, "--arch", "sm_1")
    assert (code, "known: cpu, sm_60" in str(told[-1]["error"])) == (2, True)
    code, told, _ = run(tmp_path, tmp_path, "--arch", "cpu")
    assert (code, "is no source of llama.cpp" in str(told[-1]["error"])) == (1, True)
    assert not (tmp_path / "native").exists()


def test_the_source_is_named_by_what_is_built_of_it(source: Path) -> None:
    digest = llama_source.source_digest(source)
    (source / "docs" / "build.md").write_text("other words")
    (source / "ggml" / "src" / "ggml-vulkan" / "vulkan.cpp").unlink()
    assert llama_source.source_digest(source) == digest
    (source / "tools" / "mtmd" / "mtmd.cpp").write_text("")
    assert llama_source.source_digest(source) != digest


def test_every_preset_of_a_card_names_its_architecture() -> None:
    presets = json.loads((ROOT / "native" / "CMakePresets.json").read_text())["configurePresets"]
    values = {preset["name"]: preset.get("cacheVariables", {}).get("CMAKE_CUDA_ARCHITECTURES") for preset in presets}
    assert {name: value for name, value in values.items() if name.startswith("sm_")} == {
        name: f"{name.removeprefix('sm_')}-real" for name in build_native.toolkits.ARCHITECTURES
    }


def test_cuobjdump_is_read_as_it_prints() -> None:
    assert parse_cuobjdump(CUOBJDUMP_ELF, "sm") == {"sm_86", "sm_120a", "sm_90a"}
    assert parse_cuobjdump(CUOBJDUMP_PTX, "compute") == {"compute_90"}
    assert parse_cuobjdump("cuobjdump info    : File 'x.so' does not contain device code\n", "sm") == set()


def test_cuobjdump_and_the_headers_must_agree(tmp_path: Path) -> None:
    library = write_library(tmp_path / "lib", "sm_86", "sm_90a", "sm_120a", "compute_90")
    tool = tmp_path / "bin" / "cuobjdump"
    tool.parent.mkdir()
    tool.write_text(f"#!/bin/sh\ncase $1 in --list-elf) echo '{CUOBJDUMP_ELF}';; *) echo '{CUOBJDUMP_PTX}';; esac\n")
    tool.chmod(0o755)
    toolkit = Toolkit(tmp_path, "13.0.88", True)
    assert list_images(library, toolkit) == (("sm_86", "sm_90a", "sm_120a", "compute_90"), "cuobjdump")
    write_library(tmp_path / "lib", "sm_86")
    with pytest.raises(BuildFailed, match="its headers say"):
        list_images(library, toolkit)


def test_a_library_that_exports_the_standard_library_is_no_build(tmp_path: Path) -> None:
    assert exported_standard_library(NM_BAD) == "_ZNSt6localeC1Ev"
    assert exported_standard_library(NM_GOOD) is None
    compiler = ["c++", "-shared", "-fPIC", "-x", "c", "-"]
    for name, text in {"libllama.so": "int f;", "libggml-rpc.so": "void _ZNSt6localeC1Ev(void) {}"}.items():
        subprocess.run([*compiler, "-o", str(tmp_path / name)], input=text.encode(), check=True)
        if name == "libllama.so":
            check_symbols(tmp_path)
    with pytest.raises(BuildFailed, match=r"libggml-rpc\.so exports libstdc\+\+ itself") as failed:
        check_symbols(tmp_path)
    assert "links libstdc++ dynamically" in failed.value.hint
