"""Memory: predicted against measured, refusal, and the nearest form that fits."""

from __future__ import annotations

import ctypes
import dataclasses
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import llama_cpp
import pytest
from prometheus_client import CollectorRegistry, generate_latest

from engines.config import EngineConfig
from engines.errors import DoesNotFit, ModelLoadFailed
from engines.runtime import memory, memory_probe
from engines.runtime.host_memory import Room, host_room
from engines.runtime.llama import Llama
from engines.runtime.memory_fit import nearest_form
from engines.runtime.memory_need import DEVICE_MARGIN_BYTES, HOST_MARGIN_BYTES, DeviceNeed, MemoryNeed, shortages
from tests import synthetic_encoders
from tests.conftest import PulledModel
from tests.synthetic_gguf import SyntheticModel

MIB = 1 << 20
Models = Callable[..., SyntheticModel]
LARGE = Room(1 << 50, 1 << 50)


@pytest.fixture(scope="module", autouse=True)
def _backend() -> None:
    llama_cpp.llama_backend_init()


def config(path: Path, **values: object) -> EngineConfig:
    defaults = {"model_path": str(path), "model_name": "m", "host_cache_bytes": 0, "batch_tokens": 64}
    return EngineConfig(**{**defaults, **values})  # type: ignore[arg-type]


def loaded(asked: EngineConfig) -> memory.MemoryReport:
    llama = Llama(asked, 1, lambda _share: None)
    llama.close()
    return llama.memory_report


# --- predicted against measured -------------------------------------------------------------------


@pytest.mark.parametrize("architecture", ["llama", "qwen3", "gemma3", "qwen35", "qwen35moe"])
@pytest.mark.parametrize(
    "values",
    [
        {"slots": 1, "context_tokens": 512},
        {"slots": 5, "context_tokens": 1024, "kv_type_k": "q8_0", "kv_type_v": "q8_0"},
        {"slots": 12, "context_tokens": 256, "checkpoints": 9, "sampling": "backend", "micro_batch_tokens": 32}
        | {"whole_vocabulary_slots": 12},
        {"slots": 2, "cache_tokens": 5000, "full_window": False, "mmap": False},
    ],
    ids=["one slot", "q8_0", "many sequences, device chains", "shared cache, no mmap"],
)
def test_a_synthetic_model_takes_what_was_predicted(
    tiny_model: Models, architecture: str, values: dict[str, object]
) -> None:
    report = loaded(config(tiny_model(architecture).path, **values))
    assert report.error_share("CPU") <= 0.05
    for kind, size_bytes in report.measured.host.by_kind().items():
        assert report.predicted.host.by_kind()[kind] == pytest.approx(size_bytes, rel=0.05)
    assert ("recurrent" in report.predicted.host.by_kind()) == architecture.startswith("qwen35")


@pytest.mark.parametrize("values", [{}, {"context_tokens": 2048, "slots": 8, "kv_type_k": "q8_0", "kv_type_v": "q8_0"}])
def test_the_default_model_takes_what_was_predicted(pulled_smollm2: PulledModel, values: dict[str, object]) -> None:
    assert loaded(config(pulled_smollm2.path, **values)).error_share("CPU") <= 0.05


def test_weights_repacked_for_the_cpu_are_counted_once_and_as_kept(tiny_model: Models, tmp_path: Path) -> None:
    """Some CPUs' kernels want Q4_0 in another layout; then those weights are not page cache any more."""
    path = tmp_path / "q4_0.gguf"
    options = llama_cpp.llama_model_quantize_default_params()
    options.ftype = llama_cpp.LLAMA_FTYPE_MOSTLY_Q4_0
    source = str(tiny_model("llama").path).encode()
    assert llama_cpp.llama_model_quantize(source, str(path).encode(), ctypes.byref(options)) == 0
    report = loaded(config(path))
    assert report.error_share("CPU") <= 0.05
    assert report.predicted.host.mapped_bytes == pytest.approx(report.measured.host.mapped_bytes, rel=0.05)


def test_the_process_grows_by_what_was_predicted(pulled_smollm2: PulledModel, tmp_path: Path) -> None:
    """Seen from outside: pages that no file backs, after one whole batch. The vocabulary in Python comes on top."""
    path = tmp_path / "config.json"
    path.write_text(config(pulled_smollm2.path, context_tokens=8192, threads=1).to_json())
    result = subprocess.run(
        [sys.executable, "-m", "engines.runtime.memory", "--config", str(path)],
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
    )
    figures = json.loads(result.stdout)
    assert figures["error_share"]["CPU"] <= 0.05
    kept_bytes = figures["predicted"]["CPU"]["loaded"] - figures["predicted"]["CPU"]["weights"]
    assert figures["anonymous_grown"] == pytest.approx(kept_bytes, rel=0.05)


def test_an_estimate_from_fewer_sequences_and_cells_is_close_to_the_whole(
    tiny_model: Models, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = config(tiny_model("qwen35").path, slots=16, context_tokens=16384, checkpoints=8)
    whole = memory.plan(asked)
    monkeypatch.setattr(memory_probe, "SIMULATED_STATE_BYTES", whole.host.recurrent_bytes // 3)
    monkeypatch.setattr(memory_probe, "SIMULATED_CELLS", asked.cells // 2)
    estimate = memory.plan(asked)
    assert (whole.estimated, estimate.estimated) == (False, True)
    assert estimate.host.loaded_bytes == pytest.approx(whole.host.loaded_bytes, rel=0.05)


def test_a_plan_leaves_no_memory_behind(pulled_smollm2: PulledModel) -> None:
    asked = config(pulled_smollm2.path)
    memory.plan(asked)
    before = memory.outside_view(memory.place(asked))["CPU"]
    for _ in range(10):
        memory.plan(asked)
    assert memory.outside_view(memory.place(asked))["CPU"] - before < 32 * MIB


def test_a_file_that_is_no_model_is_named_with_llama_cpps_reason(tmp_path: Path) -> None:
    path = tmp_path / "broken.gguf"
    path.write_bytes(b"GGUF" + bytes(64))
    with pytest.raises(ModelLoadFailed, match=r"could not load .*broken\.gguf: .") as failure:
        memory.plan(config(path))
    assert "\n" not in str(failure.value)


def test_a_model_that_writes_no_text_is_refused_before_llama_cpp_aborts(tmp_path: Path) -> None:
    for write in (synthetic_encoders.write_bert, synthetic_encoders.write_bert_ranker):
        write(tmp_path / "encoder.gguf")
        with pytest.raises(ModelLoadFailed, match=r"encoder\.gguf reads text and writes none.*pooling"):
            memory.plan(config(tmp_path / "encoder.gguf"))
    synthetic_encoders.write_qwen3_ranker(tmp_path / "ranker.gguf")
    assert memory.plan(config(tmp_path / "ranker.gguf")).total_bytes > 0


def test_more_candidates_than_there_are_tokens_are_refused_before_llama_cpp_aborts(tiny_model: Models) -> None:
    asked = config(tiny_model("llama").path)
    asked = dataclasses.replace(asked, sampling="backend", device_candidates=513)
    with pytest.raises(ModelLoadFailed, match="device_candidates is 513; the model has 512 tokens"):
        memory.plan(asked)
    assert memory.plan(dataclasses.replace(asked, device_candidates=512)).total_bytes > 0


def test_the_report_is_exported_by_device_kind_and_source(tiny_model: Models) -> None:
    report = loaded(config(tiny_model("qwen35").path))
    registry = CollectorRegistry()
    memory.export(report, registry)
    label = {"device": "CPU", "kind": "recurrent"}
    for source, need in (("predicted", report.predicted), ("measured", report.measured)):
        value = registry.get_sample_value("hydra_engine_memory_bytes", {**label, "source": source})
        assert value == need.host.recurrent_bytes
    assert b'kind="taken"' in generate_latest(registry)


# --- what fits ------------------------------------------------------------------------------------


def test_a_gpu_needs_free_what_is_needed_and_a_margin() -> None:
    need = MemoryNeed({"CUDA0": DeviceNeed(weights_bytes=900 * MIB, kv_bytes=100 * MIB)})
    enough = Room(1000 * MIB + DEVICE_MARGIN_BYTES, 1 << 40)
    assert shortages(need, {"CUDA0": enough}) == []
    (short,) = shortages(need, {"CUDA0": dataclasses.replace(enough, free_bytes=enough.free_bytes - 1)})
    assert "1000 MiB of CUDA0 memory is needed (weights 900 MiB, kv 100 MiB)" in str(short)


def test_mapped_weights_count_against_all_of_the_hosts_memory_and_the_rest_against_what_is_free() -> None:
    need = MemoryNeed({"CPU": DeviceNeed(weights_bytes=600 * MIB, mapped_bytes=600 * MIB, kv_bytes=100 * MIB)})
    rest, whole = 100 * MIB + HOST_MARGIN_BYTES, 700 * MIB + HOST_MARGIN_BYTES
    assert shortages(need, {"CPU": Room(rest, whole)}) == []
    (short,) = shortages(need, {"CPU": Room(rest - 1, whole)})
    assert short.needed_bytes == 100 * MIB
    (short,) = shortages(need, {"CPU": Room(rest, whole - 1)})
    assert short.needed_bytes == 700 * MIB


def test_a_device_that_tells_no_size_is_taken_to_have_room() -> None:
    need = MemoryNeed({"RPC0": DeviceNeed(weights_bytes=1 << 40)})
    assert shortages(need, {"RPC0": Room(0, 0)}) == []


def tight(asked: EngineConfig, saved_bytes: int) -> dict[str, Room]:
    """A host with too little for `asked`: exactly as much as is left once `saved_bytes` are saved."""
    host = memory.plan(asked).host
    return {"CPU": Room(host.total_bytes - host.mapped_bytes - saved_bytes + HOST_MARGIN_BYTES, 1 << 40)}


def check_fits(asked: EngineConfig, rooms: dict[str, Room]) -> None:
    assert shortages(memory.plan(asked), rooms) == []


@pytest.mark.parametrize(
    ("values", "saved_share", "changed"),
    [
        ({"slots": 8, "context_tokens": 2048, "checkpoints": 0}, 0.1, {"slots": 7}),
        ({"slots": 1, "context_tokens": 8192}, 0.4, {"kv_type_k": "q8_0", "kv_type_v": "q8_0"}),
        ({"slots": 1, "context_tokens": 8192, "kv_type_k": "q4_0", "kv_type_v": "q4_0"}, 0.2, {"context_tokens": 4096}),
    ],
)
def test_the_nearest_form_changes_the_setting_that_costs_least(
    tiny_model: Models, values: dict[str, object], saved_share: float, changed: dict[str, object]
) -> None:
    asked = config(tiny_model("llama").path, **values)
    rooms = tight(asked, int(memory.plan(asked).host.kv_bytes * saved_share))
    nearest = nearest_form(asked, rooms, ["CPU"])
    assert nearest is not None
    assert nearest.change == changed
    check_fits(nearest.config, rooms)


@pytest.mark.parametrize("model", ["llama", "qwen35"])
def test_a_smaller_micro_batch_comes_before_all_else(tiny_model: Models, model: str) -> None:
    values = {"slots": 4, "context_tokens": 8192, "batch_tokens": 4096, "micro_batch_tokens": 2048}
    asked = config(tiny_model(model).path, speculation="auto", draft_tokens=2, host_cache_bytes=1 << 30, **values)
    for tokens in (1024, 512):
        smaller = dataclasses.replace(asked, micro_batch_tokens=tokens)
        saved_bytes = memory.plan(asked).host.compute_bytes - memory.plan(smaller).host.compute_bytes
        rooms = tight(asked, saved_bytes)
        nearest = nearest_form(asked, rooms, ["CPU"])
        assert nearest is not None
        assert nearest.change == {"micro_batch_tokens": tokens}
        check_fits(nearest.config, rooms)
    usual = nearest_form(smaller, tight(smaller, 1), ["CPU"])
    assert usual is not None
    assert "micro_batch_tokens" not in usual.change, "512 are the fewest"


def test_a_hybrid_gives_up_checkpoints_before_slots(tiny_model: Models) -> None:
    asked = config(tiny_model("qwen35").path, slots=4, checkpoints=40, context_tokens=2048)
    rooms = tight(asked, memory.plan(asked).host.recurrent_bytes // 4)
    nearest = nearest_form(asked, rooms, ["CPU"])
    assert nearest is not None
    assert list(nearest.change) == ["checkpoints"]
    assert 20 < nearest.change["checkpoints"] < 40
    check_fits(nearest.config, rooms)


def test_several_settings_change_where_none_alone_is_enough(tiny_model: Models) -> None:
    asked = config(tiny_model("llama").path, slots=8, context_tokens=8192, host_cache_bytes=64 * MIB, checkpoints=0)
    host = memory.plan(asked).host
    rooms = tight(asked, host.cache_bytes + int(host.kv_bytes * 0.93))
    nearest = nearest_form(asked, rooms, ["CPU"])
    assert nearest is not None
    assert len(nearest.change) > 1
    check_fits(nearest.config, rooms)


def test_experts_are_the_first_to_leave_a_gpu_that_is_short(tiny_model: Models) -> None:
    """Where no other axis is left but layers, the one for experts is offered and its first step planned."""
    values = {"slots": 1, "checkpoints": 0, "context_tokens": 512, "kv_type_k": "q4_0", "kv_type_v": "q4_0"}
    asked = config(tiny_model("qwen35moe").path, gpu_layers=-1, sampling="host", **values)
    nearest = nearest_form(asked, {"CPU": LARGE}, ["CUDA0"])
    assert nearest is not None
    assert nearest.change == {"cpu_moe_layers": 1}
    dense = nearest_form(config(tiny_model("llama").path, gpu_layers=-1, **values), {"CPU": LARGE}, ["CUDA0"])
    assert dense is not None
    assert dense.change == {"gpu_layers": 2}  # of two layers and the output


def test_refusal_is_one_line_with_need_room_and_a_form_that_fits(tiny_model: Models) -> None:
    asked = config(tiny_model("llama").path, slots=8, context_tokens=8192)
    need = memory.plan(asked)
    memory.refuse_if_too_big(asked, need, {"CPU": LARGE})
    with pytest.raises(DoesNotFit) as refusal:
        memory.refuse_if_too_big(asked, need, tight(asked, need.host.kv_bytes // 2))
    text = str(refusal.value)
    assert "\n" not in text
    assert "of CPU memory is needed (kv 64 MiB" in text
    assert "nearest form that fits: " in text


def test_refusal_says_so_when_nothing_would_fit(tiny_model: Models) -> None:
    asked = config(tiny_model("llama").path)
    with pytest.raises(DoesNotFit, match="no smaller form"):
        memory.refuse_if_too_big(asked, memory.plan(asked), {"CPU": Room(HOST_MARGIN_BYTES, 1 << 40)})


def test_an_engine_that_cannot_fit_ends_with_code_3_before_it_loads(tiny_model: Models) -> None:
    """64 slots of four million tokens; neither the plan nor the refusal may take the memory they speak of."""
    arguments = ["--model", str(tiny_model("llama").path), "--slots", "64", "--context", str(1 << 22), "--port", "0"]
    result = subprocess.run(
        [sys.executable, "-m", "engines.runtime", *arguments], capture_output=True, text=True, timeout=60
    )
    assert result.returncode == 3
    assert "does not fit" in result.stderr
    assert "nearest form that fits" in result.stderr


# --- the host's memory ----------------------------------------------------------------------------


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def test_the_tightest_cgroup_limits_the_host(tmp_path: Path) -> None:
    proc, cgroups = tmp_path / "proc", tmp_path / "cgroup"
    write(proc / "meminfo", "MemTotal:  1000000 kB\nMemAvailable:  800000 kB\nHugePages_Total:  0\n")
    write(proc / "self" / "cgroup", "0::/a/b\n")
    assert host_room(proc, cgroups) == Room(800000 * 1024, 1000000 * 1024)
    write(cgroups / "a" / "b" / "memory.max", "max\n")
    write(cgroups / "a" / "memory.max", f"{300 * MIB}\n")
    write(cgroups / "a" / "memory.current", f"{200 * MIB}\n")
    write(cgroups / "a" / "memory.stat", f"anon 1\ninactive_file {50 * MIB}\n")
    assert host_room(proc, cgroups) == Room(150 * MIB, 300 * MIB)


def test_the_older_cgroup_layout_is_read_too(tmp_path: Path) -> None:
    proc, cgroups = tmp_path / "proc", tmp_path / "cgroup"
    write(proc / "meminfo", "MemTotal:  1000000 kB\nMemAvailable:  800000 kB\n")
    write(proc / "self" / "cgroup", "4:memory:/x\n3:cpuset:/\n0::/\n")
    write(cgroups / "memory" / "memory.limit_in_bytes", str(0x7FFFFFFFFFFFF000))
    write(cgroups / "memory" / "x" / "memory.limit_in_bytes", str(100 * MIB))
    write(cgroups / "memory" / "x" / "memory.usage_in_bytes", str(120 * MIB))
    assert host_room(proc, cgroups) == Room(0, 100 * MIB)


def test_this_host_has_room() -> None:
    room = host_room()
    assert 0 < room.free_bytes <= room.total_bytes
