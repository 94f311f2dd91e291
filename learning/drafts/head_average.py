"""The mean of heads that several instances have trained from one head, each on its own samples.

Source: Stich 2019, 'Local SGD Converges Fast and Communicates Little' (arXiv 1805.09767). Weights are by the tokens
that each has learned from.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor

from ...core.errors import WeightsError
from ...engine.drafters.head.head_weights import HeadWeights


class HeadAverage:
    """Takes one head after the other; holds their sum and no more."""

    def __init__(self, head: HeadWeights) -> None:
        """`head`: what all began with; names, shapes and vocabulary are its."""
        self._head = head
        self._sums: dict[str, Tensor] = {}
        self.num_tokens = 0

    def add(self, who: str, tensors: Mapping[str, np.ndarray], *, num_tokens: int) -> None:
        """Count in the trained tensors of one instance; nothing is counted where this raises.

        Raises WeightsError: other names or shapes than the head's, or weights that are not finite.
        """
        if num_tokens <= 0:
            return
        expected = {name: tuple(tensor.shape) for name, tensor in self._head.trained.items()}
        got = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
        if wrong := sorted(
            name for name in expected.keys() | got.keys() if expected.get(name) != got.get(name)
        ):
            raise WeightsError(
                f"{who} trained another draft head than was published: {wrong[0]} is {got.get(wrong[0])}, expected "
                f"{expected.get(wrong[0])}; what it learned is left out"
            )
        for name, tensor in tensors.items():
            if not np.isfinite(tensor).all():
                raise WeightsError(
                    f"{who} trained the draft head to weights that are not finite ({name}); what it learned is left "
                    "out; seen often, lower drafter_training.head_learning_rate"
                )
        for name, tensor in tensors.items():
            if name not in self._sums:
                self._sums[name] = torch.zeros(tensor.shape)
            self._sums[name] += torch.from_numpy(
                np.asarray(tensor, dtype=np.float32) * np.float32(num_tokens)
            )
        self.num_tokens += num_tokens

    def result(self) -> HeadWeights | None:
        """The mean, in the head's types; None where nothing was learned."""
        if not self.num_tokens:
            return None
        trained = self._head.trained
        return self._head.with_trained(
            {name: (total / self.num_tokens).to(trained[name].dtype) for name, total in self._sums.items()}
        )
