"""The compute back ends of this machine, for tests: the one that an engine on one CPU thread takes, and torch's."""

import torch

from rlhfspec.engine.cuda.cuda_backend import CudaBackend
from rlhfspec.engine.model.compute_backend import ComputeBackend
from rlhfspec.engine.model.linears import MatrixLinear, PrepackedLinear
from rlhfspec.engine.numerics import choose_backend, has_llvm

CPU = torch.device("cpu")
OWN_LAYOUTS: list[type] = []
if has_llvm():
    from rlhfspec.engine.cpu.streamed_linear import StreamedLinear

    OWN_LAYOUTS = [StreamedLinear]
LAYOUTS: list[type] = [MatrixLinear, PrepackedLinear, *OWN_LAYOUTS]
"Of a weight."


def own_backend() -> ComputeBackend:
    """What an engine on one CPU thread takes: code of our own, torch where llvmlite is missing."""
    return choose_backend(CPU)


def stock_products() -> ComputeBackend:
    """The first, with products of its own for stock modules even where torch serves."""
    backend = own_backend()
    backend.stock_linear = backend.stock_linear or (
        lambda weight, bias: MatrixLinear(weight.clone(), None if bias is None else bias.clone())
    )
    return backend


def rows_backend() -> ComputeBackend:
    """What an engine on a GPU takes, by its operators' torch bodies; for library attention."""
    return CudaBackend(CPU)


def torch_backend() -> ComputeBackend:
    """Library calls alone, as without llvmlite or with several threads."""
    return ComputeBackend(CPU)
