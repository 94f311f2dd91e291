"""What an environment gave is context only: no gradient, no advantage, no figure comes from it."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from engine_scored import sampled as sampled_rollouts
from engine_scored import scorer_of, target

from rlhfspec.core.config import AlgorithmConfig, Config, TrainerConfig
from rlhfspec.core.records import Rollout, SamplingParams
from rlhfspec.engine.decoding.logprobs import token_logprobs
from rlhfspec.learning.drafts.soft_targets import SoftTargetStore
from rlhfspec.learning.training.experience import collate
from rlhfspec.learning.training.learner import Learner
from rlhfspec.learning.training.objectives.advantages import gae, place_terminal_reward


def with_given(rollouts: list[Rollout], junk: float = 0.0) -> tuple[list[Rollout], list[np.ndarray]]:
    """Say of some tokens of every response that the environment gave them."""
    found, masks = [], []
    for index, rollout in enumerate(rollouts):
        one = rollout.completion
        sampled = np.arange(one.num_tokens) % 3 != (index + 1) % 3
        sampled[0] = True
        policy = np.where(sampled, one.policy_logprobs, np.float32(junk))
        sampling = np.where(sampled, one.sampling_logprobs, np.float32(junk))
        one = replace(one, sampled=sampled, policy_logprobs=policy, sampling_logprobs=sampling)
        found.append(replace(rollout, completion=one))
        masks.append(sampled)
    return found, masks


def learner(model, kind: str, **more) -> Learner:
    return Learner(
        model,
        algorithm=AlgorithmConfig(kind=kind, kl_coef=0.1, entropy_coef=0.01),
        trainer=TrainerConfig(minibatch_size=3, learning_rate=1e-2, num_threads=1),
        temperature=1.0,
        seed=1,
        pad_token_id=0,
        **more,
    )


def test_experience_holds_sampled_tokens_only_in_their_order(model, make_rollouts):
    rollouts, masks = with_given(make_rollouts(model))
    experience = collate(rollouts, pad_token_id=0)
    assert experience.num_tokens == sum(int(mask.sum()) for mask in masks)
    for row, (rollout, mask) in enumerate(zip(rollouts, masks, strict=True)):
        count = int(mask.sum())
        assert experience.mask[row].tolist() == [True] * count + [False] * (experience.mask.shape[1] - count)
        chosen = experience.ids[row, 1:][experience.where[row]]
        assert chosen.tolist() == rollout.completion.token_ids[mask].tolist()
        logprobs = experience.old_logprobs[row, :count]
        assert logprobs.tolist() == rollout.completion.policy_logprobs[mask].tolist()
        assert experience.lengths[row] == len(rollout.prompt.token_ids) + rollout.completion.num_tokens


def test_a_given_token_has_no_gradient(model, make_rollouts):
    """The gradient of the loss at the logits that would have chosen it is exactly zero; at all others it is not."""
    rollouts, masks = with_given(make_rollouts(model, seed=4))
    experience = collate(rollouts, pad_token_id=0)
    rows = list(range(len(rollouts)))
    for row, mask in zip(rows, masks, strict=True):
        packed = experience.packed([row])
        length = len(packed.ids)
        logits = model(packed.ids[None]).logits[0]
        logits.retain_grad()
        loss = -token_logprobs(logits[packed.before_targets], packed.targets, 1.0).sum()
        loss.backward()
        assert logits.grad is not None
        num_prompt = experience.prompt_lengths[row]
        learned = np.zeros(length, dtype=bool)
        learned[num_prompt - 1 : length - 1] = mask
        moved = (logits.grad != 0.0).any(dim=1).numpy()
        assert moved.tolist() == learned.tolist()


@pytest.mark.parametrize("kind", ["ppo", "grpo"])
def test_the_learner_computes_no_logits_of_given_tokens(kind, make_model, make_rollouts):
    """Every row that reaches the output head in training has a sampled token to predict, and its gradient arrives."""
    model = make_model()
    rollouts, masks = with_given(make_rollouts(model))
    heads: list[torch.Tensor] = []

    def keep(module, inputs, output: torch.Tensor) -> None:
        if output.requires_grad:
            output.retain_grad()
            heads.append(output)

    model.lm_head.register_forward_hook(keep)
    report = learner(model, kind).update(rollouts)
    num_sampled = sum(int(mask.sum()) for mask in masks)
    assert report.num_tokens == num_sampled
    learned = sum(len(head.reshape(-1, head.shape[-1])) for head in heads)
    assert 0 < learned <= num_sampled


@pytest.mark.parametrize("kind", ["ppo", "grpo"])
def test_log_probabilities_of_given_tokens_change_no_bit(kind, make_model, make_rollouts):
    models = [make_model(), make_model()]
    plain, junk = (with_given(make_rollouts(models[0]), junk=value)[0] for value in (0.0, -7.5))
    metrics = [learner(m, kind).update(r).metrics for m, r in zip(models, (plain, junk), strict=True)]
    assert metrics[0] == metrics[1]
    ours, theirs = (dict(m.named_parameters()) for m in models)
    assert all(torch.equal(weight, theirs[name]) for name, weight in ours.items())


def test_a_turns_last_token_bootstraps_into_the_next_turns_first(model, make_rollouts):
    rollouts, _ = with_given(make_rollouts(model, num=2))
    experience = collate(rollouts, pad_token_id=0)
    rewards = place_terminal_reward(experience.rewards, experience.mask)
    values = torch.arange(float(experience.mask.numel())).reshape(experience.mask.shape) * 0.1
    advantages, _ = gae(rewards, values * experience.mask, experience.mask, gamma=1.0, lam=0.0)
    row = int(experience.mask.sum(dim=1).argmax())
    count = int(experience.mask[row].sum())
    assert count > 1
    expected = values[row, 1:count] - values[row, : count - 1]
    assert torch.allclose(advantages[row, : count - 1], expected, atol=1e-6)


def test_the_drafters_targets_are_those_of_sampled_tokens(make_model, make_rollouts):
    model = make_model()
    rollouts, masks = with_given(make_rollouts(model))
    store = SoftTargetStore(4)
    learner(model, "grpo", observers=[store]).update(rollouts)
    for index, targets in store.kept.items():
        assert len(targets.token_ids) == int(masks[index].sum())


def test_the_engines_forward_scores_sampled_tokens_behind_given_ones():
    published = target()
    rollouts = sampled_rollouts(published, sampling=SamplingParams(max_new_tokens=12), batch=4)
    whole = collate(rollouts, pad_token_id=0)
    given, masks = with_given(rollouts)
    experience = collate(given, pad_token_id=0)
    scorer = scorer_of(published, 1.0)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    expected, found = scorer.logprobs(whole), scorer.logprobs(experience)
    torch.set_num_threads(threads)
    order = sorted(range(len(given)), key=lambda i: given[i].completion.key.sample_index)
    for row, index in enumerate(order):
        mask = torch.from_numpy(masks[index])
        of_whole = expected[row, : len(mask)][mask]
        assert torch.equal(found[row, : int(mask.sum())], of_whole)


def echoing(model, coef: float, *, observers=(), **algorithm) -> Learner:
    return Learner(
        model,
        algorithm=AlgorithmConfig(kind="grpo", echo_coef=coef, **algorithm),
        trainer=TrainerConfig(
            minibatch_size=6, learning_rate=1e-2, max_tokens_per_forward=24, max_grad_norm=1e9
        ),
        temperature=1.0,
        seed=1,
        pad_token_id=0,
        observers=observers,
    )


def gradient_of(
    learner: Learner, rollouts: list[Rollout]
) -> tuple[dict[str, torch.Tensor], dict[str, float]]:
    """Of the update's one step, as the optimizer finds it, and the update's figures."""
    found: dict[str, torch.Tensor] = {}

    def keep(optimizer, *_) -> None:
        found.update({n: p.grad.clone() for n, p in learner.model.named_parameters() if p.grad is not None})

    learner.optimizer.register_step_pre_hook(keep)
    return found, learner.update(rollouts).metrics


@pytest.mark.parametrize("weight", [0.5, 2.0])
def test_echo_adds_the_mean_cross_entropy_of_what_was_given(weight, make_model, make_rollouts):
    rollouts, masks = with_given(make_rollouts(make_model(), num=6))
    plain, _ = gradient_of(echoing(make_model(), 0.0), rollouts)
    echoed, metrics = gradient_of(echoing(make_model(), weight), rollouts)
    model = make_model()
    losses = []
    for rollout, mask in zip(rollouts, masks, strict=True):
        ids = torch.from_numpy(np.concatenate([rollout.prompt.token_ids, rollout.completion.token_ids]))
        start = len(rollout.prompt.token_ids)
        logprobs = model(ids[None]).logits[0].log_softmax(-1)[start - 1 : -1]
        losses.append(-logprobs[torch.arange(len(mask)), ids[start:]][~torch.from_numpy(mask)])
    loss = torch.cat(losses).mean()
    loss.backward()
    assert metrics["echo_loss"] == pytest.approx(loss.item(), rel=1e-5)
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None
        torch.testing.assert_close(echoed[name] - plain[name], weight * parameter.grad, rtol=1e-4, atol=1e-5)


def test_echo_learns_from_groups_of_equal_rewards_too(make_model, make_rollouts):
    rollouts, _ = with_given(make_rollouts(make_model(), num=6))
    equal = [replace(one, reward=replace(one.reward, value=1.0)) for one in rollouts]
    assert not gradient_of(echoing(make_model(), 0.0), equal)[0]
    assert gradient_of(echoing(make_model(), 1.0), equal)[0]


def test_observers_and_teachers_see_sampled_tokens_beside_echo(make_model, make_rollouts):
    rollouts, _ = with_given(make_rollouts(make_model(), num=6))
    stores = [SoftTargetStore(4), SoftTargetStore(4)]
    found = []
    for store, coef in zip(stores, (0.0, 1.0), strict=True):
        learner = echoing(make_model(), coef, observers=[store], distill_coef=0.5)
        learner.take_teacher(make_model())
        found.append(gradient_of(learner, rollouts)[1]["distill_loss"])
    assert found[0] == pytest.approx(found[1], abs=1e-6)
    plain, echoed = (store.kept for store in stores)
    assert plain.keys() == echoed.keys()
    for index, targets in plain.items():
        assert targets.token_ids.tolist() == echoed[index].token_ids.tolist()
        assert np.allclose(targets.logprobs, echoed[index].logprobs, atol=1e-5)


@pytest.mark.parametrize("environment", [{}, {"kind": "calculator", "max_turns": 1}])
def test_echo_with_nothing_between_turns_is_refused(environment):
    given = {"data": {"task": "chain"}, "models": {"draft": "d"}, "environment": environment}
    with pytest.raises(
        ValueError, match=r"echo_coef 0\.1 learns what an environment says between turns, got"
    ):
        Config.model_validate(given | {"algorithm": {"echo_coef": 0.1}})
