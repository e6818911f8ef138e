"""What recorded streams say, on streams written down by hand."""

from __future__ import annotations

import pytest

from bench.conversation import history, reusable_tokens
from bench.measures import Measures, StreamRecord, median, paired_ratio, percentile, steady_rate, whole_rate


def stream(sent_at: float, *arrivals: float, tokens: int | None = None) -> StreamRecord:
    return StreamRecord(sent_at, arrivals, 10, 0, len(arrivals) if tokens is None else tokens)


def test_it_takes_percentiles_between_neighbours() -> None:
    assert percentile([4.0, 1.0, 3.0, 2.0], 0.5) == 2.5
    assert percentile([1.0, 2.0], 0.99) == pytest.approx(1.99)
    assert percentile([7.0], 0.99) == 7.0
    assert percentile([], 0.5) == 0.0


def test_it_counts_a_whole_run_from_the_first_request_to_the_last_token() -> None:
    assert whole_rate([stream(1.0, 2.0, 3.0), stream(1.5, 4.0, 5.0)]) == 4 / 4.0


def test_it_counts_steady_tokens_only_where_all_streams_decode() -> None:
    early = stream(0.0, 1.0, 2.0, 3.0, 4.0, 5.0)
    late = stream(0.0, 3.0, 3.5, 4.0, 4.5, 5.0, 5.5, 6.0)
    # the window is (3, 5]: two tokens of the early stream, four of the late one
    assert steady_rate([early, late]) == 6 / 2.0
    assert steady_rate([late]) == 6 / 3.0


def test_it_knows_no_steady_rate_for_streams_that_never_decode_together() -> None:
    assert steady_rate([stream(0.0, 1.0, 2.0), stream(0.0, 2.5, 3.0)]) is None
    assert steady_rate([stream(0.0, 1.0, 2.0, 3.0), stream(0.0, 2.5, 3.0)]) is None


def test_it_lets_visible_tokens_stand_for_those_without_text() -> None:
    half_shown = stream(0.0, 1.0, 2.0, 3.0, tokens=6)
    assert steady_rate([half_shown]) == 2 * 2 / 2.0
    assert whole_rate([half_shown]) == 6 / 3.0


def test_it_pools_the_gaps_of_all_streams() -> None:
    measures = Measures.of([stream(0.0, 1.0, 1.5, 2.0), StreamRecord(0.0, (3.0, 4.0), 30, 10, 2)])
    assert (measures.first_token_p50_s, measures.gap_p50_s) == (2.0, 0.5)
    assert measures.gap_p99_s == pytest.approx(0.99)
    assert measures.cached_share == 10 / 40


def test_it_compares_round_by_round_and_skips_what_is_missing() -> None:
    assert paired_ratio([2.0, None, 9.0, 4.0], [1.0, 5.0, None, 1.0]) == 3.0
    assert paired_ratio([1.0], []) is None
    assert median([None, 3.0, 1.0]) == 2.0


def test_it_finds_the_longest_reusable_prefix_but_never_the_whole_prompt() -> None:
    assert reusable_tokens([1, 2, 3, 4], [[1, 2], [1, 2, 3, 9]]) == 3
    assert reusable_tokens([1, 2, 3], [[1, 2, 3, 4]]) == 2
    assert reusable_tokens([1, 2, 3], []) == 0


def test_it_continues_a_conversation_with_the_same_history() -> None:
    second, third = history(7, 1, 20), history(7, 2, 20)
    assert third[: len(second)] == second
    assert [message["role"] for message in third] == ["system", "user", "assistant", "user", "assistant", "user"]
    assert "reasoning_content" in third[2]
    assert history(8, 0, 20) != history(7, 0, 20)
