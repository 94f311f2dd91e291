"""The figures of one iteration's moves: how many, what they shipped, how long samples stood still, what they cost."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median

from rlhfspec.cluster.reporting.timeline import Timeline, overlap_s
from rlhfspec.core.decode_records import GenerationStats
from rlhfspec.policies.migration.move_messages import MoveOutcome
from rlhfspec.policies.reallocation.pool_records import MoveMode
from rlhfspec.policies.scheduling.events import MoveRecord

OUTCOMES = tuple(MoveOutcome)


def move_figures(
    moves: Sequence[MoveRecord], *, stats: GenerationStats, planning_s: float, timeline: Timeline
) -> dict[str, float]:
    """Name every figure; what needs a move that there was not is left out.

    Args:
        moves: those that ended in the iteration.
        stats: sums over the instances in it.
        planning_s: seconds the scheduler spent on deciding moves.
        timeline: of the generation, for what transfers were hidden behind.
    """
    done = [record for record in moves if record.outcome == MoveOutcome.MOVED]
    figures = {
        f"moves/num_{outcome.replace(' ', '_')}": float(sum(record.outcome == outcome for record in moves))
        for outcome in OUTCOMES
    }
    for mode in MoveMode:
        figures[f"moves/num_{mode}"] = float(sum(record.order.mode is mode for record in done))
    return (
        figures
        | _bytes(done)
        | _times(done)
        | _hidden(timeline)
        | {
            "moves/decode_thread_s": stats.move_s,
            "moves/planning_s": planning_s,
            "moves/overhead_share": overhead_share(stats, planning_s=planning_s),
        }
    )


def overhead_share(stats: GenerationStats, *, planning_s: float) -> float:
    """Seconds spent on deciding and making moves over those of generation, summed over the decode threads."""
    return (planning_s + stats.move_s) / max(stats.busy_s + stats.move_s, 1e-9)


def _bytes(done: Sequence[MoveRecord]) -> dict[str, float]:
    """Bytes by stage: before the hand-over, while the source decodes, and with it."""
    first, second = (sum(_values(done, f"stage{number}_bytes")) for number in (1, 2))
    figures = {"moves/stage1_bytes": float(first), "moves/stage2_bytes": float(second)}
    if first + second:
        figures["moves/stage1_bytes_share"] = first / (first + second)
    return figures


def _times(done: Sequence[MoveRecord]) -> dict[str, float]:
    figures = {}
    for name in ("stage1_s", "attach_s", "downtime_s"):
        values = _values(done, name)
        if values:
            figures[f"moves/{name}_median"] = median(values)
    downtimes = _values(done, "downtime_s")
    if downtimes:
        figures["moves/downtime_s_max"] = max(downtimes)
    return figures


def _hidden(timeline: Timeline) -> dict[str, float]:
    """Share of the transfer seconds in which the pool, or the same instance, was in a decode step."""
    total_s = sum(one.seconds for lane in timeline.lanes for one in lane.transfers)
    if total_s <= 0.0:
        return {}
    steps = [step for lane in timeline.lanes for step in lane.steps]
    pool_s = sum(overlap_s(lane.transfers, steps) for lane in timeline.lanes)
    own_s = sum(overlap_s(lane.transfers, lane.steps) for lane in timeline.lanes)
    return {
        "moves/transfer_s": total_s,
        "moves/transfer_hidden_share": pool_s / total_s,
        "moves/transfer_hidden_own_share": own_s / total_s,
    }


def _values(moves: Sequence[MoveRecord], name: str) -> list[float]:
    return [record.figures[name] for record in moves if name in record.figures]
