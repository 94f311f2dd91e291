"""A long sequence is learned from in stretches: what is computed between two looks, and held, is bounded."""

import pytest
import torch
from tiny_heads import random_sequences, state_of, tiny_head, trainer_of
from tiny_llama import tiny_llama
from torch.utils._python_dispatch import TorchDispatchMode

from rlhfspec.learning.drafts import head_trainer, unrolled
from rlhfspec.learning.drafts.stoppable import Products

ANCHORS, SCORES, HEADS, LEVELS = 16, 2048, 4, 3
SHAPES = [(3, 90), (1, 5), (2, 40)]


class Largest(TorchDispatchMode):
    """Notes how many numbers the largest result of a product or a softmax has."""

    def __init__(self) -> None:
        super().__init__()
        self.numbers = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        found = func(*args, **(kwargs or {}))
        if isinstance(found, torch.Tensor) and func._overloadpacket.__name__ in ("bmm", "_softmax"):
            self.numbers = max(self.numbers, found.numel())
        return found


def step_of(shapes: list[tuple[int, int]], should_stop=lambda: False):
    model = tiny_llama(initializer_range=0.3).eval()
    head = tiny_head(model)
    trainer = trainer_of(model, head)
    return trainer, trainer.step(random_sequences(model, head, shapes), should_stop)


@pytest.fixture
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(head_trainer, "PACK_ANCHORS", ANCHORS)
    monkeypatch.setattr(unrolled, "PIECE_SCORES", SCORES)


def test_the_step_is_that_of_whole_sequences(small_pieces: None) -> None:
    cut, of_cut = step_of(SHAPES)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(head_trainer, "PACK_ANCHORS", 1 << 20)
        patch.setattr(unrolled, "PIECE_SCORES", 1 << 30)
        whole, of_whole = step_of(SHAPES)
    assert of_cut is not None and of_whole is not None
    for name in ("loss", "level_losses", "level_overlaps", "needs", "grad_norm"):
        assert getattr(of_cut, name) == pytest.approx(getattr(of_whole, name), rel=1e-4), name
    assert of_cut.num_anchors == of_whole.num_anchors
    for name, value in state_of(cut).items():
        torch.testing.assert_close(value, state_of(whole)[name], rtol=1e-3, atol=1e-6)


def test_nothing_between_two_looks_grows_with_the_square_of_the_length(small_pieces: None) -> None:
    def largest(length: int) -> int:
        with Largest() as seen:
            step_of([(3, length)])
        return seen.numbers

    # of one piece, with its own levels; whole it would be more than 57,000
    assert largest(120) <= SCORES + ANCHORS * HEADS * LEVELS


def test_what_is_held_for_the_gradient_grows_with_the_length_alone(small_pieces: None) -> None:
    def held(length: int) -> int:
        numbers = live = 0

        def keep(x: torch.Tensor) -> torch.Tensor:
            nonlocal numbers, live
            live += x.numel()
            numbers = max(numbers, live)
            return x

        def give(x: torch.Tensor) -> torch.Tensor:
            nonlocal live
            live -= x.numel()
            return x

        with torch.autograd.graph.saved_tensors_hooks(keep, give):
            step_of([(3, length)])
        return numbers

    assert held(240) < 3 * held(120)


def test_looks_are_taken_within_the_attention_of_one_sequence(
    small_pieces: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    looks: list[int] = []
    monkeypatch.setattr(Products, "look", lambda self: looks.append(1))
    step_of([(3, 90)])
    by_pieces = len(looks)
    looks.clear()
    monkeypatch.setattr(unrolled, "PIECE_SCORES", 1 << 30)
    step_of([(3, 90)])
    # each piece once forward, once backward
    assert by_pieces >= len(looks) + 2 * LEVELS * (ANCHORS // 6)
