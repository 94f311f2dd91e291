"""The learner's laws: order does not matter, ratios start at 1, equal rewards teach nothing."""

import copy
import dataclasses
import math
import sys

import numpy as np
import torch
from pytest import approx, fixture, importorskip, mark, raises
from tiny_llama import tiny_llama
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

from rlhfspec.core.config import AlgorithmConfig, TrainerConfig
from rlhfspec.core.errors import ConfigError, NumericsError, StorageError
from rlhfspec.core.metrics import require_declared
from rlhfspec.core.records import FinishReason, Reward
from rlhfspec.core.settings.algorithm import ALGORITHMS
from rlhfspec.engine.decoding.logprobs import token_logprobs
from rlhfspec.learning.training.experience import collate
from rlhfspec.learning.training.learner import Learner
from rlhfspec.learning.training.learning_rate import Horizon
from rlhfspec.learning.training.objectives.targets import update_targets
from rlhfspec.learning.training.trainer_core import optimizer_of
from rlhfspec.learning.training.training_forward import response_logits

TRAINER = TrainerConfig(learning_rate=1e-2, value_learning_rate=1e-2, minibatch_size=3, epochs=2)
PPO, GRPO = AlgorithmConfig(kind="ppo"), AlgorithmConfig(kind="grpo")


@fixture
def make_learner(make_model):
    def make(model=None, *, algorithm=PPO, trainer=TRAINER, temperature=1.0, vocab_size=None) -> Learner:
        return Learner(
            model or make_model(),
            algorithm=algorithm,
            trainer=trainer,
            temperature=temperature,
            seed=5,
            pad_token_id=0,
            vocab_size=vocab_size,
        )

    return make


def parameters(learner: Learner) -> list[torch.Tensor]:
    return [p.detach().clone() for p in learner.model.parameters()]


def test_collate_orders_by_sample_index_and_marks_the_response(model, make_rollouts):
    rollouts = make_rollouts(model)
    experience = collate(rollouts[::-1], pad_token_id=0)
    assert experience.sample_indices == (0, 1, 2, 3, 4, 5)
    for row, rollout in enumerate(rollouts):
        picked = experience.ids[row, 1:][experience.where[row]]
        assert picked.tolist() == rollout.completion.token_ids.tolist()
        old = experience.old_logprobs[row][experience.mask[row]]
        assert old.numpy() == approx(rollout.completion.policy_logprobs)


def test_collate_refuses_a_sample_that_comes_twice(model, make_rollouts):
    rollouts = make_rollouts(model)
    with raises(ValueError, match="same sample index"):
        collate([*rollouts, rollouts[0]], pad_token_id=0)


@mark.parametrize("algorithm", [PPO, GRPO])
def test_rollouts_in_any_order_give_bitwise_equal_parameters(make_learner, make_rollouts, algorithm):
    learners = [make_learner(algorithm=algorithm), make_learner(algorithm=algorithm)]
    rollouts = make_rollouts(learners[0].model)
    reports = [learners[0].update(rollouts), learners[1].update(rollouts[3:] + rollouts[:3][::-1])]
    assert all(torch.equal(a, b) for a, b in zip(*map(parameters, learners), strict=True))
    assert reports[0].metrics == reports[1].metrics
    assert not torch.equal(parameters(learners[0])[0], parameters(make_learner())[0])


@mark.parametrize("temperature", [1.0, 0.7])
def test_the_ratio_starts_at_one(make_learner, make_rollouts, temperature):
    learner = make_learner(temperature=temperature)
    report = learner.update(make_rollouts(learner.model, temperature=temperature))
    assert report.metrics["ratio_at_first_minibatch"] == approx(1.0, abs=1e-4)


def test_padded_ids_take_no_part_in_log_probabilities(make_learner, make_rollouts):
    real = make_learner()
    padded = make_learner()
    padded.model.resize_token_embeddings(32)
    with torch.no_grad():
        padded.model.lm_head.weight[19:] = 1.0
    rollouts = make_rollouts(real.model)
    wrong = Learner(
        padded.model, algorithm=PPO, trainer=TRAINER, temperature=1.0, seed=5, pad_token_id=0
    ).update(rollouts)
    assert abs(wrong.metrics["ratio_at_first_minibatch"] - 1.0) > 1e-3
    fresh = make_learner()
    fresh.model.resize_token_embeddings(32)
    right = make_learner(fresh.model, vocab_size=19).update(rollouts)
    assert right.metrics["ratio_at_first_minibatch"] == approx(1.0, abs=1e-4)


def test_a_wrong_old_logprob_shows_in_the_ratio(make_learner, make_rollouts):
    learner = make_learner()
    rollouts = make_rollouts(learner.model, temperature=0.7)
    assert abs(learner.update(rollouts).metrics["ratio_at_first_minibatch"] - 1.0) > 1e-2


@mark.parametrize("aggregation", ["token_mean", "sequence_mean"])
def test_small_forwards_change_nothing_but_rounding(make_learner, make_rollouts, aggregation):
    algorithm = PPO.model_copy(update={"loss_aggregation": aggregation})
    whole, split = (
        make_learner(algorithm=algorithm, trainer=TRAINER.model_copy(update={"max_tokens_per_forward": size}))
        for size in (4096, 16)
    )
    rollouts = make_rollouts(whole.model)
    a, b = whole.update(rollouts), split.update(rollouts)
    assert a.metrics == approx(b.metrics, rel=1e-2, abs=1e-3)
    for one, other in zip(parameters(whole), parameters(split), strict=True):
        assert torch.allclose(one, other, atol=3e-3)


@mark.parametrize("algorithm", [PPO, GRPO])
def test_rewarded_tokens_become_likelier(make_learner, make_rollouts, algorithm):
    # one group per prompt would need real prompts; here all six responses are one group
    learner = make_learner(algorithm=algorithm)
    reward = {True: 1.0, False: 0.0}
    rollouts = make_rollouts(learner.model, 6, reward=lambda t: reward[bool(t[0] % 2)], group_size=6)
    before = collate(rollouts, pad_token_id=0)
    assert 0 < float(before.rewards.sum()) < 6
    learner.update(rollouts)
    logits, _ = response_logits(learner.model, before.packed(range(len(before.lengths))), 19)
    now = torch.zeros_like(before.old_logprobs)
    now[before.mask] = token_logprobs(logits, before.ids[:, 1:][before.where], 1.0).detach()
    change = (now - before.old_logprobs).sum(dim=1)
    assert change[before.rewards == 1].mean() > change[before.rewards == 0].mean()


def test_a_first_minibatch_that_is_skipped_whole_has_no_ratio(make_learner, make_rollouts):
    algorithm = AlgorithmConfig(kind="grpo", kl_coef=0.0)
    trainer = TRAINER.model_copy(update={"minibatch_size": 2, "epochs": 1})
    learner = make_learner(algorithm=algorithm, trainer=trainer)
    rollouts = make_rollouts(learner.model)
    generator = torch.Generator().manual_seed(learner.seed * 1_000_003)
    first = torch.randperm(6, generator=generator)[:2].tolist()
    groups = {index // 2 for index in first}
    rollouts = [
        dataclasses.replace(one, reward=Reward(value=0.0 if index // 2 in groups else float(index % 2)))
        for index, one in enumerate(rollouts)
    ]
    metrics = learner.update(rollouts).metrics
    assert "policy_loss" in metrics
    assert "ratio_at_first_minibatch" not in metrics


def test_a_grpo_group_of_equal_rewards_leaves_the_policy_alone(make_learner, make_rollouts):
    learner = make_learner(algorithm=AlgorithmConfig(kind="grpo", kl_coef=0.0))
    before = parameters(learner)
    report = learner.update(make_rollouts(learner.model, reward=lambda tokens: 0.1))
    assert report.metrics["num_zero_advantage_groups"] == 3
    assert all(torch.equal(a, b) for a, b in zip(before, parameters(learner), strict=True))


@mark.parametrize(
    ("algorithm", "silence"),
    [
        (AlgorithmConfig(kind="grpo", kl_coef=0.0), "equal rewards"),
        (AlgorithmConfig(kind="grpo", kl_coef=0.0, truncated="mask"), "all cut"),
        (AlgorithmConfig(kind="ppo", kl_coef=0.0, truncated="mask"), "all cut"),
    ],
)
def test_a_batch_without_gradient_takes_no_step_even_after_one_that_had(
    make_learner, make_rollouts, algorithm, silence
):
    # momentum and decay would move the weights without it
    trainer = TRAINER.model_copy(update={"weight_decay": 0.1})
    learner = make_learner(algorithm=algorithm, trainer=trainer)
    report = learner.update(make_rollouts(learner.model))
    assert report.num_optimizer_steps + report.metrics["num_skipped_minibatches"] == 4
    assert report.num_optimizer_steps > 0
    before, moments = parameters(learner), copy.deepcopy(learner.optimizer.state_dict())
    rollouts = make_rollouts(learner.model, reward=lambda tokens: 0.1)
    if silence == "all cut":
        rollouts = cut(make_rollouts(learner.model), range(6))
    report = learner.update(rollouts)
    assert (report.num_optimizer_steps, report.metrics["num_skipped_minibatches"]) == (0, 4.0)
    assert report.weight_version == 2
    assert all(torch.equal(a, b) for a, b in zip(before, parameters(learner), strict=True))
    for index, state in learner.optimizer.state_dict()["state"].items():
        assert all(torch.equal(value, moments["state"][index][part]) for part, value in state.items())


def test_a_state_after_an_update_without_gradient_keeps_what_the_critic_learned(
    make_model, make_learner, make_rollouts, tmp_path
):
    algorithm = AlgorithmConfig(kind="ppo", kl_coef=0.0, truncated="mask")
    straight, resumed = (
        make_learner(algorithm=algorithm),
        make_learner(make_model(seed=9), algorithm=algorithm),
    )
    first = cut(make_rollouts(straight.model), range(6))
    assert straight.update(first).num_optimizer_steps == 0
    straight.save(tmp_path / "state")
    resumed.load(tmp_path / "state")
    second = make_rollouts(straight.model, seed=1)
    for learner in (straight, resumed):
        learner.update(second)
    assert all(torch.equal(a, b) for a, b in zip(parameters(straight), parameters(resumed), strict=True))
    heads = [list(learner.critic.head.parameters()) for learner in (straight, resumed)]
    assert all(torch.equal(a, b) for a, b in zip(*heads, strict=True))


def test_the_optimizer_is_the_config_s(make_learner):
    group = make_learner().optimizer.param_groups[0]
    assert (group["betas"], group["eps"]) == ((0.9, 0.95), 1e-8)
    update = {"adam_betas": (0.5, 0.75), "adam_epsilon": 1e-4}
    learner = make_learner(trainer=TRAINER.model_copy(update=update))
    group = learner.optimizer.param_groups[0]
    assert (group["betas"], group["eps"]) == ((0.5, 0.75), 1e-4)


def test_the_value_head_learns_the_reward(make_learner, make_rollouts):
    learner = make_learner(trainer=TRAINER.model_copy(update={"learning_rate": 1e-8}))
    rollouts = make_rollouts(learner.model, 12)
    explained = [learner.update(rollouts).metrics["explained_variance"] for _ in range(40)]
    # it starts at zero, so the first is 0; a policy that stands still can be fitted
    assert explained[0] == approx(0.0, abs=1e-5)
    assert explained[-1] > 0.5


@mark.parametrize("placement", ["loss", "reward"])
def test_the_reference_is_the_initial_policy(make_learner, make_rollouts, placement):
    algorithm = AlgorithmConfig(kind="ppo", kl_coef=0.1, kl_placement=placement)
    learner = make_learner(algorithm=algorithm)
    rollouts = make_rollouts(learner.model)
    first = learner.update(rollouts).metrics["reference_kl"]
    assert first == approx(0.0, abs=1e-6)
    later = learner.update(make_rollouts(learner.model, seed=1)).metrics["reference_kl"]
    assert later > 1e-4


def test_every_figure_is_reported_and_finite(make_learner, make_rollouts):
    common = {
        "policy_loss",
        "entropy",
        "approx_kl",
        "clip_fraction",
        "clip_fraction_low",
        "clip_fraction_high",
        "grad_norm",
        "grad_clipped_share",
        "reference_kl",
        "kl_loss",
        "kl_coef",
        "entropy_coef",
        "ratio_min",
        "ratio_max",
        "truncated_share",
        "lr",
        "ratio_at_first_minibatch",
        "first_log_ratio",
        "num_unmoved_tensors",
        "num_skipped_samples",
        "num_skipped_minibatches",
        "mismatch/lag_mean",
        "mismatch/lag_max",
    }
    for algorithm, own in (
        (PPO, {"value_loss", "explained_variance"}),
        (GRPO, {"num_groups", "num_zero_advantage_groups"}),
    ):
        learner = make_learner(algorithm=algorithm)
        report = learner.update(make_rollouts(learner.model))
        assert set(report.metrics) == common | own
        assert all(math.isfinite(value) for value in report.metrics.values())
        assert (report.weight_version, report.num_samples, report.num_optimizer_steps) == (1, 6, 4)
    assert report.metrics["num_groups"] == 3


@mark.parametrize("kind", sorted(ALGORITHMS.keys() - {"distill"}))
def test_every_algorithm_makes_rewarded_responses_likelier(make_model, make_rollouts, kind):
    # seven responses of one prompt; those that begin with an even token are paid
    algorithm = AlgorithmConfig(kind=kind, clip_ratio=0.2, clip_ratio_high=0.3)
    model = make_model()
    rollouts = make_rollouts(model, 8, seed=3, reward=lambda tokens: float(tokens[0] % 2 == 0), group_size=8)
    learner = Learner(
        model,
        algorithm=algorithm,
        trainer=TrainerConfig(learning_rate=3e-3, minibatch_size=8),
        temperature=1.0,
        seed=5,
        pad_token_id=0,
        horizon=Horizon(max_new_tokens=16),
    )
    before = collate(rollouts, pad_token_id=0)
    assert 0 < float(before.rewards.sum()) < 8
    metrics = learner.update(rollouts).metrics
    require_declared(name if "/" in name else f"learner/{name}" for name in metrics)
    logits, _ = response_logits(learner.model, before.packed(range(8)), 19)
    now = torch.zeros_like(before.old_logprobs)
    now[before.mask] = token_logprobs(logits, before.ids[:, 1:][before.where], 1.0).detach()
    change = (now - before.old_logprobs).sum(dim=1)
    assert change[before.rewards == 1].mean() > change[before.rewards == 0].mean()


def cut(rollouts, rows):
    """Let some rollouts end at the limit of new tokens."""
    return [
        dataclasses.replace(
            one, completion=dataclasses.replace(one.completion, finish_reason=FinishReason.LENGTH)
        )
        if row in rows
        else one
        for row, one in enumerate(rollouts)
    ]


def test_masked_responses_are_no_part_of_the_loss(make_learner, make_rollouts):
    algorithm = AlgorithmConfig(kind="grpo", truncated="mask", kl_coef=0.1)
    learners = [make_learner(algorithm=algorithm) for _ in range(2)]
    rollouts = cut(make_rollouts(learners[0].model), {1, 4})
    metrics = learners[0].update(rollouts).metrics
    assert metrics["truncated_share"] == approx(1 / 3)
    assert metrics["num_skipped_samples"] >= 2
    # other tokens in their place, at the same advantage: nothing changes
    other = list(rollouts)
    for row in (1, 4):
        tokens = rollouts[row].completion.token_ids
        changed = dataclasses.replace(rollouts[row].completion, token_ids=(tokens + 1) % 17 + 2)
        other[row] = dataclasses.replace(rollouts[row], completion=changed)
    learners[1].update(other)
    for one, same in zip(*map(parameters, learners), strict=True):
        assert torch.allclose(one, same, atol=1e-6)


def test_what_is_no_part_of_the_loss_is_no_part_of_whitening(make_learner, make_rollouts):
    learner = make_learner(algorithm=AlgorithmConfig(kind="reinforce_pp", truncated="mask", kl_coef=0.0))
    rollouts = make_rollouts(learner.model, reward=lambda tokens: float(len(tokens)))
    experience = collate(cut(rollouts, {0}), pad_token_id=0)
    targets = update_targets(
        experience,
        learner._first.of(experience, []),
        algorithm=learner.algorithm,
        trainer=learner.trainer,
        critic=None,
        trainers=learner.trainers,
        generator=torch.Generator(),
        kl_coef=0.0,
    )
    kept = targets.advantages[1:][experience.mask[1:]]
    assert float(kept.mean()) == approx(0.0, abs=1e-5)
    assert not targets.advantages[0].any()


def test_a_response_that_was_cut_is_not_blamed_for_ending(make_learner, make_rollouts):
    # values are 1 everywhere, rewards 0: who ended is worth less than expected, who was cut is not
    seen = {}
    for truncated in ("learn", "bootstrap"):
        learner = make_learner(
            algorithm=AlgorithmConfig(kind="ppo", truncated=truncated, whiten_advantages=False)
        )
        torch.nn.init.ones_(learner.critic.head.outer.bias)
        rollouts = cut(make_rollouts(learner.model, reward=lambda tokens: 0.0), {0, 1, 2, 3, 4, 5})
        experience = collate(rollouts, pad_token_id=0)
        first = learner._first.of(experience, learner._first_parts(False))
        targets = update_targets(
            experience,
            first,
            algorithm=learner.algorithm,
            trainer=learner.trainer,
            critic=learner.critic,
            trainers=learner.trainers,
            generator=torch.Generator().manual_seed(0),
            kl_coef=0.0,
        )
        seen[truncated] = targets.advantages[experience.mask]
    assert float(seen["learn"].max()) < 0.0
    assert float(seen["bootstrap"].abs().max()) == approx(0.0, abs=1e-5)


def test_minibatches_are_of_equal_size_and_groups_stay_together(make_learner):
    learner = make_learner(trainer=TRAINER.model_copy(update={"minibatch_size": 4, "epochs": 1}))
    generator = torch.Generator().manual_seed(0)
    parts = list(learner._minibatches(torch.arange(9), generator))
    assert sorted(len(part) for part in parts) == [3, 3, 3]
    assert sorted(row for part in parts for row in part) == list(range(9))
    assert parts != [[0, 1, 2], [3, 4, 5], [6, 7, 8]], "in random order"
    groups = torch.tensor([7, 7, 3, 3, 9, 9, 4, 4])
    parts = list(learner._minibatches(groups, generator))
    assert len(parts) == 2 and all(len(groups[part].unique()) == 2 for part in parts)


def test_steered_coefficients_are_part_of_what_is_resumed(make_model, make_learner, make_rollouts, tmp_path):
    algorithm = AlgorithmConfig(
        kl_coef=0.1, kl_target=0.5, kl_horizon=10, entropy_target=100.0, entropy_coef_step=0.01
    )
    straight = make_learner(algorithm=algorithm)
    first, second = make_rollouts(straight.model), make_rollouts(straight.model, seed=1)
    straight.update(first)
    straight.save(tmp_path / "state")
    expected = straight.update(second)
    resumed = make_learner(make_model(seed=9), algorithm=algorithm)
    resumed.load(tmp_path / "state")
    assert resumed.update(second).metrics == expected.metrics
    assert expected.metrics["kl_coef"] != 0.1 and expected.metrics["entropy_coef"] == approx(0.08)
    assert all(torch.equal(a, b) for a, b in zip(parameters(straight), parameters(resumed), strict=True))


def test_a_constant_length_needs_to_be_told(make_learner):
    with raises(ConfigError, match="constant_length"):
        make_learner(algorithm=AlgorithmConfig(kind="dr_grpo"))


def test_a_resumed_learner_goes_on_bitwise(make_model, make_learner, make_rollouts, tmp_path):
    straight = make_learner()
    first, second = make_rollouts(straight.model), make_rollouts(straight.model, seed=1)
    straight.update(first)
    straight.save(tmp_path / "state")
    straight.update(second)
    resumed = make_learner(make_model(seed=9))
    resumed.load(tmp_path / "state")
    resumed.update(second)
    assert resumed.weight_version == 2
    assert all(torch.equal(a, b) for a, b in zip(parameters(straight), parameters(resumed), strict=True))


def test_a_checkpoint_of_another_algorithm_is_refused(make_learner, tmp_path):
    make_learner(algorithm=GRPO).save(tmp_path / "grpo")
    with raises(ConfigError, match="has no critic"):
        make_learner(algorithm=PPO).load(tmp_path / "grpo")


def test_a_checkpoint_that_was_not_written_to_its_end_is_refused(make_learner, tmp_path):
    learner = make_learner()
    learner.save(tmp_path / "whole")
    (tmp_path / "whole" / ".metadata").unlink()
    with raises(ConfigError, match="no checkpoint of a trainer"):
        learner.load(tmp_path / "whole")


def test_a_checkpoint_is_not_written_over(make_learner, tmp_path):
    learner = make_learner()
    learner.save(tmp_path / "state")
    with raises(ConfigError, match="holds a checkpoint of a trainer already"):
        learner.save(tmp_path / "state")


def test_a_checkpoint_where_no_folder_can_be_is_a_storage_error(make_learner, tmp_path):
    (tmp_path / "file").write_text("")
    with raises(StorageError, match="cannot write the checkpoint"):
        make_learner().save(tmp_path / "file" / "state")


def test_rates_are_this_run_s_and_a_fresh_checkpoint_forgets_the_moments(
    make_learner, make_rollouts, tmp_path
):
    fresh, stepped = make_learner(), make_learner()
    fresh.save(tmp_path / "fresh")
    stepped.update(make_rollouts(stepped.model))
    stepped.save(tmp_path / "stepped")
    other = make_learner(trainer=TRAINER.model_copy(update={"weight_decay": 0.25}))
    other.load(tmp_path / "stepped")
    assert [group["weight_decay"] for group in other.optimizer.param_groups] == [0.25]
    stepped.load(tmp_path / "fresh")
    assert not stepped.optimizer.state and stepped.weight_version == 0


def test_a_parameter_that_no_loss_reaches_does_not_keep_a_checkpoint_from_being_read(
    make_model, make_learner, make_rollouts, tmp_path
):
    def with_spare():
        model = make_model()
        model.spare = torch.nn.Parameter(torch.ones(3))
        return make_learner(model)

    learner, resumed = with_spare(), with_spare()
    learner.update(make_rollouts(learner.model))
    learner.save(tmp_path / "state")
    resumed.load(tmp_path / "state")
    assert resumed.weight_version == 1


def test_a_learner_resumed_before_its_first_update_is_a_new_one(
    make_model, make_learner, make_rollouts, tmp_path
):
    straight, resumed = make_learner(), make_learner(make_model(seed=9))
    straight.save(tmp_path / "state")
    resumed.load(tmp_path / "state")
    rollouts = make_rollouts(straight.model)
    for learner in (straight, resumed):
        learner.update(rollouts)
    assert all(torch.equal(a, b) for a, b in zip(parameters(straight), parameters(resumed), strict=True))


def test_training_at_temperature_zero_is_refused(make_learner):
    with raises(ConfigError, match="temperature 0"):
        make_learner(temperature=0.0)


def test_a_reward_that_is_not_finite_is_named_and_changes_nothing(make_learner, make_rollouts):
    learner = make_learner()
    before = parameters(learner)
    rollouts = make_rollouts(learner.model)
    rollouts[4] = dataclasses.replace(rollouts[4], reward=Reward(value=math.nan))
    with raises(NumericsError, match=r"sample 4.*reward"):
        learner.update(rollouts)
    assert all(torch.equal(a, b) for a, b in zip(before, parameters(learner), strict=True))


def test_a_diverged_model_is_named(make_learner, make_rollouts):
    learner = make_learner()
    rollouts = make_rollouts(learner.model)
    with torch.no_grad():
        learner.model.lm_head.weight[0, 0] = math.nan
    with raises(NumericsError, match="expected a finite"):
        learner.update(rollouts)


def test_weights_that_the_last_step_makes_infinite_get_no_version(make_learner, make_rollouts, monkeypatch):
    # one step, so no later loss tells
    learner = make_learner(trainer=TRAINER.model_copy(update={"minibatch_size": 6, "epochs": 1}))
    step = learner.optimizer.step

    def spoil():
        step()
        with torch.no_grad():
            next(learner.model.parameters())[0, 0] = math.inf

    monkeypatch.setattr(learner.optimizer, "step", spoil)
    with raises(NumericsError, match=r"target model to weight version 1 failed: .* NaN or infinity"):
        learner.update(make_rollouts(learner.model))
    assert learner.weight_version == 0


DROPPING = {
    "llama": {"attention_dropout": 0.3},
    "gpt2": {"attn_pdrop": 0.3, "resid_pdrop": 0.3, "embd_pdrop": 0.3},
    "opt": {
        "dropout": 0.3,
        "attention_dropout": 0.3,
        "layerdrop": 0.5,
        "word_embed_proj_dim": 32,
        "ffn_dim": 48,
    },
}


@mark.parametrize("family", DROPPING)
@mark.parametrize("checkpointing", [False, True])
def test_dropout_stays_off_whatever_the_model_was_pretrained_with(
    make_learner, make_rollouts, family, checkpointing
):
    torch.manual_seed(0)
    sizes = {"vocab_size": 19, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = CONFIG_MAPPING[family](**sizes, max_position_embeddings=64, pad_token_id=0, **DROPPING[family])
    model = AutoModelForCausalLM.from_config(config).eval()
    trainer = TRAINER.model_copy(update={"gradient_checkpointing": checkpointing, "learning_rate": 1e-8})
    rollouts = make_rollouts(model)
    learner = make_learner(model, trainer=trainer)
    metrics = learner.update(rollouts).metrics
    assert metrics["ratio_at_first_minibatch"] == approx(1.0, abs=1e-4)
    assert metrics["approx_kl"] == approx(0.0, abs=1e-6)
    assert metrics["reference_kl"] == approx(0.0, abs=1e-6)


def test_gradient_checkpointing_gives_the_same_update(make_learner, make_rollouts):
    plain, saving = (
        make_learner(),
        make_learner(trainer=TRAINER.model_copy(update={"gradient_checkpointing": True})),
    )
    rollouts = make_rollouts(plain.model)
    plain.update(rollouts)
    saving.update(rollouts)
    for one, other in zip(parameters(plain), parameters(saving), strict=True):
        assert np.array_equal(one, other)


@mark.parametrize(
    "settings",
    [
        {"policy_loss": "sapo"},
        {"policy_loss": "geo_mean", "clip_ratio": 0.4},
        {"top_entropy_quantile": 0.2},
        {"off_policy_mask_threshold": -9.0},
    ],
)
def test_other_losses_and_masks_step_elsewhere_and_to_the_same_bits(make_learner, make_rollouts, settings):
    settings = {"kind": "grpo", "kl_coef": 0.0} | settings
    learners = [make_learner(algorithm=AlgorithmConfig(**settings)) for _ in range(2)]
    usual = make_learner(algorithm=AlgorithmConfig(kind="grpo", kl_coef=0.0))
    rollouts = make_rollouts(usual.model)
    for one in (*learners, usual):
        one.update(rollouts)
    assert all(torch.equal(a, b) for a, b in zip(*map(parameters, learners), strict=True))
    assert not all(torch.equal(a, b) for a, b in zip(parameters(learners[0]), parameters(usual), strict=True))


@mark.parametrize(
    ("settings", "said"),
    [
        ({"policy_loss": "sapo", "clip_ratio": 0.3}, "clip_ratio is of policy losses that clip"),
        ({"sapo_temperature_neg": 2.0}, "sapo_temperature_neg is of policy_loss sapo"),
        ({"policy_loss": "geo_mean", "ratio_level": "sequence"}, "geo_mean takes"),
        ({"top_entropy_quantile": 0.2, "entropy_coef": 0.1}, "take out one of the two"),
    ],
)
def test_keys_of_another_loss_are_refused(settings, said):
    with raises(ValueError, match=said):
        AlgorithmConfig(kind="grpo", **settings)


def test_a_reference_that_moves_mixes_the_policy_in_and_resumes_to_the_same_bits(
    make_learner, make_rollouts, tmp_path
):
    settings = {"sync_ref_model": True, "ref_model_sync_steps": 3, "ref_model_mixup_alpha": 0.25}
    algorithm = AlgorithmConfig(kind="grpo", kl_coef=0.1, **settings)
    learner = make_learner(algorithm=algorithm)
    first, rollouts = parameters(learner), make_rollouts(learner.model)
    # two minibatches in two passes: four steps
    seen, step = [], learner.optimizer.step

    def noting(*args, **kwargs):
        step(*args, **kwargs)
        seen.append(parameters(learner))

    learner.optimizer.step = noting
    learner.update(rollouts)
    assert learner.num_steps == 4
    for old, third, now in zip(first, seen[2], learner.reference.parameters(), strict=True):
        torch.testing.assert_close(now, 0.75 * old + 0.25 * third, rtol=1e-6, atol=1e-8)
    learner.save(tmp_path / "state")
    other = make_learner(algorithm=algorithm)
    other.load(tmp_path / "state")
    for one in (learner, other):
        one.update(rollouts)
    assert learner.num_steps == 8, "the next is at six"
    for name in ("model", "reference"):
        pairs = zip(getattr(learner, name).parameters(), getattr(other, name).parameters(), strict=True)
        assert all(torch.equal(a, b) for a, b in pairs)
    assert not any(torch.equal(a, b) for a, b in zip(first, other.reference.parameters(), strict=True))


def test_a_reference_that_cannot_move_is_refused():
    for settings in ({"kl_coef": 0.0, "sync_ref_model": True}, {"ref_model_sync_steps": 8}):
        with raises(ValueError, match="would have no effect"):
            AlgorithmConfig(kind="grpo", **settings)


@mark.parametrize("optim", ["muon", "adamw_8bit"])
def test_another_optimizer_steps_what_it_is_for_and_resumes_to_the_same_bits(
    make_learner, make_rollouts, tmp_path, optim
):
    if optim == "adamw_8bit":
        importorskip("bitsandbytes")
    trainer = TRAINER.model_copy(update={"optim": optim, "weight_decay": 0.1})
    # from 4,096 numbers on a weight's moments have 8 bits
    straight, resumed = (
        make_learner(tiny_llama(seed, hidden_size=64, intermediate_size=128), trainer=trainer)
        for seed in (0, 9)
    )
    straight.update(make_rollouts(straight.model))
    straight.save(tmp_path / "state")
    resumed.load(tmp_path / "state")
    second = make_rollouts(straight.model, seed=1)
    for learner in (straight, resumed):
        learner.update(second)
    assert all(torch.equal(a, b) for a, b in zip(parameters(straight), parameters(resumed), strict=True))
    kinds = {name: set(straight.optimizer.state[one]) for name, one in straight.model.named_parameters()}
    if optim == "muon":
        by_muon = {name for name, held in kinds.items() if held == {"momentum_buffer"}}
        assert by_muon and all("_proj" in name for name in by_muon)
        assert all("exp_avg" in held for name, held in kinds.items() if name not in by_muon)
        assert {name for name in kinds if "_proj" in name and name.endswith("weight")} == by_muon
    else:
        types = [straight.optimizer.state[one]["state1"].dtype for one in straight.model.parameters()]
        assert {torch.uint8, torch.float32} == set(types)
    rates = [group["lr"] for group in straight.optimizer.param_groups]
    assert rates == [1e-2] * len(rates)


def test_muon_orthogonalises_the_momentum_at_the_length_of_adam_s_step(make_model):
    model = make_model()
    weight = model.model.layers[0].mlp.up_proj.weight
    before = weight.detach().clone()
    optimizer = optimizer_of(model, TrainerConfig(learning_rate=0.1, optim="muon"))
    for one in model.parameters():
        one.grad = torch.randn(one.shape, generator=torch.Generator().manual_seed(1))
    optimizer.step()
    step = (before - weight.detach()) / 0.1
    # 0.2 sqrt(larger side) times a matrix whose singular values are near 1
    singular = torch.linalg.svdvals(step) / (0.2 * max(step.shape) ** 0.5)
    assert float(singular.min()) > 0.5 and float(singular.max()) < 1.4


def test_eight_bits_without_their_library_are_refused(make_learner, monkeypatch):
    monkeypatch.setitem(sys.modules, "bitsandbytes", None)
    with raises(ConfigError, match="pip install bitsandbytes, or take adamw"):
        make_learner(trainer=TRAINER.model_copy(update={"optim": "adamw_8bit"}))
