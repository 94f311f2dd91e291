"""Sequences in one call of variable-length attention get what each gets alone: the same body on CPU and GPU.

On the CPU, which has no such kernel, a function of the same signature stands in for torch's, written by its docstring.
"""

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

import rlhfspec.engine.attention.backends as backends
from rlhfspec.learning.training.batching import PackedSequences
from rlhfspec.learning.training.packed_attention import _attend
from tests.helpers.devices import DEVICES
from tests.helpers.variable_length import as_documented


@pytest.mark.parametrize("kv_heads", [1, 4])
@pytest.mark.parametrize("window", [None, 5])
@pytest.mark.parametrize("tree", [False, True])
@pytest.mark.parametrize("device", DEVICES)
def test_one_call_gives_each_sequence_what_it_gets_alone(
    monkeypatch: pytest.MonkeyPatch, device: str, tree: bool, window: int | None, kv_heads: int
) -> None:
    backends._variable_length.cache_clear()
    if device == "cpu":
        monkeypatch.setattr("torch.nn.attention.varlen.varlen_attn", as_documented)
    elif backends._variable_length() is None:
        pytest.skip(f"torch {torch.__version__} has no variable-length attention with a scale and a window")
    rng = np.random.default_rng(0)
    shared = rng.integers(5, 99, size=9)
    sequences = [
        rng.integers(5, 99, size=7),
        np.array([3]),
        *(np.append(shared, [i, 4, 4]) for i in range(3)),
    ]
    packed = PackedSequences.of(sequences if tree else sequences[:3])
    torch.manual_seed(0)
    parts = [
        torch.randn(1, heads, len(packed.ids), 16, device=device, dtype=torch.bfloat16, requires_grad=True)
        for heads in (4, kv_heads, kv_heads)
    ]
    upstream = torch.randn(1, len(packed.ids), 4, 16, device=device, dtype=torch.bfloat16)

    query, key, value = parts

    def result(packed: PackedSequences) -> list[Tensor]:
        out, _ = _attend(
            torch.nn.Module(),
            query,
            key,
            value,
            None,
            packed=packed,
            scaling=0.3,
            sliding_window=window,
        )
        assert out.shape == upstream.shape
        return [out, *torch.autograd.grad(out, parts, upstream)]

    one_call = result(
        packed.to(torch.device(device)) if device != "cpu" else replace(packed, on_gpu=packed.paths())
    )
    for got, alone in zip(one_call, result(packed), strict=True):
        torch.testing.assert_close(got.float(), alone.float(), atol=0.04, rtol=0.04)
    backends._variable_length.cache_clear()


def test_full_precision_keeps_a_call_a_sequence(monkeypatch: pytest.MonkeyPatch) -> None:
    """Flash attention takes 16 bits alone."""
    backends._variable_length.cache_clear()
    monkeypatch.setattr("torch.nn.attention.varlen.varlen_attn", None)
    query, key, value = (torch.randn(1, 2, 6, 16) for _ in range(3))
    packed = PackedSequences.of([np.arange(2), np.arange(5, 9)])
    module = torch.nn.Module()
    gpu = replace(packed, on_gpu=packed.paths())
    out, _ = _attend(module, query, key, value, None, packed=gpu)
    last = slice(2, 6)
    alone, _ = _attend(module, query[:, :, last], key[:, :, last], value[:, :, last], None)
    torch.testing.assert_close(out[:, 2:], alone)
