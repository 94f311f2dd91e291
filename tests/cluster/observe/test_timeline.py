"""Timelines of two instances made by hand: lanes, journeys, overlaps."""

from __future__ import annotations

import pytest
from made_moves import BEGAN_S, move, span, three_moves, two_instances

from rlhfspec.cluster.observe.timeline import Interval, build_timeline, merge, overlap_s


def stretch(begin_s: float, end_s: float) -> Interval:
    return Interval(begin_s=begin_s, end_s=end_s)


def test_seconds_count_from_the_first_decode_step() -> None:
    timeline = build_timeline(two_instances(), three_moves())
    assert timeline.began_s == BEGAN_S and timeline.length_s == 10.0
    assert timeline.lanes[0].sends == (Interval(begin_s=2.5, end_s=5.0, move_id="0-3", peer="gen-1"),)
    assert timeline.lanes[1].receives[0].peer == "gen-0"
    assert [step.num_samples for step in timeline.lanes[1].steps] == [2, 2, 1, 2, 3]


def test_an_instance_is_busy_in_decode_steps_and_arrivals_and_idle_in_transfers() -> None:
    lanes = build_timeline(two_instances(), three_moves()).lanes
    assert {lane.instance: lane.busy_s for lane in lanes} == {"gen-0": 8.0, "gen-1": 7.0}


def test_a_shipped_sample_leaves_with_its_caches_and_a_recomputed_one_behind_its_last_decode_step() -> None:
    shipped, recomputed = build_timeline(two_instances(), three_moves()).journeys
    assert (shipped.move_id, shipped.source, shipped.destination) == ("0-3", "gen-0", "gen-1")
    assert (shipped.left.end_s, shipped.arrived.begin_s) == (5.0, 6.0)
    assert (recomputed.move_id, recomputed.left.end_s, recomputed.arrived.begin_s) == ("0-5", 8.0, 8.25)


def test_a_shipped_sample_has_its_journey_before_the_scheduler_says_how_it_ended() -> None:
    # a recomputed one has none yet: nothing says where it came from
    (journey,) = build_timeline(two_instances()).journeys
    assert journey.move_id == "0-3" and journey.record is None


def test_a_journey_from_an_instance_that_did_not_answer_is_left_out() -> None:
    spans = {"gen-1": two_instances()["gen-1"]}
    assert build_timeline(spans, three_moves()).journeys == ()


def test_a_transfer_that_failed_before_its_first_frame_does_not_stretch_the_timeline() -> None:
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
    timeline = build_timeline(spans)
    found = [(one.move_id, one.begin_s, one.end_s) for one in timeline.lanes[0].receives]
    assert found == [("0-1", 0.0, 0.5), ("0-2", 2.0, 3.0), ("0-4", 2.5, 3.5), ("0-3", 3.0, 4.0)]
    assert timeline.length_s == 4.0


def test_lanes_are_in_the_order_of_their_numbers() -> None:
    names = ["gen-10", "gen-0-r1", "gen-2", "gen-0"]
    lanes = build_timeline({name: [] for name in names}).lanes
    assert [lane.instance for lane in lanes] == ["gen-0", "gen-0-r1", "gen-2", "gen-10"]


def test_a_pool_that_did_nothing_has_an_empty_timeline() -> None:
    timeline = build_timeline({"gen-0": []}, [move("0-1", "kept")])
    assert timeline.length_s == 0.0 and timeline.journeys == () and timeline.lanes[0].busy_s == 0.0


def test_touching_and_overlapping_intervals_are_merged() -> None:
    parts = [stretch(3, 4), stretch(0, 1), stretch(1, 2), stretch(0.5, 1.5), stretch(4.25, 5)]
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
    others = [stretch(2, 3.5), stretch(0, 1), stretch(3, 4), stretch(7, 7)]
    assert overlap_s([stretch(begin_s, end_s)], others) == pytest.approx(seconds)


def test_overlaps_add_up_over_intervals_and_are_zero_with_none() -> None:
    assert overlap_s([stretch(0, 2), stretch(1, 3)], [stretch(0, 4)]) == pytest.approx(4.0)
    assert overlap_s([stretch(0, 2)], []) == overlap_s([], [stretch(0, 2)]) == 0.0
