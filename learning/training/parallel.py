"""What a learner asks of those that learn with it: of nobody (`OneTrainer`), or of a group that has all weights each.

In a group rows are shared out and gradients summed before each step. Sums and not means: the weights of a minibatch's
tokens sum to 1 over all trainers, so what N trainers learn is what one learns, up to the order of additions.

Source: Li et al. 2020, 'PyTorch distributed: experiences on accelerating data parallel training', section 3.2.3
(gradients summed in buckets).
"""

from __future__ import annotations

from collections.abc import Generator, Iterable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ...core.errors import NotFiniteError, PeerLost
from ...engine.weights.chunks import unique_tensors

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

    def clip(self, parameters: Sequence[nn.Parameter], max_norm: float) -> Tensor:
        """Scale gradients down to a norm over all of them; return the norm before, where they lie. Collective."""
        return nn.utils.clip_grad_norm_(parameters, max_norm)


def gradient_of(parameter: nn.Parameter) -> Tensor:
    """Its gradient, of zeros where no loss reached it: another trainer's rows may have, and Adam's moments move on."""
    if parameter.grad is None:
        parameter.grad = torch.zeros_like(parameter)
    return parameter.grad


_TCPStore: Any = dist.TCPStore  # type: ignore[attr-defined]
BUCKET_VALUES = 8 << 20
"Values summed at a time: 32 MiB of float32."
_LOST_MARKS = ("gloo/transport", "onnection closed", "onnection reset", "Broken pipe", "Timed out waiting")
"In messages of Gloo, which has no error type of its own."


class DataParallel(OneTrainer):
    """One of several trainers, in torch's default process group."""

    def __init__(self) -> None:
        """Wrap the group that `join_group` made."""
        self.rank, self.size = dist.get_rank(), dist.get_world_size()

    def sum(self, tensor: Tensor) -> Tensor:
        """See `OneTrainer`."""
        with self.naming("sum what each trainer computed"):
            dist.all_reduce(tensor)
        return tensor

    def gather(self, part: T) -> list[T]:
        """See `OneTrainer`."""
        parts: list[Any] = [None] * self.size
        with self.naming("tell each other how it went"):
            dist.all_gather_object(parts, part)
        return parts

    def gather_to_first(self, part: T) -> list[T]:
        """See `OneTrainer`."""
        parts: list[Any] | None = [None] * self.size if self.rank == 0 else None
        with self.naming("tell the first one what they kept"):
            dist.gather_object(part, parts, dst=0)
        return parts or []

    def take_first(self, tensors: Iterable[Tensor]) -> None:
        """See `OneTrainer`."""
        with self.naming("take the first one's values"):
            for tensor in tensors:
                dist.broadcast(tensor.detach(), src=0)

    def sum_gradients(self, parameters: Sequence[nn.Parameter]) -> None:
        """See `OneTrainer`."""
        self.sum_whole(parameters)

    def sum_whole(self, parameters: Sequence[nn.Parameter]) -> None:
        """See `OneTrainer`."""
        gradients = [gradient_of(parameter) for parameter in parameters]
        for bucket in _buckets(gradients):
            flat = self.sum(torch.cat([gradient.reshape(-1) for gradient in bucket]))
            for gradient, part in zip(bucket, flat.split([one.numel() for one in bucket]), strict=True):
                gradient.copy_(part.view_as(gradient))

    def clip(self, parameters: Sequence[nn.Parameter], max_norm: float) -> Tensor:
        """See `OneTrainer`."""
        norm = self._everyones(nn.utils.get_total_norm([gradient_of(parameter) for parameter in parameters]))
        nn.utils.clip_grads_with_norm_(parameters, max_norm, norm)
        return norm

    def _everyones(self, norm: Tensor) -> Tensor:
        """One norm for all: the first trainer's, so that copies of the weights stay equal."""
        self.take_first([norm])
        return norm

    @contextmanager
    def naming(self, what: str) -> Iterator[None]:
        """See `OneTrainer`."""
        try:
            yield
        except RuntimeError as error:
            if not _is_lost_peer(error):
                raise
            raise PeerLost(
                f"trainer {self.rank} of {self.size} could not {what}: another trainer died or fell silent "
                f"({_reason(error)})"
            ) from error


def new_store(host: str, size: int, timeout_s: float) -> Any:
    """Where a group meets; the first trainer keeps it and tells the others its port."""
    return _TCPStore(
        host, 0, size, is_master=True, timeout=timedelta(seconds=timeout_s), wait_for_workers=False
    )


def join_group(store: Any, *, rank: int, size: int, device: torch.device, timeout_s: float) -> None:
    """Make torch's default process group of `size` trainers: NCCL for tensors on GPUs, Gloo for all else.

    `timeout_s` is of every later wait in the group. Raises PeerLost when not all come in time.
    """
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    try:
        dist.init_process_group(
            backend, store=store, rank=rank, world_size=size, timeout=timedelta(seconds=timeout_s)
        )
    except RuntimeError as error:
        raise PeerLost(
            f"trainer {rank} of {size} waited up to {timeout_s:.0f} s for the others to join the process group and "
            f"gave up ({_reason(error)}); raise cluster.order_timeout_s where they are only slow"
        ) from error


def store_at(host: str, port: int, size: int, timeout_s: float) -> Any:
    """The store that another trainer keeps. Raises PeerLost when it cannot be reached."""
    try:
        return _TCPStore(host, port, size, is_master=False, timeout=timedelta(seconds=timeout_s))
    except RuntimeError as error:
        raise PeerLost(
            f"a trainer could not reach the first one at {host}:{port} within {timeout_s:.0f} s "
            f"({_reason(error)}); raise cluster.start_timeout_s where it is only slow"
        ) from error


def meet(store: Any, what: str, *, rank: int, size: int, timeout_s: float) -> None:
    """Wait until all trainers have come to `what` they do next, under a limit of its own. Raises PeerLost."""
    keys = [f"{what}-{one}" for one in range(size)]
    store.set(keys[rank], b"1")
    try:
        store.wait(keys, timedelta(seconds=timeout_s))
    except RuntimeError as error:
        raise PeerLost(
            f"trainer {rank} of {size} waited {timeout_s:.0f} s for all trainers to {what} and gave up "
            f"({_reason(error)}); raise cluster.start_timeout_s where they are only slow"
        ) from error


def _buckets(gradients: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    bucket: list[Tensor] = []
    size = 0
    for gradient in gradients:
        if bucket and size + gradient.numel() > BUCKET_VALUES:
            yield bucket
            bucket, size = [], 0
        bucket.append(gradient)
        size += gradient.numel()
    if bucket:
        yield bucket


def _reason(error: RuntimeError) -> str:
    return str(error).strip().splitlines()[0][:160]


def _is_lost_peer(error: RuntimeError) -> bool:
    return isinstance(error, dist.DistError) or any(mark in str(error) for mark in _LOST_MARKS)
