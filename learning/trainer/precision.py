"""In which types a model learns: float32 weights for the optimizer, matrix products in the type to compute in.

A bfloat16 weight has 8 significant bits: a step of less than 1/512 of it rounds to nothing, so at usual learning
rates most weights would never move. The optimizer therefore steps float32 weights, and `torch.autocast` rounds
them for each product, on devices that compute in bfloat16.

Source: Micikevicius et al. 2018, 'Mixed precision training', section 3.1 (a float32 master copy of the weights).
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch
from torch import nn

from rlhfspec.core.errors import ConfigError


def compute_dtype_on(device: torch.device, published: torch.dtype) -> torch.dtype:
    """What products are computed in for weights that are published in a type: float32 unless a GPU has it natively.

    Instances on a CPU widen bfloat16 weights to float32, with or without instructions for it; so does the learner.
    """
    native = device.type == "cuda" and (
        published != torch.bfloat16 or torch.cuda.is_bf16_supported(including_emulation=False)
    )
    return published if native else torch.float32


def autocast(
    device: torch.device, compute_dtype: torch.dtype, *, keeps_casts: bool = True
) -> AbstractContextManager[object]:
    """Compute matrix products in `compute_dtype`; float32 leaves everything as it is.

    `keeps_casts`: a rounded weight is kept until the block ends; not where weights are gathered and given back.
    """
    if compute_dtype == torch.float32:
        return nullcontext()
    return torch.autocast(device.type, dtype=compute_dtype, cache_enabled=keeps_casts)


def require_master_weights(model: nn.Module) -> None:
    """Raise ConfigError when an optimizer would step weights of another type than float32."""
    for name, parameter in model.named_parameters():
        if parameter.requires_grad and parameter.dtype != torch.float32:
            dtype = str(parameter.dtype).removeprefix("torch.")
            why = "the learner is not tested"
            if parameter.dtype.itemsize < torch.float32.itemsize:
                why = "most steps round to nothing (at a learning rate of 1e-6, 98 of 100 weights never move)"
            raise ConfigError(
                f"the optimizer would step '{name}' in {dtype}, where {why}; expected float32 weights: build the "
                "model with dtype float32 and let compute_dtype say what to compute in"
            )


def hold_linears_in(model: nn.Module, dtype: torch.dtype) -> None:
    """Keep a frozen model's linear weights in the type that autocast rounds them to: same bits, less memory.

    Norms, embeddings and a head tied to one stay: their type is that of the hidden states.
    """
    elsewhere = {
        id(parameter)
        for module in model.modules()
        if not isinstance(module, nn.Linear)
        for parameter in module.parameters(recurse=False)
    }
    for module in model.modules():
        if isinstance(module, nn.Linear) and id(module.weight) not in elsewhere:
            module.to(dtype)
