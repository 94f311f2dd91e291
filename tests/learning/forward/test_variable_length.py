"""Sequences in one call of variable-length attention get what each gets alone: the same body on CPU and GPU.

On the CPU, which has no such kernel, a function of the same signature stands in for torch's, written by its docstring.
"""

import pytest
import torch
from torch import Tensor

import rlhfspec.engine.attention.backends as backends
from rlhfspec.learning.trainer.packed_attention import _attend
from tests.helpers.devices import DEVICES
from tests.helpers.variable_length import as_documented


@pytest.mark.parametrize("kv_heads", [1, 4])
@pytest.mark.parametrize("window", [None, 5])
@pytest.mark.parametrize("device", DEVICES)
def test_one_call_gives_each_sequence_what_it_gets_alone(
    monkeypatch: pytest.MonkeyPatch, device: str, window: int | None, kv_heads: int
) -> None:
    backends._variable_length.cache_clear()
    if device == "cpu":
        monkeypatch.setattr("torch.nn.attention.varlen.varlen_attn", as_documented)
    elif backends._variable_length() is None:
        pytest.skip(f"torch {torch.__version__} has no variable-length attention with a scale and a window")
    lengths = [7, 1, 40, 16]
    torch.manual_seed(0)
    parts = [
        torch.randn(1, heads, sum(lengths), 16, device=device, dtype=torch.bfloat16, requires_grad=True)
        for heads in (4, kv_heads, kv_heads)
    ]
    upstream = torch.randn(1, sum(lengths), 4, 16, device=device, dtype=torch.bfloat16)

    query, key, value = parts

    def result(starts: Tensor | None) -> list[Tensor]:
        out, _ = _attend(
            torch.nn.Module(),
            query,
            key,
            value,
            None,
            sequence_lengths=lengths,
            sequence_starts=starts,
            scaling=0.3,
            sliding_window=window,
        )
        assert out.shape == upstream.shape
        return [out, *torch.autograd.grad(out, parts, upstream)]

    one_call = result(torch.tensor([0, 7, 8, 48, 64], dtype=torch.int32, device=device))
    for got, alone in zip(one_call, result(None), strict=True):
        torch.testing.assert_close(got.float(), alone.float(), atol=0.04, rtol=0.04)
    backends._variable_length.cache_clear()


def test_full_precision_keeps_a_call_a_sequence(monkeypatch: pytest.MonkeyPatch) -> None:
    """Flash attention takes 16 bits alone."""
    backends._variable_length.cache_clear()
    monkeypatch.setattr("torch.nn.attention.varlen.varlen_attn", None)
    query, key, value = (torch.randn(1, 2, 6, 16) for _ in range(3))
    starts = torch.tensor([0, 2, 6], dtype=torch.int32)
    module = torch.nn.Module()
    out, _ = _attend(module, query, key, value, None, sequence_lengths=[2, 4], sequence_starts=starts)
    last = slice(2, 6)
    alone, _ = _attend(
        module, query[:, :, last], key[:, :, last], value[:, :, last], None, sequence_lengths=[4]
    )
    torch.testing.assert_close(out[:, 2:], alone)
