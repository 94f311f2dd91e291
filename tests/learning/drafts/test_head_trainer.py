"""A head's training: it learns, it stops between two operations with nothing changed, and goes on from its state."""

import copy
from dataclasses import replace

import numpy as np
import pytest
import torch
from tiny_heads import random_sequences, sampled_sequences, state_of, tiny_head, trainer_of
from tiny_llama import tiny_llama
from torch import Tensor

from rlhfspec.core.errors import ConfigError
from rlhfspec.engine.drafters.head.head_weights import load_head, save_head
from rlhfspec.learning.drafts.head import TargetParts, draft_vocabulary, fresh_head
from rlhfspec.learning.drafts.head_trainer import HeadTrainer
from rlhfspec.learning.drafts.stoppable import Products

SHAPES = [(3, 9), (2, 6), (4, 7)]


def model_of(seed: int = 0):
    return tiny_llama(seed, initializer_range=0.3).eval()


def same(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


class StopAt:
    """Says stop when it is asked for the n-th time, and ever after."""

    def __init__(self, when: int) -> None:
        self.asked, self.when = 0, when

    def __call__(self) -> bool:
        self.asked += 1
        return self.asked >= self.when


def test_training_lowers_the_loss_of_every_level_and_raises_the_overlap():
    model = tiny_llama(initializer_range=0.05).eval()
    with torch.no_grad():
        # what comes next hangs on the last token, and can be learned in seconds
        model.get_input_embeddings().weight.mul_(20.0)
        model.lm_head.weight.mul_(30.0)
    head = fresh_head(model, draft_vocabulary(19, 19, responses=[]))
    train = sampled_sequences(model, head, 16, 12)
    held_out = sampled_sequences(model, head, 8, 12, seed=1)
    trainer = trainer_of(model, head, learning_rate=0.02)
    before = trainer_of(model, head).step(held_out)
    for _ in range(20):
        trainer.step(train)
    after = trainer_of(model, trainer.head).step(held_out)
    assert before is not None and after is not None
    for level in range(3):
        assert after.level_losses[level] < 0.3 * before.level_losses[level]
        assert after.level_overlaps[level] > before.level_overlaps[level] + 0.3


def test_a_step_that_is_stopped_anywhere_changes_nothing():
    model = model_of()
    head = tiny_head(model)
    sequences = random_sequences(model, head, SHAPES)
    trainer = trainer_of(model, head)
    trainer.step(sequences)
    before = state_of(trainer)
    never = StopAt(1 << 30)
    twin = copy.deepcopy(trainer)
    twin.step(sequences, never)
    assert never.asked > 50
    for when in [*range(1, never.asked, 7), never.asked]:
        asked = StopAt(when)
        assert trainer.step(sequences, asked) is None
        assert asked.asked == when, "it was asked again after it had said stop"
        assert same(state_of(trainer), before)
        assert all(parameter.grad is None for parameter in trainer.module.parameters())
    assert trainer.step(sequences) is not None
    assert same(state_of(trainer), state_of(twin))


def test_no_product_is_longer_than_a_piece(monkeypatch):
    most = 6000.0
    monkeypatch.setattr("rlhfspec.learning.drafts.stoppable.PIECE_FLOPS", {torch.float32: most})
    num_products = 0
    product = Products.product

    def measured(self, left, right):
        nonlocal num_products
        num_products += 1
        # eight rows are taken at once however wide the matrix
        assert len(left) <= 8 or 2 * len(left) * right.numel() <= most
        return product(self, left, right)

    monkeypatch.setattr(Products, "product", measured)
    model = model_of()
    head = tiny_head(model)
    assert trainer_of(model, head).step(random_sequences(model, head, SHAPES)) is not None
    assert num_products > 100


def test_copies_that_were_given_out_do_not_change():
    model = model_of()
    head = tiny_head(model)
    trainer = trainer_of(model, head)
    sequences = random_sequences(model, head, SHAPES)
    trainer.step(sequences)
    state = state_of(trainer)
    kept = {name: value.clone() for name, value in state.items()}
    for _ in range(3):
        trainer.step(sequences)
    assert same(state, kept)


def test_what_was_trained_survives_its_files_bit_for_bit(tmp_path):
    model = model_of()
    head = tiny_head(model)
    trainer = trainer_of(model, head)
    sequences = random_sequences(model, head, SHAPES)
    trainer.step(sequences)
    save_head(tmp_path / "head", trainer.head)
    read = load_head(tmp_path / "head", num_target_layers=2)
    assert read.config == trainer.head.config
    assert same(dict(read.tensors), dict(trainer.head.tensors))
    one, other = trainer_of(model, trainer.head).step(sequences), trainer_of(model, read).step(sequences)
    assert one == other and one is not None


def test_the_target_that_has_changed_is_learned_from():
    model, changed = model_of(), model_of(1)
    head = tiny_head(model)
    sequences = random_sequences(model, head, SHAPES)
    trainer = trainer_of(model, head)
    trainer.take_target(TargetParts.of(changed, head.config.tapped_layers))
    got, expected = trainer.step(sequences), trainer_of(changed, head).step(sequences)
    assert got == expected and got is not None


def test_each_sequence_is_told_its_need():
    model = model_of()
    head = tiny_head(model)
    sequences = random_sequences(model, head, [(3, 9), (1, 1), (2, 6)])
    together = trainer_of(model, head).step(sequences)
    assert together is not None and together.needs[1] == 0.0
    for index in (0, 2):
        alone = trainer_of(model, head).step([sequences[index]])
        assert alone is not None
        assert together.needs[index] == pytest.approx(alone.needs[0], rel=1e-5)
        assert alone.needs[0] == pytest.approx(1.0 - alone.level_overlaps[0], rel=1e-5)


def test_nothing_to_learn_from_is_no_step():
    model = model_of()
    head = tiny_head(model)
    trainer = trainer_of(model, head)
    assert trainer.step(random_sequences(model, head, [(1, 1)])) is None
    assert trainer.step([]) is None
    assert trainer.num_steps == 0


def test_hidden_states_that_are_not_finite_change_nothing():
    model = model_of()
    head = tiny_head(model)
    trainer = trainer_of(model, head)
    before = state_of(trainer)
    (sequence,) = random_sequences(model, head, [(3, 9)])
    report = trainer.step([replace(sequence, taps=torch.full_like(sequence.taps, torch.inf))])
    assert report is not None and not np.isfinite(report.grad_norm)
    assert same(state_of(trainer), before)


def test_a_direction_that_is_forgotten_moves_nothing_where_there_is_no_gradient():
    model = model_of()
    trainer = trainer_of(model, tiny_head(model))
    trainer.step(random_sequences(model, trainer.head, SHAPES))
    trainer.forget_direction()
    state = state_of(trainer)
    assert all(not value.any() for name, value in state.items() if name.endswith("exp_avg"))
    assert any(value.any() for name, value in state.items() if name.endswith("exp_avg_sq"))


@pytest.mark.parametrize("wrong", [{"num_unrolled": 0}, {"temperature": -1.0}, {"learning_rate": 0.0}])
def test_settings_out_of_range_are_refused(wrong: dict):
    model = model_of()
    with pytest.raises(ConfigError, match="expects num_unrolled of 1 or more"):
        trainer_of(model, tiny_head(model), **wrong)


def test_weights_of_another_head_are_refused():
    model = model_of()
    trainer: HeadTrainer = trainer_of(model, tiny_head(model))
    other = trainer_of(model, tiny_head(model, 7))
    before = state_of(trainer)
    with pytest.raises(ConfigError, match="lm_head"):
        trainer.load(other.weights())
    assert same(state_of(trainer), before)


def test_products_in_bfloat16_learn_the_same_but_for_rounding():
    model = model_of()
    head = tiny_head(model)
    sequences = random_sequences(model, head, SHAPES)
    exact = trainer_of(model, head).step(sequences)
    rounded = trainer_of(model, head, compute_dtype=torch.bfloat16).step(sequences)
    assert exact is not None and rounded is not None
    assert rounded.loss == pytest.approx(exact.loss, rel=0.05)
    assert rounded.grad_norm == pytest.approx(exact.grad_norm, rel=0.1)
