"""Advantages against numbers made by hand."""

import torch
from pytest import approx

from rlhfspec.learning.training.objectives.advantages import (
    discounted_returns,
    explained_variance,
    gae,
    group_advantages,
    leave_one_out_advantages,
    place_terminal_reward,
    reinforce_pp_advantages,
    reinforce_pp_baseline_advantages,
    spread,
    whiten,
)


def test_gae_follows_the_recursion_and_stops_at_the_last_real_token():
    # gamma 0.5, lambda 0.5, r = (1, 0, 2), V = (1, 2, 3); a fourth position is padding with rubbish.
    # delta_2 = 2 - 3 = -1;              A_2 = -1
    # delta_1 = 0 + 0.5*3 - 2 = -0.5;    A_1 = -0.5 + 0.25*(-1) = -0.75
    # delta_0 = 1 + 0.5*2 - 1 = 1;       A_0 = 1 + 0.25*(-0.75) = 0.8125
    rewards = torch.tensor([[1.0, 0.0, 2.0, 0.0]])
    values = torch.tensor([[1.0, 2.0, 3.0, 99.0]])
    mask = torch.tensor([[True, True, True, False]])
    advantages, returns = gae(rewards, values, mask, gamma=0.5, lam=0.5)
    assert advantages[0].tolist() == approx([0.8125, -0.75, -1.0, 0.0])
    assert returns[0].tolist() == approx([1.8125, 1.25, 2.0, 0.0])


def test_gae_with_gamma_and_lambda_one_is_return_minus_value():
    # sums of rewards from each token on: (3, 2, 2); minus V (1, 2, 3): (2, 0, -1)
    mask = torch.ones(1, 3, dtype=torch.bool)
    rewards, values = torch.tensor([[1.0, 0.0, 2.0]]), torch.tensor([[1.0, 2.0, 3.0]])
    advantages, returns = gae(rewards, values, mask, gamma=1.0, lam=1.0)
    assert advantages[0].tolist() == approx([2.0, 0.0, -1.0])
    assert returns[0].tolist() == approx([3.0, 2.0, 2.0])


def test_discounted_returns():
    # gamma 0.5: G_2 = 4; G_1 = 0 + 2 = 2; G_0 = 1 + 1 = 2
    mask = torch.ones(1, 3, dtype=torch.bool)
    assert discounted_returns(torch.tensor([[1.0, 0.0, 4.0]]), mask, gamma=0.5)[0].tolist() == [2.0, 2.0, 4.0]


def test_the_reward_is_paid_on_the_last_real_token():
    mask = torch.tensor([[True, True, False], [True, True, True]])
    assert place_terminal_reward(torch.tensor([5.0, 7.0]), mask).tolist() == [[0, 5, 0], [0, 0, 7]]


def test_whitening_ignores_padding():
    # real values 1, 3: mean 2, unbiased variance 2 -> -+1 / sqrt(2)
    mask = torch.tensor([[True, True, False]])
    expected = [-(0.5**0.5), 0.5**0.5, 0.0]
    assert whiten(torch.tensor([[1.0, 3.0, 1000.0]]), mask)[0].tolist() == approx(expected, abs=1e-6)


def test_huge_rewards_are_scaled_like_any_others():
    # the square of 1e30 is no float32
    mask = torch.tensor([[True, True]])
    assert whiten(torch.tensor([[1e30, 3e30]]), mask)[0].tolist() == approx([-(0.5**0.5), 0.5**0.5])
    groups = group_advantages(torch.tensor([1e30, 3e30]), torch.tensor([0, 0]))
    assert groups.tolist() == approx([-(0.5**0.5), 0.5**0.5])


def test_one_token_has_nothing_to_be_compared_with():
    assert whiten(torch.tensor([[4.0]]), torch.tensor([[True]])).tolist() == [[0.0]]
    assert whiten(torch.tensor([[4.0]]), torch.tensor([[False]])).tolist() == [[0.0]]


def test_whitening_equal_values_gives_zero_not_nan():
    mask = torch.ones(1, 2, dtype=torch.bool)
    assert whiten(torch.tensor([[4.0, 4.0]]), mask)[0].tolist() == [0.0, 0.0]


def test_grpo_centres_on_the_group_mean_and_divides_by_its_deviation():
    # group 0: (1, 3): mean 2, unbiased std sqrt(2): -+0.7071; group 7: (0, 0, 3): mean 1, std sqrt(3)
    rewards = torch.tensor([1.0, 0.0, 3.0, 0.0, 3.0])
    groups = torch.tensor([0, 7, 0, 7, 7])
    advantages = group_advantages(rewards, groups)
    root3 = 3**0.5
    expected = [-(0.5**0.5), -1 / root3, 0.5**0.5, -1 / root3, 2 / root3]
    assert advantages.tolist() == approx(expected, rel=1e-5)


def test_trl_adds_a_larger_epsilon():
    # TRL 1.16 adds 1e-4, verl 0.9 and this project 1e-6: (1, 3) over sqrt(2) + 1e-4
    advantages = group_advantages(torch.tensor([1.0, 3.0]), torch.tensor([0, 0]), epsilon=1e-4)
    assert advantages.tolist() == approx([-1 / (2**0.5 + 1e-4), 1 / (2**0.5 + 1e-4)], abs=1e-6)


def test_rloo_compares_with_the_others():
    # group 0: (1, 3, 5) against 4, 3, 2; group 7: alone, nobody to compare with
    rewards, groups = torch.tensor([1.0, 9.0, 3.0, 5.0]), torch.tensor([0, 7, 0, 0])
    assert leave_one_out_advantages(rewards, groups).tolist() == approx([-3.0, 0.0, 0.0, 3.0])


def test_reinforce_pp_whitens_returns_over_the_batch():
    # rewards (0, 1) and (3): returns with gamma 0.5 are (0.5, 1) and (3); mean 1.5, unbiased variance 1.75
    rewards = torch.tensor([[0.0, 1.0], [3.0, 0.0]])
    mask = torch.tensor([[True, True], [True, False]])
    found = reinforce_pp_advantages(rewards, mask, gamma=0.5)[mask]
    assert found.tolist() == approx([(x - 1.5) / 1.75**0.5 for x in (0.5, 1.0, 3.0)])


def test_reinforce_pp_baseline_centres_on_the_group_and_whitens_over_tokens():
    # group means 2 and 5: -1 (two tokens), 1, 0, 0; over the five tokens mean -0.2, unbiased variance 0.7
    rewards, groups = torch.tensor([1.0, 3.0, 5.0, 5.0]), torch.tensor([0, 0, 1, 1])
    mask = torch.tensor([[True, True], [True, False], [True, False], [True, False]])
    found = reinforce_pp_baseline_advantages(rewards, groups, mask)[mask]
    assert found.tolist() == approx([(x + 0.2) / 0.7**0.5 for x in (-1, -1, 1, 0, 0)], abs=1e-6)


def test_a_response_that_was_cut_goes_on_with_the_value_after_it():
    # gamma 0.5, lambda 1, r = (0, 1), V = (0.5, 1): after the cut 2, after the end nothing
    rewards, values = torch.tensor([[0.0, 1.0]] * 2), torch.tensor([[0.5, 1.0]] * 2)
    mask = torch.ones(2, 2, dtype=torch.bool)
    after = torch.tensor([2.0, 0.0])
    advantages, returns = gae(rewards, values, mask, gamma=0.5, lam=1.0, last_values=after)
    # G_1 = 1 + 0.5 * 2 = 2, G_0 = 1; without: 1, 0.5
    assert returns.tolist() == [[1.0, 2.0], [0.5, 1.0]]
    assert advantages.tolist() == [[0.5, 1.0], [0.0, 0.0]]
    assert discounted_returns(rewards, mask, gamma=0.5, last_values=after).tolist() == returns.tolist()


def test_gae_passes_over_tokens_that_were_given():
    # r and V at tokens 0 and 2 only; what lies between is as if it were not there
    mask = torch.tensor([[True, False, True]])
    advantages, returns = gae(
        torch.tensor([[0.0, 9.0, 2.0]]), torch.tensor([[1.0, 9.0, 3.0]]), mask, gamma=0.5, lam=0.5
    )
    short, short_returns = gae(
        torch.tensor([[0.0, 2.0]]), torch.tensor([[1.0, 3.0]]), torch.ones(1, 2, dtype=torch.bool),
        gamma=0.5, lam=0.5,
    )  # fmt: skip
    assert advantages[mask].tolist() == short[0].tolist()
    assert returns[mask].tolist() == short_returns[0].tolist()
    assert float(advantages[0, 1]) == 0.0


def test_dr_grpo_does_not_divide():
    advantages = group_advantages(torch.tensor([1.0, 3.0]), torch.tensor([0, 0]), divide_by_std=False)
    assert advantages.tolist() == [-1.0, 1.0]


def test_a_group_of_equal_rewards_gives_exactly_zero():
    # 0.1 three times: the float32 mean is not 0.1, so centring alone would leave a remainder to blow up
    rewards = torch.tensor([0.1, 0.1, 0.1, 1.0, 0.0])
    groups = torch.tensor([4, 4, 4, 5, 5])
    advantages = group_advantages(rewards, groups)
    assert advantages[:3].tolist() == [0.0, 0.0, 0.0]
    assert advantages[3] > 0 > advantages[4]


def test_spread_repeats_over_real_tokens_only():
    mask = torch.tensor([[True, False], [True, True]])
    assert spread(torch.tensor([2.0, -1.0]), mask).tolist() == [[2.0, 0.0], [-1.0, -1.0]]


def test_explained_variance():
    mask = torch.ones(1, 2, dtype=torch.bool)
    returns = torch.tensor([[0.0, 2.0]])
    assert explained_variance(returns, returns, mask) == 1.0
    # errors (0, 1): variance 0.25; returns' variance 1 -> 0.75
    assert explained_variance(torch.tensor([[0.0, 1.0]]), returns, mask) == approx(0.75)
    assert explained_variance(returns, torch.ones(1, 2), mask) == 0.0
