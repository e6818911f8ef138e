"""Drafts beside the sizes of batches that an engine is started with."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.engines.runtime.test_core import run, running
from tests.synthetic_gguf import SyntheticModel


@pytest.mark.parametrize("context_tokens", [16, 64])
@pytest.mark.parametrize("draft_tokens", [14, 15, 16])
async def test_drafts_may_be_as_long_as_a_batch(
    tiny_model: Callable[..., SyntheticModel], draft_tokens: int, context_tokens: int
) -> None:
    """llama.cpp ends the process where a recurrent model's micro-batch is no longer than what may be taken back."""
    model = tiny_model("qwen35", tie_free=True, nextn=True)
    settings = {"batch_tokens": 16, "micro_batch_tokens": 16, "slots": 1, "context_tokens": context_tokens}
    async with running(model, speculation="mtp", draft_tokens=draft_tokens, **settings) as core:
        work = await run(core, [3, 10], 14, draft_min=draft_tokens)
        assert work.tokens[2:] == model.follow(10, 14)
