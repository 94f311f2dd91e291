"""A live page of a run in its third iteration."""

from __future__ import annotations

from rlhfspec.cluster.observe.live_page import EventRow, InstanceRow, LivePage, WaitRow

NOW = 1_700_000_000.0
PAGE = LivePage(
    run="demo",
    folder="/runs/demo",
    namespace="rlhfspec-demo-1234",
    pid=7,
    host="node",
    told_at=NOW,
    num_iterations=5,
    iteration=2,
    phase="generate",
    phase_since=NOW - 4.0,
    done=12,
    total=64,
    progress_at=NOW - 1.0,
    weight_version=2,
    figures={"reward/mean": 0.25, "time/iteration_s": 3.0},
    instances=(
        InstanceRow(
            name="gen-0",
            state="serving",
            num_running=3,
            num_slots=4,
            tokens_per_s=120.0,
            activity="training",
            activity_s=12.0,
        ),
        InstanceRow(name="gen-1", state="gone"),
    ),
    waits=(
        WaitRow(waiter="the loop", waited_for="trainer", order="update", since=NOW - 9.0, timeout_s=300.0),
    ),
    events=(EventRow(at=NOW, text="instance gen-1 was lost"),),
)
