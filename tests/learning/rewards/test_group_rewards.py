"""Functions that take lists are given the samples of a prompt, whatever order and batches these come in."""

import os
import signal
from dataclasses import replace

import numpy as np
from odd_rewards import against_the_others
from pytest import approx, raises

from rlhfspec.core.config import RewardConfig
from rlhfspec.core.errors import ConfigError, RewardError
from rlhfspec.core.records import FinishReason, Prompt, ResponseFacts, Reward, Unscored
from rlhfspec.learning.rewards.reward_function import build_reward

TEXTS = {0: ("aaaa", "aaa", "a"), 7: ("b", "bbbbbb", "bb")}


def samples(texts=TEXTS):
    """(prompt, response, facts) of each, the groups side by side."""
    return [
        (
            Prompt(prompt_id=40 + group, token_ids=np.array([1]), text="p"),
            text,
            ResponseFacts(
                sample_index=100 * group + place,
                num_tokens=5,
                finish_reason=FinishReason.STOP,
                group_id=group,
            ),
        )
        for group, those in texts.items()
        for place, text in enumerate(those)
    ]


def score(rows, name="against_the_others", **settings):
    stage = build_reward(RewardConfig(**{"kind": f"odd_rewards:{name}", "timeout_s": 30.0, **settings}))
    prompts, texts, facts = zip(*rows, strict=True)
    return stage.score_each(prompts, texts, facts)


def values(rows, **settings):
    return {
        row[2].sample_index: outcome.value
        for row, outcome in zip(rows, score(rows, **settings), strict=True)
        if isinstance(outcome, Reward)
    }


def test_a_comparing_function_gives_what_it_gives_for_the_whole_list():
    expected = [number for those in TEXTS.values() for number in against_the_others(list(those))]
    assert expected[:3] == approx([1.069, 0.267, -1.336], abs=1e-3)
    found = values(samples())
    assert [*found.values()] == expected
    assert values(samples(), scope="sample") == dict.fromkeys(found, 0.0)


def test_neither_arrival_nor_other_groups_nor_a_lost_child_change_a_group_s_rewards():
    rows, expected = samples(), values(samples())
    mixed = [rows[place] for place in (4, 2, 0, 5, 3, 1)]
    assert values(mixed) == expected == values(rows[:3]) | values(rows[:2:-1])
    stage = build_reward(RewardConfig(kind="odd_rewards:against_the_others"))
    os.kill(stage._parts[0][1]._child._process.pid, signal.SIGKILL)
    stage._parts[0][1]._child._process.wait()
    prompts, texts, facts = zip(*mixed, strict=True)
    assert [reward.value for reward in stage.score(prompts, texts, facts)] == [
        expected[one.sample_index] for one in facts
    ]


def test_an_async_function_with_lists_of_ours_has_each_in_the_order_of_the_sample_index():
    rows = samples()[::-1]
    for outcome, (_, _, facts) in zip(score(rows, "in_turn"), rows, strict=True):
        index = facts.sample_index
        assert outcome == Reward(value=float(index % 100), parts={"index": float(index)})


def test_whose_group_nobody_knows_is_alone():
    rows = [(prompt, text, replace(facts, group_id=None)) for prompt, text, facts in samples()]
    assert set(values(rows).values()) == {0.0}


def test_a_call_that_hangs_names_its_samples_and_the_other_groups_are_scored():
    rows = samples({0: ("hang", "aaa"), 7: TEXTS[7]})
    outcomes = score(rows, on_error="skip", timeout_s=0.1)
    assert [type(one) for one in outcomes] == [Unscored] * 2 + [Reward] * 3
    for place in (0, 1):
        assert (
            f"sample {place} (prompt 40) did not return within reward.timeout_s (0.1 s for each of the 2 responses of "
            "the prompt, which it is given together)"
        ) in outcomes[place].reason


def test_a_group_is_left_out_as_a_whole():
    """The files of a run hold whole groups, so whoever scores them again compares the same responses."""
    rows = samples({0: ("bad", "aaa", "a"), 7: TEXTS[7]})
    outcomes = score(rows, on_error="skip")
    assert [type(one) for one in outcomes] == [Unscored] * 3 + [Reward] * 3
    assert all("sample 0 (prompt 40) returned None" in one.reason for one in outcomes[:3])
    with raises(RewardError, match=r"sample 0 \(prompt 40\) returned None"):
        score(rows)


def test_a_scope_without_effect_is_refused():
    with raises(ConfigError, match=r"reward.scope is group, and 'fine' takes one response and no lists"):
        build_reward(RewardConfig(kind="odd_rewards:fine", scope="group"))
    with raises(ValueError, match=r"reward.scope group is of Python functions"):
        RewardConfig(kind="gsm8k", scope="group")
