"""Weights against the sampler: formulas by hand, and what a learner makes of a sampler that rounds otherwise."""

import dataclasses
import math

import pytest
import torch

from core.config import AlgorithmConfig, TrainerConfig
from learning.algorithms.off_policy import importance_figures, importance_weights
from learning.learner import Learner

POLICY = torch.tensor([[0.2, 0.9, 0.5], [0.4, 0.4, 0.0]]).log()
SAMPLING = torch.tensor([[0.4, 0.3, 0.5], [0.4, 0.5, 1.0]]).log()
MASK = torch.tensor([[True, True, True], [True, True, False]])


@pytest.mark.parametrize(
    ("mode", "expected"),
    [
        ("token_truncate", [[0.5, 2.0, 1.0], [1.0, 0.8, 0.0]]),
        ("token_mask", [[0.5, 0.0, 1.0], [1.0, 0.8, 0.0]]),
        ("sequence_truncate", [[1.5, 1.5, 1.5], [0.8, 0.8, 0.0]]),
        ("sequence_mask", [[1.5, 1.5, 1.5], [0.8, 0.8, 0.0]]),
        ("geometric_mask", [[1.0, 1.0, 1.0], [1.0, 1.0, 0.0]]),
    ],
)
def test_each_mode_by_hand(mode, expected):
    weights = importance_weights(POLICY, SAMPLING, MASK, mode=mode, cap=2.0, floor=0.0)
    assert weights.tolist() == [pytest.approx(row) for row in expected]


@pytest.mark.parametrize(
    ("mode", "floor", "cap", "expected"),
    [
        ("token_mask", 0.6, 2.0, [[0.0, 0.0, 1.0], [1.0, 0.8, 0.0]]),
        ("token_mask", 0.6, 4.0, [[0.0, 3.0, 1.0], [1.0, 0.8, 0.0]]),
        ("sequence_mask", 0.9, 2.0, [[1.5, 1.5, 1.5], [0.0, 0.0, 0.0]]),
        # the means are 1.5 ** (1 / 3) = 1.145 and 0.8 ** (1 / 2) = 0.894
        ("geometric_mask", 0.85, 1.14, [[0.0, 0.0, 0.0], [1.0, 1.0, 0.0]]),
        ("geometric_mask", 0.90, 1.15, [[1.0, 1.0, 1.0], [0.0, 0.0, 0.0]]),
    ],
)
def test_a_mask_is_a_band(mode, floor, cap, expected):
    weights = importance_weights(POLICY, SAMPLING, MASK, mode=mode, cap=cap, floor=floor)
    assert weights.tolist() == [pytest.approx(row) for row in expected]


def test_a_geometric_mean_does_not_shrink_with_the_length():
    def weights(length, mode):
        shape = (1, length)
        return importance_weights(
            torch.full(shape, -0.05),
            torch.zeros(shape),
            torch.ones(shape, dtype=torch.bool),
            mode=mode,
            cap=2.0,
            floor=0.5,
        )

    assert weights(4, "sequence_mask").all() and not weights(400, "sequence_mask").any()
    assert weights(4, "geometric_mask").all() and weights(400, "geometric_mask").all()


def test_a_sequence_above_the_cap_is_masked_whole_and_counted():
    weights = importance_weights(POLICY, SAMPLING, MASK, mode="sequence_mask", cap=1.2, floor=0.0)
    assert weights.tolist() == [[0.0] * 3, pytest.approx([0.8, 0.8, 0.0])]
    assert importance_figures(weights, MASK)["mismatch/masked_share"] == pytest.approx(3 / 5)


def test_a_long_light_sequence_is_not_taken_for_masked():
    policy, sampling, mask = (
        torch.full((1, 2000), -0.05),
        torch.zeros(1, 2000),
        torch.ones(1, 2000, dtype=torch.bool),
    )
    weights = importance_weights(policy, sampling, mask, mode="sequence_mask", cap=2.0, floor=0.0)
    assert 0.0 < float(weights.max()) < 1e-8
    assert importance_figures(weights, mask)["mismatch/masked_share"] == 0.0


def off_by(rollouts, shift):
    """The same samples by a sampler whose log-probabilities are all off by so much."""
    return [
        dataclasses.replace(
            one,
            completion=dataclasses.replace(
                one.completion,
                policy_logprobs=one.completion.policy_logprobs + shift,
                sampling_logprobs=one.completion.sampling_logprobs + shift,
            ),
        )
        for one in rollouts
    ]


def updated(make_model, rollouts, *, recompute_old=False, **algorithm):
    learner = Learner(
        make_model(),
        algorithm=AlgorithmConfig(kind="grpo", kl_coef=0.0, **algorithm),
        trainer=TrainerConfig(learning_rate=1e-3, minibatch_size=6, num_threads=1),
        temperature=1.0,
        seed=5,
        pad_token_id=0,
    )
    figures = learner.update(rollouts, recompute_old=recompute_old).figures
    return figures, {name: tensor.clone() for name, tensor in learner.weights()}


def test_recomputed_old_logprobs_undo_what_the_sampler_rounded(make_model, make_rollouts):
    rollouts = make_rollouts(make_model())
    figures, weights = updated(make_model, off_by(rollouts, 0.1), recompute_old=True)
    _, expected = updated(make_model, rollouts, recompute_old=True)
    assert figures["ratio_at_first_minibatch"] == pytest.approx(1.0, abs=1e-5)
    assert figures["mismatch/max_logprob_difference"] == pytest.approx(0.1, abs=1e-4)
    assert figures["mismatch/kl"] == pytest.approx(math.expm1(-0.1) + 0.1, abs=1e-4)
    assert all(torch.equal(tensor, expected[name]) for name, tensor in weights.items())
    plain, _ = updated(make_model, off_by(rollouts, 0.1))
    assert plain["ratio_at_first_minibatch"] == pytest.approx(math.exp(-0.1), abs=1e-4)


def test_masked_sequences_teach_nothing(make_model, make_rollouts):
    rollouts = make_rollouts(make_model())
    # the sampler thought every token less likely than it is: each sequence's ratio is above the cap
    odd = off_by(rollouts, -1.0)
    figures, weights = updated(
        make_model, odd, recompute_old=True, importance_sampling="sequence_mask", importance_sampling_cap=2.0
    )
    assert figures["mismatch/masked_share"] == 1.0 and figures["grad_norm"] == 0.0
    start = dict(make_model().named_parameters())
    assert all(torch.equal(tensor, start[name]) for name, tensor in weights.items())
    figures, _ = updated(
        make_model, odd, recompute_old=True, importance_sampling="token_truncate", importance_sampling_cap=2.0
    )
    assert figures["mismatch/importance_mean"] == pytest.approx(2.0)


def test_a_filter_is_in_no_weight(make_model, make_rollouts):
    """Top-p kept a mass of 0.8 at every token: that scales no token's loss, and masks no sequence."""
    filtered = [
        dataclasses.replace(
            one,
            completion=dataclasses.replace(
                one.completion, sampling_logprobs=one.completion.policy_logprobs - math.log(0.8)
            ),
        )
        for one in make_rollouts(make_model())
    ]
    figures, _ = updated(
        make_model,
        filtered,
        recompute_old=True,
        importance_sampling="sequence_mask",
        importance_sampling_floor=0.9,
    )
    assert figures["mismatch/importance_mean"] == pytest.approx(1.0, abs=1e-4)
    assert figures["mismatch/masked_share"] == 0.0


def test_a_geometric_mean_has_a_floor_of_its_own():
    weights = importance_weights(
        torch.full((1, 4), -0.3),
        torch.zeros(1, 4),
        torch.ones(1, 4, dtype=torch.bool),
        mode="geometric_mask",
        cap=1.01,
        floor=0.0,
    )
    assert not weights.any()


def test_weights_against_the_samplers_own_values_are_refused():
    with pytest.raises(ValueError, match="every weight would be 1; set old_logprobs auto or trainer"):
        AlgorithmConfig(kind="grpo", importance_sampling="token_mask", old_logprobs="sampler")
