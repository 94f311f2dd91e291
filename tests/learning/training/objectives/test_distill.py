"""Distillation: the KL by hand, its direction, and a student that moves while the teacher stays."""

import math
from functools import partial

import numpy as np
import pytest
import torch

from rlhfspec.learning.training.objectives.padded_batches import (
    Example,
    distillation_loss,
    distilled_loss,
    supervised_batches,
)
from rlhfspec.learning.training.trainer_core import OneForward, small_trainer


def logits_of(*rows: list[float]) -> torch.Tensor:
    return torch.tensor(rows).log()


def test_the_loss_is_the_mean_kl_from_teacher_to_student():
    # KL((1/2, 1/2) || (1/4, 3/4)) = (ln 2 + ln 2/3) / 2; the second position agrees: 0
    student = logits_of([0.25, 0.75], [0.9, 0.1])
    teacher = logits_of([0.5, 0.5], [0.9, 0.1])
    by_hand = (math.log(2) + math.log(2 / 3)) / 2 / 2
    assert float(distillation_loss(student, teacher)) == pytest.approx(by_hand, rel=1e-5)
    # the other direction is another number: ((1/4) ln 1/2 + (3/4) ln 3/2) / 2
    backwards = (0.25 * math.log(0.5) + 0.75 * math.log(1.5)) / 2
    assert float(distillation_loss(teacher, student)) == pytest.approx(backwards, rel=1e-5)


def test_a_shift_of_all_logits_changes_nothing():
    student, teacher = logits_of([0.25, 0.75]), logits_of([0.5, 0.5])
    shifted = distillation_loss(student + 7.0, teacher - 3.0)
    assert float(shifted) == pytest.approx(float(distillation_loss(student, teacher)), rel=1e-4)


def test_the_student_comes_closer_and_the_teacher_stays(make_model):
    student, teacher = make_model(seed=1), make_model(seed=0).requires_grad_(False)
    before = [p.clone() for p in teacher.parameters()]
    examples = [Example(token_ids=np.array([2 + i, 7, 8, 9, 1]), num_prompt_tokens=1) for i in range(4)]
    (batch,) = supervised_batches(examples, max_tokens=64, pad_token_id=0, rng=np.random.default_rng(0))
    trainer = small_trainer(student, learning_rate=1e-2, warmup_steps=1)
    divergences = []
    for _ in range(20):
        forward = OneForward(partial(distilled_loss, teacher=teacher, batch=batch))
        trainer.learn(forward, "of a test")
        divergences.append(forward.value)
    assert divergences[-1] < 0.2 * divergences[0]
    assert all(torch.equal(a, b) for a, b in zip(before, teacher.parameters(), strict=True))


def test_a_student_that_equals_its_teacher_has_nothing_to_learn(make_model):
    student, teacher = make_model(), make_model()
    (batch,) = supervised_batches(
        [Example(token_ids=np.array([3, 4, 5]), num_prompt_tokens=1)],
        max_tokens=64, pad_token_id=0, rng=np.random.default_rng(0),
    )  # fmt: skip
    loss = distilled_loss(student, teacher, batch)
    loss.backward()
    assert float(loss) == pytest.approx(0.0, abs=1e-6)
    assert max(float(p.grad.abs().max()) for p in student.parameters()) < 1e-5
