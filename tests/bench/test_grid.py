"""Which form of llama-server counts, and what the last line says."""

from __future__ import annotations

import json

from bench.grid import Cell, CellResults, last_line, make_cells, table_row
from bench.measures import Measures
from bench.servers import FORMS, HYDRA


def measures(whole: float, steady: float | None) -> Measures:
    return Measures(whole, steady, 0.1, 0.01, 0.02, 128.0, 0.0)


def results(streams: int = 1, context_tokens: int = 128, sampling: str = "greedy") -> CellResults:
    """Two rounds of ours; of two forms that were the best at one thing each; and one lucky round of a third."""
    filled = CellResults(Cell(streams, context_tokens, sampling, 64))
    for round_index, (ours, whole_best, steady_best) in enumerate([(90.0, 100.0, 80.0), (120.0, 100.0, 90.0)]):
        filled.add(HYDRA, round_index, measures(ours, 200.0))
        filled.add("unified", round_index, measures(whole_best, 100.0))
        filled.add("unified+bs", round_index, measures(steady_best, 160.0))
    filled.add("default", 0, measures(99.0, 120.0))
    return filled


def test_it_counts_the_best_form_for_each_measure() -> None:
    cell = results().as_dict()
    assert (cell["peer"], cell["ratio"]) == ("unified", 1.05)
    assert (cell["steady_peer"], cell["steady_ratio"]) == ("unified+bs", 1.25)


def test_it_tries_a_form_again_that_was_best_once_but_does_not_count_it_for_one_round() -> None:
    filled = results()
    filled.add("default+bare", 0, measures(500.0, None))
    assert filled.kept_forms() == {"default+bare", "unified+bs"}
    assert filled.as_dict()["peer"] == "unified"


def test_it_says_the_worse_sampling_at_the_first_context() -> None:
    other = results(sampling="topk")
    other.add(HYDRA, 0, measures(50.0, 80.0))
    other.add(HYDRA, 1, measures(50.0, 80.0))
    line = last_line([results(), other, results(streams=8), results(streams=8, context_tokens=8192)])
    assert line == {"ratio": {"1": 0.5, "8": 1.05}, "steady": {"1": 0.5, "8": 1.25}, "peer": "unified"}


def test_it_reads_back_what_it_wrote() -> None:
    filled = results()
    again = CellResults.from_dict(json.loads(json.dumps(filled.as_dict())))
    assert again == filled
    assert table_row(again)[:6] == ["128", "1", "greedy", "105.0", "100.0", "1.050"]


def test_it_runs_short_contexts_first_and_answers_longer_where_prompts_queue() -> None:
    cells = make_cells([1, 8], [128, 8192], ["greedy"], 64)
    assert [(c.streams, c.context_tokens) for c in cells] == [(1, 128), (8, 128), (1, 8192), (8, 8192)]
    assert [c.new_tokens for c in cells] == [64, 66, 64, 176]


def test_it_knows_every_form_of_llama_server() -> None:
    assert len(set(FORMS.values())) == 8
    assert FORMS["default"] == ()
    assert FORMS["unified+bare+bs"] == ("--kv-unified", "-ctxcp", "0", "-cram", "0", "-bs")
