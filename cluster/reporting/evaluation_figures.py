"""The figures of one evaluation: means over prompts, pass@k, response lengths."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence

import numpy as np

from rlhfspec.core.records import FinishReason, Rollout

CORRECT = "correct"
"The part of a reward that says whether a response is right; from 0.5 on it counts as passed."


def correctness(parts: Mapping[str, float]) -> float | None:
    """The first part called `correct`, or NAME/correct in a mixture; None where a reward has none."""
    return next((value for name, value in parts.items() if name.split("/")[-1] == CORRECT), None)


def evaluation_figures(rollouts: Sequence[Rollout], skipped: Sequence[int] = ()) -> dict[str, float]:
    """Name every figure of one evaluation.

    `eval/accuracy` is the share of right samples, and so is `eval/mean_at_k`, its name where each prompt has k
    samples; `eval/pass_at_k` the share of prompts with a right one among k, `eval/pass_at_1`, `_2`, `_4`, ... the
    estimate for fewer. Without the part `correct` (of a mixture: NAME/correct) in every reward these are left out; a
    sample without a reward counts in them as wrong. `eval/best_at_k` is the mean over prompts of the best reward.

    Args:
        rollouts: the samples with a reward; those of one prompt share a group.
        skipped: the group of each sample without one (`reward.on_error: skip`).
    """
    rewards = np.array([rollout.reward.value for rollout in rollouts])
    lengths = np.array([rollout.completion.num_sampled_tokens for rollout in rollouts])
    cut = [rollout.completion.finish_reason is FinishReason.LENGTH for rollout in rollouts]
    figures = {
        "eval/reward_mean": float(rewards.mean()),
        "eval/reward_std": float(rewards.std()),
        "eval/best_at_k": float(np.mean([values.max() for values in _by_group(rollouts, rewards)])),
        "eval/response_tokens_mean": float(lengths.mean()),
        "eval/length_cut_share": float(np.mean(cut)),
        "eval/num_prompts": float(len({*skipped, *(rollout.completion.group_id for rollout in rollouts)})),
        "eval/num_samples": float(len(rollouts) + len(skipped)),
        "eval/num_skipped": float(len(skipped)),
    }
    found = [correctness(rollout.reward.parts) for rollout in rollouts]
    passed = [value for value in found if value is not None]
    if len(passed) < len(rollouts):
        return figures
    groups = _by_group(rollouts, np.array(passed), skipped)
    figures["eval/accuracy"] = sum(passed) / (len(rollouts) + len(skipped))
    figures["eval/mean_at_k"] = float(np.mean([values.mean() for values in groups]))
    num_samples = min(len(values) for values in groups)
    for name, k in [("k", num_samples), *((str(k), k) for k in _powers_of_two(num_samples))]:
        estimates = [
            pass_at_k(num_samples=len(values), num_passed=int((values >= 0.5).sum()), k=k)
            for values in groups
        ]
        figures[f"eval/pass_at_{name}"] = float(np.mean(estimates))
    return figures


def pass_at_k(*, num_samples: int, num_passed: int, k: int) -> float:
    """Chance that one of k samples of a prompt passes, without bias from `num_samples` of them.

    1 - C(n - c, k) / C(n, k). Source: Chen et al. 2021, 'Evaluating large language models trained on code', eq. 1.
    Raises ValueError unless 0 <= num_passed <= num_samples and 1 <= k <= num_samples.
    """
    if not (0 <= num_passed <= num_samples and 1 <= k <= num_samples):
        raise ValueError(
            f"pass@{k} of {num_samples} samples with {num_passed} passed: expected k of at least 1 and at most the "
            "number of samples, and no more passed than that"
        )
    num_failed = num_samples - num_passed
    if num_failed < k:
        return 1.0
    return 1.0 - float(np.prod(1.0 - k / np.arange(num_failed + 1, num_samples + 1)))


def _powers_of_two(below: int) -> list[int]:
    return [1 << power for power in range(below.bit_length()) if 1 << power < below]


def _by_group(
    rollouts: Sequence[Rollout], values: np.ndarray, skipped: Sequence[int] = ()
) -> list[np.ndarray]:
    groups: dict[int, list[float]] = defaultdict(list)
    for rollout, value in zip(rollouts, values, strict=True):
        groups[rollout.completion.group_id].append(float(value))
    for group_id in skipped:
        groups[group_id].append(0.0)
    return [np.array(group) for group in groups.values()]
