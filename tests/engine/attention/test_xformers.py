"""The xformers back end as far as a machine without CUDA can say: what it asks of the kernel, and what it refuses."""

from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from rlhfspec.core.errors import ConfigError
from rlhfspec.engine.attention import xformers as back_end
from rlhfspec.engine.attention.backends import reference_attention
from rlhfspec.engine.attention.xformers import require_xformers, xformers_attention


def documented(query: Tensor, key: Tensor, value: Tensor, *, attn_bias: Tensor, scale: float) -> Tensor:
    """`memory_efficient_attention` 0.0.35 as its documentation reads, with the limits its kernel states."""
    batch, rows, heads, _ = query.shape
    assert attn_bias.shape == (batch, heads, rows, key.shape[1]), "the bias is not broadcast"
    assert attn_bias.stride(-1) == 1
    alignment = 128 // torch.finfo(attn_bias.dtype).bits
    assert all(stride % alignment == 0 for stride in attn_bias.stride()[:-1])
    assert all(x.stride(-1) == 1 for x in (query, key, value))
    query, key, value = (x.transpose(1, 2) for x in (query * scale, key, value))
    weights = (query @ key.transpose(-2, -1) + attn_bias).softmax(-1)
    return (weights @ value).transpose(1, 2).contiguous()


def case(*, rows: int, bias_rows: int, bias_batch: int, size: int = 16) -> dict[str, Tensor]:
    random = torch.Generator().manual_seed(1)
    q, keys, values = (
        torch.randn(6, length, size, generator=random, dtype=torch.float32) for length in (rows, 96, 96)
    )
    seen = torch.rand(bias_batch, bias_rows, 96, generator=random) < 0.5
    seen[..., 0] = True
    bias = torch.zeros(seen.shape).masked_fill(~seen, float("-inf"))
    # a view of the pool: rows of the whole capacity lie between samples
    stored = torch.zeros(6, 128, size)
    stored[:, :96] = keys
    return {"q": q, "keys": stored[:, :96], "values": values, "bias": bias}


@pytest.mark.parametrize(
    ("rows", "bias_rows", "bias_batch"),
    [(4, 1, 6), (10, 10, 6), (10, 10, 1), (10, 10, 3), (4, 1, 2)],
    ids=["single", "tree", "alone", "tree, shared by two heads", "single, shared by three heads"],
)
def test_it_equals_the_reference(
    monkeypatch: pytest.MonkeyPatch, rows: int, bias_rows: int, bias_batch: int
) -> None:
    kernel = SimpleNamespace(memory_efficient_attention=documented)
    monkeypatch.setattr(back_end, "_operators", lambda: kernel)
    inputs = case(rows=rows, bias_rows=bias_rows, bias_batch=bias_batch)
    settings = {"rows": rows - 1, "scaling": 0.25, "softcap": None}
    torch.testing.assert_close(
        xformers_attention(**inputs, **settings), reference_attention(**inputs, **settings)
    )


def test_softcap_takes_the_reference() -> None:
    inputs = case(rows=4, bias_rows=4, bias_batch=6)
    settings = {"rows": 4, "scaling": 0.25, "softcap": 20.0}
    assert torch.equal(xformers_attention(**inputs, **settings), reference_attention(**inputs, **settings))


def test_what_is_missing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(back_end, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"not installed; pip install xformers==0\.0\.35"):
        require_xformers(torch.device("cuda"))
    monkeypatch.setattr(back_end, "find_spec", lambda name: object())
    with pytest.raises(ConfigError, match=r"needs engine\.device cuda, got cpu"):
        require_xformers(torch.device("cpu"))
    kernel = SimpleNamespace(FwOp=SimpleNamespace(is_available=lambda: False))
    monkeypatch.setattr(back_end, "import_module", lambda name: kernel)
    with pytest.raises(ConfigError, match=f"does not go with torch {torch.__version__.split('+')[0]}"):
        require_xformers(torch.device("cuda"))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="the kernel needs a GPU: not run")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_kernel_itself(dtype: torch.dtype) -> None:
    pytest.importorskip("xformers")
    made = case(rows=10, bias_rows=10, bias_batch=6, size=64)
    inputs = {name: x.to("cuda", dtype) for name, x in made.items()}
    settings = {"rows": 10, "scaling": 0.125, "softcap": None}
    try:
        found = xformers_attention(**inputs, **settings)
    except NotImplementedError as error:
        pytest.skip(f"this build of xformers has no kernel for it here: {str(error)[:200]}")
    near = 1e-3 if dtype == torch.float32 else 2e-2
    torch.testing.assert_close(found, reference_attention(**inputs, **settings), rtol=near, atol=near)
