"""Which toolkit compiles for which card, on what real tools printed."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from native import toolkits, wheel_toolkit
from native.architectures import ARCHITECTURES, ArchitectureUnknown, checked, newest_gcc
from native.toolkits import Toolkit, ToolkitMissing, choose, environment, find_toolkits, missing_line, parse_version

NVCC_13 = """nvcc: NVIDIA (R) Cuda compiler driver
Copyright (c) 2005-2025 NVIDIA Corporation
Built on Wed_Aug_20_01:58:59_PM_PDT_2025
Cuda compilation tools, release 13.0, V13.0.88
Build cuda_13.0.r13.0/compiler.36424714_0
"""
NVCC_11 = """nvcc: NVIDIA (R) Cuda compiler driver
Copyright (c) 2005-2022 NVIDIA Corporation
Built on Wed_Sep_21_10:33:58_PDT_2022
Cuda compilation tools, release 11.8, V11.8.89
Build cuda_11.8.r11.8/compiler.31833905_0
"""
DEBIAN = Toolkit(Path("/usr/lib/nvidia-cuda-toolkit"), "11.8.89", True)
CUDA_12_9 = Toolkit(Path("/opt/cuda-12.9"), "12.9.86", True)
CUDA_13 = Toolkit(Path("/usr/local/cuda"), "13.0.88", True)
BARE_13 = Toolkit(Path("/usr/local/cuda"), "13.0.88", False)
FOUR = ("sm_60", "sm_86", "sm_90", "sm_120")


def write_toolkit(
    root: Path, printed: str = NVCC_13, headers: tuple[str, ...] = ("cuda_runtime.h", "cublas_v2.h")
) -> Path:
    """A folder with an nvcc that prints what a real one did."""
    (root / "bin").mkdir(parents=True)
    (root / "include").mkdir()
    (root / "bin" / "nvcc").write_text(f"#!/bin/sh\ncat <<'END'\n{printed}END\n")
    (root / "bin" / "nvcc").chmod(0o755)
    for header in headers:
        (root / "include" / header).touch()
    return root


def test_names_are_checked_put_in_order_and_unknown_ones_refused() -> None:
    assert checked(["sm_120", "cpu", "sm_60", "sm_120"]) == ("cpu", "sm_60", "sm_120")
    with pytest.raises(ArchitectureUnknown, match=r"gtx970.*known: cpu, sm_60, .*, sm_120"):
        checked(["sm_86", "gtx970"])


def test_versions_are_read_from_what_nvcc_prints() -> None:
    assert (parse_version(NVCC_13), parse_version(NVCC_11), parse_version("sh: nvcc")) == ("13.0.88", "11.8.89", None)
    assert CUDA_13.release == (13, 0)


def test_one_toolkit_makes_a_fat_build_of_all_cards_that_it_knows() -> None:
    assert choose(FOUR, [CUDA_12_9]) == [(CUDA_12_9, FOUR)]
    assert choose(("sm_86", "sm_120"), [CUDA_13]) == [(CUDA_13, ("sm_86", "sm_120"))]


def test_two_toolkits_share_the_cards_and_the_one_named_first_wins() -> None:
    assert choose(FOUR, [CUDA_13, DEBIAN]) == [(CUDA_13, ("sm_86", "sm_90", "sm_120")), (DEBIAN, ("sm_60",))]
    assert choose(("sm_86",), [DEBIAN, CUDA_13]) == [(DEBIAN, ("sm_86",))]
    assert choose(("sm_60", "sm_120"), [DEBIAN, CUDA_13, CUDA_12_9]) == [(CUDA_12_9, ("sm_60", "sm_120"))]


@pytest.mark.parametrize(
    ("arch", "here", "line"),
    [
        ("sm_60", [CUDA_13], r"sm_60 \(Tesla P100\) needs CUDA 8\.0 to 12\.9; here is CUDA 13\.0\.88 .*apt install"),
        ("sm_120", [DEBIAN], r"sm_120 \(RTX 50\) needs CUDA 12\.8 or newer; here is CUDA 11\.8\.89 .*too old"),
        ("sm_86", [], r"here is no toolkit\. Debian's is 11\.8"),
        ("sm_90", [BARE_13], r"needs cuBLAS' headers beside nvcc"),
    ],
)
def test_a_missing_toolkit_is_one_clear_line(arch: str, here: list[Toolkit], line: str) -> None:
    with pytest.raises(ToolkitMissing, match=line) as missing:
        choose(("sm_86", arch) if arch == "sm_120" else (arch,), here)
    assert "\n" not in str(missing.value)


def test_every_architecture_says_what_it_needs() -> None:
    for name, arch in ARCHITECTURES.items():
        assert arch.needs in missing_line(name, [Toolkit(Path("/x"), "1.0", True)])


def test_toolkits_are_found_where_they_are_named_and_once(tmp_path: Path) -> None:
    given = write_toolkit(tmp_path / "given")
    named = write_toolkit(tmp_path / "named", NVCC_11, headers=("cuda_runtime.h",))
    (tmp_path / "link").symlink_to(given)
    write_toolkit(tmp_path / "broken", "no version\n")
    environ = {"CUDA_HOME": str(named), "CUDA_PATH": str(tmp_path / "broken"), "PATH": str(tmp_path / "link" / "bin")}
    found = [toolkit for toolkit in find_toolkits([given], environ) if tmp_path in toolkit.root.parents]
    assert found == [Toolkit(given, "13.0.88", True), Toolkit(named, "11.8.89", False)]


def test_the_toolkits_own_programs_come_first() -> None:
    environ = {"PATH": "/usr/local/cuda-13/bin:/bin", "CUDA_HOME": "/usr/local/cuda-13", "CUDACXX": "nvcc", "LANG": "C"}
    values = environment(DEBIAN, environ)
    # Debian keeps ptxas in /usr/bin: it must not be found behind another toolkit's.
    assert values["PATH"] == "/usr/lib/nvidia-cuda-toolkit/bin:/usr/bin:/usr/local/cuda-13/bin:/bin"
    assert values["CUDAToolkit_ROOT"] == "/usr/lib/nvidia-cuda-toolkit"
    assert values["CUDACXX"] == "/usr/lib/nvidia-cuda-toolkit/bin/nvcc"
    assert "CUDA_HOME" not in values
    assert environment(None, environ) == {"PATH": environ["PATH"], "LANG": "C"}


def test_an_old_toolkit_gets_an_old_compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, version in {"g++": "12", "g++-11": "11"}.items():
        (tmp_path / name).write_text(f"#!/bin/sh\necho {version}\n")
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path) + os.pathsep + "/nonexistent")
    (tmp_path / "sh").symlink_to("/bin/sh")
    assert [newest_gcc(release) for release in ((11, 8), (12, 0), (12, 9), (13, 1))] == [11, 11, 14, 15]
    assert toolkits.host_compiler(CUDA_13) is None
    assert toolkits.host_compiler(DEBIAN) == str(tmp_path / "g++-11")
    (tmp_path / "g++-11").unlink()
    with pytest.raises(ToolkitMissing, match=r"takes GCC up to 11 as host compiler; apt install g\+\+-11"):
        toolkits.host_compiler(DEBIAN)


def test_wheels_become_a_toolkit_by_links(tmp_path: Path) -> None:
    root = write_toolkit(tmp_path / "nvidia" / "cu13")
    (root / "nvvm").mkdir()
    (root / "lib").mkdir()
    for library in ("libcudart.so.13", "libcublas.so.13", "libcudadevrt.a"):
        (root / "lib" / library).write_text(library)
    assert wheel_toolkit.is_of_wheels(root)
    for _ in range(2):
        made = wheel_toolkit.completed(root, tmp_path / "made")
    assert (made / "lib64" / "libcudart.so").read_text() == "libcudart.so.13"
    assert (made / "lib64" / "stubs" / "libcuda.so").read_bytes()[:4] == b"\x7fELF"
    assert not wheel_toolkit.is_of_wheels(made)
    assert toolkits.look_at(made) == Toolkit(made, "13.0.88", True)


def test_what_is_linked_against_a_toolkit_of_wheels_asks_for_the_driver(tmp_path: Path) -> None:
    """Also with compilers that link only what is needed, as Ubuntu's do."""
    root = write_toolkit(tmp_path / "nvidia" / "cu13")
    (root / "nvvm").mkdir()
    (root / "lib").mkdir()
    (root / "include").mkdir(exist_ok=True)
    (root / "include" / "cuda.h").write_text(
        "#define cuMemAlloc cuMemAlloc_v2\nCUresult CUDAAPI cuMemCreate(int);\nCUresult CUDAAPI cuMemAlloc(int);\n"
    )
    stub = wheel_toolkit.completed(root, tmp_path / "made") / "lib64" / "stubs" / "libcuda.so"
    library = tmp_path / "libuser.so"
    code = "void cuMemCreate(void); void cuMemAlloc_v2(void); void use(void) { cuMemCreate(); cuMemAlloc_v2(); }"
    command = ["cc", "-shared", "-fPIC", "-x", "c", "-", "-x", "none", "-Wl,--as-needed,--no-undefined", str(stub)]
    subprocess.run([*command, "-o", str(library)], input=code.encode(), check=True, timeout=60)
    assert b"libcuda.so.1" in library.read_bytes()
