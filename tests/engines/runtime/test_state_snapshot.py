"""A generation that goes on elsewhere: the same tokens, the same text, nothing sent twice."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from engines.api_constraint import ConstraintSpec, constraint_spec
from engines.api_schema import ChatRequest
from engines.config import EngineConfig
from engines.errors import GenerationStays, StateInvalid
from engines.runtime import state_snapshot
from engines.runtime.constraint import Constraint, ConstraintCompiler
from engines.runtime.generation import Generation, Mailbox
from engines.runtime.llama import Llama
from engines.runtime.prefix import PrefixCache
from engines.runtime.sampler import Sampler, SamplingParams
from engines.runtime.state_codec import StateCodec
from engines.runtime.state_snapshot import (
    GenerationState,
    Manifest,
    StatePiece,
    captured,
    require_tellable,
    resumed,
)
from tests.engines.runtime.test_core import finished, generation, prompt_of
from tests.engines.runtime.test_state_codec import Pieces, done, exported, import_all, two
from tests.paced_engine import slow_steps
from tests.synthetic_gguf import IM_END, SyntheticModel

SAMPLED = SamplingParams(temperature=1.2, top_k=30, seed=77, repeat_penalty=1.3, presence_penalty=0.4, repeat_last_n=32)
PENALTY_FREE = SamplingParams(
    temperature=1.0, top_k=0, top_p=1.0, min_p=0.0, seed=5, logit_bias=((7, float("-inf")), (IM_END, float("-inf")))
)


def form_of(pattern: str) -> ConstraintSpec:
    body = {"messages": [{"role": "user", "content": "x"}], "regex": pattern}
    spec = constraint_spec(ChatRequest.model_validate(body), None)
    assert spec is not None
    return spec


@pytest.mark.parametrize(
    ("params", "pattern"),
    [(SAMPLED, ""), (PENALTY_FREE, ""), (SamplingParams(temperature=0), ""), (SAMPLED, "([a-z]{3}[0-9]{2}){40}")],
)
@pytest.mark.parametrize("architecture", ["llama", "qwen35"])
async def test_a_running_generation_goes_on_elsewhere(
    tiny_model: Callable[..., SyntheticModel], slow: ExitStack, architecture: str, params: SamplingParams, pattern: str
) -> None:
    """The undisturbed run is the answer; stop strings hold text back on the way, and the model writes what is no text too."""
    model = tiny_model(architecture)
    fields: dict[str, Any] = {"params": params, "stops": ("\x00\x00\x00 never", "zzzzzzzz")}
    async with two(model, slots=2) as (a, b):
        compilers = {core: ConstraintCompiler(core.loaded.vocabulary) for core in (a, b)}

        def form() -> Constraint | None:
            return compilers[a].compile(form_of(pattern)) if pattern else None

        alone = generation(prompt_of(model, 60), 80, constraint=form(), **fields)
        a.submit(alone)
        whole = await finished(alone)
        work = generation(prompt_of(model, 60), 80, reuse_prefix=False, constraint=form(), **fields)
        sent = ""
        slow.enter_context(slow_steps(0.01))
        a.submit(work)
        while len(work.tokens) < 85:
            sent += "".join(piece.text for piece in await work.mailbox.take(10))

        def take(cache: PrefixCache, codec: StateCodec) -> tuple[Pieces, Manifest]:
            slot = next(slot for slot in cache.slots if slot.generation is work)
            pieces = exported(codec, slot.sequence)
            manifest = Manifest("f", "m", "", tuple(pieces.tokens), (), work.tokens[-1], captured(work))
            work.cancelled = True
            return pieces, Manifest.from_json(manifest.to_json())

        pieces, manifest = await done(a, take)
        slow.close()
        sent += "".join(piece.text for piece in work.mailbox._pieces)
        assert len(manifest.all_tokens) == len(pieces.tokens) + 1

        def go_on(cache: PrefixCache, codec: StateCodec) -> Generation:
            import_all(codec, cache.slots[0].sequence, pieces)
            llama = cache.slots[0].sequence.llama
            return resumed(manifest, llama, lambda: compilers[b], Mailbox(), time.monotonic() + 60)

        moved = await done(b, go_on)
        assert moved.tokens == manifest.all_tokens
        b.submit(moved)
        rest = await finished(moved)
        assert moved.tokens == alone.tokens
        assert sent + rest.text == whole.text
        assert rest.stats is not None
        assert rest.stats.completion_tokens == 80
        assert rest.stats.prompt_tokens == 60


def manifest(**fields: Any) -> Manifest:
    running = GenerationState("r", 2, 10, SAMPLED, draws=3, held_text=b"\xe2\x82", stops=("x",))
    values: dict[str, Any] = {"next_token": 4, "generation": running}
    return Manifest("f", "name", "ab", (1, 2, 3), (StatePiece("block", 0, 3, 99),), **{**values, **fields})


def test_a_manifest_comes_back_from_json_as_it_was() -> None:
    assert Manifest.from_json(manifest().to_json()) == manifest()
    # One that engines of the version before read, too.
    assert manifest(next_token=None, generation=None).version == 1
    biased = replace(manifest().generation or GenerationState("", 1, 1, SAMPLED, 0), params=PENALTY_FREE)
    assert Manifest.from_json(manifest(generation=biased).to_json()).generation == biased


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"version": 9}, "version 9"),
        ({"tokens": ["1"]}, r"tokens\.0"),
        ({"tokens": 3}, "tokens"),
        ({"surprise": 1}, "surprise"),
        ({"pieces": [{"kind": "spell", "start": 0, "end": 3, "size_bytes": 1}]}, "no known kind"),
        ({"pieces": [{"kind": "block", "start": 0, "end": 3, "size_bytes": -1}]}, "no known kind or size"),
        ({"generation": {"request_id": "r"}}, "generation"),
    ],
)
def test_a_manifest_with_a_wrong_value_is_refused(change: dict[str, Any], words: str) -> None:
    raw = json.dumps({**json.loads(manifest().to_json()), **change}).encode()
    with pytest.raises(StateInvalid, match=words):
        Manifest.from_json(raw)


def test_a_manifest_that_is_no_json_or_claims_too_much_is_refused() -> None:
    for raw in (b"", b"{", b"[]", b"\xff", b"[" * 100_000):
        with pytest.raises(StateInvalid):
            Manifest.from_json(raw)
    running = manifest().generation
    assert running is not None
    for wrong in ({"prompt_tokens": 9}, {"prompt_tokens": 0}, {"draws": -1}, {"held_text": bytes(1 << 17)}):
        with pytest.raises(StateInvalid):
            Manifest.from_json(manifest(generation=replace(running, **wrong)).to_json())


def test_a_manifest_of_the_version_before_is_read_and_a_later_one_is_refused_as_that() -> None:
    values = json.loads(manifest().to_json())
    new = ("thinking", "drafts", "drafted_tokens", "accepted_tokens", "restore_s", "prompt_wait_s")
    running = {key: value for key, value in values["generation"].items() if key not in new}
    before = Manifest.from_json(json.dumps({**values, "version": 1, "generation": running}).encode())
    assert before.generation == manifest().generation
    later = {**values, "version": 3, "generation": {**running, "mood": 1}}
    with pytest.raises(StateInvalid, match="version 3"):
        Manifest.from_json(json.dumps(later).encode())


def test_what_more_is_to_be_told_of_a_request_than_is_read_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    params = replace(SAMPLED, top_logprobs=20)
    choices = [generation([1, 2], 9000, params=params, choice=number) for number in range(2)]
    for one in choices:
        one.tokens, one.text.said = [1, 2, *[3] * 8000], [(1, ())]
        require_tellable([one])
    with pytest.raises(GenerationStays):
        require_tellable(choices)
    monkeypatch.setattr(state_snapshot, "MAX_MANIFEST_BYTES", 100)
    with pytest.raises(GenerationStays):
        manifest().to_json()


def test_skipping_draws_is_drawing(tiny_model: Callable[..., SyntheticModel]) -> None:
    llama = Llama(EngineConfig(str(tiny_model("llama").path), "tiny", context_tokens=64), 1, lambda share: None)
    try:
        row = np.random.default_rng(0).standard_normal(512, dtype=np.float32)
        drawn, skipped = Sampler(PENALTY_FREE, llama), Sampler(PENALTY_FREE, llama)
        tokens = [drawn.draw_from_logits(row.copy())[0] for _ in range(40)]
        skipped.skip(25)
        assert [skipped.draw_from_logits(row.copy())[0] for _ in range(15)] == tokens[25:]
        assert drawn.draws == skipped.draws == 40
        drawn.close()
        skipped.close()
    finally:
        llama.close()
