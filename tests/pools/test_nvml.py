"""What is made of NVML's answers: recorded ones of a real H200, synthetic ones of cards that people have at home."""

from __future__ import annotations

import json
from pathlib import Path

import pynvml
import pytest

from pools.nvml import NvmlSession
from pools.nvml_record import QUESTIONS
from pools.readings import GpuProcess
from tests.pools.replayed_nvml import RECORDINGS, ReplayedNvml

SYNTHETIC = ("p100", "rtx3060", "rtx5060ti")
NOTHING = Path("/nonexistent")


@pytest.fixture
def bus(tmp_path: Path) -> Path:
    """A machine's PCI bus with one card of NVIDIA and a network card."""
    for address, vendor, kind in (("0000:01:00.0", "0x10de", "0x030200"), ("0000:02:00.0", "0x8086", "0x020000")):
        (tmp_path / address).mkdir()
        (tmp_path / address / "vendor").write_text(f"{vendor}\n")
        (tmp_path / address / "class").write_text(f"{kind}\n")
    return tmp_path


def test_the_recorded_h200_is_read_whole() -> None:
    recording = json.loads((RECORDINGS / "h200.json").read_text())
    assert recording["label"].startswith("recorded from a real NVIDIA H200")
    cards = NvmlSession(ReplayedNvml("h200"), NOTHING).read()
    assert (cards.problem, cards.unreadable) == ("", ())
    card = cards.gpus[0]
    assert "H200" in card.name
    assert (card.kind, card.arch, card.problem) == ("cuda", "sm_90", "")
    assert card.memory_total_bytes > 139 << 30
    assert card.memory_used_bytes is not None and 0 < card.memory_used_bytes < card.memory_total_bytes
    told = (card.temperature_c, card.power_w, card.power_limit_w, card.utilization_percent, card.clock_mhz)
    assert None not in told
    assert card.pcie_generation_max == 5
    assert cards.driver_version.count(".") == 2


@pytest.mark.parametrize("name", SYNTHETIC)
def test_synthetic_recordings_say_that_they_are_and_answer_every_question(name: str) -> None:
    recording = json.loads((RECORDINGS / f"{name}.json").read_text())
    assert recording["label"].startswith("synthetic")
    assert set(recording["cards"][0]) == set(QUESTIONS)


def test_unlike_cards_are_read_side_by_side() -> None:
    cards = NvmlSession(ReplayedNvml("rtx5060ti", "p100", "rtx3060"), NOTHING).read().gpus
    assert [(card.index, card.arch, card.name) for card in cards] == [
        (0, "sm_120", "NVIDIA GeForce RTX 5060 Ti"),
        (1, "sm_60", "Tesla P100-PCIE-16GB"),
        (2, "sm_86", "NVIDIA GeForce RTX 3060"),
    ]
    modern, old, resting = cards
    assert modern.processes == (GpuProcess(77, modern.processes[0].name, None),), "a process whose share is not told"
    assert old.processes[0].memory_bytes == 9124708352
    assert (old.power_w, old.power_limit_w, old.temperature_c) == (148.213, 250.0, 63)
    assert (resting.utilization_percent, resting.pcie_generation, resting.pcie_generation_max) == (0.0, 1, 4)
    assert (modern.pcie_width, modern.pcie_width_max) == (8, 8)


def test_what_a_card_does_not_tell_is_none_and_never_zero() -> None:
    library = ReplayedNvml("rtx3060")
    silent = ("nvmlDeviceGetPowerUsage", "nvmlDeviceGetTemperature", "nvmlDeviceGetUtilizationRates")
    for question in (*silent, "nvmlDeviceGetClockInfo", "nvmlDeviceGetCurrPcieLinkWidth"):
        library.cards[0][question] = {"nvml_error": pynvml.NVML_ERROR_NOT_SUPPORTED}
    library.cards[0]["nvmlDeviceGetComputeRunningProcesses"] = {"nvml_error": pynvml.NVML_ERROR_NO_PERMISSION}
    (card,) = NvmlSession(library, NOTHING).read().gpus
    told = (card.power_w, card.temperature_c, card.utilization_percent, card.clock_mhz, card.pcie_width)
    assert told == (None,) * 5
    assert (card.memory_used_bytes, card.processes) == (512753664, ())


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (pynvml.NVML_ERROR_LIBRARY_NOT_FOUND, "Install"),
        (pynvml.NVML_ERROR_DRIVER_NOT_LOADED, "modprobe"),
        (pynvml.NVML_ERROR_LIB_RM_VERSION_MISMATCH, "Restart the machine"),
        (pynvml.NVML_ERROR_FUNCTION_NOT_FOUND, "Update"),
        (pynvml.NVML_ERROR_NO_PERMISSION, "/dev/nvidia"),
        (pynvml.NVML_ERROR_UNKNOWN, "nvidia-smi"),
    ],
)
def test_a_driver_that_cannot_be_asked_is_told_with_a_hint(bus: Path, error: int, words: str) -> None:
    library = ReplayedNvml("p100")
    library.init_error = error
    cards = NvmlSession(library, bus).read()
    assert cards.gpus == ()
    assert cards.problem
    assert words in cards.problem_hint


def test_a_machine_without_a_card_needs_no_driver(tmp_path: Path) -> None:
    library = ReplayedNvml("p100")
    library.init_error = pynvml.NVML_ERROR_LIBRARY_NOT_FOUND
    assert NvmlSession(library, tmp_path).read().problem == ""


def test_a_card_that_fell_off_the_bus_is_told_and_hides_no_other() -> None:
    library = ReplayedNvml("p100", "rtx3060", "rtx5060ti")
    library.lost = {0}
    library.cards[2]["nvmlDeviceGetMemoryInfo"] = {"nvml_error": pynvml.NVML_ERROR_GPU_IS_LOST}
    cards = NvmlSession(library, NOTHING).read()
    assert [card.name for card in cards.gpus] == ["NVIDIA GeForce RTX 3060"]
    fallen, half_fallen = cards.unreadable
    assert (fallen.index, fallen.uuid, half_fallen.index) == (0, None, 2)
    assert half_fallen.uuid == library.cards[2]["nvmlDeviceGetUUID"]
    assert "fallen off the bus" in fallen.problem
    assert "Xid" in fallen.problem_hint


def test_a_driver_too_old_for_its_card_is_told_with_the_numbers_it_still_gives() -> None:
    library = ReplayedNvml("rtx5060ti")
    library.system["nvmlSystemGetCudaDriverVersion_v2"] = 12040
    (card,) = NvmlSession(library, NOTHING).read().gpus
    assert "CUDA 12.4" in card.problem and "12.8" in card.problem
    assert card.memory_used_bytes == 1073741824


def test_the_library_is_opened_once_for_many_readings() -> None:
    library = ReplayedNvml("p100")
    session = NvmlSession(library, NOTHING)
    for _ in range(5):
        session.read()
    assert library.sessions == 1
    session.close()
    session.read()
    assert library.sessions == 2
