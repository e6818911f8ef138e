"""Configuration to llama_model_params: what is checked, and what reaches llama.cpp."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest

from engines.config import ConfigInvalid, EngineConfig
from engines.errors import ModelLoadFailed
from engines.runtime import ggml, llama_log
from engines.runtime.memory_probe import Simulation
from engines.runtime.placement import expert_pattern, place
from tests.synthetic_gguf import SyntheticModel


def config(**values: object) -> EngineConfig:
    return EngineConfig(**{"model_path": "/nowhere.gguf", "model_name": "m", **values})  # type: ignore[arg-type]


def test_a_placement_survives_the_journey_through_json() -> None:
    asked = config(
        devices=("CUDA0", "CUDA1"),
        split_mode="row",
        tensor_split=(3.0, 1.5),
        cpu_moe_layers=12,
        tensor_overrides=(r"blk\.1\.ffn_.*=CPU", "output=CUDA1"),
    )
    assert EngineConfig.from_json(asked.to_json()) == asked


@pytest.mark.parametrize(
    ("key", "value", "complaint"),
    [
        ("split_mode", '"tensor"', "none, layer, row"),
        ("tensor_split", "[1, -1]", "shares of 0 or more"),
        ("tensor_split", "[0, 0]", "one of them above 0"),
        ("tensor_split", '["half"]', "tuple"),
        ("tensor_split", "2.5", "tuple"),
        ("tensor_split", "[true]", "tuple"),
        ("tensor_overrides", '"a=CPU"', "tuple"),
        ("tensor_overrides", '["blk"]', "regex=DEVICE"),
        ("tensor_overrides", '["(=CPU"]', "no regular expression"),
        ("model_name", '["a"]', "str"),
        ("cpu_moe_layers", "-1", "between 0"),
        ("gpu_layers", "-2", "between -1"),
    ],
)
def test_a_bad_placement_is_refused_where_the_configuration_is_read(key: str, value: str, complaint: str) -> None:
    rest = "" if key == "model_name" else '"model_name": "m", '
    with pytest.raises(ConfigInvalid, match=complaint):
        EngineConfig.from_json(f'{{"model_path": "m.gguf", {rest}"{key}": {value}}}')


@pytest.mark.parametrize(
    ("values", "complaint"),
    [
        ({"devices": ("CUDA7",)}, "'CUDA7'; this machine has .*CPU"),
        ({"devices": ("CPU",)}, "is no GPU"),
        ({"devices": ("none",), "tensor_split": (1.0, 1.0)}, "2 shares; there are no GPU devices"),
        (
            {"devices": ("none",), "tensor_overrides": ("ffn=CUDA7",)},
            "'ffn' to 'CUDA7'; this engine's devices are CPU$",
        ),
    ],
)
def test_what_this_machine_lacks_is_named_before_llama_cpp_sees_it(values: dict[str, object], complaint: str) -> None:
    with pytest.raises(ModelLoadFailed, match=complaint) as failure:
        place(config(**values))
    assert "\n" not in str(failure.value)


def test_mapping_the_file_is_left_out_on_request() -> None:
    assert place(config(mmap=False)).native.load_mode == 0
    assert place(config()).native.load_mode == -1


def test_the_expert_pattern_names_the_experts_of_the_first_layers_only() -> None:
    pattern = expert_pattern(11)
    on_host = [
        *(f"blk.{layer}.ffn_{part}_exps.weight" for layer in (0, 1, 10) for part in ("up", "down", "gate", "gate_up")),
        "blk.3.ffn_up_chexps.weight",
    ]
    stay = ["blk.11.ffn_up_exps.weight", "blk.1.ffn_up_shexp.weight", "blk.1.ffn_up.weight", "blk.1.attn_q.weight"]
    assert all(re.search(pattern, name) for name in on_host)
    assert not any(re.search(pattern, name) for name in stay)


def test_overrides_reach_llama_cpp_in_the_order_given(tiny_model: Callable[..., SyntheticModel]) -> None:
    """Its log tells which tensors were moved by a rule."""
    path = str(tiny_model("qwen35moe").path)
    asked = config(
        model_path=path,
        devices=("none",),
        cpu_moe_layers=2,
        tensor_overrides=(r"blk\.0\.attn_.*=CPU", r"^output\.=cpu"),
    )
    with llama_log.collected(forward=False) as log, Simulation(asked):
        pass
    moved = {match[1] for line in log.lines if (match := re.search(r"tensor (\S+) .* overridden to CPU", line))}
    assert "output.weight" in moved
    assert {f"blk.{layer}.ffn_{part}_exps.weight" for layer in (0, 1) for part in ("up", "down", "gate")} <= moved
    assert all(name.startswith(("blk.0.attn_", "output.")) or "_exps" in name for name in moved)
    assert not any(name.startswith("blk.2.") for name in moved)


def test_a_pattern_that_only_cplusplus_rejects_is_one_line_not_a_crash(
    tiny_model: Callable[..., SyntheticModel],
) -> None:
    asked = config(model_path=str(tiny_model("llama").path), tensor_overrides=(r"(?<=blk)x=CPU",))
    with pytest.raises(ModelLoadFailed, match="could not load") as failure:
        Simulation(asked)
    assert "\n" not in str(failure.value)


def test_devices_come_from_the_ggml_of_this_libllama() -> None:
    host = ggml.device("cpu")
    assert host is not None
    assert (host.name, host.kind) == ("CPU", ggml.CPU)
    assert host in ggml.devices()
    assert ggml.buffer_type_device(ggml.buffer_type(host.handle)) == ggml.HOST
