"""The router's bench: a simulated pool, traces made up or read, and a last line that says how we compare."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bench.__main__ import main
from bench.router_policies import Router, fixed, least_loaded, total_s
from bench.router_simulation import Job, SimulatedEngine, cards, run
from bench.router_traces import BLOCK_TOKENS, TraceRequest, at_rate, conversations, long_and_short, read_trace

SMALL = ["--oracle-requests", "20", "--oracle-tries", "5"]


def trace_file(folder: Path) -> Path:
    path = folder / "trace.jsonl"
    rows = [
        {
            "timestamp": 400 * n,
            "input_length": 512 * (n % 5 + 1),
            "output_length": 20,
            "hash_ids": list(range(n % 5 + 1)),
        }
        for n in range(60)
    ]
    path.write_text("\n".join(json.dumps(row) for row in rows))
    return path


def test_a_trace_is_replayed_and_the_last_line_compares(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["router", "--trace", str(trace_file(tmp_path)), *SMALL]) == 0
    answer = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert {"decision_us_p50", "vs_round_robin", "vs_oracle"} <= set(answer)
    assert answer["vs_oracle"] <= 1
    assert answer["vs_round_robin"] > 0


def test_what_is_no_trace_is_refused_in_a_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "bad").write_text("{}\n")
    assert main(["router", "--trace", str(tmp_path / "bad")]) == 1
    assert main(["router", "--trace", str(tmp_path / "none")]) == 1
    assert main(["router", "--trace", str(trace_file(tmp_path)), "--load", "2"]) == 1
    assert capsys.readouterr().err.count("bench:") == 3


def test_conversations_are_found_in_a_trace_by_what_they_begin_with(tmp_path: Path) -> None:
    path = tmp_path / "talks"
    rows = [(0, [0, 1]), (1, [0, 2]), (2, [0, 1, 3]), (3, [0, 2, 4])]
    shared = [(10 + n, [0, 100 + n]) for n in range(30)]
    text = [
        json.dumps({"timestamp": at, "input_length": 9, "output_length": 1, "hash_ids": ids})
        for at, ids in rows + shared
    ]
    path.write_text("\n".join(text))
    sessions = [request.session for request in read_trace(path)]
    assert sessions[2] == sessions[0] != sessions[1] == sessions[3]
    assert len(set(sessions)) == 32


def test_a_simulated_engine_takes_as_long_as_its_card_does() -> None:
    card = cards()[0]
    engine = SimulatedEngine(0, card)
    job = Job(TraceRequest(0.0, 0, 1000, 50, (1, 2)))
    engine.submit(job)
    engine.advance(float("inf"))
    assert job.first_at_s == pytest.approx(card.prefill.seconds(0, 1000))
    assert job.ended_at_s - job.first_at_s == pytest.approx(50 * card.decode.step_s(1, 1000), rel=0.01)
    again = Job(TraceRequest(job.ended_at_s, 0, 1000, 1, (1, 2)))
    engine.submit(again)
    engine.advance(float("inf"))
    assert again.cached_tokens == 999


def test_every_request_ends_and_our_router_beats_the_fewest_requests_on_unlike_cards() -> None:
    requests = at_rate(conversations(40, 3, system_blocks=2, systems=2, turns=3, think_s=5, turn_blocks=1,
                                     output_tokens=50), 4.0)  # fmt: skip
    router = Router()
    ours, theirs = run(requests, cards(), router), run(requests, cards(), least_loaded)
    assert all(job.ended_at_s >= job.first_at_s >= job.request.at_s for job in ours + theirs)
    assert len(ours) == len(requests)
    assert total_s(ours) < total_s(theirs)
    assert total_s(run(requests, cards(), fixed(router.choices))) == pytest.approx(total_s(ours))


def test_made_up_traces_are_the_same_for_the_same_seed() -> None:
    assert long_and_short(50, 1) == long_and_short(50, 1) != long_and_short(50, 2)
    for request in long_and_short(50, 1):
        assert len(request.blocks) == -(-request.prompt_tokens // BLOCK_TOKENS)
