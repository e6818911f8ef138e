"""How large the blocks of a state are, and that states in blocks of unlike sizes are states all the same."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise

import pytest

from engines.runtime import state_sizes
from engines.runtime.state_sizes import block_ends
from tests.engines.runtime.test_core import prompt_of, run
from tests.engines.runtime.test_state_desk import desk_of
from tests.engines.runtime.test_state_dock import Laid, laid_out
from tests.synthetic_gguf import SyntheticModel


def test_blocks_are_alike_but_for_the_rest() -> None:
    assert list(block_ends(0, 1000, 256)) == [256, 512, 768, 1000]
    assert list(block_ends(512, 1024, 256)) == [768, 1024]
    assert list(block_ends(7, 7, 256)) == []


@pytest.mark.parametrize(("begin", "count"), [(0, 65536), (0, 65535), (0, 65537), (4096, 9000), (100, 611), (0, 1)])
def test_the_last_blocks_get_ever_smaller(begin: int, count: int) -> None:
    ends = list(block_ends(begin, count, 4096, 512))
    sizes = [end - start for start, end in pairwise([begin, *ends])]
    assert ends[-1] == count
    assert all(0 < size <= 4096 for size in sizes)
    assert sizes[-1] <= 512
    behind = [count - end for end in ends]
    for size, left in zip(sizes, behind, strict=True):
        # What is still to come when a block leaves is hardly less than it, down to the smallest.
        assert left > 0 or size <= 512
        assert size in (4096, 2048, 1024, 512) or left == 0
    assert sizes == sorted(sizes, reverse=True)
    assert len(sizes) <= (count - begin) / 4096 + 4


@pytest.mark.parametrize("architecture", ["llama", "qwen35"])
async def test_a_card_s_state_in_unlike_blocks_comes_in_as_it_left(
    tiny_model: Callable[..., SyntheticModel], architecture: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(state_sizes, "LEAST_MOVED_BYTES", 0)
    monkeypatch.setattr(state_sizes, "LAST_MOVED_BYTES", 0)
    model = tiny_model(architecture)
    async with desk_of(model) as (core, desk):
        desk._config = replace(core.config, gpu_layers=1, kv_block_tokens=0)
        token_bytes = desk._codec().layout.attention.token_bytes
        monkeypatch.setattr(state_sizes, "GPU_MOVED_BYTES", 256 * token_bytes)
        monkeypatch.setattr(state_sizes, "LEAST_BLOCKS", 1)
        await run(core, prompt_of(model, 430), 5)
        manifest, found = await laid_out(desk)
        sizes = [piece.tokens for piece in manifest.pieces if piece.kind == "block"]
        assert sizes[:2] == [256, 128]
        assert len(sizes) == 3
        await desk.enter(1, manifest, Laid(found))
        async with await desk.export(1) as state:
            assert [piece.tokens for piece in state.manifest.pieces if piece.kind == "block"] == sizes
            whole = [b"", b""]
        for slot in (0, 1):
            async with await desk.export(slot, "raw") as state:
                async for buffer in state:
                    whole[slot] += bytes(buffer)
        assert whole[0] == whole[1]
