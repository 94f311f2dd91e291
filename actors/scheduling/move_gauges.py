"""Counters of the scheduler's moves for the node's metrics port (`ray_rlhfspec_*`)."""

from __future__ import annotations

from rlhfspec.actors.waiting import run_metrics
from rlhfspec.policies.scheduling.events import MoveRecord


def count_move(record: MoveRecord) -> None:
    """Count one move that has ended, its bytes by stage, and how long the sample stood still."""
    mode, figures = str(record.order.mode), record.figures
    run_metrics.add("moves", outcome=str(record.outcome), mode=mode)
    for stage in ("stage1", "stage2"):
        run_metrics.add("moved_bytes", figures.get(f"{stage}_bytes", 0.0), stage=stage)
    if "downtime_s" in figures:
        # clocks of two machines may differ by more than a sample stood still
        run_metrics.observe("move_downtime_seconds", max(figures["downtime_s"], 0.0), mode=mode)
