"""The metrics of one iteration: rewards and lengths, decoding and the update, its evaluation, its moves."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from statistics import median
from typing import TypeVar

import numpy as np

from ...core.decode_records import GenerationStats
from ...core.records import FinishReason, Reward, Rollout, UpdateReport
from ...policies.migration.move_messages import MoveOutcome
from ...policies.reallocation.pool_records import MoveMode
from ...policies.scheduling.events import MoveRecord
from .summary import amdahl_bound
from .timeline import Trace, overlap_s, stretches

T = TypeVar("T")
CORRECT = "correct"
"The part of a reward that says whether a response is right; from 0.5 on it counts as passed."


def correctness(parts: Mapping[str, T]) -> T | None:
    """The first part called `correct`, or NAME/correct in a mixture; None where a reward has none."""
    return next((value for name, value in parts.items() if name.split("/")[-1] == CORRECT), None)


def reward_metrics(rewards: Sequence[Reward]) -> dict[str, float]:
    """`reward/mean`, `reward/std`, and `reward/PART` for every part that a sample has.

    A part's mean is over the samples that have it. `reward/accuracy` is that of the first part called `correct`. A
    part that is called as one of these metrics gives way to it.
    """
    values = np.array([reward.value for reward in rewards])
    by_part: dict[str, list[float]] = {}
    for reward in rewards:
        for name, value in reward.parts.items():
            by_part.setdefault(name, []).append(value)
    metrics = {"reward/mean": float(values.mean()), "reward/std": float(values.std())}
    correct = correctness(by_part)
    if correct is not None:
        metrics["reward/accuracy"] = float(np.mean(correct))
    return {f"reward/{name}": float(np.mean(part)) for name, part in by_part.items()} | metrics


def distribution_metrics(rollouts: Sequence[Rollout], advantages: Sequence[float] | None) -> dict[str, float]:
    """Name every metric; `advantages` are the samples' means, None where the update reports none."""
    rewards = np.array([rollout.reward.value for rollout in rollouts])
    lengths = np.array([rollout.completion.num_sampled_tokens for rollout in rollouts])
    cut = [rollout.completion.finish_reason is FinishReason.LENGTH for rollout in rollouts]
    metrics = {"rollout/length_cut_share": float(np.mean(cut))}
    for percent in (10, 50, 90, 99):
        metrics[f"rollout/response_tokens_p{percent}"] = float(np.percentile(lengths, percent))
    for percent in (10, 50, 90):
        metrics[f"reward/p{percent}"] = float(np.percentile(rewards, percent))
    metrics |= {"reward/min": float(rewards.min()), "reward/max": float(rewards.max())}
    if advantages is not None:
        of_samples = np.array(advantages)
        metrics |= {
            "learner/advantage_mean": float(of_samples.mean()),
            "learner/advantage_std": float(of_samples.std()),
            "learner/advantage_min": float(of_samples.min()),
            "learner/advantage_max": float(of_samples.max()),
        }
    return metrics


def iteration_metrics(
    rollouts: Sequence[Rollout], stats: GenerationStats, update: UpdateReport, seconds: Mapping[str, float]
) -> dict[str, float]:
    """Name every metric of the iteration.

    Args:
        rollouts: all samples of the iteration.
        stats: what the instances' decode steps did in it.
        update: the learner's report.
        seconds: `generate`, `score`, `update`, `publish`, `refit`, `evaluate`, `iteration`; score counts only what
            follows the last completion, because the rest is hidden behind generation.
    """
    lengths = np.array([int(rollout.completion.is_sampled.sum()) for rollout in rollouts])
    metrics = reward_metrics([rollout.reward for rollout in rollouts])
    metrics |= {
        "rollout/mean_acceptance_length": stats.mean_acceptance_length,
        "rollout/acceptance_rate": stats.acceptance_rate,
        "rollout/goodput_tokens_per_s": float(lengths.sum()) / max(seconds["generate"], 1e-9),
        "rollout/decode_s": stats.busy_s,
        "rollout/draft_s": stats.draft_s,
        "rollout/response_tokens_mean": float(lengths.mean()),
        "rollout/response_tokens_max": float(lengths.max()),
        "rollout/num_samples": float(len(rollouts)),
        "rollout/num_recomputed": float(sum(rollout.completion.epoch > 0 for rollout in rollouts)),
        "rollout/num_preemptions": float(stats.num_preemptions),
    }
    metrics |= {f"time/{name}_s": value for name, value in seconds.items()}
    metrics |= {f"update/{part}_s": value for part, value in update.part_seconds.items()}
    metrics |= {f"update/{name}": value for name, value in update.cost.items()}
    # a metric with an area of its own keeps it
    return metrics | {
        name if "/" in name else f"learner/{name}": value for name, value in update.metrics.items()
    }


def with_evaluation(metrics: Mapping[str, float], evaluated: Mapping[str, float]) -> dict[str, float]:
    """The metrics of an iteration with those of the evaluation after it, whose seconds belong to it; none: as it is."""
    spent_s = evaluated.get("time/evaluate_s", 0.0)
    total_s = metrics["time/iteration_s"] + spent_s
    # generation that hid an update would leave it to be waited for
    hidden_s = metrics.get("time/update_hidden_s", 0.0)
    bound = amdahl_bound(total_s, metrics["time/generate_s"] - hidden_s)
    whole = {**metrics, **evaluated, "time/iteration_s": total_s, "time/amdahl_bound": bound}
    if (mfu := metrics.get("update/mfu_fwd_bwd")) is not None:
        learned_s = metrics["update/forward_s"] + metrics["update/backward_s"]
        whole["update/mfu_wall"] = mfu * learned_s / total_s
    return whole


def evaluation_metrics(rollouts: Sequence[Rollout], skipped: Sequence[int] = ()) -> dict[str, float]:
    """Name every metric of one evaluation.

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
    metrics = {
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
        return metrics
    groups = _by_group(rollouts, np.array(passed), skipped)
    metrics["eval/accuracy"] = sum(passed) / (len(rollouts) + len(skipped))
    metrics["eval/mean_at_k"] = float(np.mean([values.mean() for values in groups]))
    num_samples = min(len(values) for values in groups)
    for name, k in [("k", num_samples), *((str(k), k) for k in _powers_of_two(num_samples))]:
        estimates = [
            pass_at_k(num_samples=len(values), num_passed=int((values >= 0.5).sum()), k=k)
            for values in groups
        ]
        metrics[f"eval/pass_at_{name}"] = float(np.mean(estimates))
    return metrics


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


def move_metrics(
    moves: Sequence[MoveRecord], *, stats: GenerationStats, planning_s: float, trace: Trace
) -> dict[str, float]:
    """Name every metric; what needs a move that there was not is left out.

    Args:
        moves: those that ended in the iteration.
        stats: sums over the instances in it.
        planning_s: seconds the scheduler spent on deciding moves.
        trace: of the generation, for what transfers were hidden behind.
    """
    done = [record for record in moves if record.outcome == MoveOutcome.MOVED]
    metrics = {
        f"moves/num_{outcome.replace(' ', '_')}": float(sum(record.outcome == outcome for record in moves))
        for outcome in MoveOutcome
    }
    for mode in MoveMode:
        metrics[f"moves/num_{mode}"] = float(sum(record.order.mode is mode for record in done))
    # by stage: before the hand-over, while the source decodes, and with it
    first, second = (sum(_values(done, f"stage{number}_bytes")) for number in (1, 2))
    metrics |= {"moves/stage1_bytes": float(first), "moves/stage2_bytes": float(second)}
    if first + second:
        metrics["moves/stage1_bytes_share"] = first / (first + second)
    for name in ("stage1_s", "attach_s", "downtime_s"):
        if values := _values(done, name):
            metrics[f"moves/{name}_median"] = median(values)
            if name == "downtime_s":
                metrics["moves/downtime_s_max"] = max(values)
    return metrics | {
        "moves/decode_thread_s": stats.move_s,
        "moves/planning_s": planning_s,
        "moves/expected_gain_s": sum(record.gain_s for record in done),
        "moves/overhead_share": overhead_share(stats, planning_s=planning_s),
        **_hidden(trace),
    }


def overhead_share(stats: GenerationStats, *, planning_s: float) -> float:
    """Seconds spent on deciding and making moves over those of generation, summed over the decode threads."""
    return (planning_s + stats.move_s) / max(stats.busy_s + stats.move_s, 1e-9)


def _hidden(trace: Trace) -> dict[str, float]:
    """Share of the transfer seconds in which the pool, or the same instance, was in a decode step."""
    lanes = [(stretches(lane, "send", "receive"), stretches(lane, "step")) for lane in trace.lanes().values()]
    total_s = sum(end - begin for transfers, _ in lanes for begin, end in transfers)
    if total_s <= 0.0:
        return {}
    pool = [step for _, steps in lanes for step in steps]
    return {
        "moves/transfer_s": total_s,
        "moves/transfer_hidden_share": sum(overlap_s(transfers, pool) for transfers, _ in lanes) / total_s,
        "moves/transfer_hidden_own_share": sum(overlap_s(*lane) for lane in lanes) / total_s,
    }


def _values(moves: Sequence[MoveRecord], name: str) -> list[float]:
    return [record.metrics[name] for record in moves if name in record.metrics]
