"""The trace of a timeline keeps the laws of the Trace Event Format that a viewer relies on."""

from __future__ import annotations

import json
from collections import defaultdict
from typing import Any

import pytest
from made_moves import RECOMPUTED, move, span, three_moves, two_instances

from rlhfspec.cluster.observe.timeline import make_trace
from rlhfspec.policies.reallocation.pool_records import MoveMode

Event = dict[str, Any]


def crowded() -> list[Event]:
    """An instance that ships to two others at once."""
    spans = two_instances()
    spans["gen-0"].append(span("send", 3.0, 4.0, "0-8 to gen-2"))
    spans["gen-0"].append(span("send", 5.0, 5.5, "0-9 to gen-1"))
    return [*make_trace(spans, three_moves()).events]


def of(events: list[Event], *phases: str) -> list[Event]:
    return [event for event in events if event["ph"] in phases]


@pytest.fixture
def events() -> list[Event]:
    return [*make_trace(two_instances(), three_moves()).events]


def names(events: list[Event]) -> dict[str, dict[tuple[int, int], str]]:
    found: dict[str, dict[tuple[int, int], str]] = defaultdict(dict)
    for event in of(events, "M"):
        if "name" in event["args"]:
            found[event["name"]][event["pid"], event["tid"]] = event["args"]["name"]
    return found


@pytest.mark.parametrize("made", [crowded, lambda: make_trace(two_instances(), three_moves()).events])
def test_every_event_is_in_a_named_thread_of_a_named_process(made) -> None:
    events = made()
    found = names(events)
    processes = {pid for pid, _ in found["process_name"]}
    for event in of(events, "X", "s", "f"):
        assert event["pid"] in processes and (event["pid"], event["tid"]) in found["thread_name"]


def test_one_process_an_instance_with_three_threads(events: list[Event]) -> None:
    found = names(events)
    assert list(found["process_name"].values()) == ["gen-0", "gen-1"]
    assert list(found["thread_name"].values()) == ["decode", "send", "receive"] * 2


@pytest.mark.parametrize("made", [crowded, lambda: make_trace(two_instances(), three_moves()).events])
def test_events_are_in_order_of_time_and_those_of_a_thread_do_not_overlap(made) -> None:
    events = of(made(), "X", "s", "f")
    assert [event["ts"] for event in events] == sorted(event["ts"] for event in events)
    assert events[0]["ts"] == 0.0
    ends: dict[tuple[int, int], float] = defaultdict(float)
    for event in of(events, "X"):
        thread = event["pid"], event["tid"]
        assert event["dur"] > 0.0 and event["ts"] >= ends[thread]
        ends[thread] = event["ts"] + event["dur"]


def test_transfers_with_two_peers_at_once_get_a_thread_each() -> None:
    events = crowded()
    threads = names(events)["thread_name"]
    sends = {
        event["args"]["move"]: (event["pid"], event["tid"])
        for event in of(events, "X")
        if event["cat"] == "send"
    }
    assert {move_id: threads[place] for move_id, place in sends.items()} == {
        "0-3": "send",
        "0-8": "send 2",
        "0-9": "send",
    }


def enclosing(events: list[Event], end: Event) -> Event:
    (found,) = [
        event
        for event in of(events, "X")
        if (event["pid"], event["tid"]) == (end["pid"], end["tid"])
        and event["ts"] <= end["ts"] < event["ts"] + event["dur"]
    ]
    return found


def test_every_arrow_has_both_ends_in_the_events_it_joins(events: list[Event]) -> None:
    starts = {event["id"]: event for event in of(events, "s")}
    ends = {event["id"]: event for event in of(events, "f")}
    assert starts.keys() == ends.keys() and len(starts) == len(of(events, "s", "f")) / 2 == 2
    joined = {
        starts[number]["name"]: (
            enclosing(events, starts[number])["name"],
            enclosing(events, ends[number])["name"],
        )
        for number in starts
    }
    assert joined == {
        "move 0-3": ("send 0-3", "attach 0-3"),
        # nothing was shipped: it left behind the last decode step at the source
        "move 0-5": ("step of 3", "attach 0-5"),
    }
    assert all(ends[number]["bp"] == "e" and ends[number]["ts"] >= starts[number]["ts"] for number in ends)
    assert {starts[number]["pid"] for number in starts} == {1} and {e["pid"] for e in ends.values()} == {2}


def test_clocks_that_contradict_a_journey_leave_no_half_arrow() -> None:
    spans = {
        "gen-0": [span("step", 0.0, 1.0, num_samples=1), span("send", 5.0, 6.0, "0-1 to gen-1")],
        "gen-1": [span("attach", 4.0, 4.5, "0-1")],
    }
    assert of([*make_trace(spans).events], "s", "f") == []


def test_a_transfer_says_why_it_was_ordered_and_how_it_ended(events: list[Event]) -> None:
    (receive,) = [event for event in of(events, "X") if event["cat"] == "receive"]
    assert receive["ts"] == 3_000_000.0 and receive["dur"] == 2_000_000.0
    told = receive["args"]
    assert told["why_ordered"] == "gen-0 would finish last" and told["outcome"] == "moved"
    assert (told["sample"], told["peer"], told["stage1_bytes"]) == (3, "gen-0", 900.0)


def test_the_text_is_one_json_object_with_the_same_events() -> None:
    moves = (*three_moves()[:1], move("0-5", mode=MoveMode.RECOMPUTE, metrics=RECOMPUTED))
    made = make_trace(two_instances(), moves)
    trace = json.loads(made.text(2))
    assert trace["traceEvents"] == made.events
    title = "generation of iteration 3: 10.0 s, 2 samples moved"
    assert trace["otherData"] == {"title": title, "began": "1970-01-12T13:46:40+00:00"}
