"""Packed sequences give each what it gets alone, in every family; the update is that of a padded loop."""

import math

import numpy as np
import pytest
import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

from rlhfspec.core.config import AlgorithmConfig, TrainerConfig
from rlhfspec.engine.decoding.logprobs import token_logprobs
from rlhfspec.engine.numerics import on_threads
from rlhfspec.learning.training.batching import PackedSequences
from rlhfspec.learning.training.experience import collate
from rlhfspec.learning.training.learner import Learner
from rlhfspec.learning.training.trainer_core import backward
from rlhfspec.learning.training.training_forward import (
    prepare_for_training,
    response_logits,
    response_statistics,
)
from tests.helpers.tiny_llama import SIZES

FAMILIES = {
    "llama": {},
    "mistral": {"sliding_window": 4},
    "qwen2": {"use_sliding_window": True, "sliding_window": 3, "max_window_layers": 1},
    "qwen3": {},
    "gemma2": {"sliding_window": 4, "query_pre_attn_scalar": 8},
    "gemma3_text": {"sliding_window": 4},
    "olmo2": {},
    "phi3": {},
    "gpt2": {"n_embd": 32, "n_head": 4, "n_layer": 2, "n_positions": 64},
    "gpt_neox": {},
    "opt": {"ffn_dim": 48, "word_embed_proj_dim": 32},
    "starcoder2": {"sliding_window": 5},
}


def new_model(family: str):
    torch.manual_seed(0)
    settings = SIZES | {"initializer_range": 0.3} | FAMILIES[family]
    if family in ("gpt2", "opt"):
        settings = {name: value for name, value in settings.items() if name not in ("head_dim",)}
    config = CONFIG_MAPPING[family](**settings)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(std=0.3)
    return model


@pytest.mark.parametrize("family", FAMILIES)
def test_every_sequence_gets_the_logits_it_gets_alone(family, make_model, make_rollouts):
    rng = np.random.default_rng(0)
    prompt, begun = rng.integers(2, 19, size=6), rng.integers(2, 19, size=3)
    pairs = [(prompt, np.append(begun, rng.integers(2, 19, size=i))) for i in range(4)]
    pairs += [(rng.integers(2, 19, size=4), begun) for _ in range(2)]
    experience = collate(make_rollouts(make_model(), 6, pairs=pairs), pad_token_id=0)
    model = new_model(family)
    rows = [3, 0, 5, 1]
    alone = []
    with torch.no_grad():
        for row in rows:
            ids = experience.ids[row, : experience.lengths[row]]
            logits = model(ids[None]).logits[0, :-1]
            alone.append(logits[experience.where[row, : len(ids) - 1]])
        prepare_for_training(model, gradient_checkpointing=False)
        packed = experience.packed(rows)
        together, hidden = response_logits(model, packed, 19)
        none, alike = response_logits(model, packed, 19, with_logits=False)
    assert len(packed.ids) < sum(experience.lengths[row] for row in rows)
    assert torch.allclose(together, torch.cat(alone), atol=2e-5)
    assert hidden.shape == (len(packed.targets), 32)
    assert none.shape == (0, 19)
    assert torch.equal(alike, hidden)
    responses = [experience.ids[row, 1:][experience.where[row]] for row in rows]
    assert torch.equal(packed.targets, torch.cat(responses))


def padded_update(model, experience, *, learning_rate: float, clip: float) -> None:
    """One step of GRPO without KL on a padded batch, written down anew: the oracle."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=learning_rate, betas=(0.9, 0.95), weight_decay=0.0)
    model.requires_grad_(True)
    logits = model(experience.ids).logits[:, :-1][experience.where]
    ids = experience.ids[:, 1:][experience.where]
    old = experience.old_logprobs[experience.mask]
    ratio = torch.exp(token_logprobs(logits, ids, 1.0) - old)
    advantages = torch.zeros(len(experience.rewards))
    for group in experience.group_ids.unique():
        members = experience.group_ids == group
        of_group = experience.rewards[members]
        if len(of_group.unique()) > 1:
            advantages[members] = (of_group - of_group.mean()) / (of_group.std() + 1e-6)
    weight = advantages[:, None].expand(experience.mask.shape)[experience.mask]
    loss = -torch.minimum(ratio * weight, ratio.clamp(1 - clip, 1 + clip) * weight).mean()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()


@pytest.mark.parametrize("max_tokens", [16, 4096])
@pytest.mark.parametrize("rewards", ["all groups teach", "one group teaches", "none teaches"])
def test_the_update_is_that_of_a_padded_loop_over_every_group(rewards, max_tokens, make_model, make_rollouts):
    """Groups without an advantage are left out of the forwards, and the parameters do not notice."""
    reward = {
        "all groups teach": lambda tokens: float(tokens.sum()),
        "one group teaches": lambda tokens: float(tokens.sum() == 17),
        "none teaches": lambda tokens: 0.5,
    }[rewards]
    rollouts = make_rollouts(make_model(), 8, reward=reward, group_size=2)
    learner = Learner(
        make_model(),
        algorithm=AlgorithmConfig(kind="grpo", kl_coef=0.0, loss_aggregation="token_mean"),
        trainer=TrainerConfig(learning_rate=1e-3, minibatch_size=8, max_tokens_per_forward=max_tokens),
        temperature=1.0,
        seed=5,
        pad_token_id=0,
    )
    experience = collate(rollouts, pad_token_id=0)
    different = [len(set(experience.rewards[i : i + 2].tolist())) > 1 for i in range(0, 8, 2)]
    expected = make_model()
    padded_update(expected, experience, learning_rate=1e-3, clip=0.2)
    metrics = learner.update(rollouts).metrics
    assert metrics["num_skipped_samples"] == 2 * different.count(False)
    for one, other in zip(learner.model.parameters(), expected.parameters(), strict=True):
        # Adam's first step has the size of the rate whatever the gradient: rounding may turn the smallest
        assert ((one - other).abs() < 1e-5).float().mean() > 0.99
    assert all(math.isfinite(value) for value in metrics.values())


@pytest.mark.parametrize(
    "algorithm", [{"kl_coef": 0.1}, {"kl_coef": 0.0, "entropy_coef": 0.1}], ids=["KL", "entropy"]
)
def test_no_sample_is_left_out_while_something_else_has_a_gradient(algorithm, make_model, make_rollouts):
    learner = Learner(
        make_model(),
        algorithm=AlgorithmConfig(kind="grpo", **algorithm),
        trainer=TrainerConfig(learning_rate=1e-3),
        temperature=1.0,
        seed=5,
        pad_token_id=0,
    )
    rollouts = make_rollouts(make_model(), temperature=0.7, reward=lambda tokens: 0.5)
    assert learner.update(rollouts).metrics["num_skipped_samples"] == 0


@pytest.mark.parametrize(("coefficient", "report", "shown"), [(0.0, False, False), (0.1, False, True)])
def test_entropy_is_left_out_where_nobody_wants_it(coefficient, report, shown, make_model, make_rollouts):
    learner = Learner(
        make_model(),
        algorithm=AlgorithmConfig(kind="grpo", entropy_coef=coefficient, report_entropy=report),
        trainer=TrainerConfig(learning_rate=1e-3),
        temperature=1.0,
        seed=5,
        pad_token_id=0,
    )
    assert ("entropy" in learner.update(make_rollouts(make_model())).metrics) == shown


@pytest.mark.parametrize("family", ["llama", "qwen3_moe"])
def test_threads_add_the_gradients_of_rows_in_one_order(family):
    """A prompt's last state predicts many first tokens, and a token's experts share it."""
    rng, wide = np.random.default_rng(0), {"hidden_size": 256, "vocab_size": 500}
    experts = {"num_experts": 8, "num_experts_per_tok": 4, "moe_intermediate_size": 32}
    torch.manual_seed(0)
    config = CONFIG_MAPPING[family](**SIZES | wide | (experts if family == "qwen3_moe" else {}))
    model = AutoModelForCausalLM.from_config(config)
    prepare_for_training(model, gradient_checkpointing=False)
    prompt = rng.integers(2, 500, size=4)
    sequences = [np.append(prompt, [first, *rng.integers(2, 500, size=3)]) for first in range(2, 402)]
    packed = PackedSequences.of(sequences, [np.arange(8) >= len(prompt)] * len(sequences))
    weight = model.get_input_embeddings().weight

    def gradient() -> torch.Tensor:
        weight.grad = None
        backward(response_statistics(model, packed, 500, 1.0, entropy=False)[0].sum())
        return weight.grad

    with on_threads(2):
        first = gradient()
        assert all(torch.equal(first, gradient()) for _ in range(10))
