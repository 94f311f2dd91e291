"""Several trainers, each with a part of every weight, its gradient and its moments (FSDP2, `fully_shard`).

A block's weights are gathered before it computes and given back after it; its gradient is summed and divided over
the trainers on its way back. All trainers therefore compute the same number of forwards and backwards, in the same
order (`PolicyForward.packs` fills up).

Weights are gathered in the type that they are held in: no `mp_policy`. One that gathers in bfloat16 would halve the
bytes, but rounds norms, biases and embeddings too, which `torch.autocast` leaves in float32, and tied weights where
they are looked up: forwards would have other bits than those of one trainer, and of `trainer.strategy: ddp`.

Source: Zhao et al. 2023, 'PyTorch FSDP: experiences on scaling fully sharded data parallel', section 3;
Rajbhandari et al. 2020, 'ZeRO', section 5 (stage 3).
"""

from __future__ import annotations

from collections.abc import Generator, Sequence

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from ...engine.weights.chunks import unique_tensors
from .parallel import DataParallel, gradient_of


class Sharded(DataParallel):
    """One of several trainers that hold a model together."""

    is_sharded = True

    def __init__(self, device: torch.device) -> None:
        """Wrap the group that `join_group` made, for models on `device`."""
        super().__init__()
        self._mesh = init_device_mesh(device.type, (self.size,))
        self._names: dict[int, list[str]] = {}

    def shard(self, *models: nn.Module | None) -> None:
        """See `OneTrainer`. Blocks are those that Hugging Face names as not to be split (`_no_split_modules`).

        Input and output embeddings are a block each unless they are tied: in the root's they would both be held from
        the first layer to the last.
        """
        for model in models:
            if model is None:
                continue
            # names now: storages of shards do not tell which tensors are tied
            self._names[id(model)] = [name for name, _ in unique_tensors(model)]
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
    if not isinstance(model, PreTrainedModel):
        return []
    ends = [model.get_input_embeddings(), model.get_output_embeddings()]
    tables = [end for end in ends if isinstance(end, nn.Module) and hasattr(end, "weight")]
    return tables if len(tables) == 2 and tables[0].weight is not tables[1].weight else []
