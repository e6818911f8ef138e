"""Sequences that are sampled on the device draw from their own candidates, whoever else is in the step."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable

import pytest

from engines.config import EngineConfig
from engines.errors import LibraryUnfit
from engines.runtime.device_chains import with_sound_sampling
from engines.runtime.llama import Batch, Llama, keeps_candidates
from tests.synthetic_gguf import SyntheticModel

SLOTS, STEPS, MOST_POSITIONS = 4, 250, 500


def config_of(model: SyntheticModel, **settings: object) -> EngineConfig:
    config = EngineConfig(model_path=str(model.path), model_name="m", slots=SLOTS, context_tokens=1024, threads=1)
    return dataclasses.replace(config, gpu_layers=-1, **settings)  # type: ignore[arg-type]


def strange_tokens(llama: Llama, model: SyntheticModel, most_rows: int) -> int:
    """How many rows' likeliest candidate is not the token that follows, in steps of changing sequences."""
    draw, batch, positions, strange = random.Random(1), Batch(64), [0] * SLOTS, 0
    for _ in range(STEPS):
        batch.clear()
        expected = []
        for seq in draw.sample(range(SLOTS), draw.randrange(1, SLOTS + 1)):
            tokens = [draw.randrange(20, 150) for _ in range(draw.randrange(1, most_rows + 1))]
            last = batch.add(seq, positions[seq], tokens, outputs=len(tokens))
            positions[seq] += len(tokens)
            rows = range(last + 1 - len(tokens), last + 1)
            expected += [(row, model.follow(token, 1)[0]) for row, token in zip(rows, tokens, strict=True)]
        assert llama.decode(batch) == 0
        for row, token in expected:
            ids, logits = llama.candidates(row)
            strange += int(ids[logits.argmax()]) != token
        for seq in range(SLOTS):
            if positions[seq] > MOST_POSITIONS:
                llama.clear(seq)
                positions[seq] = 0
    return strange


@pytest.mark.parametrize("architecture", ["llama", "qwen35"])
@pytest.mark.parametrize("most_rows", [1, 2])
def test_an_engine_draws_on_the_device_only_where_sequences_are_kept_apart(
    tiny_model: Callable[..., SyntheticModel], architecture: str, most_rows: int
) -> None:
    model = tiny_model(architecture, tie_free=True)
    speculation = "lookup" if most_rows > 1 else "none"
    config = config_of(model, speculation=speculation)
    assert config.samples_on_device
    sound = with_sound_sampling(config)
    assert sound.samples_on_device == keeps_candidates()
    llama = Llama(dataclasses.replace(config, sampling="backend"), 1, lambda share: None)
    try:
        strange = strange_tokens(llama, model, most_rows)
    finally:
        llama.close()
    # Of a dense model's rows without drafts none is known to be mixed up, with either library.
    assert (strange == 0) == (keeps_candidates() or (architecture, most_rows) == ("llama", 1))


def test_the_device_is_refused_to_who_asks_for_it_and_host_stays_host(
    tiny_model: Callable[..., SyntheticModel],
) -> None:
    model = tiny_model("llama")
    host, asked = config_of(model, sampling="host"), config_of(model, sampling="backend")
    assert with_sound_sampling(host) is host
    if keeps_candidates():
        assert with_sound_sampling(asked) is asked
    else:
        with pytest.raises(LibraryUnfit, match=r"mixes up.*build-native"):
            with_sound_sampling(asked)
