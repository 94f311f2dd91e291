"""Forwards computed ahead of the update: the update is the same to the bit, and computes only what is missing."""

import dataclasses

import pytest
import torch

from rlhfspec.core.config import AlgorithmConfig, TrainerConfig
from rlhfspec.core.errors import NumericsError
from rlhfspec.core.settings.trainer import LoraConfig
from rlhfspec.learning.trainer.learner import Learner

BLOCK = 3
CASES = {
    "grpo": {"algorithm": AlgorithmConfig(kind="grpo", kl_coef=0.1)},
    "grpo, own": {"algorithm": AlgorithmConfig(kind="grpo", kl_coef=0.1), "recompute_old": True},
    "grpo, own, no KL": {"algorithm": AlgorithmConfig(kind="grpo", kl_coef=0.0), "recompute_old": True},
    "ppo": {"algorithm": AlgorithmConfig(kind="ppo", kl_coef=0.1, kl_placement="reward")},
    "ppo, own": {"algorithm": AlgorithmConfig(kind="ppo", kl_coef=0.1), "recompute_old": True},
    "lora": {"algorithm": AlgorithmConfig(kind="grpo", kl_coef=0.1), "lora": LoraConfig(rank=4)},
}


class Counted:
    """Counts the forwards of a learner's models that no gradient needs, by number of response tokens."""

    def __init__(self, learner: Learner) -> None:
        self.num = 0
        for model in {learner.model, learner.reference or learner.model}:
            model.register_forward_hook(self._count)

    def _count(self, *_: object) -> None:
        self.num += not torch.is_grad_enabled()


def new_learner(make_model, algorithm, lora=None) -> Learner:
    trainer = TrainerConfig(
        learning_rate=1e-2, minibatch_size=4, max_tokens_per_forward=24, block_samples=BLOCK, lora=lora
    )
    return Learner(
        make_model(), algorithm=algorithm, trainer=trainer, temperature=1.0, seed=5, pad_token_id=0
    )


def bits(learner: Learner) -> dict[str, bytes]:
    return {name: tensor.clone().numpy().tobytes() for name, tensor in learner.weights()}


@pytest.fixture(params=CASES)
def case(request):
    settings = dict(CASES[request.param])
    if "lora" in settings:
        pytest.importorskip("peft")
    return settings


@pytest.mark.parametrize("ahead", [[2], [3, 0], [1, 2, 0, 3]], ids=str)
def test_an_update_is_the_same_to_the_bit_whichever_blocks_were_computed_before(
    case, ahead, make_model, make_rollouts
):
    """Ten samples in blocks of three, the last of one; two updates, so that the second starts from other weights."""
    recompute = case.pop("recompute_old", False)
    plain, streamed = new_learner(make_model, **case), new_learner(make_model, **case)
    for seed in (0, 1):
        rollouts = make_rollouts(make_model(), 10, seed=seed)
        expected = plain.update(rollouts, recompute_old=recompute).figures
        for block in ahead:
            # in any order, as they were scored
            streamed.forward_ahead(rollouts[BLOCK * block :][:BLOCK][::-1], recompute_old=recompute)
        figures = streamed.update(rollouts[::-1], recompute_old=recompute).figures
        assert figures.pop("num_samples_ahead") == len([i for i in range(10) if i // BLOCK in ahead])
        assert expected.pop("num_samples_ahead") == 0
        assert figures == expected
    assert bits(streamed) == bits(plain)


def test_the_update_computes_only_what_is_missing(case, make_model, make_rollouts):
    recompute = case.pop("recompute_old", False)
    rollouts = make_rollouts(make_model(), 9)
    learner = new_learner(make_model, **case)
    counted = Counted(learner)
    learner.forward_ahead(rollouts[:3], recompute_old=recompute)
    learner.forward_ahead(rollouts[3:6], recompute_old=recompute)
    before = counted.num
    learner.update(rollouts, recompute_old=recompute)
    in_update = counted.num - before
    whole = new_learner(make_model, **case)
    counted_whole = Counted(whole)
    whole.update(rollouts, recompute_old=recompute)
    assert 0 < in_update < counted_whole.num == before + in_update


def test_what_was_computed_of_other_tokens_or_other_company_is_not_used(make_model, make_rollouts):
    algorithm = AlgorithmConfig(kind="grpo", kl_coef=0.1)
    rollouts, others = make_rollouts(make_model(), 6), make_rollouts(make_model(), 6, seed=1)
    learner, plain = new_learner(make_model, algorithm), new_learner(make_model, algorithm)
    learner.forward_ahead(others[:3])  # of the same indices
    learner.forward_ahead(rollouts[4:6])  # a part of a block
    assert learner.update(rollouts).figures["num_samples_ahead"] == 0
    plain.update(rollouts)
    assert bits(learner) == bits(plain)
    learner.forward_ahead(rollouts[:3])
    learner.update(rollouts)
    assert learner.update(rollouts).figures["num_samples_ahead"] == 0, "of weights that have changed since"


def test_a_wish_that_grew_since_is_filled_up(make_model, make_rollouts):
    """An instance with other numerics came during the rollout: old log-probabilities are now the trainer's."""
    algorithm = AlgorithmConfig(kind="ppo", kl_coef=0.1)
    rollouts = make_rollouts(make_model(), 6)
    learner, plain = new_learner(make_model, algorithm), new_learner(make_model, algorithm)
    learner.forward_ahead(rollouts[:3])
    assert learner.update(rollouts, recompute_old=True).figures["num_samples_ahead"] == 0
    plain.update(rollouts, recompute_old=True)
    assert bits(learner) == bits(plain)


def test_a_sample_that_is_not_finite_is_named_before_its_update(make_model, make_rollouts):
    rollouts = make_rollouts(make_model(), 3)
    odd = dataclasses.replace(
        rollouts[1].completion, policy_logprobs=rollouts[1].completion.policy_logprobs * float("nan")
    )
    learner = new_learner(make_model, AlgorithmConfig(kind="grpo", kl_coef=0.1))
    with pytest.raises(NumericsError, match=r"sample 1 .*policy_logprobs is not finite"):
        learner.forward_ahead([rollouts[0], dataclasses.replace(rollouts[1], completion=odd), rollouts[2]])
