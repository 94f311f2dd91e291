"""Several trainers, each with a part of every weight, its gradient and its moments (FSDP2, `fully_shard`).

A block's weights are gathered before it computes and given back after it; its gradient is summed and divided over
the trainers on its way back. All trainers therefore compute the same number of forwards and backwards, in the same
order (`PolicyForward.packs` fills up).

A model of 7B is 28 GiB in float32, whole and in every trainer's process. So its parameters are on the meta device until
shards are made of them; where their values lie is noted on each, and each trainer copies its own rows from there.

Weights are gathered in the type that they are held in: no `mp_policy`. One that gathers in bfloat16 would halve the
bytes, but rounds norms, biases and embeddings too, which `torch.autocast` leaves in float32, and tied weights where
they are looked up: forwards would have other bits than those of one trainer, and of `trainer.strategy: ddp`.

Source: Zhao et al. 2023, 'PyTorch FSDP: experiences on scaling fully sharded data parallel', section 3;
Rajbhandari et al. 2020, 'ZeRO', section 5 (stage 3); torch's documentation of `fully_shard`, on the meta device.
"""

from __future__ import annotations

import copy
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TypeVar

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor

from ...engine.weights.chunks import require_fit, require_names, unique_tensors
from .parallel import DataParallel, gradient_of

Module = TypeVar("Module", bound=nn.Module)
_SOURCE = "filled_from"
"Attribute of a parameter on the meta device: what its shards are filled from."


class Sharded(DataParallel):
    """One of several trainers that hold a model together."""

    is_sharded = True

    def __init__(self, device: torch.device) -> None:
        """Wrap the group that `join_group` made, for models on `device`."""
        super().__init__()
        self._mesh, self._device = init_device_mesh(device.type, (self.size,)), device
        self._names: dict[int, list[str]] = {}

    def shard(self, *models: nn.Module | None) -> None:
        """See `OneTrainer`. Blocks are those that Hugging Face names as not to be split (`_no_split_modules`).

        Input and output embeddings are a block each unless they are tied: in the root's they would both be held from
        the first layer to the last. Those of a model on the meta device are filled from where its values lie.
        """
        for model in models:
            if model is None:
                continue
            # names now: storages of shards do not tell which tensors are tied
            self._names[id(model)], sources = [name for name, _ in unique_tensors(model)], sources_of(model)
            kinds = set(getattr(model, "_no_split_modules", None) or ())
            inside = [module for module in model.modules() if type(module).__name__ in kinds]
            for block in [*inside, *_untied_embeddings(model)]:
                fully_shard(block, mesh=self._mesh, reshard_after_forward=True)
            # the root too gives its weights back after a forward: the optimizer steps parts
            fully_shard(model, mesh=self._mesh, reshard_after_forward=True)
            for module in model.modules():
                if isinstance(module, FSDPModule):
                    module.set_gradient_divide_factor(1.0)
                    module.set_force_sum_reduction_for_comms(True)
            fill_shards(model, sources, rank=self.rank, size=self.size, device=self._device)

    def tensors(self, model: nn.Module) -> Generator[tuple[str, Tensor]]:
        """See `OneTrainer`; one block is whole at a time, and so are the adapters in it."""
        owners = {
            f"{path}." if path else "": module
            for path, module in model.named_modules()
            if isinstance(module, FSDPModule)
        }
        opened: FSDPModule | None = None
        is_wanted = True
        for name in self._names[id(model)]:
            owner = owners[max((path for path in owners if name.startswith(path)), key=len)]
            if owner is not opened:
                if opened is not None:
                    opened.reshard()
                owner.unshard()
                opened = owner
            if is_wanted:
                module_path, _, last = name.rpartition(".")
                whole = getattr(model.get_submodule(module_path), last).detach()
                try:
                    # a copy: storage that numpy has seen cannot be given back
                    yield name, whole.clone()
                except GeneratorExit:
                    # the others walk on, so the rest is gathered all the same
                    is_wanted = False
        if opened is not None:
            opened.reshard()

    def held(self, model: nn.Module) -> list[tuple[str, Tensor]]:
        """See `OneTrainer`."""
        return [
            (name, parameter.to_local() if isinstance(parameter, DTensor) else parameter)
            for name, parameter in model.named_parameters()
        ]

    def sum_gradients(self, parameters: Sequence[nn.Parameter]) -> None:
        """Backward passes have summed them; a parameter without one gets zeros, as an optimizer's state is saved."""
        for parameter in parameters:
            gradient_of(parameter)

    def _everyones(self, norm: Tensor) -> Tensor:
        """One norm for all: over every trainer's parts."""
        return norm.full_tensor() if isinstance(norm, DTensor) else norm


def _untied_embeddings(model: nn.Module) -> list[nn.Module]:
    """The tables at both ends of a model; none where they share a weight, or where there is no telling them apart."""
    ends = [getattr(model, f"get_{end}_embeddings", lambda: None)() for end in ("input", "output")]
    tables = [end for end in ends if isinstance(end, nn.Module) and hasattr(end, "weight")]
    return tables if len(tables) == 2 and tables[0].weight is not tables[1].weight else []


@torch.no_grad()
def fill_later(model: nn.Module, tensors: Mapping[str, Tensor]) -> None:
    """Note where the values of a model on the meta device lie; what it holds besides parameters is copied at once.

    Raises WeightsError when names, shapes or types do not fit the model.
    """
    own = dict(unique_tensors(model))
    require_names(own, tensors)
    for name, tensor in tensors.items():
        require_fit(name, tensor, own[name].shape, own[name].dtype)
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if name in tensors:
            setattr(parameter, _SOURCE, tensors[name])
    for name, buffer in model.named_buffers():
        if name in tensors:
            buffer.copy_(tensors[name])


def source_of(parameter: Tensor) -> Tensor | None:
    """Where the values of a parameter on the meta device lie; None: it has its own, or none."""
    return getattr(parameter, _SOURCE, None)


def copy_of(model: Module) -> Module:
    """A model of its own with the same values, or with values that lie where the model's do."""
    copied = copy.deepcopy(model)
    for one, other in zip(model.parameters(), copied.parameters(), strict=True):
        if (source := source_of(one)) is not None:
            setattr(other, _SOURCE, source)
    return copied


def sources_of(model: nn.Module) -> dict[str, Tensor]:
    """Where values lie, by name: to be asked for before the parameters become shards."""
    named = ((name, source_of(one)) for name, one in model.named_parameters())
    return {name: source for name, source in named if source is not None}


@contextmanager
def standing_in(model: nn.Module) -> Iterator[None]:
    """In the block, let parameters that are filled later lie on the host, in no memory: what is made beside them stays.

    Whether they learn is kept.
    """
    there = [
        (module, kind, one)
        for module in model.modules()
        for kind, one in module._parameters.items()
        if one is not None and source_of(one) is not None
    ]
    stand_ins = {
        id(one): nn.Parameter(torch.empty((), dtype=one.dtype).expand(one.shape), one.requires_grad)
        for _, _, one in there
    }
    for module, kind, one in there:
        module._parameters[kind] = stand_ins[id(one)]
    try:
        yield
    finally:
        for module, kind, one in there:
            one.requires_grad_(stand_ins[id(one)].requires_grad)
            module._parameters[kind] = one


@torch.no_grad()
def fill_shards(
    model: nn.Module, sources: Mapping[str, Tensor], *, rank: int, size: int, device: torch.device
) -> None:
    """Give the shards of a model memory, and this trainer's rows of each tensor to them; nothing is sent."""
    if not sources:
        return
    model._apply(lambda one: torch.empty_like(one, device=device) if one.device.type == "meta" else one)
    for name, parameter in model.named_parameters():
        if name in sources and isinstance(parameter, DTensor):
            part, source = parameter.to_local(), sources[name]
            first = rank * -(-len(source) // size)
            part.copy_(source[first : first + len(part)])
