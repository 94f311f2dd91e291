"""A learner and a buffer for the spot trainer that tests turn by hand: an operation ends when it is told to."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from rlhfspec.engine.drafters.head.feature_recorder import FeatureSequence

LIMIT_S = 60.0
"For a wait of a test: generous, and the end of one that hangs."
HIDDEN = 4


def sequence(num_tokens: int = 10, *, prompt_length: int = 2) -> FeatureSequence:
    """Features of a sequence; its first token is its number of tokens."""
    rows = num_tokens - 1
    return FeatureSequence(
        token_ids=np.full(num_tokens, num_tokens),
        prompt_length=prompt_length,
        taps=torch.zeros(rows, 3 * HIDDEN),
        last=torch.zeros(rows - prompt_length + 1, HIDDEN),
    )


@dataclass(frozen=True, slots=True)
class Report:
    """Of a step."""

    num_anchors: int
    needs: tuple[float, ...]
    loss: float = 0.0
    grad_norm: float = 1.0


class HandLearner:
    """Its only weight counts the steps. A step is a number of operations, each of which waits to be let go."""

    def __init__(self, num_operations: int = 1, *, by_hand: bool = False) -> None:
        self.learning_rate = 1.0
        self.tensors = {"w": torch.zeros(1)}
        self.num_operations, self.by_hand = num_operations, by_hand
        self.began = threading.Semaphore(0)
        "released when an operation begins"
        self.let_go = threading.Semaphore(0)
        "to be released for an operation to end"
        self.num_ended = 0
        self.error: Exception | None = None
        self.step_ended = threading.Event()
        self.grad_norm = 1.0
        self.num_forgotten = 0

    def operation(self) -> None:
        """One that nothing interrupts."""
        self.began.release()
        if self.by_hand:
            assert self.let_go.acquire(timeout=LIMIT_S)
        self.num_ended += 1

    def step(
        self, sequences: Sequence[FeatureSequence], should_stop: Callable[[], bool] = lambda: False
    ) -> Report | None:
        """See `HeadTrainer.step`."""
        if self.error is not None:
            raise self.error
        for _ in range(self.num_operations):
            if should_stop():
                return None
            self.operation()
        self.tensors = {"w": self.tensors["w"] + 1}
        self.step_ended.set()
        tokens = sum(one.num_response_tokens for one in sequences)
        return Report(tokens, tuple(1.0 for _ in sequences), grad_norm=self.grad_norm)

    def evaluate(self, sequences: Sequence[FeatureSequence]) -> Report:
        """The loss is the distance of the weight to 10."""
        return Report(0, (), loss=abs(float(self.tensors["w"]) - 10.0))

    def weights(self) -> dict[str, Tensor]:
        """See `HeadTrainer.weights`."""
        return {name: tensor.clone() for name, tensor in self.tensors.items()}

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """See `HeadTrainer.load`."""
        self.tensors = {name: tensor.clone() for name, tensor in tensors.items()}

    def forget_direction(self) -> None:
        """Count it."""
        self.num_forgotten += 1


class ListBuffer:
    """Keeps everything and gives everything, so many times."""

    def __init__(self, max_passes: int) -> None:
        self.max_passes = max_passes
        self.passes: Counter[int] = Counter()
        self.sequences: list[FeatureSequence] = []
        self.asked: list[int] = []
        "most tokens of each sample that was drawn"
        self.needs: list[float] = []
        self.num_iterations = 0

    def add(self, sequence: FeatureSequence) -> bool:
        """Keep it."""
        self.sequences.append(sequence)
        return True

    def sample(self, rng: np.random.Generator, max_tokens: int) -> list[FeatureSequence]:
        """All of them that may be learned from once more."""
        drawn = [one for one in self.sequences if self.passes[id(one)] < self.max_passes]
        if drawn:
            self.asked.append(max_tokens)
        return drawn

    def learned(self, sequences: Sequence[FeatureSequence], needs: Sequence[float]) -> None:
        """Note them."""
        self.needs = list(needs)
        self.passes.update(id(one) for one in sequences)

    def drop(self, sequences: Sequence[FeatureSequence]) -> None:
        """Leave them out."""
        self.sequences = [one for one in self.sequences if all(one is not each for each in sequences)]

    def next_iteration(self) -> None:
        """Count them."""
        self.num_iterations += 1
