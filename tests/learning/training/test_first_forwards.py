"""What an update computes before its first step: in blocks of samples, each by itself."""

import pytest
import torch

from rlhfspec.core.config import AlgorithmConfig, TrainerConfig
from rlhfspec.core.settings.trainer import LoraConfig
from rlhfspec.learning.training.experience import collate
from rlhfspec.learning.training.learner import Learner

BLOCK = 3
CASES = {
    "grpo": {"algorithm": AlgorithmConfig(kind="grpo", kl_coef=0.1)},
    "grpo, own": {"algorithm": AlgorithmConfig(kind="grpo", kl_coef=0.1), "recompute_old": True},
    "grpo, own, no KL": {"algorithm": AlgorithmConfig(kind="grpo", kl_coef=0.0), "recompute_old": True},
    "ppo": {"algorithm": AlgorithmConfig(kind="ppo", kl_coef=0.1, kl_placement="reward")},
    "ppo, own": {"algorithm": AlgorithmConfig(kind="ppo", kl_coef=0.1), "recompute_old": True},
    "lora": {"algorithm": AlgorithmConfig(kind="grpo", kl_coef=0.1), "lora": LoraConfig(rank=4)},
}


def new_learner(make_model, algorithm, lora=None) -> Learner:
    trainer = TrainerConfig(
        learning_rate=1e-2, minibatch_size=4, max_tokens_per_forward=24, block_samples=BLOCK, lora=lora
    )
    return Learner(
        make_model(), algorithm=algorithm, trainer=trainer, temperature=1.0, seed=5, pad_token_id=0
    )


@pytest.fixture(params=CASES)
def case(request):
    settings = dict(CASES[request.param])
    if "lora" in settings:
        pytest.importorskip("peft")
    return settings


def test_what_a_block_is_valued_at_depends_on_no_other_block(case, make_model, make_rollouts):
    """Ten samples in blocks of three, the last of one: each block alone has the same bits."""
    recompute = case.pop("recompute_old", False)
    learner = new_learner(make_model, **case)
    rollouts = make_rollouts(make_model(), 10)
    parts = learner._first_parts(recompute)
    whole = collate(rollouts, pad_token_id=0)
    together = learner._first.of(whole, parts)
    alone = [
        (block, learner._first.of(block, parts))
        for block in (collate(rollouts[start:][:BLOCK], pad_token_id=0) for start in range(0, 10, BLOCK))
    ]
    assert together.logprobs.keys() == set(parts) - {"states"}
    for part, values in together.logprobs.items():
        assert torch.equal(
            values[whole.mask], torch.cat([first.logprobs[part][block.mask] for block, first in alone])
        )
        assert not values[~whole.mask].any()
    assert (together.states is not None) == ("states" in parts)
    if together.states is not None:
        assert together.states.places.tolist() == list(range(int(whole.mask.sum())))
        assert torch.equal(together.states.states, torch.cat([first.states.states for _, first in alone]))
