"""A mixture is the weighted sum of its parts, each kept; what one part cannot score is unscored."""

import numpy as np
from pydantic import ValidationError
from pytest import approx, mark, raises

from rlhfspec.core.config import RewardConfig
from rlhfspec.core.errors import ConfigError, RewardError
from rlhfspec.core.records import FinishReason, Prompt, ResponseFacts, Reward, Unscored
from rlhfspec.learning.rewards.reward_function import build_reward

LENGTH = {"name": "length_of", "kind": "odd_rewards:fine", "weight": 0.5}
GSM8K = {"name": "solved", "kind": "gsm8k", "weight": 2.0}


def prompts(count: int, reference: str = "#### 7") -> list[Prompt]:
    return [Prompt(prompt_id=i, token_ids=np.array([1]), text="q", reference=reference) for i in range(count)]


def test_a_mixture_is_the_weighted_sum_and_keeps_its_parts_and_theirs():
    stage = build_reward(RewardConfig(parts=[LENGTH, GSM8K]))  # type: ignore[arg-type]
    right, wrong = stage.score(prompts(2), ["#### 7", "#### 8!"])
    assert right.value == approx(0.5 * 6 + 2.0 * 1.0)
    assert right.parts == {"length_of": 6.0, "solved": 1.0, "solved/correct": 1.0, "solved/format": 1.0}
    assert wrong.parts["solved/correct"] == 0.0


def test_a_part_is_scaled_before_its_weight_and_keeps_what_it_was():
    part = LENGTH | {"mean": 4.0, "std": 2.0, "clip": (-1.0, 0.5)}
    [reward] = build_reward(RewardConfig(parts=[part])).score(prompts(1), ["#### 7"])  # type: ignore[arg-type]
    assert reward.value == 0.25 and reward.parts == {"length_of": 0.5, "length_of/unscaled": 6.0}


def test_what_one_part_cannot_score_is_unscored_and_the_parts_behind_are_not_asked():
    parts = [{"name": "first", "kind": "odd_rewards:raises"}, GSM8K]
    stage = build_reward(RewardConfig(parts=parts, on_error="skip"))  # type: ignore[arg-type]
    # the second part would raise for the first sample's prompt as well
    asked = [prompts(1, reference="none")[0], prompts(2)[1]]
    bad, good = stage.score_each(asked, ["bad", "#### 7"])
    assert isinstance(bad, Unscored) and "odd_rewards:raises, sample 0 of the batch (prompt 0)" in bad.reason
    assert isinstance(good, Reward) and good.parts["solved"] == 1.0


def test_a_rule_that_cannot_score_one_prompt_scores_the_others():
    stage = build_reward(RewardConfig(kind="gsm8k", on_error="skip"))
    asked = [prompts(1, reference="none")[0], prompts(2)[1]]
    bad, good = stage.score_each(asked, ["#### 7", "#### 7"])
    assert isinstance(bad, Unscored) and "prompt 0" in bad.reason
    assert isinstance(good, Reward) and good.value == approx(1.0)
    with raises(RewardError, match="prompt 0"):
        build_reward(RewardConfig(kind="gsm8k")).score(asked, ["#### 7", "#### 7"])


def test_shaping_comes_after_the_mixture_and_needs_the_facts():
    config = RewardConfig(parts=[LENGTH], shaping={"missing_eos_penalty": 1.0})  # type: ignore[arg-type]
    stage = build_reward(config)
    cut = ResponseFacts(sample_index=3, num_tokens=9, finish_reason=FinishReason.LENGTH)
    [reward] = stage.score(prompts(1), ["four"], [cut])
    assert reward.value == 1.0
    assert reward.parts == {"length_of": 4.0, "unshaped": 2.0, "missing_eos": -1.0}
    with raises(ConfigError, match="pass `facts`"):
        stage.score(prompts(1), ["four"])


@mark.parametrize(
    ("section", "words"),
    [
        ({"kind": "model"}, "reward.model names none"),
        ({"kind": "serve"}, "exactly one of reward.url"),
        ({"kind": "serve", "url": "http://a", "app": "b"}, "exactly one of reward.url"),
        ({"kind": "serve", "url": "a:8000"}, "must begin with http"),
        ({"kind": "format"}, "reward.pattern is null"),
        ({"kind": "format", "pattern": "("}, "no regular expression"),
        ({"clip": (1.0, 1.0)}, "low below high"),
        ({"parts": [GSM8K], "kind": "gsm8k"}, "excludes reward.kind"),
        ({"parts": [GSM8K], "mean": 1.0}, "excludes reward.mean"),
        ({"parts": [GSM8K, GSM8K]}, "two parts called 'solved'"),
        ({"parts": [GSM8K | {"name": "mean"}]}, "a figure of its own"),
        ({"parts": [GSM8K | {"name": "a/b"}]}, "name"),
    ],
)
def test_a_section_that_says_two_things_is_refused(section, words):
    with raises(ValidationError, match=words):
        RewardConfig.model_validate(section)


def test_a_written_out_mixture_can_be_read_again():
    config = RewardConfig.model_validate({"parts": [GSM8K]})
    assert RewardConfig.model_validate(config.model_dump(mode="json")) == config
