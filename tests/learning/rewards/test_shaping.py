"""Shaping: the papers' formulas at their corners, and what is kept of the value before."""

from dataclasses import replace

from pytest import approx, mark, raises

from rlhfspec.core.config import Config
from rlhfspec.core.records import FinishReason, ResponseFacts, Reward
from rlhfspec.core.settings.reward import OverlongConfig, Scorer, ShapingConfig
from rlhfspec.learning.rewards.reward_stage import shape, soft_overlong_punishment, standardise


def facts(num_tokens: int, finish_reason: FinishReason = FinishReason.STOP) -> ResponseFacts:
    return ResponseFacts(sample_index=0, num_tokens=num_tokens, finish_reason=finish_reason)


@mark.parametrize(
    ("num_tokens", "punishment"),
    # DAPO's own numbers: at most 20,480 tokens, of which the last 4,096 are the buffer
    [(1, 0.0), (16384, 0.0), (17408, -0.25), (18432, -0.5), (20480, -1.0), (20481, -1.0)],
)
def test_soft_overlong_punishment_is_equation_13_of_dapo(num_tokens, punishment):
    assert soft_overlong_punishment(num_tokens, max_tokens=20480, buffer_tokens=4096) == approx(punishment)


def test_every_term_is_taken_off_and_kept_beside_the_value_before():
    config = ShapingConfig(
        overlong=OverlongConfig(max_tokens=100, buffer_tokens=50, factor=2.0),
        length_penalty=0.001,
        missing_eos_penalty=0.25,
    )
    shaped = shape(Reward(value=1.0, parts={"a": 3.0}), facts(100, FinishReason.LENGTH), config)
    assert shaped.parts == {
        "a": 3.0,
        "unshaped": 1.0,
        "overlong": -2.0,
        "length": approx(-0.1),
        "missing_eos": -0.25,
    }
    assert shaped.value == approx(1.0 - 2.0 - 0.1 - 0.25)


def test_an_environments_tokens_count_towards_the_limit_but_cost_nothing():
    config = ShapingConfig(overlong=OverlongConfig(max_tokens=100, buffer_tokens=50), length_penalty=0.01)
    told = replace(facts(40), num_given_tokens=60)
    assert shape(Reward(value=0.0), told, config).parts == {
        "unshaped": 0.0,
        "overlong": -1.0,
        "length": approx(-0.4),
    }


def test_a_response_that_ended_by_itself_misses_no_end():
    config = ShapingConfig(missing_eos_penalty=1.0)
    assert shape(Reward(value=0.5), facts(7), config).value == 0.5
    assert shape(Reward(value=0.5), facts(7, FinishReason.LENGTH), config).value == -0.5


def test_each_turn_behind_the_first_costs():
    config = ShapingConfig(turn_penalty=0.25)
    turns = (("assistant", "a"), ("tool", "b"), ("assistant", "c"), ("user", "d"), ("assistant", "e"))
    assert shape(Reward(value=1.0), replace(facts(9), turns=turns), config).value == 0.5
    assert shape(Reward(value=1.0), facts(9), config).parts == {"unshaped": 1.0, "turns": 0.0}


def test_turns_cost_nothing_where_there_is_one():
    given = {
        "data": {"task": "chain"},
        "models": {"draft": "d"},
        "reward": {"shaping": {"turn_penalty": 0.1}},
    }
    with raises(ValueError, match="every response is one turn"):
        Config.model_validate(given)


def test_without_shaping_the_reward_is_the_same_object():
    reward = Reward(value=0.5)
    assert shape(reward, facts(7), ShapingConfig()) is reward


def test_scores_are_standardised_before_they_are_clipped():
    scorer = Scorer(kind="model", model="any", mean=2.0, std=4.0, clip=(-1.0, 1.0))
    assert [standardise(value, scorer) for value in (2.0, 4.0, 100.0, -100.0)] == [0.0, 0.5, 1.0, -1.0]
