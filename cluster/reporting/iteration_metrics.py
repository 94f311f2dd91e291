"""The figures of one iteration, from its rollouts, decode statistics and the update's report."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from rlhfspec.cluster.reporting.reward_figures import reward_figures
from rlhfspec.cluster.reporting.summary import amdahl_bound
from rlhfspec.core.decode_records import GenerationStats
from rlhfspec.core.records import Rollout, UpdateReport


def iteration_figures(
    rollouts: Sequence[Rollout],
    stats: GenerationStats,
    update: UpdateReport,
    seconds: Mapping[str, float],
) -> dict[str, float]:
    """Name every figure of the iteration.

    Args:
        rollouts: all samples of the iteration.
        stats: what the instances' decode steps did in it.
        update: the learner's report.
        seconds: `generate`, `score`, `update`, `publish`, `refit`, `evaluate`, `iteration`; score counts only what
            follows the last completion, because the rest is hidden behind generation.
    """
    lengths = np.array([int(rollout.completion.is_sampled.sum()) for rollout in rollouts])
    figures = reward_figures([rollout.reward for rollout in rollouts])
    figures |= {
        "rollout/mean_acceptance_length": stats.mean_acceptance_length,
        "rollout/acceptance_rate": stats.acceptance_rate,
        "rollout/goodput_tokens_per_s": float(lengths.sum()) / max(seconds["generate"], 1e-9),
        "rollout/response_tokens_mean": float(lengths.mean()),
        "rollout/response_tokens_max": float(lengths.max()),
        "rollout/num_samples": float(len(rollouts)),
        "rollout/num_recomputed": float(sum(rollout.completion.epoch > 0 for rollout in rollouts)),
        "rollout/num_preemptions": float(stats.num_preemptions),
    }
    figures |= {f"time/{name}_s": value for name, value in seconds.items()}
    # a figure with an area of its own keeps it
    return figures | {
        name if "/" in name else f"learner/{name}": value for name, value in update.figures.items()
    }


def with_evaluation(figures: Mapping[str, float], evaluated: Mapping[str, float]) -> dict[str, float]:
    """The figures of an iteration with those of the evaluation after it, whose seconds belong to it; none: as it is."""
    spent_s = evaluated.get("time/evaluate_s", 0.0)
    total_s = figures["time/iteration_s"] + spent_s
    # generation that hid an update would leave it to be waited for
    hidden_s = figures.get("time/update_hidden_s", 0.0)
    bound = amdahl_bound(total_s, figures["time/generate_s"] - hidden_s)
    return {**figures, **evaluated, "time/iteration_s": total_s, "time/amdahl_bound": bound}
