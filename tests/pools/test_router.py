"""Where requests go: the cheapest engine that can, the same each time, and with reasons that add up."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st

from pools.router import MOVE_GAIN_S, route
from pools.router_cost import solo
from pools.router_plan import Reason, Terms, Why
from pools.router_views import (
    CombinedView,
    DecodeRates,
    EngineView,
    LinkView,
    PoolView,
    PrefillFit,
    RequestView,
    Sent,
    SnapshotView,
)

MODEL = "m"
TOKENS = st.integers(1, 60_000)


def engine(engine_id: int = 1, speed: float = 1.0, **fields: object) -> EngineView:
    """An engine of some card; `speed` 2 is twice as fast."""
    values = {
        "prefill": PrefillFit(1e-3 / speed, 1e-9 / speed),
        "decode": DecodeRates(((1, 0.02 / speed), (8, 0.04 / speed)), 1e-8),
        "slots": 4,
        "free_slots": 4,
        "context_tokens": 131_072,
        "cells": 400_000,
        "kv_group": "q4",
        "resumes": True,
        **fields,
    }
    return EngineView(engine_id, f"e{engine_id}", f"h{engine_id}", MODEL, **values)  # type: ignore[arg-type]


def request(prompt_tokens: int = 4_000, output_tokens: int = 200, **fields: object) -> RequestView:
    return RequestView(MODEL, prompt_tokens, output_tokens, **fields)  # type: ignore[arg-type]


engines = st.builds(
    engine,
    st.integers(1, 12),
    st.floats(0.05, 20),
    free_slots=st.integers(0, 4),
    decoding=st.integers(0, 4),
    resident_tokens=st.integers(0, 200_000),
    pending_tokens=st.lists(st.integers(1, 50_000), max_size=4).map(tuple),
    queue_length=st.integers(0, 80),
    request_s=st.floats(0, 60),
    chunk_s=st.sampled_from((0.0, 0.4)),
    idle_tokens=st.integers(0, 40_000),
    idle_s=st.floats(0, 4_000),
    context_tokens=st.sampled_from((4_096, 131_072)),
    cells=st.sampled_from((2_048, 400_000)),
    features=st.sampled_from((frozenset({"text"}), frozenset({"text", "vision"}))),
    streams_kv=st.booleans(),
    variant=st.integers(0, 2),
)
requests = st.builds(
    request,
    TOKENS,
    st.integers(1, 4_000),
    session=st.sampled_from(("", "s")),
    home=st.one_of(st.none(), st.integers(1, 12)),
    needs=st.sampled_from((frozenset(), frozenset({"vision"}))),
    background=st.booleans(),
    force_mode=st.sampled_from((None, None, None, "solo", "pd", "combined")),
)


@st.composite
def pools(draw: st.DrawFn) -> PoolView:
    found = {one.engine_id: one for one in draw(st.lists(engines, max_size=8))}
    hosts = sorted({one.host for one in found.values()})
    links = {(a, b): LinkView(1e9, 1e-4) for a in hosts for b in hosts if draw(st.booleans())}
    held = {"s": {one: draw(TOKENS) for one in found if draw(st.booleans())}}
    snapshots = {"s": tuple(SnapshotView(host, "q4", draw(TOKENS), draw(TOKENS) * 10_000, host) for host in hosts)}
    sent = {one: Sent(tuple(draw(st.lists(TOKENS, max_size=4)))) for one in found if draw(st.booleans())}
    return PoolView(tuple(found.values()), held=held, snapshots=snapshots, links=links, sent=sent)


def refused_everywhere(asked: RequestView, one: EngineView) -> bool:
    """The rules of feasibility, said a second time."""
    return (
        one.model != asked.model
        or not asked.needs <= one.features
        or asked.prompt_tokens >= one.context_tokens
        or min(asked.prompt_tokens + asked.output_tokens, one.context_tokens) > one.cells
        or one.queue_length >= one.queue_limit + one.free_slots
    )


@settings(max_examples=200, deadline=None)
@given(requests, pools())
def test_who_cannot_is_never_chosen_and_whoever_is_left_out_has_a_reason(asked: RequestView, pool: PoolView) -> None:
    routed = route(asked, pool)
    by_id = {one.engine_id: one for one in pool.engines}
    for candidate in routed.explanation.candidates:
        assert not refused_everywhere(asked, by_id[candidate.engine_id])
        assert not refused_everywhere(asked, by_id[candidate.prefill_engine_id])
    if asked.force_mode is None:
        named = {candidate.engine for candidate in routed.explanation.candidates if candidate.mode == "solo"}
        named |= {refusal.engine for refusal in routed.explanation.refusals if refusal.mode == "solo"}
        assert named == {one.name for one in pool.engines}
    assert (routed.plan is None) == (not routed.explanation.candidates)


@settings(max_examples=200, deadline=None)
@given(requests, pools())
def test_the_terms_add_up_to_the_cost_and_no_other_candidate_is_clearly_cheaper(
    asked: RequestView, pool: PoolView
) -> None:
    explanation = route(asked, pool).explanation
    for candidate in explanation.candidates:
        terms = [getattr(candidate.terms, name) for name in Terms.__slots__]
        assert candidate.cost_s == sum(terms)
        assert min(terms) >= 0
        assert 0 <= candidate.held_tokens <= candidate.cached_tokens < max(1, asked.prompt_tokens)
    if explanation.chosen is not None and explanation.why not in (Why.STAYS, Why.WHOLE):
        assert explanation.chosen.cost_s == min(candidate.cost_s for candidate in explanation.candidates)


@settings(max_examples=100, deadline=None)
@given(requests, pools(), st.randoms())
def test_the_same_question_has_the_same_answer_in_whatever_order_engines_are_listed(
    asked: RequestView, pool: PoolView, random: object
) -> None:
    shuffled = list(pool.engines)
    random.shuffle(shuffled)  # type: ignore[attr-defined]
    first, second = route(asked, pool), route(asked, replace(pool, engines=tuple(shuffled)))
    assert first.plan == second.plan
    assert first == route(asked, pool)


@settings(max_examples=100, deadline=None)
@given(requests, pools(), st.floats(1.2, 30))
def test_of_two_equal_engines_the_faster_is_cheaper(asked: RequestView, pool: PoolView, faster: float) -> None:
    asked = replace(asked, home=None, force_mode=None, needs=frozenset())
    slow, fast = engine(1), engine(2, speed=faster)
    routed = route(asked, PoolView((slow, fast)))
    assert routed.plan is not None
    assert routed.plan.engine_id == 2


def test_a_session_stays_where_it_is_warm_although_another_engine_is_faster() -> None:
    pool = PoolView((engine(1), engine(2, speed=1.1)), held={"s": {1: 3_900}})
    routed = route(request(session="s", home=1), pool)
    assert (routed.explanation.chosen.engine_id, routed.explanation.why) == (1, Why.WARM)  # type: ignore[union-attr]


def test_a_warm_session_moves_for_a_clear_gain_only() -> None:
    busy = engine(1, free_slots=0, queue_length=1, request_s=0.0)
    pool = PoolView((busy, engine(2)), held={"s": {1: 3_999, 2: 3_999}})
    slightly = replace(pool, engines=(replace(busy, request_s=MOVE_GAIN_S), pool.engines[1]))
    routed = route(request(session="s", home=1), slightly)
    assert (routed.plan.engine_id, routed.explanation.why) == (1, Why.STAYS)  # type: ignore[union-attr]
    clearly = replace(pool, engines=(replace(busy, request_s=60.0), pool.engines[1]))
    routed = route(request(session="s", home=1), clearly)
    assert (routed.plan.engine_id, routed.explanation.why) == (2, Why.CHEAPEST)  # type: ignore[union-attr]


def test_a_snapshot_is_read_where_that_is_faster_than_computing() -> None:
    snapshot = SnapshotView("h9", "q4", 3_900, 40_000_000, "10.0.0.9:9500")
    fast_link = PoolView((engine(1),), snapshots={"s": (snapshot,)}, links={("h9", "h1"): LinkView(1e9)})
    plan = route(request(session="s"), fast_link).plan
    assert plan is not None
    assert (plan.resume_from, plan.cached_tokens) == ("10.0.0.9:9500", 3_900)
    slow_link = replace(fast_link, links={("h9", "h1"): LinkView(1e6)})
    assert route(request(session="s"), slow_link).plan.resume_from == ""  # type: ignore[union-attr]
    other_weights = replace(fast_link, snapshots={"s": (replace(snapshot, kv_group="q3"),)})
    assert route(request(session="s"), other_weights).plan.cached_tokens == 0  # type: ignore[union-attr]


def test_a_shared_beginning_draws_a_new_session_to_the_engine_that_has_it() -> None:
    pool = PoolView((engine(1), engine(2, speed=1.05)), prefixes={"system": {1: 3_500}})
    assert route(request(prefix_keys=("whole", "system")), pool).plan.engine_id == 1  # type: ignore[union-attr]


def test_a_background_request_keeps_off_conversations() -> None:
    full = engine(1, speed=1.5, idle_tokens=2_000, idle_s=1.0)
    pool = PoolView((full, engine(2)))
    assert route(request(2_000, 20), PoolView((replace(full, idle_tokens=0), engine(2)))).plan.engine_id == 1  # type: ignore[union-attr]
    assert route(request(2_000, 20, background=True), pool).plan.engine_id == 2  # type: ignore[union-attr]


def test_prefill_and_decode_split_where_one_computes_and_the_other_talks_faster() -> None:
    first = engine(1, streams_kv=True, prefill=PrefillFit(1e-4), decode=DecodeRates(((1, 0.2),)))
    second = engine(2, streams_kv=True, prefill=PrefillFit(1e-2), decode=DecodeRates(((1, 0.01),)))
    pool = PoolView((first, second), links={("h1", "h2"): LinkView(1e9), ("h2", "h1"): LinkView(1e9)})
    plan = route(request(20_000, 500), pool).plan
    assert plan is not None
    assert (plan.mode, plan.prefill_engine_id, plan.engine_id) == ("pd", 1, 2)
    assert route(request(20_000, 500), replace(pool, links={})).plan.mode == "solo"  # type: ignore[union-attr]
    reasons = {refusal.reason for refusal in route(request(20_000, 500), replace(pool, links={})).explanation.refusals}
    assert reasons == {Reason.LINK}
    doubted = replace(pool, links={pair: replace(link, doubted=True) for pair, link in pool.links.items()})
    assert route(request(20_000, 500), doubted).plan.mode == "solo"  # type: ignore[union-attr]
    assert route(request(20_000, 500, force_mode="pd"), doubted).plan.mode == "pd"  # type: ignore[union-attr]
    other = replace(pool, engines=(replace(first, kv_group="q3"), second))
    assert {refusal.reason for refusal in route(request(20_000, 500), other).explanation.refusals} == {Reason.GROUP}
    full = replace(pool, engines=(first, replace(second, free_slots=0)))
    routed = route(request(20_000, 500), full)
    assert Reason.SLOT in {refusal.reason for refusal in routed.explanation.refusals}
    assert ("pd", 2) not in {(candidate.mode, candidate.engine_id) for candidate in routed.explanation.candidates}


def unlike_pair(**fields: object) -> PoolView:
    """One computes prompts, the other talks, ten times as fast as the other one."""
    first = engine(1, streams_kv=True, prefill=PrefillFit(1e-4), decode=DecodeRates(((1, 0.2),)), variant=1)
    second = engine(2, streams_kv=True, prefill=PrefillFit(1e-2), decode=DecodeRates(((1, 0.01),)), variant=1)
    links = {("h1", "h2"): LinkView(1e9), ("h2", "h1"): LinkView(1e9)}
    return PoolView((first, second), links=links, **fields)  # type: ignore[arg-type]


def test_the_state_travels_while_the_prompt_is_computed_and_only_what_is_left_then_costs() -> None:
    pool = unlike_pair()
    (first, second), asked = pool.engines, request(20_000, 500)
    chosen = route(asked, pool).explanation.chosen
    assert chosen is not None
    alone = solo(asked, first, pool)
    assert chosen.first_token_s == alone.first_token_s  # drawn before the move
    assert chosen.terms.prefill_s == alone.terms.prefill_s
    assert chosen.terms.decode_s == 500 * second.decode.step_s(1, 20_000)
    hidden = chosen.terms.restore_s
    slow = {key: LinkView(20_000 * 24_576 / (alone.terms.prefill_s + 3)) for key in pool.links}
    seen = route(asked, replace(pool, links=slow)).explanation.chosen
    assert seen is not None
    assert abs(seen.terms.restore_s - hidden - 3) < 0.01
    heavy = replace(first, kv_token_bytes=1.0, kv_part_bytes=2e9)
    behind = route(asked, replace(pool, engines=(heavy, second))).explanation.chosen
    assert behind is not None
    assert abs(behind.terms.restore_s - hidden - 2) < 0.01


def test_quants_of_a_family_share_a_request_once_their_loss_was_measured_and_is_small() -> None:
    pool = unlike_pair(most_kv_loss=0.1)
    mixed = replace(pool, engines=(pool.engines[0], replace(pool.engines[1], variant=2)))

    def outcome(**losses: object) -> tuple[str, set[Reason], float | None]:
        routed = route(request(20_000, 500), replace(mixed, **losses))  # type: ignore[arg-type]
        assert routed.plan is not None
        assert routed.explanation.chosen is not None
        reasons = {refusal.reason for refusal in routed.explanation.refusals}
        return routed.plan.mode, reasons, routed.explanation.chosen.to_dict().get("kv_loss")

    assert outcome() == ("solo", {Reason.UNMEASURED}, None)
    assert outcome(kv_losses={(1, 2): 0.2}) == ("solo", {Reason.LOSSY, Reason.UNMEASURED}, None)
    # The other direction is another pair, and says nothing of this one.
    assert outcome(kv_losses={(2, 1): 0.0})[0] == "solo"
    assert outcome(kv_losses={(1, 2): 0.02}) == ("pd", {Reason.UNMEASURED}, 0.02)
    assert route(request(20_000, 500), replace(mixed, kv_losses={(1, 2): 0.02})).plan.kv_loss == 0.02  # type: ignore[union-attr]


def test_the_run_mode_says_whether_engines_are_shared() -> None:
    pool = unlike_pair()

    def mode(prompt_tokens: int, **fields: object) -> str:
        plan = route(request(prompt_tokens, 500, **fields), pool).plan
        return plan.mode if plan is not None else ""

    assert mode(20_000) == "pd"
    assert mode(20_000, run_mode="concurrency") == "solo"
    assert mode(20_000, run_mode="concurrency", force_mode="pd") == "pd"
    assert (mode(1_000), mode(1_000, run_mode="fast")) == ("solo", "pd")
    (short,) = route(request(1_000, 500), pool).explanation.refusals
    assert (short.mode, short.engine, short.reason) == ("pd", "e1 and another", Reason.SHORT)
    assert mode(20_000, movable=False) == "solo"
    refusals = route(request(20_000, movable=False, force_mode="pd"), pool).explanation.refusals
    assert Reason.FIXED in {refusal.reason for refusal in refusals}


def test_a_hurry_leaves_out_what_others_lose() -> None:
    crowded = engine(1, speed=1.6, free_slots=1, decoding=3, resident_tokens=9_000)
    pool = PoolView((crowded, engine(2)))
    calm = route(request(8_000, 200), pool)
    assert (calm.plan.engine_id, calm.explanation.why) == (2, Why.CHEAPEST)  # type: ignore[union-attr]
    hurried = route(request(8_000, 200, run_mode="fast"), pool)
    assert hurried.plan.engine_id == 1  # type: ignore[union-attr]
    assert hurried.explanation.to_dict()["run_mode"] == "fast"


def test_two_engines_that_gain_little_together_are_not_bothered() -> None:
    pool = unlike_pair()
    first = pool.engines[0]
    near = replace(pool, engines=(first, replace(first, engine_id=2, name="e2", host="h2", prefill=PrefillFit(1.1e-4),
                                                 decode=DecodeRates(((1, 0.19),)))))  # fmt: skip
    routed = route(request(20_000, 50), near)
    assert (routed.plan.mode, routed.explanation.why) == ("solo", Why.WHOLE)  # type: ignore[union-attr]
    assert routed.explanation.candidates[0].mode == "pd"


def test_a_combined_pair_is_weighed_like_an_engine_and_left_out_when_its_peer_is_gone() -> None:
    pair = CombinedView(engine(3, speed=1.8), peer_engine_id=2)
    pool = PoolView((engine(1),), combined=(pair,))
    assert route(request(), pool).plan.mode == "combined"  # type: ignore[union-attr]
    lost = replace(pool, combined=(replace(pair, peer_reachable=False),))
    routed = route(request(), lost)
    assert routed.plan.mode == "solo"  # type: ignore[union-attr]
    assert [refusal.reason for refusal in routed.explanation.refusals] == [Reason.PEER]


def test_an_operator_may_force_an_engine_or_a_form() -> None:
    pool = PoolView((engine(1), engine(2, speed=9)))
    assert route(request(force_engine=1), pool).plan.engine_id == 1  # type: ignore[union-attr]
    assert route(request(force_engine=7), pool).plan is None
    assert {r.reason for r in route(request(force_mode="combined"), pool).explanation.refusals} == {Reason.MODE}


def test_an_answer_goes_where_it_is_not_cut_as_long_as_there_is_such_an_engine() -> None:
    short, long = engine(1, 4.0, context_tokens=1024, cells=4096), engine(2, 1.0, context_tokens=8192, cells=32_768)
    asked = request(200, 200, most_output_tokens=3_000)
    routed = route(asked, PoolView((short, long)))
    assert routed.plan is not None
    assert routed.plan.engine_id == 2
    assert [refusal.reason for refusal in routed.explanation.refusals if refusal.mode == "solo"] == [Reason.CONTEXT]
    # Cut is better than not at all, and what fits everywhere goes where it costs least.
    for question, engines in (
        (asked, (short,)),
        (request(200, 200, most_output_tokens=824), (short, long)),
        (request(200, 200), (short, long)),
        (request(200, 200, most_output_tokens=3_000, force_engine=1), (short, long)),
    ):
        plan = route(question, PoolView(engines)).plan
        assert plan is not None
        assert plan.engine_id == 1


def test_what_was_sent_since_the_last_measurement_counts_as_work() -> None:
    pool = PoolView((engine(1), engine(2)), sent={1: Sent((4_000,) * 3)})
    assert route(request(), pool).plan.engine_id == 2  # type: ignore[union-attr]


def test_rates_are_read_between_their_measurements() -> None:
    rates = DecodeRates(((1, 0.01), (8, 0.024)), 1e-6)
    assert rates.step_s(1, 0) == 0.01
    assert abs(rates.step_s(4, 1_000) - (0.01 + 3 * 0.002 + 0.001)) < 1e-12
    assert abs(rates.step_s(16, 0) - 0.04) < 1e-12
    assert DecodeRates(((1, 0.01),)).step_s(9, 0) == 0.01
    fit = PrefillFit(1e-3, 1e-7)
    assert abs(fit.seconds(0, 1_000) - (1.0 + 0.1)) < 1e-12
    assert abs(fit.seconds(400, 1_000) - (fit.seconds(0, 1_000) - fit.seconds(0, 400))) < 1e-12
    assert fit.seconds(1_000, 1_000) == 0.0


def test_an_explanation_is_json_with_every_term() -> None:
    pool = PoolView((engine(1), engine(2, features=frozenset())))
    values = route(request(needs=frozenset({"text"})), pool).explanation.to_dict()
    assert set(values["chosen"]["terms"]) == set(Terms.__slots__)
    lacking = {"mode": "solo", "engine": "e2", "reason": "it lacks what the request needs", "detail": "text"}
    assert values["refusals"] == [lacking]
    assert solo(request(), pool.engines[0], pool).cost_s > 0


def test_who_needs_whole_rows_goes_where_slots_for_them_are_free() -> None:
    busy = engine(1, free_slots=3, request_s=20.0, whole_row_slots=1, free_whole_row_slots=0)
    free = engine(2, speed=0.8, free_slots=3, request_s=20.0, whole_row_slots=1, free_whole_row_slots=1)
    pool = PoolView((busy, free))
    assert route(request(), pool).plan.engine_id == 1  # type: ignore[union-attr]
    assert route(request(whole_rows=True), pool).plan.engine_id == 2  # type: ignore[union-attr]
    # One that tells nothing of them has them everywhere.
    untold = PoolView((replace(busy, whole_row_slots=0), free))
    assert route(request(whole_rows=True), untold).plan.engine_id == 1  # type: ignore[union-attr]
