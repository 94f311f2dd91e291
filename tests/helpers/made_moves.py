"""Moves and spans made by hand: two instances, one sample shipped, one recomputed, one that never left."""

from rlhfspec.actors.trace_events import TraceEvent
from rlhfspec.core.records import SampleKey
from rlhfspec.policies.migration.move_messages import MoveOrder
from rlhfspec.policies.reallocation.pool_records import MoveMode
from rlhfspec.policies.scheduling.events import MoveRecord

BEGAN_S = 1_000_000.0
"Wall clock of the first decode step."

SHIPPED = {"stage1_s": 0.5, "stage1_bytes": 900.0, "stage2_bytes": 100.0, "attach_s": 0.25, "downtime_s": 0.5}
RECOMPUTED = {
    "attach_s": 0.75,
    "stage1_bytes": 0.0,
    "stage2_bytes": 0.0,
    "computed_tokens": 30.0,
    "downtime_s": 1.0,
}


def move(
    move_id: str,
    outcome: str = "moved",
    *,
    mode: MoveMode = MoveMode.MIGRATE,
    source: str = "gen-0",
    destination: str = "gen-1",
    why_ended: str = "it runs here",
    metrics: dict[str, float] | None = None,
) -> MoveRecord:
    """A move of the sample with the number behind the dash."""
    order = MoveOrder(
        move_id=move_id,
        key=SampleKey(run_seed=7, sample_index=int(move_id.partition("-")[2])),
        epoch=0,
        source=source,
        destination=destination,
        mode=mode,
    )
    return MoveRecord(
        order=order,
        outcome=outcome,
        why_ordered="gen-0 would finish last",
        why_ended=why_ended,
        gain_s=2.0,
        ordered_s=50.0,
        ended_s=51.5,
        metrics=metrics or {},
    )


def span(kind, begin_s: float, end_s: float, label: str = "", num_samples: int = 0) -> TraceEvent:
    """A span; seconds count from BEGAN_S."""
    return TraceEvent(kind, BEGAN_S + begin_s, BEGAN_S + end_s, label, num_samples)


def two_instances() -> dict[str, list[TraceEvent]]:
    """gen-0 decodes for 8 s, gen-1 for 2 s, from 5 to 6 s and, with what came to it, up to 10 s."""
    return {
        "gen-0": [
            *(span("step", t, t + 1.0, num_samples=4) for t in range(4)),
            span("send", 2.5, 5.0, "0-3 to gen-1"),
            *(span("step", t, t + 1.0, num_samples=3) for t in range(4, 8)),
        ],
        "gen-1": [
            *(span("step", t, t + 1.0, num_samples=2) for t in range(2)),
            span("receive", 3.0, 5.0, "0-3 from gen-0"),
            span("step", 5.0, 6.0, num_samples=1),
            span("attach", 6.0, 6.25, "0-3"),
            span("step", 6.25, 8.25, num_samples=2),
            span("attach", 8.25, 9.0, "0-5"),
            span("step", 9.0, 10.0, num_samples=3),
        ],
    }


def three_moves() -> tuple[MoveRecord, ...]:
    """Of `two_instances`."""
    return (
        move("0-3", metrics=SHIPPED),
        move("0-5", mode=MoveMode.RECOMPUTE, metrics=RECOMPUTED),
        move("0-6", "kept", why_ended="finished before it left"),
    )
