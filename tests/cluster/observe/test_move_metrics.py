"""Figures and records of moves, on hand-made numbers."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from made_moves import move, three_moves, two_instances

from rlhfspec.cluster.folder.iteration_logs import append_moves, odd_moves
from rlhfspec.cluster.observe.iteration_metrics import move_metrics, overhead_share
from rlhfspec.cluster.observe.timeline import make_trace
from rlhfspec.core.decode_records import GenerationStats

STATS = GenerationStats(prefill_s=1.0, draft_s=2.0, verify_s=9.0, accept_s=1.0, other_s=1.0, move_s=2.0)


def test_move_metrics_of_three_hand_made_moves() -> None:
    moves = three_moves()
    trace = make_trace(two_instances(), moves)
    assert move_metrics(moves, stats=STATS, planning_s=0.4, trace=trace) == pytest.approx(
        {
            "moves/num_moved": 2,
            "moves/num_kept": 1,
            "moves/num_taken_back": 0,
            "moves/num_lost": 0,
            "moves/num_migrate": 1,
            "moves/num_recompute": 1,
            "moves/stage1_bytes": 900,
            "moves/stage2_bytes": 100,
            "moves/stage1_bytes_share": 0.9,
            "moves/stage1_s_median": 0.5,
            "moves/attach_s_median": 0.5,
            "moves/downtime_s_median": 0.75,
            "moves/downtime_s_max": 1.0,
            # out from 2.5 to 5 s, in from 3 to 5 s; gen-0 decodes all the while, gen-1 not before 5 s
            "moves/transfer_s": 4.5,
            "moves/transfer_hidden_share": 1.0,
            "moves/transfer_hidden_own_share": 2.5 / 4.5,
            "moves/decode_thread_s": 2.0,
            "moves/planning_s": 0.4,
            "moves/expected_gain_s": 4.0,
            "moves/overhead_share": 2.4 / 16.0,
        }
    )


def test_without_moves_there_are_counts_and_costs_and_nothing_made_up() -> None:
    trace = make_trace({"gen-0": []})
    metrics = move_metrics((), stats=GenerationStats(verify_s=4.0), planning_s=0.1, trace=trace)
    counts = {"num_moved", "num_kept", "num_taken_back", "num_lost", "num_migrate", "num_recompute"}
    assert {name for name, value in metrics.items() if value == 0.0} == {
        f"moves/{name}"
        for name in counts | {"stage1_bytes", "stage2_bytes", "decode_thread_s", "expected_gain_s"}
    }
    assert {name: value for name, value in metrics.items() if value} == {
        "moves/planning_s": 0.1,
        "moves/overhead_share": 0.025,
    }


def test_bytes_shipped_for_failed_moves_are_not_counted_as_moved() -> None:
    moves = [move("0-1", "taken back"), move("0-2", "lost"), move("0-3", "kept"), move("0-4", "kept")]
    metrics = move_metrics(moves, stats=STATS, planning_s=0.0, trace=make_trace({}))
    found = {
        name: metrics[f"moves/num_{name}"] for name in ("moved", "kept", "taken_back", "lost", "migrate")
    }
    assert found == {"moved": 0, "kept": 2, "taken_back": 1, "lost": 1, "migrate": 0}


def test_the_overhead_share_is_zero_without_generation() -> None:
    assert overhead_share(GenerationStats(), planning_s=0.0) == 0.0


def test_every_move_is_a_line_that_says_why(tmp_path: Path) -> None:
    path = tmp_path / "moves.jsonl"
    append_moves(path, 0, ())
    assert not path.exists()
    append_moves(path, 0, three_moves()[:1])
    append_moves(path, 1, three_moves()[1:])
    first, second, third = map(json.loads, path.read_text().splitlines())
    assert first == {
        "iteration": 0,
        "move": "0-3",
        "stream": "train",
        "sample_index": 3,
        "epoch": 0,
        "source": "gen-0",
        "destination": "gen-1",
        "mode": "migrate",
        "why_ordered": "gen-0 would finish last",
        "predicted_gain_s": 2.0,
        "outcome": "moved",
        "why_ended": "it runs here",
        "ordered_s": 50.0,
        "ended_s": 51.5,
        "figures": three_moves()[0].metrics,
    }
    assert (second["iteration"], second["mode"]) == (1, "recompute")
    assert (third["outcome"], third["why_ended"]) == ("kept", "finished before it left")


def test_only_moves_taken_back_or_lost_are_reported() -> None:
    odd = [
        move("0-1", "taken back", why_ended="gen-0 waited 5.1 s for the scheduler's verdict"),
        move("0-2", "lost", why_ended=""),
    ]
    assert odd_moves([*three_moves(), *odd]) == [
        "move 0-1 of sample 1 from gen-0 to gen-1 was taken back: gen-0 waited 5.1 s for the scheduler's verdict",
        "move 0-2 of sample 2 from gen-0 to gen-1 was lost: no reason given",
    ]


def test_many_failed_moves_are_reported_in_four_lines() -> None:
    lines = odd_moves([move(f"0-{n}", "lost", why_ended="gen-1: died") for n in range(10)])
    assert len(lines) == 4 and lines[-1] == "7 more moves were taken back or lost; see moves.jsonl"
