"""Figures of how lengths, rewards and advantages are distributed over an iteration's samples."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

import numpy as np

from rlhfspec.core.metric_registry import is_of_family
from rlhfspec.core.records import FinishReason, Rollout


def distribution_figures(rollouts: Sequence[Rollout], advantages: Sequence[float] | None) -> dict[str, float]:
    """Name every figure; `advantages` are the samples' means, None where the update reports none."""
    rewards = np.array([rollout.reward.value for rollout in rollouts])
    lengths = np.array([rollout.completion.num_sampled_tokens for rollout in rollouts])
    cut = [rollout.completion.finish_reason is FinishReason.LENGTH for rollout in rollouts]
    figures = {"rollout/length_cut_share": float(np.mean(cut))}
    for percent in (10, 50, 90, 99):
        figures[f"rollout/response_tokens_p{percent}"] = float(np.percentile(lengths, percent))
    for percent in (10, 50, 90):
        figures[f"reward/p{percent}"] = float(np.percentile(rewards, percent))
    figures |= {"reward/min": float(rewards.min()), "reward/max": float(rewards.max())}
    # a part that is called like a figure of all rewards does not take its place
    parts = {f"reward/{name}": value for name, value in _part_means(rollouts).items()}
    figures |= {name: value for name, value in parts.items() if is_of_family(name)}
    if advantages is not None:
        of_samples = np.array(advantages)
        figures |= {
            "learner/advantage_mean": float(of_samples.mean()),
            "learner/advantage_std": float(of_samples.std()),
            "learner/advantage_min": float(of_samples.min()),
            "learner/advantage_max": float(of_samples.max()),
        }
    return figures


def _part_means(rollouts: Sequence[Rollout]) -> dict[str, float]:
    values: dict[str, list[float]] = defaultdict(list)
    for rollout in rollouts:
        for name, value in rollout.reward.parts.items():
            values[name].append(value)
    return {name: float(np.mean(those)) for name, those in sorted(values.items())}
