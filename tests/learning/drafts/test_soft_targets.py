"""Soft targets: the KL by hand, what merging tokens does to it, and a learner that is not disturbed."""

import math

import numpy as np
import pytest
import torch

from rlhfspec.core.config import AlgorithmConfig, TrainerConfig
from rlhfspec.engine.decoding.logprobs import scaled_logits
from rlhfspec.engine.weights.shared_ids import fit_draft, without
from rlhfspec.learning.drafts.refit import distillation_batches
from rlhfspec.learning.drafts.soft_targets import SoftTargetStore, soft_kl, targets_without, whole_kl
from rlhfspec.learning.training.experience import collate
from rlhfspec.learning.training.learner import Learner
from rlhfspec.learning.training.objectives.padded_batches import distillation_loss
from rlhfspec.learning.training.training_forward import prepare_for_training, response_logits
from tests.learning.conftest import seen_logits, tiny_model


def kept(logits: torch.Tensor, num_tokens: int):
    store = SoftTargetStore(num_tokens)
    store.observe(seen_logits([0], [len(logits)], logits))
    return store.of([0])


def test_what_is_not_kept_counts_as_one_event():
    teacher = torch.tensor([[0.5, 0.2, 0.2, 0.1]]).log()
    student = torch.tensor([[0.25, 0.25, 0.4, 0.1]]).log()
    # kept: token 0; any other token has 1/2 under the teacher and 3/4 under the student
    by_hand = 0.5 * math.log(0.5 / 0.25) + 0.5 * math.log(0.5 / 0.75)
    assert float(soft_kl(student, kept(teacher, 1))) == pytest.approx(by_hand, rel=1e-5)


def test_the_kl_grows_with_the_tokens_kept_up_to_the_whole_one():
    torch.manual_seed(0)
    teacher, student = torch.randn(5, 12) * 2, torch.randn(5, 12) * 2
    logprobs = torch.log_softmax(student, dim=-1)
    seen = [float(soft_kl(logprobs, kept(teacher, k)).mean()) for k in range(1, 13)]
    assert seen == sorted(seen) and seen[0] < 0.9 * seen[-1]
    assert seen[-1] == pytest.approx(float(distillation_loss(student, teacher)), rel=1e-4)


@pytest.mark.parametrize("num_tokens", [2, 6])
def test_a_student_that_equals_its_teacher_has_nothing_to_learn(num_tokens):
    torch.manual_seed(0)
    logits = (torch.randn(4, 6) * 5).requires_grad_()
    loss = soft_kl(torch.log_softmax(logits, dim=-1), kept(logits.detach(), num_tokens)).mean()
    loss.backward()
    assert loss.item() == pytest.approx(0.0, abs=1e-5) and float(logits.grad.abs().max()) < 1e-5


def test_a_student_that_is_certain_and_wrong_gets_a_finite_loss_and_gradient():
    teacher = torch.tensor([[0.0, 0.0, -80.0]])
    student = torch.tensor([[200.0, 0.0, 0.0]], requires_grad=True)
    loss = soft_kl(torch.log_softmax(student, dim=-1), kept(teacher, 2)).sum()
    loss.backward()
    assert torch.isfinite(loss) and torch.isfinite(student.grad).all() and loss.item() > 10.0


def test_the_store_answers_in_the_order_asked_and_only_when_it_has_all():
    store = SoftTargetStore(1)
    store.observe(seen_logits([7, 4], [2, 1], torch.eye(3)))
    targets = store.of([4, 7])
    assert targets is not None and targets.token_ids[:, 0].tolist() == [2, 0, 1]
    assert store.of([4, 5]) is None
    store.observe(seen_logits([4], [1], torch.eye(3)[:1]))
    assert store.of([4]).token_ids.tolist() == [[0]], "the last epoch's"
    store.begin()
    assert store.of([4]) is None


def test_a_store_of_no_tokens_keeps_nothing():
    store = SoftTargetStore(0)
    store.observe(seen_logits([0], [3], torch.eye(3)))
    assert store.of([0]) is None


def test_keeping_soft_targets_changes_no_parameter_of_the_learner(make_model, make_rollouts):
    store = SoftTargetStore(19)
    learners = [
        Learner(
            make_model(),
            algorithm=AlgorithmConfig(kind="ppo"),
            trainer=TrainerConfig(learning_rate=1e-2, minibatch_size=3, max_tokens_per_forward=16),
            temperature=0.7,
            seed=5,
            pad_token_id=0,
            observers=observers,
        )
        for observers in ([], [store])
    ]
    rollouts = make_rollouts(make_model(), temperature=0.7)
    metrics = [learner.update(rollouts).metrics for learner in learners]
    assert metrics[0] == metrics[1]
    pairs = zip(*(learner.model.parameters() for learner in learners), strict=True)
    assert all(torch.equal(a, b) for a, b in pairs)
    # two minibatches: the targets of the first one are the initial policy's
    experience = collate(rollouts, pad_token_id=0)
    model = make_model()
    prepare_for_training(model, gradient_checkpointing=False)
    logits, _ = response_logits(model, experience.packed(range(len(experience.lengths))), 19)
    targets = store.of(experience.sample_indices)
    assert targets is not None and targets.logprobs.shape == (experience.num_tokens, 19)
    expected = torch.log_softmax(scaled_logits(logits, 0.7), dim=-1).gather(-1, targets.token_ids.long())
    close = ((targets.logprobs - expected).abs() < 1e-3).float().mean()
    assert 0.2 < float(close) < 1.0, "some come from before the first step, the others from after it"


def test_what_the_draft_never_drafts_is_no_part_of_what_it_learns():
    torch.manual_seed(0)
    teacher, foreign = torch.randn(5, 12) * 2, torch.tensor([3, 8])
    student = torch.randn(5, 12, requires_grad=True)
    shared = [token for token in range(12) if token not in foreign]
    by_hand = distillation_loss(student[:, shared], teacher[:, shared])
    masked = without(student, foreign)
    soft = soft_kl(torch.log_softmax(masked, dim=-1), targets_without(kept(teacher, 12), foreign)).mean()
    whole = whole_kl(without(teacher, foreign), masked).mean()
    assert soft.item() == pytest.approx(by_hand.item(), rel=1e-4)
    assert whole.item() == pytest.approx(by_hand.item(), rel=1e-4)
    for loss in (soft, whole):
        (gradient,) = torch.autograd.grad(loss, student, retain_graph=True)
        assert torch.isfinite(gradient).all() and not gradient[:, foreign].any()
    few = soft_kl(torch.log_softmax(masked, dim=-1), targets_without(kept(teacher, 3), foreign))
    assert torch.isfinite(few).all() and (few <= whole_kl(without(teacher, foreign), masked) + 1e-5).all()


@pytest.mark.parametrize("num_targets", [0, 19])
def test_a_draft_s_divergence_is_finite_where_the_target_said_what_it_lacks(make_rollouts, num_targets):
    draft = fit_draft(tiny_model(), [4, 5], num_ids=19)
    said = (np.array([2, 4, 3]), np.array([4, 5, 6, 7]))
    rollouts = make_rollouts(tiny_model(), 2, pairs=[said, said])
    store = None
    if num_targets:
        store = SoftTargetStore(num_targets)
        for rollout in rollouts:
            length = rollout.completion.num_tokens
            store.observe(
                seen_logits([rollout.completion.key.sample_index], [length], torch.randn(length, 19))
            )
    data = distillation_batches(rollouts, soft_targets=store, max_tokens=64, pad_token_id=0)
    prepare_for_training(draft, gradient_checkpointing=False)
    divergence = data.divergence(draft, [0, 1], temperature=1.0, vocab_size=19)
    assert torch.isfinite(divergence).all() and divergence.abs().max() < 100.0
