"""Kernels of ours compute on a GPU where Triton can make them, and can be turned off."""

import pytest
import torch

from core.config import EngineConfig
from engine.cuda.cuda_backend import CudaBackend, StoredLinear
from engine.decoding import noise
from engine.numerics import choose_backend, kernels_for
from tests.helpers.triton_scripts import NEEDS_TRITON

CUDA = torch.device("cuda")


@NEEDS_TRITON
def test_a_gpu_is_served_by_kernels_where_a_compiler_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(noise, "which", lambda name: "/usr/bin/" + name)
    assert isinstance(choose_backend(CUDA), CudaBackend)
    assert choose_backend(CUDA, kernels=False).name == "torch"
    monkeypatch.setattr(noise, "which", lambda name: None)
    monkeypatch.delenv("CC", raising=False)
    assert choose_backend(CUDA).name == "torch"


def test_kernels_serve_numerics_that_promise_the_distribution() -> None:
    assert kernels_for(EngineConfig(), "fast")
    assert not kernels_for(EngineConfig(), "invariant")
    assert not kernels_for(EngineConfig(kernels="off"), "fast")


def test_a_stored_weight_is_not_copied_and_follows() -> None:
    weight, other = torch.randn(8, 16), torch.randn(8, 16)
    linear = StoredLinear(weight, None)
    x, residual = torch.randn(1, 16), torch.randn(1, 8)
    torch.testing.assert_close(linear.add_to(residual.clone(), x), residual + x @ weight.t())
    assert linear.holds(weight, None) and not linear.holds(other, None)
    linear.take(other, None)
    assert torch.equal(weight, other), "in its own memory"
    linear.take_rows(0, weight)
    assert torch.equal(linear(x), torch.mm(x, other.t()))
