"""Products of experts with few tokens each: the sources that a card's build compiles, run on emulated threads.

Weights are random bytes with sane scales, which gguf's own unpacking and a plain product read; activations are rounded as the
card's are.
"""

from __future__ import annotations

import os
import re
import shutil
import struct
import subprocess
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, quants

from native import changes
from native.grouped_experts import GROUPED_EXPERTS

EMULATED = Path(__file__).resolve().parent / "emulated"
CUDA = Path(__file__).resolve().parent.parent.parent / "native" / "cuda"
pytestmark = [
    pytest.mark.soak,
    pytest.mark.timeout(900),
    pytest.mark.skipif(shutil.which("g++") is None, reason="there is no C++ compiler"),
]
Q = GGMLQuantizationType

# Where a block has its scales: half-precision numbers at these bytes.
SCALES = {
    Q.Q4_0: (0,),
    Q.Q4_1: (0, 2),
    Q.Q5_0: (0,),
    Q.Q5_1: (0, 2),
    Q.Q8_0: (0,),
    Q.Q2_K: (80, 82),
    Q.Q3_K: (108,),
    Q.Q4_K: (0, 2),
    Q.Q5_K: (0, 2),
    Q.Q6_K: (208,),
    Q.IQ4_NL: (0,),
    Q.IQ4_XS: (0,),
    Q.IQ2_XXS: (0,),
    Q.IQ3_S: (0,),
    Q.IQ1_S: (0,),
}


@dataclass(frozen=True)
class Case:
    """A product. `crowd` is the share of pairs that choose the first expert if they can; `few` experts are chosen from."""

    type: GGMLQuantizationType
    columns: int
    rows: int
    experts: int
    tokens: int
    slots: int
    channels: int = 1  # rows of activations of a token
    gate: bool = False
    bias: bool = False
    crowd: float = 0.0
    few: int = 0


def chosen(case: Case, random: np.random.Generator) -> np.ndarray:
    ids = np.empty((case.tokens, case.slots), np.int32)
    for token in range(case.tokens):
        ids[token] = random.permutation(case.few or case.experts)[: case.slots]
        if 0 not in ids[token] and random.random() < case.crowd:
            ids[token, random.integers(case.slots)] = 0
    return ids


def packed(case: Case, random: np.random.Generator) -> np.ndarray:
    """Weights, shape (experts, rows, bytes of a row)."""
    per_block, block_bytes = GGML_QUANT_SIZES[case.type]
    shape = (case.experts, case.rows, case.columns // per_block, block_bytes)
    blocks = random.integers(0, 256, shape, dtype=np.uint8)
    if case.type == Q.MXFP4:
        blocks[..., 0] = random.integers(118, 124, shape[:3])
    for place in SCALES.get(case.type, ()):
        # In the larger blocks it is multiplied with a whole number.
        scales = (random.uniform(0.01, 0.03, shape[:3]) / (per_block / 32) ** 2).astype(np.float16)
        blocks[..., place : place + 2] = scales[..., None].view(np.uint8)
    return blocks.reshape(case.experts, case.rows, -1)


def rounded(y: np.ndarray) -> np.ndarray:
    """Activations as a card rounds them, in blocks of 32."""
    blocks = y.reshape(*y.shape[:-1], -1, 32)
    scales = np.abs(blocks).max(-1, keepdims=True) / np.float32(127)
    whole = np.trunc(blocks / scales + np.copysign(0.5, blocks))
    return np.asarray(whole * scales.astype(np.float16).astype(np.float32)).reshape(y.shape)


class Inputs:
    def __init__(self, case: Case, seed: int = 1) -> None:
        random = np.random.default_rng(seed)
        self.case = case
        self.x, self.gate = packed(case, random), packed(case, random)
        self.x_bias = random.uniform(-1, 1, (case.experts, case.rows)).astype(np.float32) * case.bias
        self.gate_bias = random.uniform(-1, 1, (case.experts, case.rows)).astype(np.float32) * case.bias
        self.ids = chosen(case, random)
        self.y = random.uniform(-1, 1, (case.tokens, case.channels, case.columns)).astype(np.float32)

    def encoded(self) -> bytes:
        case = self.case
        sizes = (case.columns, case.rows, case.experts, len(self.ids), case.slots, case.channels, case.gate, case.bias)
        parts = [struct.pack("<10i", case.type, *sizes, self.x.shape[-1]), self.x.tobytes()]
        parts += [self.gate.tobytes()] * case.gate + [self.x_bias.tobytes(), self.gate_bias.tobytes()] * case.bias
        return b"".join([*parts, self.ids.tobytes(), self.y.tobytes()])

    def product(self) -> np.ndarray:
        """Shape (tokens, slots, rows)."""
        y = np.repeat(rounded(self.y), self.case.slots, axis=1) if self.case.channels == 1 else rounded(self.y)
        x = np.einsum("tsk,tsrk->tsr", y, quants.dequantize(self.x, self.case.type)[self.ids])
        x = x + self.x_bias[self.ids]
        if not self.case.gate:
            return np.asarray(x)
        gate = (
            np.einsum("tsk,tsrk->tsr", y, quants.dequantize(self.gate, self.case.type)[self.ids])
            + self.gate_bias[self.ids]
        )
        return np.asarray(x * gate / (1 + np.exp(-gate)))


def slice_of(text: str, first: str, behind: str) -> str:
    start = text.index(first)
    return text[start : text.index(behind, start)]


@pytest.fixture(scope="module")
def program(tree: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("experts")
    source = tree / "ggml" / "src" / "ggml-cuda"
    header = (tree / "ggml" / "include" / "ggml.h").read_text()
    common = (source / "common.cuh").read_text()
    enums = [slice_of(header, f"enum {name} {{", "};") + "};\n" for name in ("ggml_type", "ggml_glu_op")]
    traits = slice_of(common, "template <ggml_type type>\nstruct ggml_cuda_type_traits;", "//////////////////////")
    fusion = slice_of(common, "struct ggml_cuda_mm_fusion_args_host {", "struct ggml_cuda_kernel_launch_params")
    sizes = {type: GGML_QUANT_SIZES[type][0] for type in (*SCALES, Q.MXFP4)}
    elements = "".join(f"case {int(type)}: return {count};\n" for type, count in sizes.items())
    size = "".join(f"case {int(type)}: return {GGML_QUANT_SIZES[type][1]};\n" for type in sizes)
    (folder / "types.h").write_text(
        "".join(enums)
        + "#define GGML_COMMON_DECL_CUDA\n#define GGML_COMMON_IMPL_CUDA\n"
        + f'#include "{tree / "ggml" / "src" / "ggml-common.h"}"\n'
        + traits
        + fusion
        + f"inline int type_elements(ggml_type type) {{ switch (type) {{\n{elements}default: return 1; }} }}\n"
        + f"inline size_t ggml_type_size(int type) {{ switch (type) {{\n{size}default: return 4; }} }}\n"
        + "inline size_t ggml_row_size(int type, int64_t n) { return n/type_elements((ggml_type) type)*ggml_type_size(type); }\n"
    )
    for name in ("cuda_fp16.h", "cp-async.cuh"):
        (folder / name).write_text("#pragma once\n")
    for name in ("unary.cuh", "vecdotq.cuh"):
        shutil.copy(source / name, folder)
    for path in CUDA.glob("mmid-grouped*"):
        text = path.read_text()
        text = re.sub(r"extern __shared__ (int4?) (\w+)\[\];", r"\1 * \2 = (\1 *) dynamic_shared;", text)
        text = text.replace('asm volatile("cp.async.commit_group;");', "emulated_copies_commit();")
        text = text.replace('asm volatile("cp.async.wait_group 1;" : : : "memory");', "emulated_copies_wait(1);")
        assert "asm" not in text and "extern" not in text
        (folder / path.name).write_text(text)
    program = folder / "experts"
    command = ["g++", "-std=c++17", "-O1", "-w", "-fpermissive", f"-I{folder}", f"-I{EMULATED}"]
    subprocess.run([*command, "-o", str(program), str(EMULATED / "experts.cpp")], check=True, timeout=600)
    return program


def run(program: Path, all_inputs: list[Inputs], limits: str | None = "1000,1") -> list[np.ndarray | None]:
    """The products, or None where the step takes another way."""
    environment = {name: value for name, value in os.environ.items() if name != "GGML_CUDA_MMID_GROUPED"}
    if limits is not None:
        environment["GGML_CUDA_MMID_GROUPED"] = limits
    given = b"".join(inputs.encoded() for inputs in all_inputs)
    ended = subprocess.run([str(program)], input=given, capture_output=True, timeout=600, env=environment)
    assert ended.returncode == 0, ended.stderr.decode()
    results: list[np.ndarray | None] = []
    place = 0
    for inputs in all_inputs:
        takes = struct.unpack_from("<i", ended.stdout, place)[0]
        shape = (*inputs.ids.shape, inputs.case.rows)
        values = np.frombuffer(ended.stdout, np.float32, int(np.prod(shape)), place + 4).reshape(shape)
        results.append(values if takes else None)
        place += 4 + values.nbytes
    assert place == len(ended.stdout)
    return results


def error(got: np.ndarray | None, wanted: np.ndarray) -> float:
    assert got is not None
    return float(((got - wanted) ** 2).sum() / (wanted**2).sum())


CASES = [
    # all columns of activations that a warp holds, and more; experts that nobody chose
    Case(Q.Q4_0, 2048, 8, 16, 9, 2),
    Case(Q.Q4_0, 2048, 7, 24, 16, 8, gate=True),
    Case(Q.Q4_0, 512, 37, 24, 32, 8, channels=8),
    Case(Q.Q4_0, 512, 64, 6, 64, 2, crowd=0.9),
    Case(Q.Q4_0, 768, 33, 9, 12, 3, channels=3, gate=True),
    Case(Q.Q4_0, 64, 50, 4, 9, 1),
    Case(Q.Q4_0, 256, 200, 2, 64, 1, gate=True),
    Case(Q.Q4_0, 2112, 9, 8, 11, 4, crowd=1.0),
    Case(Q.Q4_0, 4096, 10, 8, 20, 2, gate=True, few=2),
    Case(Q.Q4_0, 320, 21, 8, 9, 7, bias=True),
    Case(Q.Q4_0, 256, 21, 8, 9, 7, gate=True, bias=True, crowd=0.5),
    Case(Q.Q8_0, 2048, 9, 12, 10, 3),
    Case(Q.Q8_0, 512, 19, 12, 33, 5, channels=5, gate=True),
    Case(Q.Q8_0, 4160, 5, 5, 9, 2),
    Case(Q.Q4_K, 2048, 9, 12, 10, 3, gate=True),
    Case(Q.Q4_K, 512, 18, 300, 64, 2),
    Case(Q.Q4_K, 2304, 6, 5, 9, 4, channels=4, crowd=1.0),
    Case(Q.Q6_K, 2048, 7, 12, 10, 3),
    Case(Q.Q6_K, 512, 19, 12, 40, 6, channels=6, gate=True),
    Case(Q.Q6_K, 2304, 6, 5, 9, 4, bias=True),
    # every token's expert
    Case(Q.Q4_0, 2048, 10, 1, 32, 1, gate=True),
    Case(Q.Q8_0, 512, 37, 1, 10, 1, gate=True),
    Case(Q.Q4_K, 2304, 7, 1, 9, 1, gate=True),
    Case(Q.Q6_K, 2048, 5, 1, 11, 1, gate=True),
    *(Case(type, 768, 5, 6, 9, 3, gate=type in (Q.Q4_1, Q.IQ4_XS)) for type in (*SCALES, Q.MXFP4)),
]


def test_products_are_those_of_the_chosen_experts(program: Path) -> None:
    all_inputs = [Inputs(case) for case in CASES]
    for inputs, got in zip(all_inputs, run(program, all_inputs), strict=True):
        # Sums of activations are those before rounding, as everywhere on a card. A lane of the row left out would be 0.015.
        assert error(got, inputs.product()) < 5e-4, inputs.case


def test_a_token_has_the_same_bits_whatever_else_is_in_the_step(program: Path) -> None:
    for type in (Q.Q4_0, Q.Q8_0, Q.Q4_K, Q.Q6_K):
        together = Inputs(Case(type, 512, 21, 5, 24, 3, gate=True, crowd=0.7))
        alone = []
        for token in range(0, 24, 5):
            inputs = Inputs(together.case)
            inputs.ids, inputs.y = together.ids[token : token + 1], together.y[token : token + 1]
            alone.append(inputs)
        all_results = run(program, [together, *alone])
        assert all_results[0] is not None
        for i, got in enumerate(all_results[1:]):
            assert got is not None and got.tobytes() == all_results[0][5 * i : 5 * i + 1].tobytes(), (type, i)


@pytest.mark.parametrize("tokens", [9, 16, 32, 64, 128])
def test_warps_have_equal_shares_of_the_work(program: Path, tokens: int) -> None:
    """By the instructions that a card counted: of reading a group of rows, and of multiplying it with a token. By groups alone a
    warp with those of three tokens would have 1.6 times the mean."""
    warps, groups, experts = 2112, 256, 256  # of an H200 and of gate and up of 35B-A3B
    random = np.random.default_rng(tokens)
    ids = np.stack([random.choice(experts, 8, replace=False) for _ in range(tokens)]).astype(np.int32)
    given = struct.pack("<3i", experts, *ids.shape) + ids.tobytes()
    command = [str(program), "shares", str(warps), str(groups)]
    ended = subprocess.run(command, input=given, capture_output=True, timeout=600, check=True)
    own_groups, products = np.array([line.split() for line in ended.stdout.splitlines()], int).T
    assert len(own_groups) == warps
    assert own_groups.sum() == groups * len(np.unique(ids))
    assert products.sum() == groups * ids.size
    instructions = 315 * own_groups + 400 * products
    # With few tokens a share is less than ten groups, of which one may be too many.
    assert instructions.max() <= (1.15 if tokens > 9 else 1.3) * instructions.mean()


def test_which_steps_take_this_way(program: Path) -> None:
    def takes(limits: str | None, *cases: Case) -> list[bool]:
        return [got is not None for got in run(program, [Inputs(case) for case in cases], limits)]

    few, nine, many = (Case(Q.Q4_0, 64, 2, 8, tokens, 2) for tokens in (8, 9, 33))
    assert takes(None, few, nine, many) == [False, True, False]  # 8 tokens for each of 8 experts are 32 tokens
    # What is not multiplied from registers has to have long rows, and 2 tokens for each of 8 experts.
    short, long, crowded = (Case(Q.Q6_K, *sizes, 2) for sizes in ((512, 2, 16, 9), (1024, 2, 16, 9), (1024, 2, 8, 9)))
    assert takes(None, short, long, crowded) == [False, True, False]
    assert takes("4,9", short, crowded) == [True, True]
    assert takes("0", nine) == [False]
    assert takes("1000,2", few, many) == [True, True]
    assert takes("2", nine, few) == [False, False]
    assert takes("nonsense", nine) == [True]
    assert takes(None, Case(Q.Q4_0, 96, 2, 8, 9, 2)) == [False]  # no whole lanes


def test_which_steps_take_the_expert_of_all_tokens_this_way(program: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def takes(*cases: Case) -> list[bool]:
        return [got is not None for got in run(program, [Inputs(case) for case in cases], None)]

    steps = [Case(Q.Q4_0, 64, 2, 1, tokens, 1, gate=True) for tokens in (8, 9, 32, 33)]
    assert takes(*steps) == [False, True, True, False]
    assert takes(Case(Q.Q4_0, 2048, 514, 1, 9, 1, gate=True)) == [False]  # large matrices have tiles enough
    monkeypatch.setenv("GGML_CUDA_SHARED_EXPERT", "0")
    assert takes(*steps) == [False] * 4


def test_the_pinned_source_takes_the_changes(tree: Path) -> None:
    backend = (tree / "ggml/src/ggml-cuda/ggml-cuda.cu").read_text()
    assert backend.count("ggml_cuda_should_use_mmid_grouped(src0, src1, dst, cc)") == 3
    assert (
        "ggml_cuda_mul_mat_id_grouped(ctx, src0, src1, ids, dst, fusion)"
        in (tree / "ggml/src/ggml-cuda/mmvq.cu").read_text()
    )
    assert set(GROUPED_EXPERTS) <= set(changes.CHANGES)
