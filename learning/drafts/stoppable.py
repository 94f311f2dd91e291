"""Products of a head's training, in pieces of a few milliseconds between which a look is taken whether to stop.

A spot trainer gives its core back within a decode step. Weights stay float32; products may be of bfloat16, which some
processors compute several times faster.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from functools import lru_cache
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

PIECE_FLOPS = {torch.float32: 4e8, torch.bfloat16: 1e9}
"Of one product on the CPU: about 5 ms of a core."
BFLOAT16_OVER_FLOAT32 = 1.5
"How much faster products must be for weights to be cast for them."


class Stopped(Exception):
    """The work in progress was asked to stop; it is thrown away."""


class Products:
    """Computes products of one step; raises `Stopped` as soon as `should_stop` says so."""

    def __init__(
        self, should_stop: Callable[[], bool] = lambda: False, dtype: torch.dtype = torch.float32
    ) -> None:
        self._should_stop = should_stop
        self.dtype = dtype
        self._casts: dict[int, tuple[Tensor, Tensor]] = {}

    def look(self) -> None:
        """Raise `Stopped` when it is time."""
        if self._should_stop():
            raise Stopped

    def watched(self, x: Tensor) -> Tensor:
        """Look now, and again when the gradient of `x` has been computed; returns `x`."""
        self.look()
        if x.requires_grad:
            x.register_hook(self._at_gradient)
        return x

    def linear(self, x: Float[Tensor, "R I"], weight: Float[Tensor, "O I"]) -> Float[Tensor, "R O"]:
        """`x @ weight.T`, float32, by pieces, forward and backward."""
        return _Linear.apply(self, x, weight)  # type: ignore[return-value]

    def cast(self, weight: Tensor) -> Tensor:
        """A weight as products take it; kept while this object lives."""
        if weight.dtype == self.dtype:
            return weight.detach()
        if id(weight) not in self._casts:
            self._casts[id(weight)] = weight, weight.detach().to(self.dtype)
        return self._casts[id(weight)][1]

    def product(self, left: Float[Tensor, "R I"], right: Float[Tensor, "I O"]) -> Float[Tensor, "R O"]:
        """One look, one product of two matrices of `dtype`; float32."""
        self.look()
        return (left @ right).float()

    def by_rows(self, left: Float[Tensor, "R I"], right: Float[Tensor, "I O"]) -> Float[Tensor, "R O"]:
        """The same in pieces of rows."""
        rows = self.piece_rows(right)
        if len(left) <= rows:
            return self.product(left, right)
        return torch.cat([self.product(piece, right) for piece in left.split(rows)])

    def piece_rows(self, matrix: Tensor) -> int:
        """Rows that a product with `matrix` takes at once; on a GPU all are short."""
        if matrix.device.type != "cpu":
            return 1 << 30
        return max(8, int(PIECE_FLOPS.get(self.dtype, 4e8) / (2 * matrix.numel())))

    def _at_gradient(self, _: Tensor) -> None:
        self.look()


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, products: Products, x: Tensor, weight: Tensor) -> Tensor:
        x = x.to(products.dtype)
        ctx.products, ctx.weight = products, weight
        ctx.save_for_backward(x)
        return products.by_rows(x, products.cast(weight).t())

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        (x,) = ctx.saved_tensors
        grad = grads[0].to(ctx.products.dtype)
        of_x = ctx.products.by_rows(grad, ctx.products.cast(ctx.weight)) if ctx.needs_input_grad[1] else None
        of_weight = ctx.products.by_rows(grad.t(), x) if ctx.needs_input_grad[2] else None
        return None, of_x, of_weight


def pieces_of(num_rows: int, rows: int) -> Iterator[slice]:
    """Cut `num_rows` into slices of at most `rows`."""
    for start in range(0, num_rows, rows):
        yield slice(start, min(start + rows, num_rows))


@lru_cache(maxsize=1)
def fastest_dtype() -> torch.dtype:
    """bfloat16 where this processor multiplies it much faster than float32, by a measurement of milliseconds."""
    best = {}
    for dtype in (torch.float32, torch.bfloat16):
        left, right = torch.ones(256, 512, dtype=dtype), torch.ones(512, 1024, dtype=dtype)
        times = []
        for _ in range(7):
            began_s = time.perf_counter()
            _ = left @ right
            times.append(time.perf_counter() - began_s)
        best[dtype] = min(times)
    is_fast = best[torch.float32] > BFLOAT16_OVER_FLOAT32 * best[torch.bfloat16]
    return torch.bfloat16 if is_fast else torch.float32


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
