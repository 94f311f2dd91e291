"""Traces of two instances made by hand: when events were, which way samples went, overlaps."""

from __future__ import annotations

import pytest
from made_moves import BEGAN_S, move, span, three_moves, two_instances

from rlhfspec.cluster.observe.timeline import end_s, make_trace, merge, overlap_s, stretches


def test_seconds_count_from_the_first_decode_step() -> None:
    trace = make_trace(two_instances(), three_moves())
    lanes = trace.lanes()
    assert trace.began_s == BEGAN_S and trace.length_s == 10.0
    assert stretches(lanes["gen-0"], "send") == [(2.5, 5.0)]
    assert [one["args"]["samples"] for one in lanes["gen-1"] if one["cat"] == "step"] == [2, 2, 1, 2, 3]


def test_a_shipped_sample_leaves_with_its_caches_and_a_recomputed_one_behind_its_last_decode_step() -> None:
    found = make_trace(two_instances(), three_moves()).moves
    assert {move_id: (end_s(left), arrived["ts"] / 1e6) for move_id, left, arrived in found} == {
        "0-3": (5.0, 6.0),
        "0-5": (8.0, 8.25),
    }


def test_a_shipped_sample_has_its_way_before_the_scheduler_says_how_it_ended() -> None:
    # a recomputed one has none yet: nothing says where it came from
    assert [move_id for move_id, *_ in make_trace(two_instances()).moves] == ["0-3"]


def test_a_way_from_an_instance_that_did_not_answer_is_left_out() -> None:
    assert make_trace({"gen-1": two_instances()["gen-1"]}, three_moves()).moves == []


def test_a_transfer_that_failed_before_its_first_frame_does_not_stretch_the_trace() -> None:
    spans = {
        "gen-0": [
            span("step", 0.0, 1.0, num_samples=1),
            # no first frame at all: the beginning is that of the clock
            span("receive", -BEGAN_S, 0.5, "0-1 from gen-1"),
            span("receive", 2.0, 3.0, "0-2 from gen-1"),
            # its beginning is that of the transfer before
            span("receive", 2.0, 4.0, "0-3 from gen-1"),
            span("receive", 2.5, 3.5, "0-4 from gen-2"),
        ]
    }
    trace = make_trace(spans)
    found = {
        one["args"]["move"]: (one["ts"] / 1e6, end_s(one), one["args"]["peer"])
        for one in trace.lanes()["gen-0"]
        if one["cat"] == "receive"
    }
    assert found == {
        "0-1": (0.0, 0.5, "gen-1"),
        "0-2": (2.0, 3.0, "gen-1"),
        "0-3": (3.0, 4.0, "gen-1"),
        "0-4": (2.5, 3.5, "gen-2"),
    }
    assert trace.length_s == 4.0


def test_lanes_are_in_the_order_of_their_numbers() -> None:
    names = ["gen-10", "gen-0-r1", "gen-2", "gen-0"]
    assert list(make_trace({name: [] for name in names}).lanes()) == ["gen-0", "gen-0-r1", "gen-2", "gen-10"]


def test_a_pool_that_did_nothing_has_an_empty_trace() -> None:
    trace = make_trace({"gen-0": []}, [move("0-1", "kept")])
    assert trace.length_s == 0.0 and trace.moves == [] and trace.lanes() == {"gen-0": []}


def test_touching_and_overlapping_stretches_are_merged() -> None:
    parts = [(3, 4), (0, 1), (1, 2), (0.5, 1.5), (4.25, 5)]
    assert merge(parts) == [(0, 2), (3, 4), (4.25, 5)]
    assert merge(parts, gap_s=0.25) == [(0, 2), (3, 5)]


@pytest.mark.parametrize(
    ("begin_s", "end_s", "seconds"),
    [
        (-1, 0, 0),
        (-1, 10, 3),
        (0.5, 2.5, 1),
        (1, 2, 0),
        (1.5, 4.5, 2),
        (2, 4, 2),
        (3, 3.25, 0.25),
        (9, 10, 0),
    ],
)
def test_overlap_with_one_second_and_two_seconds(begin_s: float, end_s: float, seconds: float) -> None:
    assert overlap_s([(begin_s, end_s)], [(2, 3.5), (0, 1), (3, 4), (7, 7)]) == pytest.approx(seconds)


def test_overlaps_add_up_over_stretches_and_are_zero_with_none() -> None:
    assert overlap_s([(0, 2), (1, 3)], [(0, 4)]) == pytest.approx(4.0)
    assert overlap_s([(0, 2)], []) == overlap_s([], [(0, 2)]) == 0.0
