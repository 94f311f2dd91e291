"""Blocks of scored samples on their way to the trainers, over trainers made by hand. No Ray, no models."""

from types import SimpleNamespace
from typing import Any

import pytest

from rlhfspec.cluster.run.forward_stream import ForwardStream, Streamed
from rlhfspec.core.errors import InstanceLost


def scored(index: int) -> Any:
    return SimpleNamespace(completion=SimpleNamespace(key=SimpleNamespace(sample_index=index)))


class Trainers:
    """Take one block at a time, and 2 s for each; done when told."""

    def __init__(self) -> None:
        self.got: list[list[int]] = []
        self.under_way = 0
        self.is_done = False
        self.clock_s = 0.0
        self.wait_s = 0.0

    def begin_forwards(self, rollouts: Any, *, recompute_old: bool) -> int:
        assert recompute_old
        self.under_way += 1
        assert self.under_way == 1, "one order at a time"
        self.got.append([rollout.completion.key.sample_index for rollout in rollouts])
        self.is_done = False
        return len(self.got)

    def answered(self, order: int) -> bool:
        assert order == len(self.got)
        return self.is_done

    def end_forwards(self, order: int) -> float:
        self.under_way -= 1
        self.clock_s += 0.0 if self.is_done else self.wait_s
        return 2.0


def stream(trainers: Trainers, *indices: int, size: int = 2) -> ForwardStream:
    return ForwardStream(
        trainers, indices, block_samples=size, recompute_old=True, clock=lambda: trainers.clock_s
    )


def test_a_block_goes_when_all_of_it_is_scored_and_the_trainers_are_free():
    trainers = Trainers()
    forwards = stream(trainers, 14, 10, 11, 12, 13)
    for index in (13, 14, 10):
        forwards.add(scored(index))
        forwards.look()
    assert trainers.got == [[14]], "the last block is smaller, and the others are not whole"
    forwards.add(scored(12))
    forwards.add(scored(11))
    forwards.look()
    assert trainers.got == [[14]], "the trainers are busy"
    for _ in range(3):
        trainers.is_done = True
        forwards.look()
    assert trainers.got == [[14], [13, 12], [10, 11]]


def test_what_was_waited_for_at_the_end_was_not_hidden():
    trainers = Trainers()
    forwards = stream(trainers, 0, 1, 2, 3)
    for index in (0, 1, 2, 3):
        forwards.add(scored(index))
    forwards.look()
    trainers.is_done = True
    forwards.look()
    trainers.wait_s = 1.5
    assert forwards.finish() == Streamed(num_samples=4, hidden_s=2.5)
    assert trainers.under_way == 0
    assert forwards.finish().num_samples == 4, "and nothing is waited for twice"


def test_a_block_that_was_not_ordered_is_left_to_the_update():
    trainers = Trainers()
    forwards = stream(trainers, 0, 1)
    forwards.add(scored(0))
    forwards.add(scored(1))
    assert forwards.finish() == Streamed(num_samples=0, hidden_s=0.0)
    assert trainers.got == []


def test_a_trainer_that_died_is_told_during_the_rollout():
    trainers = Trainers()

    def die(order: int) -> float:
        raise InstanceLost("trainer-1 died")

    trainers.end_forwards = die
    forwards = stream(trainers, 0, 1, 2, 3)
    forwards.add(scored(2))
    forwards.add(scored(3))
    forwards.look()
    trainers.is_done = True
    with pytest.raises(InstanceLost, match="trainer-1 died"):
        forwards.look()
