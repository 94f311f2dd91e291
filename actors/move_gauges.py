"""Counters of the scheduler's moves for the node's metrics port (`ray_rlhfspec_*`)."""

from __future__ import annotations

from ray.util.metrics import Counter, Histogram

from policies.scheduling.events import MoveRecord

DOWNTIME_BOUNDS_S = [0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 5.0]


class MoveGauges:
    """Counts moves by outcome and mode, their bytes by stage, and how long samples stood still."""

    def __init__(self) -> None:
        self._moves = Counter(
            "rlhfspec_moves", description="Moves of samples that ended.", tag_keys=("outcome", "mode")
        )
        self._bytes = Counter(
            "rlhfspec_moved_bytes",
            description="Bytes of caches that came with moved samples.",
            tag_keys=("stage",),
        )
        self._downtime_s = Histogram(
            "rlhfspec_move_downtime_seconds",
            description="From the last decode step at the source to the first at the destination.",
            boundaries=DOWNTIME_BOUNDS_S,
            tag_keys=("mode",),
        )

    def count(self, record: MoveRecord) -> None:
        """Count one move that has ended."""
        mode, figures = str(record.order.mode), record.figures
        self._moves.inc(1, tags={"outcome": record.outcome, "mode": mode})
        for stage in ("stage1", "stage2"):
            if figures.get(f"{stage}_bytes", 0.0) > 0.0:
                self._bytes.inc(figures[f"{stage}_bytes"], tags={"stage": stage})
        if "downtime_s" in figures:
            # clocks of two machines may differ by more than a sample stood still
            self._downtime_s.observe(max(figures["downtime_s"], 0.0), tags={"mode": mode})
