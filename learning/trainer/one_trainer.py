"""What a learner asks of the others when there are none: everything is here already.

`DataParallel` and `Sharded` answer the same questions for a group of trainers, so the learner reads the same for one
and for many.
"""

from __future__ import annotations

from collections.abc import Generator, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import TypeVar

import torch
from torch import Tensor, nn

from rlhfspec.core.errors import NotFiniteError
from rlhfspec.engine.weights.chunks import unique_tensors

T = TypeVar("T")


class OneTrainer:
    """A group of one. Methods said to be collective are called by all trainers of a group, in the same order."""

    size = 1
    rank = 0
    is_sharded = False

    def shard(self, *models: nn.Module | None) -> None:
        """Divide models over the trainers, before an optimizer is made of their parameters. Collective."""

    def tensors(self, model: nn.Module) -> Generator[tuple[str, Tensor]]:
        """A model's tensors, whole, in name order; each is valid until the next is asked for. Collective."""
        yield from unique_tensors(model)

    def held(self, model: nn.Module) -> list[tuple[str, Tensor]]:
        """The part of a model's parameters that this trainer holds."""
        return list(model.named_parameters())

    def sum(self, tensor: Tensor) -> Tensor:
        """The sum of all trainers' tensors of this shape. Collective."""
        return tensor

    def gather(self, part: T) -> list[T]:
        """What every trainer gives, in the order of their ranks; to be read-only. Collective."""
        return [part]

    def gather_to_first(self, part: T) -> list[T]:
        """The same for the first trainer; an empty list for the others. Collective."""
        return [part]

    def take_first(self, tensors: Iterable[Tensor]) -> None:
        """Let the first trainer's values be everyone's. Collective."""

    def agree(self, problem: str | None) -> None:
        """Raise NotFiniteError on all trainers when one has a problem, naming it. Collective."""
        problems = self.gather(problem)
        for rank, found in enumerate(problems):
            if found is not None:
                raise NotFiniteError(found if self.size == 1 else f"trainer {rank} of {self.size}: {found}")

    def sum_gradients(self, parameters: Sequence[nn.Parameter]) -> None:
        """Let every trainer's gradients be the sum of all, where backward passes have not done so. Collective."""

    def sum_whole(self, parameters: Sequence[nn.Parameter]) -> None:
        """The same for parameters that every trainer has whole, whatever becomes of the model's. Collective."""

    @contextmanager
    def naming(self, what: str) -> Iterator[None]:
        """Turn an end of the group inside the block, where trainers `what` together, into PeerLost."""
        yield

    def clip(self, parameters: Sequence[nn.Parameter], max_norm: float) -> float:
        """Scale gradients down to a norm over all of them; return the norm before. Collective."""
        return float(nn.utils.clip_grad_norm_(parameters, max_norm))


def gradient_of(parameter: nn.Parameter) -> Tensor:
    """Its gradient, of zeros where no loss reached it: another trainer's rows may have, and Adam's moments move on."""
    if parameter.grad is None:
        parameter.grad = torch.zeros_like(parameter)
    return parameter.grad
