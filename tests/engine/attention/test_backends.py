"""Ordered attention: equal to the formula, and to itself whatever lies around."""

import pytest
import torch
from torch import Tensor

from rlhfspec.engine.attention.backends import (
    ATTENTION,
    CHUNK,
    SHARE_BIAS,
    Attention,
    ordered_attention,
    reference_attention,
)
from rlhfspec.engine.attention.by_length import split_attention
from rlhfspec.engine.cache.kv_pool import KVPool, KVShape
from rlhfspec.engine.cuda import row_operators  # noqa: F401 (defines the operator)
from rlhfspec.engine.model.forward_plan import TreePlan
from rlhfspec.engine.model.prefill_plan import PrefillPiece, PrefillPlan

HEADS, SIZE = 2, 16
SCALING = SIZE**-0.5


def random_inputs(view: int, rows: int = 4, batch: int = 1) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(view)
    merged = batch * HEADS
    q = torch.randn(merged, rows, SIZE, generator=generator) * 2
    keys = torch.randn(merged, view, SIZE, generator=generator)
    values = torch.randn(merged, view, SIZE, generator=generator)
    return q, keys, values


def bias_of(seen: Tensor) -> Tensor:
    return torch.zeros(seen.shape).masked_fill_(~seen, float("-inf"))[None]


@pytest.mark.parametrize("name", ["ordered", "sdpa"])
@pytest.mark.parametrize("softcap", [None, 2.0])
@pytest.mark.parametrize("view", [32, 128, 160, 416])
def test_back_ends_equal_the_formula(name: str, softcap: float | None, view: int) -> None:
    q, keys, values = random_inputs(view, rows=8, batch=3)
    seen = torch.rand(8, view, generator=torch.Generator().manual_seed(1)) < 0.5
    seen[:, view // 2] = True
    settings = {"rows": 8, "scaling": SCALING, "softcap": softcap}
    got = ATTENTION[name](q, keys, values, bias_of(seen), **settings)
    expected = reference_attention(q, keys, values, bias_of(seen), **settings)
    torch.testing.assert_close(got, expected, rtol=0, atol=2e-6)


@pytest.mark.parametrize("softcap", [None, 2.0])
@pytest.mark.parametrize("name", ["sdpa", "reference"])
def test_one_bias_serves_all_heads_of_a_sample(name: str, softcap: float | None) -> None:
    attention = ATTENTION[name]
    assert attention in SHARE_BIAS and ordered_attention not in SHARE_BIAS
    q, keys, values = random_inputs(96, rows=8, batch=3)
    seen = torch.rand(3, 8, 96, generator=torch.Generator().manual_seed(1)) < 0.5
    seen[..., 48] = True
    bias = torch.zeros(seen.shape).masked_fill_(~seen, float("-inf"))
    settings = {"rows": 8, "scaling": SCALING, "softcap": softcap}
    shared = attention(q, keys, values, bias, **settings)
    each = reference_attention(q, keys, values, bias.repeat_interleave(HEADS, 0), **settings)
    torch.testing.assert_close(shared, each, rtol=0, atol=2e-6)


def test_the_reference_by_hand() -> None:
    q = torch.tensor([[[1.0]]])
    keys = torch.tensor([[[0.0], [3.0], [9.0]]])
    values = torch.tensor([[[4.0], [8.0], [100.0]]])
    bias = torch.tensor([[[0.0, 0.0, float("-inf")]]])
    weights = torch.softmax(torch.tensor([0.0, 3.0]), -1)
    plain = reference_attention(q, keys, values, bias, rows=1, scaling=1.0, softcap=None)
    assert plain.item() == pytest.approx((4 * weights[0] + 8 * weights[1]).item())
    capped = torch.softmax(torch.tensor([0.0, 2 * torch.tanh(torch.tensor(1.5))]), -1)
    got = reference_attention(q, keys, values, bias, rows=1, scaling=1.0, softcap=2.0)
    assert got.item() == pytest.approx((4 * capped[0] + 8 * capped[1]).item())


@pytest.mark.parametrize("context", [5, 100, CHUNK - 1, CHUNK, 200, 2 * CHUNK + 3])
@pytest.mark.parametrize("softcap", [None, 2.0])
def test_a_row_does_not_depend_on_rows_batch_or_view(context: int, softcap: float | None) -> None:
    q, keys, values = random_inputs(416, rows=64, batch=8)
    seen = (torch.arange(416) < context).expand(64, -1)

    def attend(batch: int, rows: int, view: int) -> Tensor:
        out = ordered_attention(
            q[: batch * HEADS, :rows],
            keys[: batch * HEADS, :view],
            values[: batch * HEADS, :view],
            bias_of(seen[:rows, :view]),
            rows=rows,
            scaling=SCALING,
            softcap=softcap,
        )
        return out[:HEADS, :4]

    alone = attend(1, 4, -(-context // 32) * 32)
    for batch, rows, view in [(1, 4, 416), (1, 64, 416), (8, 4, 416), (8, 36, 288 if context < 288 else 416)]:
        assert torch.equal(attend(batch, rows, view), alone)


@pytest.mark.parametrize("context", [3, 60, 119, CHUNK + 5, 2 * CHUNK + 40])
def test_decoys_between_a_nodes_ancestors_change_nothing(context: int) -> None:
    """The path stored densely, and with refused siblings in between, inside one chunk."""
    q, keys, values = random_inputs(416)
    stored = [context, context + 2, context + 5]
    dense = torch.cat([torch.arange(context), torch.tensor(stored)])
    sparse_seen = torch.zeros(4, 416, dtype=torch.bool)
    sparse_seen[:, dense] = True
    settings = {"rows": 4, "scaling": SCALING, "softcap": None}
    with_decoys = ordered_attention(q, keys, values, bias_of(sparse_seen), **settings)
    keys[:, : len(dense)], values[:, : len(dense)] = keys[:, dense], values[:, dense]
    dense_seen = (torch.arange(416) < len(dense)).expand(4, -1)
    densely = ordered_attention(q, keys, values, bias_of(dense_seen), **settings)
    assert torch.equal(with_decoys, densely)


def pool_with(keys: Tensor, values: Tensor) -> KVPool:
    """One layer, one slot."""
    shape = KVShape(num_layers=1, num_kv_heads=HEADS, num_heads=2 * HEADS, head_size=SIZE)
    pool = KVPool(shape, num_slots=1, capacity=96, dtype=torch.float32, device=torch.device("cpu"))
    pool.range_of(0, 0, keys.shape[1]).copy_(torch.stack([keys, values])[None])
    return pool


def packed(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """q [H, M, E], k and v [Hkv, M, E] as plans take them: [M, Hkv, group + 2, E]."""
    queries = q.view(HEADS, -1, *q.shape[1:])
    return torch.cat([queries, k[:, None], v[:, None]], dim=1).permute(2, 0, 1, 3).contiguous()


@pytest.mark.parametrize("attention", [ordered_attention, split_attention])
@pytest.mark.parametrize("window", [None, 3, 8])
def test_plans_apply_the_sliding_window_by_distance_in_the_conversation(
    window: int | None, attention: Attention
) -> None:
    """A tree behind 10 tokens: each node equals its own root-to-node path computed by a causal prefill."""
    generator = torch.Generator().manual_seed(2)
    q = torch.randn(2 * HEADS, 16, SIZE, generator=generator)
    k = torch.randn(HEADS, 16, SIZE, generator=generator)
    v = torch.randn(HEADS, 16, SIZE, generator=generator)
    context, parents = 10, [-1, 0, 0, 1, 2, 4]
    paths = []
    for node, parent in enumerate(parents):
        paths.append([*(paths[parent] if parent >= 0 else []), node])
    seen = torch.zeros(1, 6, 6, dtype=torch.bool)
    for node, path in enumerate(paths):
        seen[0, node, path] = True
    pool = pool_with(k[:, :context], v[:, :context])
    plan = TreePlan(
        pool=pool,
        attention=attention,
        base=torch.tensor([context]),
        num_tokens=6,
        seen=seen,
        depth=torch.tensor([[len(path) - 1 for path in paths]]),
        view_tokens=context + 6,
    )
    settings = {"scaling": SCALING, "softcap": None, "sliding_window": window}
    qkv = packed(q[:, context:], k[:, context:], v[:, context:])
    tree = plan.attend(0, qkv, **settings)
    # what a recording reads holds the same
    assert torch.equal(plan.fixed_copy(1).attend(0, qkv, **settings), tree)
    for node, path in enumerate(paths):
        tokens = [*range(context), *(context + step for step in path)]
        prefill = PrefillPlan(
            pool=pool_with(k[:, :0], v[:, :0]),
            attention=reference_attention,
            pieces=[PrefillPiece(slot=0, start=0, length=len(tokens))],
        )
        dense = prefill.attend(0, packed(q[:, tokens], k[:, tokens], v[:, tokens]), **settings)
        torch.testing.assert_close(tree[node], dense[-1], rtol=0, atol=2e-6)


def test_the_window_counts_the_token_itself() -> None:
    v = torch.arange(5.0)[None, :, None].expand(HEADS, -1, SIZE)
    plan = PrefillPlan(
        pool=pool_with(v[:, :0], v[:, :0]),
        attention=reference_attention,
        pieces=[PrefillPiece(slot=0, start=0, length=5)],
    )
    zeros = torch.zeros(2 * HEADS, 5, SIZE)
    qkv = packed(zeros, torch.zeros_like(v), v)
    out = plan.attend(0, qkv, scaling=1.0, softcap=None, sliding_window=2)
    assert out[:, 0].tolist() == [0.0, 0.5, 1.5, 2.5, 3.5]
