"""What a migration costs the sample that moves and those that stay: downtime, bytes by stage, slower steps.

Samples of about 512 tokens on a target of 29M parameters move one or two at a time between two instances that go on
decoding. A decode step that overlaps a transfer is compared with the nearest one of as many samples on the same
instance that overlaps none.
"""

from __future__ import annotations

import bisect
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from actors.migration.settings import MigrationSettings
from actors.spans import Span
from benchmarks.moving.exact import count_mismatches
from benchmarks.moving.wide_pair import wide_workload
from benchmarks.support.actor_pool import ActorPool
from core.config import EngineConfig, SpeculationConfig
from policies.migration.messages import MoveOutcome
from policies.reallocation.forced import ForcedMoves

PROMPT_TOKENS = 400
NEW_TOKENS = 240
SAMPLES = 8


@dataclass(slots=True, kw_only=True)
class Moved:
    """One entry a migration, or a pair of decode steps."""

    downtime_s: list[float] = field(default_factory=list)
    downtime_steps: list[float] = field(default_factory=list)
    context_tokens: list[float] = field(default_factory=list)
    stage1_bytes: list[float] = field(default_factory=list)
    stage2_bytes: list[float] = field(default_factory=list)
    stage1_s: list[float] = field(default_factory=list)
    attach_s: list[float] = field(default_factory=list)
    step_pairs: list[tuple[float, float]] = field(default_factory=list)
    "(overlapping a transfer, not)"
    mismatches: int = 0

    @property
    def slowdown(self) -> float:
        """Mean step that overlaps a transfer over the mean of their partners, minus 1."""
        overlapped, alone = np.array(self.step_pairs).T
        return float(overlapped.sum() / alone.sum() - 1.0)


def move_while_decoding(*, rollouts: int, plain: bool = False) -> Moved:
    """Run rollouts with rare random migrations and collect what they cost."""
    workload = wide_workload(SAMPLES, prompt_tokens=PROMPT_TOKENS, new_tokens=NEW_TOKENS)
    pool = ActorPool(
        workload,
        engine=EngineConfig(max_running_samples=2 * SAMPLES, probe=False),
        speculation=SpeculationConfig(policy="off")
        if plain
        else SpeculationConfig(policy="fixed", num_nodes=6, depth=6),
        migration=MigrationSettings(),
    )
    moved = Moved()
    try:
        requests = workload.requests()
        expected = pool.rollout(requests).completions
        # opens both channels
        pool.rollout(requests, reallocation=ForcedMoves(rate=0.05, seed=99))
        for seed in range(rollouts):
            outcome = pool.rollout(requests, reallocation=ForcedMoves(rate=0.02, seed=seed))
            moved.mismatches += count_mismatches(outcome.completions, expected)
            for record in outcome.moves:
                if record.outcome == MoveOutcome.MOVED:
                    destination = outcome.spans[record.order.destination]
                    _keep(moved, record.figures, destination)
            for spans in outcome.spans.values():
                moved.step_pairs += _step_pairs(spans)
    finally:
        pool.close()
    return moved


def _keep(moved: Moved, figures: dict[str, float], destination: Sequence[Span]) -> None:
    moved.downtime_s.append(figures["downtime_s"])
    moved.downtime_steps.append(figures["downtime_s"] / _median_step_s(destination))
    for name in ("context_tokens", "stage1_bytes", "stage2_bytes", "stage1_s", "attach_s"):
        getattr(moved, name).append(figures[name])


def _median_step_s(spans: Sequence[Span]) -> float:
    return float(np.median([span.end_s - span.begin_s for span in spans if span.kind == "step"]))


def _step_pairs(spans: Sequence[Span]) -> list[tuple[float, float]]:
    """Pair every step that overlaps a transfer with the nearest of as many samples that does not."""
    transfers = [(span.begin_s, span.end_s) for span in spans if span.kind in ("send", "receive")]
    steps = sorted((span for span in spans if span.kind == "step"), key=lambda span: span.begin_s)
    overlapping = [any(b < step.end_s and e > step.begin_s for b, e in transfers) for step in steps]
    alone: dict[int, list[Span]] = {}
    for step, overlaps in zip(steps, overlapping, strict=True):
        if not overlaps:
            alone.setdefault(step.num_samples, []).append(step)
    pairs: list[tuple[float, float]] = []
    for step, overlaps in zip(steps, overlapping, strict=True):
        partners = alone.get(step.num_samples)
        if overlaps and partners:
            place = bisect.bisect_left([p.begin_s for p in partners], step.begin_s)
            near = partners[max(0, place - 1) : place + 1]
            # a neighbour on either side: contexts grow, and growth cancels out
            pairs.append((_seconds(step), float(np.mean([_seconds(p) for p in near]))))
    return pairs


def _seconds(span: Span) -> float:
    return span.end_s - span.begin_s
