"""AdamW whose step can be given up half-way: it writes beside the weights, and changes over when all is done."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from rlhfspec.core.errors import ConfigError
from rlhfspec.learning.drafts.operations import Products, pieces_of

PIECE_NUMBERS = 1 << 19
"Weights that are updated between two looks: about a millisecond of a core."
EPSILON = 1e-8


class StoppableAdam:
    """Adam with decoupled weight decay (Loshchilov and Hutter 2019), of named float32 parameters.

    Every parameter and both moments exist twice: a step writes the second ones.
    """

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        *,
        betas: tuple[float, float] = (0.9, 0.95),
        weight_decay: float = 0.0,
        max_norm: float = 1.0,
    ) -> None:
        self._parameters = dict(parameters)
        self._betas, self._weight_decay, self._max_norm = betas, weight_decay, max_norm
        self.num_steps = 0
        self._moments = {
            name: (torch.zeros_like(parameter), torch.zeros_like(parameter))
            for name, parameter in self._parameters.items()
        }
        self._spare = {
            name: tuple(torch.empty_like(parameter) for _ in range(3))
            for name, parameter in self._parameters.items()
        }

    @torch.no_grad()
    def step(self, learning_rate: float, products: Products) -> float:
        """Take a step by the parameters' gradients; returns their norm, which is clipped.

        Raises Stopped, with nothing changed. Where the norm is not finite, no step is taken.
        """
        norm = self._norm(products)
        if not torch.isfinite(norm):
            return float(norm)
        clip = (self._max_norm / (norm + 1e-6)).clamp(max=1.0)
        for name, parameter in self._parameters.items():
            self._update(name, parameter, learning_rate, clip, products)
        self._change_over()
        return float(norm)

    @torch.no_grad()
    def forget_direction(self) -> None:
        """Zero the first moments: the weights have gone back, and where they were heading was wrong."""
        for first, _ in self._moments.values():
            first.zero_()

    def state(self) -> dict[str, Tensor]:
        """Copies of the moments by parameter and part, and the number of steps."""
        found = {"num_steps": torch.tensor(self.num_steps)}
        for name, moments in self._moments.items():
            for part, value in zip(("exp_avg", "exp_avg_sq"), moments, strict=True):
                found[f"{name}.{part}"] = value.detach().cpu().clone()
        return found

    def load_state(self, state: Mapping[str, Tensor]) -> None:
        """Go on where `state` was called. Raises ConfigError where it is another head's."""
        expected = {name: value.shape for name, value in self.state().items()}
        got = {name: value.shape for name, value in state.items()}
        if expected != got:
            raise ConfigError(
                "the saved state of a draft head's optimizer is of a head of other sizes; go on with the head that "
                "it was saved with"
            )
        self.num_steps = int(state["num_steps"])
        for name, moments in self._moments.items():
            for part, value in zip(("exp_avg", "exp_avg_sq"), moments, strict=True):
                value.copy_(state[f"{name}.{part}"])

    def _norm(self, products: Products) -> Tensor:
        squares = []
        for parameter in self._parameters.values():
            flat = _flat(parameter.grad)
            for piece in pieces_of(len(flat), 4 * PIECE_NUMBERS):
                products.look()
                squares.append(torch.linalg.vector_norm(flat[piece]))
        return torch.linalg.vector_norm(torch.stack(squares))

    def _update(
        self, name: str, parameter: nn.Parameter, learning_rate: float, clip: Tensor, products: Products
    ) -> None:
        beta1, beta2 = self._betas
        steps = self.num_steps + 1
        rate = learning_rate / (1 - beta1**steps)
        root = (1 - beta2**steps) ** 0.5
        old = [_flat(each) for each in (parameter, *self._moments[name])]
        new = [_flat(each) for each in self._spare[name]]
        gradient = _flat(parameter.grad)
        for piece in pieces_of(len(gradient), PIECE_NUMBERS):
            products.look()
            grad = gradient[piece] * clip
            first = torch.lerp(old[1][piece], grad, 1 - beta1, out=new[1][piece])
            second = torch.mul(old[2][piece], beta2, out=new[2][piece]).addcmul_(grad, grad, value=1 - beta2)
            move = first / second.sqrt().div_(root).add_(EPSILON)
            torch.mul(old[0][piece], 1 - learning_rate * self._weight_decay, out=new[0][piece])
            new[0][piece].sub_(move, alpha=rate)

    def _change_over(self) -> None:
        """Let what was written be the parameters and moments: a few assignments."""
        for name, parameter in self._parameters.items():
            moments, (value, first, second) = self._moments[name], self._spare[name]
            self._spare[name] = (parameter.data, *moments)
            self._moments[name] = (first, second)
            parameter.data = value
        self.num_steps += 1


def _flat(x: Any) -> Tensor:
    return x.detach().view(-1)
