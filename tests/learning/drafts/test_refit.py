"""Refits: the draft follows a drifted target, within its budget, and never takes worse or broken weights."""

import copy
import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from tiny_llama import tiny_llama

from rlhfspec.core.config import DrafterTrainingConfig
from rlhfspec.core.errors import ConfigError
from rlhfspec.engine.decoding.logprobs import scaled_logits, token_logprobs
from rlhfspec.learning.drafts.draft_learner import DraftTerms
from rlhfspec.learning.drafts.refit import DraftRefitter, distillation_batches
from rlhfspec.learning.drafts.soft_targets import SoftTargetStore
from rlhfspec.learning.models.demo_pair import sample_responses
from rlhfspec.learning.training.experience import collate
from rlhfspec.learning.training.training_forward import prepare_for_training, response_logits
from tests.learning.conftest import seen_logits, tiny_model

TOKEN_S = 0.01


class Clock:
    """Stands still but for what a test adds."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def make_refitter(clock):
    """A refitter of a model whose forwards take `TOKEN_S` seconds a padded token."""

    def make(model, *, temperature: float = 1.0, **settings) -> DraftRefitter:
        def take_time(_, args, kwargs, output) -> None:
            clock.now_s += kwargs["input_ids"].numel() * TOKEN_S

        model.register_forward_hook(take_time, with_kwargs=True)
        defaults = {"learning_rate": 3e-3, "max_tokens_per_step": 64, "max_passes": 3}
        return DraftRefitter(
            model,
            DraftTerms(
                settings=DrafterTrainingConfig(**defaults | settings), temperature=temperature, vocab_size=19
            ),
            clock=clock,
        )

    return make


def drifted(model, *, by: float = 0.5):
    """The same model with noise on every weight, relative to its spread."""
    generator = torch.Generator().manual_seed(3)
    other = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in other.parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.add_(noise * parameter.std() * by if parameter.dim() > 1 else 0.0 * noise)
    return other


def sampled_rollouts(model, make_rollouts, num: int, *, seed: int = 0):
    """Rollouts whose responses were sampled from the model."""
    prompts = [np.random.default_rng([seed, i]).integers(2, 19, size=3) for i in range(num)]
    responses = sample_responses(model, prompts, max_new_tokens=10, eos_token_id=1, pad_token_id=0, seed=seed)
    return make_rollouts(model, num, group_size=1, pairs=list(zip(prompts, responses, strict=True)))


def targets_of(model, rollouts, *, num_tokens: int = 8, temperature: float = 1.0) -> SoftTargetStore:
    experience = collate(rollouts, pad_token_id=0)
    prepare_for_training(model, gradient_checkpointing=False)
    logits, _ = response_logits(model, experience.packed(range(len(experience.lengths))), 19)
    store = SoftTargetStore(num_tokens)
    lengths = experience.mask.sum(1).tolist()
    store.observe(
        seen_logits(experience.sample_indices, lengths, scaled_logits(logits.detach(), temperature))
    )
    return store


@torch.no_grad()
def kl_and_overlap(target, draft, rollouts) -> tuple[float, float]:
    """Mean KL(target || draft) and mean sum of min(p, q), which is speculative sampling's acceptance rate."""
    experience = collate(rollouts, pad_token_id=0)
    for model in (target, draft):
        prepare_for_training(model, gradient_checkpointing=False)
    p, q = (
        torch.log_softmax(
            response_logits(model, experience.packed(range(len(experience.lengths))), 19)[0], dim=-1
        )
        for model in (target, draft)
    )
    return float((p.exp() * (p - q)).sum(-1).mean()), float(torch.minimum(p, q).exp().sum(-1).mean())


def weights(model) -> list[torch.Tensor]:
    return [parameter.detach().clone() for parameter in model.parameters()]


def same(before: list[torch.Tensor], model) -> bool:
    return all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))


@pytest.mark.parametrize("soft", [True, False], ids=["likeliest tokens", "sampled tokens"])
def test_a_draft_follows_a_target_that_has_drifted(make_refitter, make_rollouts, soft):
    draft = tiny_model()
    target = drifted(draft)
    rollouts = sampled_rollouts(target, make_rollouts, 160)
    unseen = sampled_rollouts(target, make_rollouts, 40, seed=1)
    kl, overlap = kl_and_overlap(target, draft, unseen)
    store = targets_of(target, rollouts) if soft else None
    report = make_refitter(draft).refit(rollouts, budget_s=1000.0, soft_targets=store)
    assert report.outcome == "taken" and report.weight_version == 1
    assert report.kl_after < report.kl_before
    new_kl, new_overlap = kl_and_overlap(target, draft, unseen)
    assert new_kl < 0.7 * kl and new_overlap > overlap + 0.04


def test_it_ends_within_its_budget_and_uses_what_it_can(make_refitter, make_rollouts, clock):
    draft = tiny_model()
    rollouts = sampled_rollouts(drifted(draft), make_rollouts, 32)
    refitter = make_refitter(draft, max_passes=1000)
    dearest_s = 64 * TOKEN_S
    for budget_s in (4.0, 9.0, 25.0):
        began_s = clock()
        report = refitter.refit(rollouts, budget_s=budget_s)
        took_s = clock() - began_s
        assert report.refit_s == pytest.approx(took_s) and took_s <= budget_s
        assert report.num_steps >= 1 and took_s > budget_s - 2 * dearest_s
    assert report.num_tokens > sum(rollout.completion.num_tokens for rollout in rollouts)


def test_passes_are_bounded_however_large_the_budget(make_refitter, make_rollouts):
    draft = tiny_model()
    rollouts = sampled_rollouts(drifted(draft), make_rollouts, 32)
    data = distillation_batches(rollouts, soft_targets=None, max_tokens=64, pad_token_id=0)
    report = make_refitter(draft, max_passes=2).refit(rollouts, budget_s=1e9)
    assert report.num_steps == 2 * len(data.batches) > 2


def test_a_budget_for_no_step_changes_nothing_and_costs_nothing(make_refitter, make_rollouts, clock):
    draft = tiny_model()
    rollouts = sampled_rollouts(drifted(draft), make_rollouts, 32)
    refitter = make_refitter(draft)
    refitter.refit(rollouts, budget_s=5.0)
    before, version, now_s = weights(draft), refitter.weight_version, clock()
    for budget_s in (-1.0, 0.0, 64 * TOKEN_S):
        report = refitter.refit(rollouts, budget_s=budget_s)
        assert (report.outcome, report.num_steps, report.kl_before) == ("no_time", 0, None)
    assert same(before, draft) and refitter.weight_version == version and clock() == now_s


def test_weights_that_do_worse_on_the_held_out_slice_are_given_up(make_refitter, make_rollouts):
    draft = tiny_model()
    target = drifted(draft)
    rollouts = sampled_rollouts(target, make_rollouts, 32)
    before = weights(draft)
    report = make_refitter(draft, learning_rate=3.0).refit(rollouts, budget_s=1e9)
    assert report.outcome == "worse" and report.kl_after > report.kl_before
    assert report.weight_version == 0 and same(before, draft)


def test_a_learning_rate_that_is_far_too_high_costs_some_refits_and_no_more(make_refitter, make_rollouts):
    draft = tiny_model()
    target = drifted(draft)
    rollouts = sampled_rollouts(target, make_rollouts, 32)
    store = targets_of(target, rollouts)
    refitter = make_refitter(draft, learning_rate=1.0, max_passes=1)
    outcomes = [refitter.refit(rollouts, budget_s=1e9, soft_targets=store).outcome for _ in range(12)]
    assert outcomes[0] == "worse" and "taken" in outcomes


@pytest.fixture
def poisoned(make_rollouts):
    """Draft, rollouts, and soft targets of which one training sample's are not numbers."""
    draft = tiny_model()
    target = drifted(draft)
    rollouts = sampled_rollouts(target, make_rollouts, 32)
    held_out = distillation_batches(rollouts, soft_targets=None, max_tokens=64, pad_token_id=0).held_out
    store = targets_of(target, rollouts)
    index = next(index for index in range(32) if index not in held_out)
    length = rollouts[index].completion.num_tokens
    store.observe(seen_logits([index], [length], torch.full((length, 19), torch.nan)))
    return draft, rollouts, store


def test_a_loss_that_is_not_finite_leaves_the_old_weights(make_refitter, poisoned):
    draft, rollouts, store = poisoned
    before = weights(draft)
    report = make_refitter(draft).refit(rollouts, budget_s=1e9, soft_targets=store)
    assert report.outcome == "not_finite" and report.weight_version == 0
    assert report.kl_before is not None and report.kl_after is None
    assert same(before, draft)


def test_after_one_given_up_the_next_refit_is_as_good_as_the_first(make_refitter, poisoned):
    draft, rollouts, store = poisoned
    refitter = make_refitter(draft)
    refitter.refit(rollouts, budget_s=1e9, soft_targets=store)
    assert refitter._before == []
    report = refitter.refit(rollouts, budget_s=1e9)
    assert (report.outcome, report.weight_version) == ("taken", 1) and refitter._before == []


def test_a_resumed_refit_goes_on_bitwise(make_refitter, make_rollouts, tmp_path):
    draft = tiny_model()
    rollouts = sampled_rollouts(drifted(draft), make_rollouts, 32)
    straight = make_refitter(draft)
    assert straight.refit(rollouts, budget_s=1e9).num_steps > 1
    straight.save(tmp_path / "refit")
    resumed = make_refitter(tiny_model(seed=9))
    resumed.load(tmp_path / "refit")
    expected, got = (one.refit(rollouts, budget_s=1e9) for one in (straight, resumed))
    assert replace(got, refit_s=0.0) == replace(expected, refit_s=0.0) and got.num_steps > 1
    assert same(weights(straight.model), resumed.model)


def test_a_refit_s_state_that_is_cut_or_another_model_s_is_refused(make_refitter, tmp_path):
    refitter, path = make_refitter(tiny_model()), tmp_path / "refit"
    refitter.save(path)
    with pytest.raises(ConfigError, match="other weights"):
        make_refitter(tiny_llama(num_hidden_layers=1)).load(path)
    path.write_bytes(path.read_bytes()[:-5])
    with pytest.raises(ConfigError, match="is no state of a draft model's training"):
        refitter.load(path)


def test_one_sample_leaves_nothing_to_judge_by(make_refitter, make_rollouts):
    draft = tiny_model()
    rollouts = sampled_rollouts(draft, make_rollouts, 1)
    report = make_refitter(draft).refit(rollouts, budget_s=1e9)
    assert (report.outcome, report.num_steps) == ("one_sample", 0)


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_the_divergence_is_taken_at_the_response_tokens_and_under_the_temperature(make_rollouts, temperature):
    target, draft = tiny_model(0), tiny_model(1)
    prepare_for_training(draft, gradient_checkpointing=False)
    rollouts = make_rollouts(target, 4, temperature=temperature)
    store = targets_of(target, rollouts, num_tokens=19, temperature=temperature)
    for soft_targets in (None, store):
        data = distillation_batches(rollouts, soft_targets=soft_targets, max_tokens=512, pad_token_id=0)
        got = data.divergence(draft, [0, 1, 2, 3], temperature=temperature, vocab_size=19)
        by_hand = [
            value
            for rollout in rollouts
            for value in divergence_by_hand(target, draft, rollout, temperature, soft_targets is not None)
        ]
        assert got.tolist() == pytest.approx(by_hand, abs=1e-4)


@torch.no_grad()
def divergence_by_hand(target, draft, rollout, temperature: float, soft: bool) -> list[float]:
    prompt, response = rollout.prompt.token_ids, rollout.completion.token_ids
    ids = torch.from_numpy(np.concatenate([prompt, response]))[None]
    p, q = (model(ids).logits[0, len(prompt) - 1 : -1] for model in (target, draft))
    if soft:
        p, q = (torch.log_softmax(logits / temperature, dim=-1) for logits in (p, q))
        return (p.exp() * (p - q)).sum(-1).tolist()
    tokens = ids[0, len(prompt) :]
    return (token_logprobs(p, tokens, temperature) - token_logprobs(q, tokens, temperature)).tolist()


def test_no_group_is_both_held_out_and_learned_from(model, make_rollouts):
    rollouts = make_rollouts(model, 40, group_size=4)
    data = distillation_batches(rollouts, soft_targets=None, max_tokens=40, pad_token_id=0)
    learned = [row for rows in data.batches for row in rows]
    groups = [rollout.completion.group_id for rollout in rollouts]
    assert data.held_out and not {groups[row] for row in data.held_out} & {groups[row] for row in learned}
    assert len(learned) == len(set(learned)) == 40 - 2 * 4
    assert all(data.num_tokens(rows) <= 40 for rows in [*data.batches, data.held_out])


def test_samples_that_the_update_left_out_are_left_out_here_too(model, make_rollouts):
    rollouts = make_rollouts(model, 12, group_size=2)
    store = targets_of(model, [rollouts[i] for i in (0, 1, 4, 5, 8, 9)])
    data = distillation_batches(rollouts, soft_targets=store, max_tokens=64, pad_token_id=0)
    assert sorted([*data.held_out, *(row for rows in data.batches for row in rows)]) == [0, 1, 4, 5, 8, 9]
    too_few = targets_of(model, rollouts[:1])
    data = distillation_batches(rollouts, soft_targets=too_few, max_tokens=64, pad_token_id=0)
    assert len(data.held_out) + sum(map(len, data.batches)) == 12


def test_samples_of_a_single_group_are_split_among_themselves(model, make_rollouts):
    data = distillation_batches(
        make_rollouts(model, 6, group_size=6), soft_targets=None, max_tokens=512, pad_token_id=0
    )
    assert (data.held_out, sorted(data.batches[0])) == ([0], [1, 2, 3, 4, 5])


def test_a_draft_whose_held_out_divergence_hides_an_infinite_weight_is_given_up(
    make_refitter, make_model, make_rollouts, monkeypatch
):
    model = make_model()
    refitter = make_refitter(model)
    before = [parameter.detach().clone() for parameter in model.parameters()]

    def spoil(*_):
        with torch.no_grad():
            next(model.parameters())[0, 0] = math.inf

    refitter._trainer.optimizer.register_step_post_hook(spoil)
    monkeypatch.setattr(refitter, "_evaluate", lambda data: 0.0)
    report = refitter.refit(make_rollouts(make_model()), budget_s=1e9)
    assert (report.outcome, report.weight_version) == ("not_finite", 0)
    assert all(torch.equal(new, old) for new, old in zip(model.parameters(), before, strict=True))
