"""A head is judged on held-out sequences as a step would see them, and nothing of it changes."""

from dataclasses import replace

import torch
from tiny_heads import random_sequences, state_of, tiny_head, trainer_of
from tiny_llama import tiny_llama


def test_an_evaluation_reports_the_step_that_it_does_not_take() -> None:
    model = tiny_llama(initializer_range=0.3).eval()
    head = tiny_head(model)
    sequences = random_sequences(model, head, [(3, 9), (2, 1), (4, 7)])
    trainer = trainer_of(model, head)
    trainer.step(sequences)
    before = state_of(trainer)
    found = trainer.evaluate(sequences)
    after = state_of(trainer)
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)
    taken = trainer.step(sequences)
    assert taken is not None and taken.grad_norm > 0.0
    assert found == replace(taken, grad_norm=0.0)
