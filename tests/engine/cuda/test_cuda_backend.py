"""Kernels of ours compute on a GPU where Triton can make them, and can be turned off."""

from types import SimpleNamespace

import pytest
import torch
from transformers import LlamaConfig

from rlhfspec.core.config import EngineConfig
from rlhfspec.core.errors import ConfigError
from rlhfspec.engine import triton_here
from rlhfspec.engine.attention.backends import SHARE_BIAS, ordered_attention, sdpa_attention
from rlhfspec.engine.attention.by_length import split_attention
from rlhfspec.engine.cuda.cuda_backend import CudaBackend
from rlhfspec.engine.model import linears
from rlhfspec.engine.model.compute_backend import ComputeBackend
from rlhfspec.engine.numerics import attention_for, choose_backend, kernels_for
from tests.helpers.triton_scripts import NEEDS_TRITON

CUDA = torch.device("cuda")


@NEEDS_TRITON
def test_a_gpu_is_served_by_kernels_where_a_compiler_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton_here, "which", lambda name: "/usr/bin/" + name)
    assert isinstance(choose_backend(CUDA), CudaBackend)
    assert choose_backend(CUDA, kernels=False).name == "torch"
    monkeypatch.setattr(triton_here, "which", lambda name: None)
    monkeypatch.delenv("CC", raising=False)
    assert choose_backend(CUDA).name == "torch"


def test_kernels_serve_numerics_that_promise_the_distribution() -> None:
    assert kernels_for(EngineConfig(), "fast")
    assert not kernels_for(EngineConfig(), "invariant")
    assert not kernels_for(EngineConfig(kernels="off"), "fast")


def test_products_take_as_many_rows_as_there_are(monkeypatch: pytest.MonkeyPatch) -> None:
    weight, x, residual = torch.randn(8, 16), torch.randn(1, 16), torch.randn(1, 8)
    linear = CudaBackend(torch.device("cpu")).linear(weight, None, torch.float32)
    monkeypatch.setattr(linears, "with_rows", None)
    torch.testing.assert_close(linear(x), x @ weight.t())
    torch.testing.assert_close(linear.add_to(residual.clone(), x), residual + x @ weight.t())


@NEEDS_TRITON
def test_split_attention_is_taken_on_a_gpu_with_triton_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton_here, "which", lambda name: "/usr/bin/" + name)
    engine = EngineConfig(attention="split")
    for chosen in (engine, EngineConfig()):
        attention = attention_for(chosen, "fast", choose_backend(CUDA))
        assert attention is split_attention and attention in SHARE_BIAS
        for dtype, size, takes in (
            (torch.bfloat16, 64, True),
            (torch.float32, 64, False),
            (torch.bfloat16, 256, False),
        ):
            config = LlamaConfig(hidden_size=4 * size, num_attention_heads=4, num_key_value_heads=2)
            model = SimpleNamespace(dtype=dtype, config=config)
            got = attention_for(chosen, "fast", choose_backend(CUDA), model)  # type: ignore[arg-type]
            assert got is (split_attention if takes else sdpa_attention)
    assert attention_for(EngineConfig(kernels="off"), "fast", choose_backend(CUDA)) is sdpa_attention
    assert attention_for(EngineConfig(), "invariant", ComputeBackend(CUDA)) is ordered_attention
    with pytest.raises(ConfigError, match=r"split needs engine\.device cuda"):
        attention_for(engine, "fast", ComputeBackend(torch.device("cpu")))
    with pytest.raises(ConfigError, match="split is not invariant"):
        attention_for(engine, "invariant", choose_backend(CUDA))
    monkeypatch.setattr(triton_here, "which", lambda name: None)
    monkeypatch.delenv("CC", raising=False)
    assert attention_for(EngineConfig(), "fast", choose_backend(CUDA)) is sdpa_attention
