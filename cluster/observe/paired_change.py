"""What changed between two evaluations of the same keys: under common noise most responses are equal, and cancel.

Standard errors are of means over prompts, whose samples are not independent. The unpaired one is that of evaluations
with prompts and noise of their own: common prompts alone, with other noise, lie between.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence

import numpy as np

from ...core.records import Rollout, SampleKey


def paired_change(rollouts: Sequence[Rollout], earlier: Mapping[SampleKey, Rollout]) -> dict[str, float]:
    """Name the change of the mean reward over what both evaluations have, and its standard errors.

    Args:
        rollouts: with a reward; those of one prompt share a group.
        earlier: of other weights.

    Returns:
        Nothing where fewer than two prompts are common.
    """
    now, before = defaultdict[int, list[float]](list), defaultdict[int, list[float]](list)
    num_equal = num_common = 0
    for rollout in rollouts:
        known = earlier.get(rollout.completion.key)
        if known is None or not np.array_equal(known.prompt.token_ids, rollout.prompt.token_ids):
            continue
        now[rollout.completion.group_id].append(rollout.reward.value)
        before[rollout.completion.group_id].append(known.reward.value)
        num_common += 1
        num_equal += np.array_equal(known.completion.token_ids, rollout.completion.token_ids)
    if len(now) < 2:
        return {}
    new, old = (np.array([np.mean(values) for values in group.values()]) for group in (now, before))
    return {
        "eval/reward_change": float((new - old).mean()),
        "eval/reward_change_stderr": _stderr(new - old),
        "eval/reward_change_unpaired_stderr": float(np.hypot(_stderr(new), _stderr(old))),
        "eval/responses_equal": num_equal / num_common,
    }


def _stderr(values: np.ndarray) -> float:
    return float(values.std(ddof=1) / np.sqrt(len(values)))
