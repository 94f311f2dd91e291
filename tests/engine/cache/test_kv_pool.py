"""The KV pool's moves of tokens inside their slots."""

import numpy as np
import pytest
import torch

from rlhfspec.engine.cache.kv_pool import KVPool, KVShape


def filled_pool() -> KVPool:
    shape = KVShape(num_layers=2, num_kv_heads=2, num_heads=4, head_size=4)
    pool = KVPool(shape, num_slots=6, capacity=64, dtype=torch.float32, device=torch.device("cpu"))
    pool.cells.copy_(torch.randn(pool.cells.shape, generator=torch.Generator().manual_seed(2)))
    return pool


@pytest.mark.parametrize("seed", range(6))
def test_a_path_is_made_dense_with_and_without_a_look_at_it(seed: int) -> None:
    """On a GPU nothing asks how many tokens move; the cells end up the same."""
    random = np.random.default_rng(seed)
    root = torch.from_numpy(random.integers(0, 40, 5))
    nodes = [np.sort(random.choice(np.arange(1, 12), 4, replace=False)) for _ in range(5)]
    nodes[0] = np.array([2, 3, 6, 9])
    path = torch.from_numpy(np.stack([np.concatenate([[0], row]) for row in nodes]))
    accepted = torch.from_numpy(np.append(4, random.integers(0, 5, 4)))
    step = torch.arange(5)
    path = torch.minimum(path, path.gather(1, accepted[:, None]))
    moved = (step <= accepted[:, None]) & (path != step)
    looked, unseen = filled_pool(), filled_pool()
    before = looked.cells.clone()
    looked.make_dense(root, path, moved)
    unseen.make_dense_unseen(root, path, moved)
    assert torch.equal(looked.cells, unseen.cells)
    for b, i in torch.nonzero(moved).tolist():
        there, here = int(root[b]) + i, int(root[b] + path[b, i])
        assert torch.equal(looked.cells[:, :, b, :, there], before[:, :, b, :, here])
    assert moved[0].sum() == 4
    assert torch.equal(looked.cells[:, :, 5], before[:, :, 5])
