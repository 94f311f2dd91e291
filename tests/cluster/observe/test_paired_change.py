"""What changed between two evaluations of the same keys."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from made_rollouts import rollout

from rlhfspec.cluster.observe.paired_change import paired_change
from rlhfspec.core.metrics import require_declared


def change(now, before):
    return paired_change(now, {one.completion.key: one for one in before})


def test_equal_evaluations_differ_by_nothing_and_without_any_error():
    rollouts = [rollout(n, reward=float(n), group=n) for n in range(4)]
    found = change(rollouts, rollouts)
    require_declared(found)
    assert found["eval/reward_change"] == found["eval/reward_change_stderr"] == 0.0
    assert found["eval/responses_equal"] == 1.0
    assert found["eval/reward_change_unpaired_stderr"] == pytest.approx(np.std(range(4), ddof=1) / 2 * 2**0.5)


def test_the_error_is_that_of_means_over_prompts_of_what_both_have():
    before = [rollout(n, reward=1.0, group=n // 2, num_tokens=3) for n in range(8)]
    now = [rollout(n, reward=1.0 + (n < 2), group=n // 2) for n in range(6)]
    found = change(now, before)
    assert found["eval/reward_change"] == pytest.approx(1 / 3)
    assert found["eval/reward_change_stderr"] == pytest.approx(np.std([1, 0, 0], ddof=1) / 3**0.5)
    assert found["eval/responses_equal"] == 0.0


def test_another_prompt_under_the_same_key_is_no_pair():
    before = [rollout(n, reward=1.0, group=n) for n in range(3)]
    now = [replace(one, prompt=replace(one.prompt, token_ids=np.array([9]))) for one in before]
    assert change(now, before) == {} == change(now, [])
