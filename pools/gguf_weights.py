"""How many bytes of a GGUF's weights belong to which layer: what a placement moves between a card and the host."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

from pools.gguf_reader import TensorInfo

_BLOCK = re.compile(r"blk\.(\d+)\.")
# The tensors that `cpu_moe_layers` keeps in host memory; the engine's own pattern is engines.runtime.placement.expert_pattern.
_EXPERTS = re.compile(r"blk\.\d+\.ffn_(up|down|gate|gate_up)_(ch|)exps")
_INPUT = re.compile(r"(token_embd|token_types|position_embd|per_layer_token_embd|token_embd_norm)\b")


@dataclass(frozen=True)
class WeightSizes:
    """Bytes by place. `layer_bytes` and `expert_bytes` have one entry per block, draft heads last; experts come on top.

    `input_bytes` never leaves the host; `output_bytes` go with the output layer. With `is_tied` the output layer has no matrix
    of its own and uses the input's, of which a card gets a copy.
    """

    input_bytes: int
    output_bytes: int
    layer_bytes: tuple[int, ...]
    expert_bytes: tuple[int, ...]
    is_tied: bool


def weight_sizes(tensors: Iterable[TensorInfo], block_count: int) -> WeightSizes:
    """Sums tensors up; those of no block count as the output layer's, but for the input's. Draft heads are blocks too."""
    layers, experts = [0] * block_count, [0] * block_count
    input_bytes = output_bytes = 0
    has_output = False
    for tensor in tensors:
        block = _BLOCK.match(tensor.name)
        if block is not None and int(block[1]) < block_count:
            sizes = experts if _EXPERTS.match(tensor.name) else layers
            sizes[int(block[1])] += tensor.size_bytes
        elif _INPUT.match(tensor.name):
            input_bytes += tensor.size_bytes
        else:
            has_output = has_output or tensor.name == "output.weight"
            output_bytes += tensor.size_bytes
    return WeightSizes(input_bytes, output_bytes, tuple(layers), tuple(experts), is_tied=not has_output)
