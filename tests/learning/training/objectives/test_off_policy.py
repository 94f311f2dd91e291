"""Weights against the sampler: formulas by hand, and what a learner makes of a sampler that is another policy."""

import dataclasses
import math

import numpy as np
import pytest
import torch

from rlhfspec.core.config import AlgorithmConfig, TrainerConfig
from rlhfspec.core.errors import ConfigError, NumericsError
from rlhfspec.core.records import WeightSpan
from rlhfspec.core.settings.correction import CORRECTIONS, CorrectionConfig
from rlhfspec.learning.training.experience import collate, token_versions
from rlhfspec.learning.training.learner import Learner
from rlhfspec.learning.training.objectives.off_policy import importance_weights

POLICY = torch.tensor([[0.2, 0.9, 0.5], [0.4, 0.4, 0.0]]).log()
SAMPLING = torch.tensor([[0.4, 0.3, 0.5], [0.4, 0.5, 1.0]]).log()
MASK = torch.tensor([[True, True, True], [True, True, False]])


def weights_of(correction, policy=POLICY, sampling=SAMPLING, mask=MASK):
    return importance_weights(policy, sampling, mask, CorrectionConfig(**correction))


@pytest.mark.parametrize(
    ("correction", "expected"),
    [
        ({"kind": "tis"}, [[0.5, 2.0, 1.0], [1.0, 0.8, 0.0]]),
        ({"kind": "decoupled"}, [[0.5, 3.0, 1.0], [1.0, 0.8, 0.0]]),
        ({"weight": "token", "weight_cap": None}, [[0.5, 3.0, 1.0], [1.0, 0.8, 0.0]]),
        ({"kind": "sequence_tis"}, [[1.5, 1.5, 1.5], [0.8, 0.8, 0.0]]),
        ({"kind": "sequence_tis", "weight_cap": 1.2}, [[1.2, 1.2, 1.2], [0.8, 0.8, 0.0]]),
        ({"kind": "icepop", "mask_low": 0.4}, [[0.5, 3.0, 1.0], [1.0, 0.8, 0.0]]),
        ({"kind": "icepop", "mask_low": 0.6, "mask_high": 2.0}, [[0.0, 0.0, 1.0], [1.0, 0.8, 0.0]]),
        ({"kind": "mis"}, [[1.5, 1.5, 1.5], [0.8, 0.8, 0.0]]),
        ({"kind": "mis", "mask_low": 0.9}, [[1.5, 1.5, 1.5], [0.0, 0.0, 0.0]]),
        ({"kind": "mis", "mask_low": 0.0, "mask_high": 1.2}, [[0.0, 0.0, 0.0], [0.8, 0.8, 0.0]]),
        # the means are 1.5 ** (1 / 3) = 1.145 and 0.8 ** (1 / 2) = 0.894
        ({"kind": "geometric"}, [[0.0, 0.0, 0.0], [0.0, 0.0, 0.0]]),
        ({"kind": "geometric", "mask_low": 0.85, "mask_high": 1.14}, [[0.0, 0.0, 0.0], [1.0, 1.0, 0.0]]),
        ({"kind": "geometric", "mask_low": 0.90, "mask_high": 1.15}, [[1.0, 1.0, 1.0], [0.0, 0.0, 0.0]]),
        # weights of tokens, masks of responses
        ({"weight": "token", "mask": "sequence", "mask_low": 0.9}, [[0.5, 2.0, 1.0], [0.0, 0.0, 0.0]]),
    ],
)
def test_each_kind_by_hand(correction, expected):
    weights, _ = weights_of(correction)
    assert weights.tolist() == [pytest.approx(row) for row in expected]


def test_what_was_cut_and_masked_is_counted():
    _, metrics = weights_of({"kind": "tis"})
    assert metrics == pytest.approx(
        {
            "mismatch/importance_mean": (0.5 + 2.0 + 1.0 + 1.0 + 0.8) / 5,
            "mismatch/effective_share": 5.3**2 / (5 * (0.25 + 4.0 + 1.0 + 1.0 + 0.64)),
            "mismatch/clipped_share": 1 / 5,
            "mismatch/masked_share": 0.0,
            "mismatch/masked_response_share": 0.0,
        }
    )
    _, metrics = weights_of({"kind": "mis", "mask_low": 0.0, "mask_high": 1.2})
    assert metrics["mismatch/masked_share"] == pytest.approx(3 / 5)
    assert metrics["mismatch/masked_response_share"] == 0.5
    # one token of three: the response is still learned from
    _, metrics = weights_of({"kind": "icepop", "mask_low": 0.6})
    assert metrics["mismatch/masked_share"] == pytest.approx(1 / 5)
    assert metrics["mismatch/masked_response_share"] == 0.0
    _, metrics = weights_of({"kind": "geometric"})
    assert metrics["mismatch/masked_response_share"] == 1.0 and metrics["mismatch/effective_share"] == 0.0


def test_a_geometric_mean_does_not_shrink_with_the_length():
    def kept(length, **correction):
        shape = (1, length)
        mask = torch.ones(shape, dtype=torch.bool)
        return weights_of(correction, torch.full(shape, -0.05), torch.zeros(shape), mask)[0].all()

    assert kept(4, kind="mis") and not kept(400, kind="mis")
    assert kept(4, kind="geometric", mask_high=2.0) and kept(400, kind="geometric", mask_high=2.0)


def test_a_long_light_sequence_is_not_taken_for_masked():
    policy, sampling, mask = (
        torch.full((1, 2000), -0.05),
        torch.zeros(1, 2000),
        torch.ones(1, 2000, dtype=torch.bool),
    )
    weights, metrics = weights_of({"kind": "mis", "mask_low": 0.0}, policy, sampling, mask)
    assert 0.0 < float(weights.max()) < 1e-8
    assert metrics["mismatch/masked_share"] == 0.0


def with_logprobs(rollout, logprobs):
    completion = dataclasses.replace(rollout.completion, policy_logprobs=logprobs, sampling_logprobs=logprobs)
    return dataclasses.replace(rollout, completion=completion)


def with_spans(rollout, spans):
    """Spans are (first position, version)."""
    made = tuple(WeightSpan(first_position=first, weight_version=version) for first, version in spans)
    return dataclasses.replace(rollout, completion=dataclasses.replace(rollout.completion, weight_spans=made))


def off_by(rollouts, shift):
    """The same samples by a sampler whose log-probabilities are all off by so much."""
    return [with_logprobs(one, one.completion.policy_logprobs + shift) for one in rollouts]


def new_learner(make_model, **algorithm):
    return Learner(
        make_model(),
        algorithm=AlgorithmConfig(kind="grpo", kl_coef=0.0, **algorithm),
        trainer=TrainerConfig(learning_rate=1e-3, minibatch_size=6, num_threads=1),
        temperature=1.0,
        seed=5,
        pad_token_id=0,
    )


def updated(make_model, rollouts, *, recompute_old=False, **algorithm):
    learner = new_learner(make_model, **algorithm)
    metrics = learner.update(rollouts, recompute_old=recompute_old).metrics
    return metrics, {name: tensor.clone() for name, tensor in learner.weights()}


def test_recomputed_old_logprobs_undo_what_the_sampler_rounded(make_model, make_rollouts):
    rollouts = make_rollouts(make_model())
    metrics, weights = updated(make_model, off_by(rollouts, 0.1), recompute_old=True)
    _, expected = updated(make_model, rollouts, recompute_old=True)
    assert metrics["ratio_at_first_minibatch"] == pytest.approx(1.0, abs=1e-5)
    assert metrics["mismatch/max_logprob_difference"] == pytest.approx(0.1, abs=1e-4)
    assert metrics["mismatch/kl"] == pytest.approx(math.expm1(-0.1) + 0.1, abs=1e-4)
    assert all(torch.equal(tensor, expected[name]) for name, tensor in weights.items())
    plain, _ = updated(make_model, off_by(rollouts, 0.1))
    assert plain["ratio_at_first_minibatch"] == pytest.approx(math.exp(-0.1), abs=1e-4)


def test_masked_responses_teach_nothing(make_model, make_rollouts):
    rollouts = make_rollouts(make_model())
    # the sampler thought every token less likely than it is: each response's ratio is above the band
    odd = off_by(rollouts, -1.0)
    metrics, weights = updated(make_model, odd, recompute_old=True, correction={"kind": "mis"})
    assert metrics["mismatch/masked_response_share"] == 1.0 and metrics["grad_norm"] == 0.0
    start = dict(make_model().named_parameters())
    assert all(torch.equal(tensor, start[name]) for name, tensor in weights.items())
    metrics, _ = updated(make_model, odd, recompute_old=True, correction={"kind": "tis"})
    assert metrics["mismatch/importance_mean"] == pytest.approx(2.0)
    assert metrics["mismatch/clipped_share"] == 1.0
    assert metrics["mismatch/ratio_mean"] == pytest.approx(math.e, rel=1e-4)
    assert metrics["mismatch/ratio_max"] == pytest.approx(math.e, rel=1e-4)


def test_a_filter_is_in_no_weight(make_model, make_rollouts):
    """Top-p kept a mass of 0.8 at every token: that scales no token's loss, and masks no response."""
    filtered = [
        dataclasses.replace(
            one,
            completion=dataclasses.replace(
                one.completion, sampling_logprobs=one.completion.policy_logprobs - math.log(0.8)
            ),
        )
        for one in make_rollouts(make_model())
    ]
    metrics, _ = updated(
        make_model, filtered, recompute_old=True, correction={"kind": "mis", "mask_low": 0.9}
    )
    assert metrics["mismatch/importance_mean"] == pytest.approx(1.0, abs=1e-4)
    assert metrics["mismatch/masked_share"] == 0.0


def with_the_trainers_own_logprobs(make_model, rollouts):
    """The same samples by a sampler that is the trainer, to the bit."""
    learner = new_learner(make_model)
    experience = collate(rollouts, pad_token_id=0)
    own = learner._first.of(experience, ["own"]).logprobs["own"]
    return [
        with_logprobs(rollout, own[row][experience.mask[row]].numpy()) for row, rollout in enumerate(rollouts)
    ]


@pytest.mark.parametrize("recompute_old", [False, True])
@pytest.mark.parametrize("kind", [kind for kind in CORRECTIONS if kind != "none"])
def test_nothing_changes_where_sampler_and_trainer_agree_to_the_bit(
    make_model, make_rollouts, kind, recompute_old
):
    rollouts = with_the_trainers_own_logprobs(make_model, make_rollouts(make_model()))
    _, expected = updated(make_model, rollouts)
    metrics, weights = updated(make_model, rollouts, recompute_old=recompute_old, correction={"kind": kind})
    assert metrics["mismatch/importance_mean"] == metrics["mismatch/effective_share"] == 1.0
    assert metrics["mismatch/masked_share"] == metrics["mismatch/clipped_share"] == 0.0
    assert metrics["mismatch/lag_max"] == 0.0
    start = dict(make_model().named_parameters())
    assert any(not torch.equal(tensor, start[name]) for name, tensor in weights.items())
    assert all(torch.equal(tensor, expected[name]) for name, tensor in weights.items())


def test_a_tokens_lag_is_counted_from_the_version_it_came_from(make_model, make_rollouts):
    rollouts = make_rollouts(make_model(), pairs=[(np.array([3, 4]), np.array([5, 6, 7, 8]))] * 6)
    spans = [((0, 0),), ((0, 0), (1, 2)), ((0, 1), (3, 2)), ((0, 2),), ((0, 2),), ((0, 2),)]
    rollouts = [with_spans(one, each) for one, each in zip(rollouts, spans, strict=True)]
    learner = new_learner(make_model)
    learner.weight_version = 2
    metrics = learner.update(rollouts).metrics
    assert metrics["mismatch/lag_max"] == 2.0
    assert metrics["mismatch/lag_mean"] == (4 * 2 + 1 * 2 + 3 * 1) / 24


def test_stale_samples_are_not_corrected_by_weights_that_are_all_1(make_model, make_rollouts):
    learner = new_learner(make_model, correction={"kind": "decoupled"})
    learner.weight_version = 1
    with pytest.raises(
        ConfigError, match=r"1 versions before weight version 1 .* kind decoupled, whose weights"
    ):
        learner.update(make_rollouts(learner.model))
    assert learner.weight_version == 1


@pytest.mark.parametrize("spans", [(), ((1, 0),), ((0, 0), (2, 1), (2, 2)), ((0, 0), (3, 1), (1, 2))])
def test_spans_that_are_no_list_of_versions_are_refused(make_model, make_rollouts, spans):
    broken = with_spans(make_rollouts(make_model())[0], spans)
    with pytest.raises(NumericsError, match=r"sample 0 .* weight spans begin at positions"):
        token_versions(broken.completion)


def test_several_versions_give_the_same_update_in_any_order(make_model, make_rollouts):
    rollouts = [
        with_spans(one, ((0, 0), (1, 1)) if one.completion.num_tokens > 1 else ((0, 1),))
        for one in off_by(make_rollouts(make_model()), 0.3)
    ]
    correction = {"kind": "decoupled"}
    _, one = updated(make_model, rollouts, recompute_old=True, correction=correction)
    _, other = updated(make_model, rollouts[::-1], recompute_old=True, correction=correction)
    assert all(torch.equal(tensor, other[name]) for name, tensor in one.items())
