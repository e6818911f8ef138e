"""Ten requests of all kinds over real engines of unlike speed: why each went where it went, and how true that then was."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from io import StringIO
from typing import Any

import pytest
from django.core.management import call_command

from pools.db import in_db
from pools.router_plan import TERMS
from sessions import services
from sessions.first_tokens import Calibration
from sessions.relayed_request import dispatcher
from sessions.services import TurnView
from sessions.turn import wait_for_writes
from tests.sessions.local_client import LocalClient
from tests.sessions.routed_pool import Conversation, RoutedPool
from tests.sessions.test_routing import PATIENCE_S, start  # noqa: F401 -- a fixture

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.soak]
# Of ten predictions so many are this near to what came, and no fewer of those terms that matter: more than this part of the
# first token's time was spent there, or was expected to be. The machine may be busy with other things, but not the first token
# of all requests be a surprise.
NEAR_OF_TEN, NEAR, NEAR_TERM, MATTERS = 7, 2.5, 3.0, 0.25
# Tokens take no time from busy machines.
NEAR_REUSE = 1.1
# What was expected of a time that came: an engine cannot tell what it is learned to be late with from what it is late with.
EXPECTED = {
    "queue_s": ("queue_s",),
    "restore_s": ("restore_s",),
    "prefill_s": ("prefill_s", "drift_s", "crowd_s"),
}
# A restore is over in milliseconds here, which a busy machine may lose anywhere.
RESTORE_SLACK_S = 0.1
WORDS = "The river carries stones past the mill, and nobody counts them. "


class Asker:
    """Clients of all kinds over one pool."""

    def __init__(self, pool: RoutedPool) -> None:
        self._pool = pool
        self._client = LocalClient()
        self._begun = 0

    def new(self, name: str = "") -> Conversation:
        self._begun += 1
        headers = {"X-Session-Id": name} if name else {}
        return Conversation(self._client, headers, [{"role": "system", "content": f"Story {self._begun}. {WORDS * 8}"}])

    async def on_each_engine(self) -> None:
        """Some work for all, so that what they are asked next is no guess."""
        for engine in self._pool.engines:
            for size in (1, 6, 16):
                talk = self.new()
                talk.headers["X-Hydra-Force-Engine"] = engine
                await talk.say(f"Tell me more. {WORDS * size}")

    async def parked_and_moved(self) -> None:
        """A conversation goes on at an engine that never saw it, from the store."""
        talk = self.new("moving")
        headers, _ = await talk.say(WORDS * 12)
        session, home = headers["X-Hydra-Session"], headers["X-Hydra-Engine"]
        other = next(name for name in self._pool.engines if name != home)
        for act, body in (("park", {}), ("migrate", {"engine": other})):
            answer = await self._client.post(
                f"/v1/sessions/{session}/{act}", json.dumps(body), content_type="application/json"
            )
            assert answer.status_code == 200, answer.content
        headers, usage = await talk.say("And then?")
        assert headers["X-Hydra-Engine"] == other
        assert usage["prompt_tokens_details"]["cached_tokens"] > 0

    async def ten(self) -> None:
        """New, warm and again warm, resumed, long; at last three at once on engines that have two slots each."""
        talk = self.new("warm")
        for number in range(3):
            await talk.say(f"Question {number} about the river. {WORDS * 2}")
        await self.parked_and_moved()
        await self.new().say(WORDS * 20)
        await self.new().say("Hello.", stream=False)
        await asyncio.gather(*(self.new().say(f"Hello {number}. {WORDS * 10}") for number in range(3)))


async def test_ten_requests_tell_why_they_went_where_they_went(start: Any) -> None:  # noqa: F811 -- the fixture
    pool = await start("llama", 3)
    asker = Asker(pool)
    await asker.on_each_engine()
    await asker.ten()
    await wait_for_writes(PATIENCE_S)
    told = StringIO()
    await in_db(call_command, "why", "--limit", "10", stdout=told)
    print(told.getvalue())
    turns = await in_db(services.turn_views, None, 10)
    assert len(turns) == 10
    for turn in turns:
        assert str(turn.request_id)[:8] in told.getvalue()
        check(turn, set(pool.engines))
    assert "10 first tokens: actual / predicted" in told.getvalue()
    assert told.getvalue().count("  came: ") == 10
    # What was expected of the prompts' reuse is what then was found.
    later = [turn for turn in turns if turn.explanation["chosen"]["cached_tokens"]]  # type: ignore[index]
    assert len(later) >= 3
    for turn in later:
        assert near(turn.cached_tokens, turn.explanation["chosen"]["cached_tokens"], NEAR_REUSE)  # type: ignore[index]
    assert any(turn.explanation["chosen"]["terms"]["restore_s"] for turn in turns)  # type: ignore[index]
    learned = [known.first_tokens for known in dispatcher().board._known.values()]
    assert len(learned) == 3
    assert all(one.answers and one.now != Calibration() for one in learned)
    assert sum(near(turn.first_token_s, turn.predicted_first_token_s, NEAR) for turn in turns) >= NEAR_OF_TEN
    check_terms(turns)
    # Three that came at once: the later ones were told of the earlier ones, or went elsewhere.
    at_once = turns[:3]
    assert len({turn.engine_name for turn in at_once}) > 1 or any(
        turn.explanation["chosen"]["terms"]["queue_s"]  # type: ignore[index]
        for turn in at_once
    )
    # Whoever was told of a line stood in it, and whoever came beside others on the same processor was told of them.
    for turn in at_once:
        terms = turn.explanation["chosen"]["terms"]  # type: ignore[index]
        assert not terms["queue_s"] or turn.explanation["came"]["queue_s"] > 0.25 * terms["queue_s"]  # type: ignore[index]
    assert any(turn.explanation["candidates"][-1]["terms"]["crowd_s"] for turn in at_once)  # type: ignore[index]


def check(turn: TurnView, engines: set[str]) -> None:
    """The explanation is whole, its terms add up, and what was predicted and what came stand beside each other."""
    explanation = turn.explanation
    assert explanation is not None
    names = {one["engine"] for one in explanation["candidates"]} | {one["engine"] for one in explanation["refusals"]}
    assert engines <= names
    for candidate in explanation["candidates"]:
        terms = candidate["terms"]
        assert candidate["cost_s"] == pytest.approx(sum(terms.values()), abs=2e-5)
        before = ("queue_s", "restore_s", "prefill_s", "fixed_s", "wake_s", "drift_s")
        assert candidate["first_token_s"] >= sum(terms[name] for name in before) - 2e-5
    assert explanation["chosen"]["engine"] == turn.engine_name
    assert explanation["chosen"]["first_token_s"] == pytest.approx(turn.predicted_first_token_s, abs=2e-6)
    assert turn.first_token_s
    # Where the time went, under the same names; the engine's times and the site's add up.
    came = explanation["came"]
    assert set(came) <= set(TERMS)
    assert sum(came.values()) - came["decode_s"] == pytest.approx(turn.first_token_s, abs=1e-4)
    assert explanation["chosen"]["terms"]["restore_s"] or not came["restore_s"]


def near(one_s: float | None, other_s: float | None, factor: float) -> bool:
    assert one_s is not None and other_s is not None
    return one_s < factor * other_s and other_s < factor * one_s


def check_terms(turns: Sequence[TurnView]) -> None:
    """Time went where it was expected to go, not only as much of it in all."""
    true: dict[str, list[bool]] = {name: [] for name in EXPECTED}
    for turn in turns:
        explanation = turn.explanation
        assert explanation is not None and turn.first_token_s and turn.predicted_first_token_s
        terms, came = explanation["chosen"]["terms"], explanation["came"]
        # What was to come from the store came from there, and in about that time.
        assert bool(terms["restore_s"]) == bool(came["restore_s"])
        if came["restore_s"]:
            assert near(came["restore_s"] + RESTORE_SLACK_S, terms["restore_s"] + RESTORE_SLACK_S, NEAR_TERM)
        for name, seen in true.items():
            expected_s = sum(terms[one] for one in EXPECTED[name])
            matters = came[name] > MATTERS * turn.first_token_s or expected_s > MATTERS * turn.predicted_first_token_s
            if matters:
                seen.append(near(came[name], expected_s, NEAR_TERM))
    # All but the shortest prompts are mostly computing.
    assert len(true["prefill_s"]) >= NEAR_OF_TEN
    assert sum(true["prefill_s"]) >= len(true["prefill_s"]) * NEAR_OF_TEN / 10, true
    # Few stand in a line at all: one may be mistaken about it.
    assert true["queue_s"].count(False) <= 1, true
