"""Attention over lists of visible blocks: the files that a card's build compiles, run here on emulated threads.

Emulated are the threads of CUDA and what one part of a tile computes (tests/native/emulated); the search of the mask, the lists,
who computes which part and how parts are combined are the build's own files. They are compared with a plain reference.
"""

from __future__ import annotations

import shutil
import subprocess
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from native import build_native, changes
from native.errors import BuildFailed
from native.row_blocks import ROW_BLOCKS
from native.source_change import Change

ROOT = Path(__file__).resolve().parent.parent.parent
EMULATED = Path(__file__).resolve().parent / "emulated"
HEAD_SIZE = 8
BLOCK_CELLS = 8
HEADS_A_TILE = 4  # Q heads that a tile computes together


@dataclass(frozen=True)
class Case:
    """A step of `rows` over `cells`; `seen` says which cells each row may see, shape (streams, rows, cells)."""

    name: str
    seen: np.ndarray
    tile_rows: int = 1
    kv_heads: int = 2
    gqa_ratio: int = 4
    cuda_blocks: int = 7
    sinks: bool = False


def stepwise(rows: int, own_blocks: int, generated: int) -> np.ndarray:
    """Each row's prompt in a piece, then tokens that all rows generated side by side."""
    cells = rows * own_blocks * BLOCK_CELLS + rows * generated
    cells = -(-cells // BLOCK_CELLS) * BLOCK_CELLS
    seen = np.zeros((1, rows, cells), bool)
    for row in range(rows):
        seen[0, row, row * own_blocks * BLOCK_CELLS : (row + 1) * own_blocks * BLOCK_CELLS - row % 3] = True
        for token in range(generated):
            seen[0, row, rows * own_blocks * BLOCK_CELLS + token * rows + row] = True
    return seen


def cases() -> list[Case]:
    random = np.random.default_rng(3)
    sparse = random.random((1, 6, 160)) < 0.03
    sparse[0, 2] = False  # a row that sees nothing
    one_cell = np.zeros((1, 3, 64), bool)
    one_cell[0, [0, 1, 2], [0, 37, 63]] = True
    unlike = np.zeros((1, 5, 400), bool)
    unlike[0, 0, :320] = True  # one long sequence and four of some cells
    for row in range(1, 5):
        unlike[0, row, 320 + 16 * row : 325 + 16 * row] = True
    everything = np.ones((1, 4, 128), bool)
    long = random.random((1, 2, 1030 * BLOCK_CELLS)) < 0.002  # more blocks than a pass over the list has threads
    return [
        Case("prompts and generated tokens", stepwise(8, 6, 5), cuda_blocks=13),
        Case("as many CUDA blocks as tiles", stepwise(8, 3, 0), cuda_blocks=16),
        Case("tiles of eight rows of several sequences", stepwise(11, 4, 3), tile_rows=8, cuda_blocks=9),
        Case("drafts: two rows each", np.repeat(stepwise(6, 4, 3), 2, axis=1), tile_rows=2, cuda_blocks=11),
        Case("a row that sees nothing", sparse),
        Case("a row that sees nothing, with sinks", sparse, sinks=True, cuda_blocks=5),
        Case("tiles of two rows, one of which sees nothing", sparse, tile_rows=2),
        Case("one cell for each row", one_cell, cuda_blocks=64),
        Case("one CUDA block", one_cell, cuda_blocks=1),
        Case("nothing at all", np.zeros((1, 3, 64), bool), cuda_blocks=4),
        Case("unlike lengths, sinks", unlike, cuda_blocks=23, sinks=True),
        Case("everything, six Q heads for each K/V head", everything, gqa_ratio=6, cuda_blocks=37),
        Case("two streams", random.random((2, 5, 96)) < 0.1, tile_rows=2, cuda_blocks=10),
        Case("a long cache", long, kv_heads=1, cuda_blocks=29),
        *(
            Case(
                f"by chance {number}",
                random.random((1, int(random.integers(1, 14)), 8 * int(random.integers(1, 30))))
                < random.choice((0.01, 0.1, 0.6)),
                tile_rows=int(random.choice((1, 2, 8))),
                kv_heads=int(random.integers(1, 4)),
                gqa_ratio=int(random.choice((4, 5, 8))),
                cuda_blocks=int(random.integers(1, 60)),
                sinks=bool(random.integers(2)),
            )
            for number in range(8)
        ),
    ]


@dataclass(frozen=True)
class Inputs:
    q: np.ndarray  # (streams, heads, rows, head size)
    k: np.ndarray  # (streams, kv heads, cells, head size)
    v: np.ndarray
    mask: np.ndarray  # (streams, rows, cells): 0 or -inf
    sinks: np.ndarray  # (heads,)


def inputs(case: Case) -> Inputs:
    random = np.random.default_rng(len(case.name))
    streams, rows, cells = case.seen.shape
    heads = case.kv_heads * case.gqa_ratio
    return Inputs(
        q=random.normal(size=(streams, heads, rows, HEAD_SIZE)).astype(np.float32),
        k=random.normal(size=(streams, case.kv_heads, cells, HEAD_SIZE)).astype(np.float16).astype(np.float32),
        v=random.normal(size=(streams, case.kv_heads, cells, HEAD_SIZE)).astype(np.float16).astype(np.float32),
        mask=np.where(case.seen, 0, -np.inf).astype(np.float32),
        sinks=random.normal(size=heads).astype(np.float32),
    )


def encoded(case: Case) -> bytes:
    streams, rows, cells = case.seen.shape
    shape = (rows, cells, case.kv_heads, case.gqa_ratio, streams, case.cuda_blocks, case.tile_rows, int(case.sinks))
    given = inputs(case)
    arrays = (given.q, given.k, given.v, given.mask, given.sinks)
    return np.array(shape, "<i4").tobytes() + b"".join(array.tobytes() for array in arrays)


# --- the reference --------------------------------------------------------------------------------------


def attention(case: Case) -> np.ndarray:
    """What rows attend to, shape (streams, rows, heads, head size); a row that sees nothing has no weights: 0/0."""
    given = inputs(case)
    repeat = case.gqa_ratio
    k, v = (np.repeat(array.astype(float), repeat, axis=1) for array in (given.k, given.v))
    scores = np.einsum("shrd,shcd->shrc", given.q.astype(float), k) / np.sqrt(HEAD_SIZE) + given.mask[:, None]
    weights = np.exp(scores)
    total = weights.sum(axis=-1) + (np.exp(given.sinks)[None, :, None] if case.sinks else 0)
    with np.errstate(invalid="ignore"):
        out: np.ndarray = np.einsum("shrc,shcd->srhd", weights, v) / np.moveaxis(total, 1, 2)[..., None]
    return out


def lists(case: Case) -> list[list[int]]:
    """For each tile the blocks that a row of it may see, at least one."""
    streams, rows, cells = case.seen.shape
    found = []
    for stream in range(streams):
        for first in range(0, rows, case.tile_rows):
            any_row = case.seen[stream, first : first + case.tile_rows].any(axis=0)
            blocks = any_row.reshape(cells // BLOCK_CELLS, BLOCK_CELLS).any(axis=1)
            found.append([int(block) for block in np.flatnonzero(blocks)] or [0])
    return found


Part = tuple[int, int, int, int, int, int]  # CUDA block, head, tile, first, stop, whether it is the end of the tile


def parts(case: Case) -> list[Part]:
    """All units in their order, cut into equal runs, and runs cut where tiles end."""
    sizes = [len(blocks) for blocks in lists(case)]
    heads = -(-case.gqa_ratio // HEADS_A_TILE) * case.kv_heads
    units = [(head, tile, place) for head in range(heads) for tile, size in enumerate(sizes) for place in range(size)]
    runs = min(case.cuda_blocks, len(units))
    found: list[Part] = []
    for run in range(runs):
        own = units[run * len(units) // runs : (run + 1) * len(units) // runs]
        for head, tile in dict.fromkeys((head, tile) for head, tile, _ in own):
            places = [place for h, t, place in own if (h, t) == (head, tile)]
            stop = places[-1] + 1
            found.append((run, head, tile, places[0], stop, int(stop == sizes[tile])))
    return found


def seams(case: Case) -> list[tuple[int, int]]:
    """The CUDA block that ends a tile which others began, and the first of these."""
    by_tile: dict[tuple[int, int], list[int]] = defaultdict(list)
    for run, head, tile, *_ in parts(case):
        by_tile[head, tile].append(run)
    return sorted((runs[-1], runs[0]) for runs in by_tile.values() if len(runs) > 1)


# --- the build's files -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Result:
    lists: list[list[int]]
    parts: list[Part]
    seams: list[tuple[int, int]]
    out: np.ndarray


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Result]:
    compiler = shutil.which("g++") or shutil.which("c++")
    if compiler is None:
        pytest.skip("there is no C++ compiler")
    program = tmp_path_factory.mktemp("emulated") / "attention"
    command = [compiler, "-std=c++17", "-O1", f"-I{EMULATED}", f"-I{ROOT / 'native' / 'cuda'}", "-Wno-unknown-pragmas"]
    subprocess.run([*command, "-o", str(program), str(EMULATED / "attention.cpp")], check=True, timeout=300)
    given = cases()
    ended = subprocess.run(
        [str(program)], input=b"".join(encoded(case) for case in given), check=True, timeout=300, capture_output=True
    )
    data = memoryview(ended.stdout)
    found = {}
    for case in given:
        found[case.name], data = decoded(case, data)
    assert not data
    return found


def decoded(case: Case, data: memoryview) -> tuple[Result, memoryview]:
    def taken(count: int) -> list[int]:
        nonlocal data
        values = np.frombuffer(data[: 4 * count], "<i4").tolist()
        data = data[4 * count :]
        return [int(value) for value in values]

    streams, rows, cells = case.seen.shape
    tiles, blocks = taken(2)
    assert (tiles, blocks) == (-(-rows // case.tile_rows) * streams, cells // BLOCK_CELLS)
    blocks_of = [taken(taken(1)[0]) for _ in range(tiles)]
    (count,) = taken(1)
    own = [tuple(taken(6)) for _ in range(count)]
    (count,) = taken(1)
    between = [tuple(taken(2)) for _ in range(count)]
    size = streams * rows * case.kv_heads * case.gqa_ratio * HEAD_SIZE
    out = np.frombuffer(data[: 4 * size], "<f4").reshape(streams, rows, -1, HEAD_SIZE)
    return Result(blocks_of, own, between, out), data[4 * size :]  # type: ignore[arg-type]


@pytest.mark.parametrize("case", cases(), ids=lambda case: case.name)
def test_every_visible_block_is_computed_once_and_combined(case: Case, results: dict[str, Result]) -> None:
    result = results[case.name]
    assert result.lists == lists(case)
    assert result.parts == parts(case)
    assert sorted(result.seams) == seams(case)
    covered = [(head, tile, place) for _, head, tile, first, stop, _ in result.parts for place in range(first, stop)]
    assert len(set(covered)) == len(covered)
    np.testing.assert_allclose(result.out, attention(case), rtol=2e-4, atol=2e-5)


def test_cuda_blocks_share_the_work_evenly(results: dict[str, Result]) -> None:
    """However unlike the sequences are: no CUDA block computes two K blocks more than another."""
    for case in cases():
        work: dict[int, int] = defaultdict(int)
        for run, _, _, first, stop, _ in results[case.name].parts:
            work[run] += stop - first
        assert max(work.values()) - min(work.values()) <= 1, case.name


# --- the changes ------------------------------------------------------------------------------------------


def small_tree(folder: Path, made: tuple[Change, ...]) -> Path:
    """The places that change, and nothing else."""
    texts: dict[str, str] = defaultdict(str)
    for change in made:
        texts[change.path] += f"before\n{change.old}behind\n" if change.old else ""
    for path, text in texts.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        if text:
            (folder / path).write_text(text)
    return folder


def test_the_changes_are_made_once_and_add_their_files(tmp_path: Path) -> None:
    tree = small_tree(tmp_path, ROW_BLOCKS)
    changes.apply(tree, ROW_BLOCKS)
    after = {path: path.read_text() for path in tree.rglob("*") if path.is_file()}
    changes.apply(tree, ROW_BLOCKS)
    assert after == {path: path.read_text() for path in tree.rglob("*") if path.is_file()}
    added = tree / "ggml/src/ggml-cuda/fattn-share.h"
    assert added.read_text() == (ROOT / "native/cuda/fattn-share.h").read_text()


def test_another_version_of_the_changes_gets_another_tree(tmp_path: Path) -> None:
    """Changes are not taken back: a tree that an earlier Hydra changed is fetched anew, not built upon."""
    assert set(ROW_BLOCKS) <= set(changes.CHANGES)
    name = f"source-1.2-{changes.digest()}"
    tree = tmp_path / "native" / name / "source" / "bindings" / "vendor" / "llama.cpp"
    small_tree(tree, changes.CHANGES)
    assert build_native._source(None, "llama-cpp-python==1.2", tmp_path) == tree
    assert (tree / "ggml/src/ggml-cuda/fattn-share.h").exists()
    earlier = tmp_path / "native" / "source-1.2-row-blocks"
    (tmp_path / "native" / name).rename(earlier)
    with pytest.raises(BuildFailed, match="could not fetch"):  # there is no such version
        build_native._source(None, "llama-cpp-python==1.2", tmp_path)
    assert not earlier.exists()
