"""What a CUDA library has code for, read from headers that nvcc wrote; and which cards can run it."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engines.cuda_images import CudaImages, ImagesUnreadable, capability, read_images
from tests.cuda_library import RECORDED, elf, fat_binary, write_library


def test_every_architecture_is_read_as_cuobjdump_names_it(tmp_path: Path) -> None:
    images = read_images(write_library(tmp_path, *RECORDED))
    assert set(images.names) == set(RECORDED)
    assert images.names == ("sm_60", "sm_86", "sm_90a", "sm_120a", "sm_121", "compute_90")


def test_a_library_for_the_cpu_has_none(tmp_path: Path) -> None:
    assert read_images(write_library(tmp_path)) == CudaImages(frozenset(), frozenset())
    (tmp_path / "plain.so").write_bytes(elf({".text": bytes(8)}))
    assert read_images(tmp_path / "plain.so").names == ()


@pytest.mark.parametrize(
    ("inside", "runs", "fails"),
    [
        (["sm_86"], [86, 89], [80, 75, 90, 120]),
        (["sm_120a"], [120], [121, 90]),
        (["sm_121"], [121], [120]),
        (["compute_90"], [90, 100, 120], [86]),
        (["sm_60", "sm_86", "sm_120a"], [60, 61, 86, 89, 120], [70, 75, 90]),
        ([], [], [60, 86]),
    ],
)
def test_machine_code_runs_within_its_major_version_and_ptx_on_all_newer_cards(
    tmp_path: Path, inside: list[str], runs: list[int], fails: list[int]
) -> None:
    images = read_images(write_library(tmp_path, *inside))
    assert [card for card in (*runs, *fails) if images.runs_on(card)] == runs


def test_architectures_of_cards_are_told_from_those_of_cpus() -> None:
    assert [capability(name) for name in ("sm_60", "sm_120", "sm_120a", "x86-64", "", "sm_1", "cpu")] == [
        60,
        120,
        120,
        None,
        None,
        None,
        None,
    ]


def test_what_is_no_library_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "libggml-cuda.so"
    for content in (b"", b"\x7fELF", b"\x7fELF\x01\x01" + bytes(100), elf({".nv_fatbin": fat_binary("sm_86")})[:900]):
        path.write_bytes(content)
        with pytest.raises(ImagesUnreadable):
            read_images(path)
    with pytest.raises(FileNotFoundError):
        read_images(tmp_path / "absent.so")


@given(st.data())
def test_damaged_libraries_never_hang_or_crash(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    content = bytearray(elf({".nv_fatbin": fat_binary("sm_86", "sm_120a")}))
    for _ in range(data.draw(st.integers(1, 6))):
        content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
    path = tmp_path_factory.mktemp("damaged") / "x.so"
    path.write_bytes(content)
    try:
        read_images(path)
    except ImagesUnreadable:
        return
