"""Attention in our own code: the formula, and bits that depend on nothing else that is computed beside it."""

import numpy as np
import pytest
import torch
from torch import Tensor

from rlhfspec.engine.attention.backends import reference_attention
from rlhfspec.engine.cache.kv_pool import KVPool, KVShape
from rlhfspec.engine.cache.segments import Segments, segments_of
from rlhfspec.engine.cpu.attention import BLOCK_ROWS
from rlhfspec.engine.cpu.pool_attention import CpuAttention, block_tokens

HEADS, QUERIES = 2, 3


def pool_of(size: int, *, slots: int = 4, capacity: int = 160) -> KVPool:
    shape = KVShape(num_layers=2, num_kv_heads=HEADS, num_heads=HEADS * QUERIES, head_size=size)
    pool = KVPool(shape, num_slots=slots, capacity=capacity, dtype=torch.float32, device=torch.device("cpu"))
    pool.cells.normal_(generator=torch.Generator().manual_seed(size))
    return pool


def tokens_of(number: int, size: int, seed: int = 1) -> Tensor:
    return torch.randn(number, HEADS, QUERIES + 2, size, generator=torch.Generator().manual_seed(seed))


def attend(
    pool: KVPool,
    qkv: Tensor,
    segments: Segments,
    window: int | None = None,
    softcap: float | None = None,
    width: int | None = None,
) -> Tensor:
    how = {"scaling": 0.3, "softcap": softcap, "sliding_window": window}
    out = CpuAttention(width).attend(pool, 1, qkv, segments, **how)
    return out.view(len(qkv), HEADS, QUERIES, -1)


def expected(
    pool: KVPool, qkv: Tensor, token: int, slot: int, visible: Tensor, softcap: float | None = None
) -> Tensor:
    """What one token attends to, in float64, of the cached positions that it sees."""
    keys, values = pool.cells[1, :, slot, :, visible]
    return reference_attention(
        qkv[token, :, :QUERIES],
        keys,
        values,
        torch.zeros(1, 1, len(visible)),
        rows=QUERIES,
        scaling=0.3,
        softcap=softcap,
    )


def tree_case(size: int) -> tuple[KVPool, Tensor, Segments, Tensor, Tensor]:
    """Two samples; two columns were computed before, five and three tokens are computed now."""
    pool, qkv = pool_of(size), tokens_of(8, size)
    seen = torch.rand(2, 5, 7, generator=torch.Generator().manual_seed(9)) < 0.5
    seen[:, :, 0] = True
    for token in range(5):
        seen[:, token, token + 2] = True
        seen[:, token, token + 3 :] = False
    depth = torch.tensor([[0, 1, 1, 2, 2, 3, 3]] * 2)
    segments = segments_of(
        pool,
        slots=np.array([1, 2]),
        counts=np.array([5, 3]),
        starts=np.array([32, 79]),
        bases=np.array([30, 77]),
        seen=seen,
        depth=depth,
    )
    return pool, qkv, segments, seen, depth


@pytest.mark.parametrize("softcap", [0.5, 3.0, 50.0])
def test_scores_are_bounded(softcap: float) -> None:
    """Softly: the largest lose most; what is not seen stays unseen."""
    pool, size = pool_of(16), 16
    segments = segments_of(pool, slots=np.array([0, 2]), counts=np.array([3, 1]), starts=np.array([40, 7]))
    qkv = tokens_of(4, size) * 4
    bounded, free = attend(pool, qkv, segments, softcap=softcap), attend(pool, qkv, segments)
    for token, slot, length in ((0, 0, 41), (1, 0, 42), (2, 0, 43), (3, 2, 8)):
        wanted = expected(pool, qkv, token, slot, torch.arange(length), softcap)
        torch.testing.assert_close(bounded[token], wanted, rtol=1e-4, atol=2e-5)
    assert (bounded - free).abs().max() > (1e-3 if softcap > 10 else 0.1)
    alone = segments_of(pool, slots=np.array([0]), counts=np.array([1]), starts=np.array([41]))
    assert torch.equal(attend(pool, qkv[1:2], alone, softcap=softcap)[0], bounded[1])


@pytest.mark.parametrize("size", [8, 16, 64, 72, 128])
@pytest.mark.parametrize("window", [None, 9])
def test_a_chain_sees_what_came_before(size: int, window: int | None) -> None:
    pool, counts = pool_of(size), np.array([1, 40, 5])
    starts = np.array([100, 3, 0])
    segments = segments_of(pool, slots=np.array([0, 2, 3]), counts=counts, starts=starts)
    qkv = tokens_of(46, size)
    out = attend(pool, qkv, segments, window)
    token = 0
    for slot, count, start in zip((0, 2, 3), counts, starts, strict=True):
        for position in range(start, start + count):
            assert torch.equal(pool.cells[1, :, slot, :, position], qkv[token, :, -2:].transpose(0, 1))
            first = 0 if window is None else max(0, position - window + 1)
            visible = torch.arange(first, position + 1)
            torch.testing.assert_close(
                out[token], expected(pool, qkv, token, slot, visible), rtol=2e-5, atol=2e-5
            )
            token += 1


@pytest.mark.parametrize("size", [8, 64])
@pytest.mark.parametrize("window", [None, 3, 20])
def test_a_tree_sees_its_base_and_the_columns_marked(size: int, window: int | None) -> None:
    pool, qkv, segments, seen, depth = tree_case(size)
    out = attend(pool, qkv, segments, window)
    token = 0
    for sample, (slot, count, base) in enumerate(((1, 5, 30), (2, 3, 77))):
        for index in range(count):
            own = depth[sample, index + 2]
            in_window = depth[sample] > own - (window or 999)
            columns = base + (seen[sample, index] & in_window).nonzero()[:, 0]
            first = 0 if window is None else min(base, max(0, base + int(own) - window + 1))
            visible = torch.cat([torch.arange(first, base), columns])
            torch.testing.assert_close(
                out[token], expected(pool, qkv, token, slot, visible), rtol=2e-5, atol=2e-5
            )
            token += 1


@pytest.mark.parametrize("size", [8, 24, 32, 64, 128])
@pytest.mark.parametrize("window", [None, 9])
def test_vectors_of_any_width_give_the_same_bits(size: int, window: int | None) -> None:
    """Other processors sum other numbers of rows abreast."""
    found = []
    for width in (8, 16):
        pool, qkv, segments, *_ = tree_case(size)
        found.append(attend(pool, qkv, segments, window, width=width))
        pool, qkv = pool_of(size), tokens_of(46, size)
        segments = segments_of(
            pool, slots=np.array([0, 2, 3]), counts=np.array([1, 40, 5]), starts=np.array([100, 3, 0])
        )
        found.append(attend(pool, qkv, segments, window, width=width))
    assert torch.equal(found[0], found[2]) and torch.equal(found[1], found[3])


@pytest.mark.parametrize("size", [8, 32, 128])
def test_cells_that_nobody_sees_need_hold_no_number(size: int) -> None:
    pool, qkv = pool_of(size), tokens_of(5, size)
    segments = segments_of(pool, slots=np.array([2]), counts=np.array([5]), starts=np.array([41]))
    wanted = attend(pool, qkv, segments)
    pool.cells[..., 41:, :] = torch.nan
    assert torch.equal(attend(pool, qkv, segments), wanted)


def test_neighbours_and_pieces_change_no_bit() -> None:
    """A prompt in one piece, with others, token by token; more rows than are kept at a time."""
    count = 3 * block_tokens(QUERIES) + 1
    assert count * QUERIES > BLOCK_ROWS
    qkv = tokens_of(count, 64)
    together = attend(
        pool_of(64),
        torch.cat([tokens_of(7, 64, seed=2), qkv]),
        segments_of(
            pool_of(64), slots=np.array([0, 3]), counts=np.array([7, count]), starts=np.array([50, 20])
        ),
    )[7:]
    pool = pool_of(64, slots=4, capacity=96)
    pool.cells[:] = pool_of(64).cells[..., :96, :]
    for token in range(count):
        segment = segments_of(pool, slots=np.array([3]), counts=np.array([1]), starts=np.array([20 + token]))
        assert torch.equal(attend(pool, qkv[token : token + 1], segment), together[token : token + 1])


def test_a_node_behind_decoys_has_the_bits_of_its_dense_position() -> None:
    pool, qkv, segments, seen, _ = tree_case(64)
    last = attend(pool, qkv, segments)[4]
    columns = 30 + seen[0, 4].nonzero()[:, 0]
    dense = pool_of(64)
    path = torch.cat([torch.arange(30), columns])
    dense.cells[1, :, 0, :, : len(path)] = pool.cells[1, :, 1, :, path]
    # what was there beyond the path does not matter
    segment = segments_of(dense, slots=np.array([0]), counts=np.array([1]), starts=np.array([len(path) - 1]))
    assert torch.equal(attend(dense, qkv[4:5], segment)[0], last)


def test_what_is_not_a_number_stays_so_and_infects_nobody() -> None:
    pool, qkv = pool_of(16), tokens_of(2, 16)
    qkv[0, :, 0, 3] = torch.nan
    segments = segments_of(pool, slots=np.array([0, 1]), counts=np.array([1, 1]), starts=np.array([9, 9]))
    out = attend(pool, qkv, segments)
    assert out[0, :, 0].isnan().all()
    assert out[0, :, 1:].isfinite().all() and out[1].isfinite().all()


@pytest.mark.parametrize(("slot", "start"), [(0, 159), (4, 0)])
def test_tokens_outside_the_pool_are_refused(slot: int, start: int) -> None:
    with pytest.raises(IndexError, match="4 slots of 160"):
        segments_of(pool_of(16), slots=np.array([slot]), counts=np.array([2]), starts=np.array([start]))
