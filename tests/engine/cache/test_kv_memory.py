"""Memory that comes and goes behind a pool's slots: what is held, what is given back, what stays readable."""

import gc
import mmap
from pathlib import Path

import numpy as np
import pytest
import torch

from rlhfspec.engine.cache.cuda_memory import MappedMemory
from rlhfspec.engine.cache.kv_memory import KVMemory, PagedHostMemory, Pages, PoolShape, WholeMemory
from rlhfspec.engine.cache.kv_pool import KVPool, KVShape
from tests.helpers.host_pages import HostPages

SHAPE = PoolShape(num_layers=2, num_slots=4, num_kv_heads=2, capacity=300, head_size=16, dtype=torch.float32)
TOKENS_A_PAGE = mmap.PAGESIZE // 64
MAPPED_TOKENS_A_PAGE = TOKENS_A_PAGE // 4


def paged(kind: str) -> KVMemory:
    return PagedHostMemory(SHAPE) if kind == "host" else MappedMemory(SHAPE, HostPages())


def counted(memory: KVMemory, seed: int = 0) -> torch.Tensor:
    return torch.randn(memory.cells.shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("kind", ["host", "mapped"])
def test_what_is_held_keeps_what_is_written(kind: str) -> None:
    memory = paged(kind)
    lengths = np.array([300, 1, 70, 130])
    memory.hold(lengths)
    written = counted(memory)
    for slot, length in enumerate(lengths):
        memory.cells[:, :, slot, :, :length] = written[:, :, slot, :, :length]
    for slot, length in enumerate(lengths):
        assert torch.equal(memory.cells[:, :, slot, :, :length], written[:, :, slot, :, :length])
    memory.hold(lengths[:3])
    memory.hold(np.array([300, 200, 60]))
    assert torch.equal(memory.cells[:, :, 0, :, :300], written[:, :, 0, :, :300])
    assert torch.equal(memory.cells[:, :, 2, :, :60], written[:, :, 2, :, :60])
    assert torch.equal(memory.cells[:, :, 1, :, :1], written[:, :, 1, :, :1]), "growing keeps what was there"


@pytest.mark.parametrize("kind", ["host", "mapped"])
def test_all_of_it_is_finite_always(kind: str) -> None:
    """Attention reads masked positions, of slots without a sample too; a NaN there would spread."""
    memory = paged(kind)
    for lengths in ([], [300, 300, 300, 300], [5, 5], [], [300]):
        memory.hold(np.array(lengths, dtype=np.int64))
        assert torch.isfinite(memory.cells).all()
        for slot, length in enumerate(lengths):
            memory.cells[:, :, slot, :, :length] = 1.0


def test_the_host_gets_its_pages_back() -> None:
    """Measured where the system says what a process holds."""
    status = Path("/proc/self/smaps_rollup")
    if not status.exists():
        pytest.skip("this system does not say what a process holds (no /proc/self/smaps_rollup)")

    def held_bytes() -> int:
        line = next(line for line in status.read_text().splitlines() if line.startswith("Rss"))
        return int(line.split()[1]) * 1024

    shape = PoolShape(
        num_layers=8, num_slots=8, num_kv_heads=4, capacity=2048, head_size=64, dtype=torch.float32
    )
    before = held_bytes()
    memory = PagedHostMemory(shape)
    assert held_bytes() - before < 8 << 20, "nothing is written yet"
    memory.hold(np.full(8, 2048))
    memory.cells.fill_(1.0)
    whole = held_bytes() - before
    assert whole > 0.95 * memory.cells.nbytes
    memory.hold(np.full(2, 512))
    left = held_bytes() - before
    assert left < whole / 10
    assert memory.bytes_of(np.full(2, 512)) == memory.cells.nbytes // 16
    assert not memory.cells[:, :, 2:].any() and memory.cells[:, :, :2, :, :512].all()


@pytest.mark.parametrize("kind", ["host", "mapped"])
@pytest.mark.parametrize(("source", "target"), [(3, 0), (2, 1)])
def test_a_moved_slot_is_another_one(kind: str, source: int, target: int) -> None:
    memory = paged(kind)
    lengths = np.array([20, 300, 130, 257])
    memory.hold(lengths)
    written = counted(memory)
    for slot, length in enumerate(lengths):
        memory.cells[:, :, slot, :, :length] = written[:, :, slot, :, :length]
    length = int(lengths[source])
    memory.move(source, target, length)
    moved = [*lengths[:3]]
    if target < 3:
        moved[target] = lengths[source]
    memory.hold(np.array(moved))
    assert torch.equal(memory.cells[:, :, target, :, :length], written[:, :, source, :, :length])
    for slot in {0, 1, 2} - {source, target}:
        assert torch.equal(
            memory.cells[:, :, slot, :, : lengths[slot]], written[:, :, slot, :, : lengths[slot]]
        )


def test_pages_are_counted_run_by_run() -> None:
    pages = Pages(num_runs=6, token_bytes=64, page_bytes=4096)
    assert pages.count(np.array([0, 1, 64, 65])).tolist() == [0, 1, 1, 2]
    assert pages.bytes_of(np.array([1, 65])) == 3 * 6 * 4096
    assert pages.whole(300) == 320, "five pages, ten view steps"
    assert Pages(num_runs=1, token_bytes=6144, page_bytes=1 << 21).whole(1) == 1024


def test_mapped_pages_are_made_once_and_shared_by_nobody() -> None:
    driver = HostPages()
    memory = MappedMemory(SHAPE, driver)
    assert driver.num_created == 1, "the blank page alone lies everywhere"
    assert set(driver.mapped.values()) == {0}
    assert memory.growth_bytes == 2 * driver.page_bytes
    memory.hold(np.array([MAPPED_TOKENS_A_PAGE + 1, 1]))
    assert driver.num_created == 1 + 4 + 2
    assert memory.bytes_of(np.array([MAPPED_TOKENS_A_PAGE + 1, 1])) == 6 * driver.page_bytes
    mine = [page for page in driver.mapped.values() if page]
    assert sorted(mine) == [1, 2, 3, 4, 5, 6], "each page behind one address"
    waits = driver.num_waits
    memory.hold(np.array([MAPPED_TOKENS_A_PAGE + 1, 2]))
    assert driver.num_waits == waits, "nothing to map, nothing to wait for"
    memory.hold(np.array([1, 1, 1]))
    assert driver.num_created == 7, "what one gave back another took"
    memory.hold(np.array([], dtype=np.int64))
    assert set(driver.mapped.values()) == {0}
    kept = driver.num_created - 1 - len(driver.released)
    assert kept == 4, "two growths of two heads"


def test_mapped_memory_goes_with_the_last_tensor_over_it() -> None:
    driver = HostPages()
    memory = MappedMemory(SHAPE, driver)
    memory.hold(np.array([300, 300]))
    memory.cells[:, :, 1, :, :300] = 3.0
    cells = memory.cells[:, :, 1, :, 7]
    del memory
    gc.collect()
    assert driver.mapped and (cells == 3.0).all()
    del cells
    gc.collect()
    assert not driver.mapped and len(driver.released) == driver.num_created


@pytest.mark.parametrize("kind", ["whole", "host", "mapped"])
def test_a_pool_finds_its_cells_however_they_lie(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    made = {"whole": lambda: WholeMemory(SHAPE, torch.device("cpu"))}.get(kind, lambda: paged(kind))()
    monkeypatch.setattr("rlhfspec.engine.cache.kv_pool.memory_for", lambda *_, **__: made)
    shape = KVShape(num_layers=2, num_kv_heads=2, num_heads=4, head_size=16)
    pool = KVPool(shape, num_slots=4, capacity=300, dtype=torch.float32, device=torch.device("cpu"), reach=8)
    pool.memory.hold(np.full(4, 300))
    tokens = torch.randn(3, 2, 2, 16)
    slots, positions = torch.tensor([0, 2, 3]), torch.tensor([299, 0, 64])
    for layer in range(2):
        pool.write(layer, pool.rows(slots, positions), tokens + layer)
    starts = torch.tensor([5, 100, 200])
    tree = torch.randn(6, 2, 2, 16)
    pool.write(1, pool.tree_rows(starts, 2), tree)
    for layer in range(2):
        for index, (slot, position) in enumerate(zip(slots.tolist(), positions.tolist(), strict=True)):
            cells = pool.range_of(slot, position, position + 1)[layer, :, :, 0]
            assert torch.equal(cells, (tokens[index] + layer).transpose(0, 1))
    for slot, start in enumerate(starts.tolist()):
        for step in range(2):
            cells = pool.cells[1, :, slot, :, start + step]
            assert torch.equal(cells, tree[slot * 2 + step].transpose(0, 1))
    keys, values = pool.view(1, 1, 2, 128)
    assert torch.equal(keys.view(2, 2, 128, 16), pool.cells[1, 0, 1:3, :, :128])
    assert torch.equal(values.view(2, 2, 128, 16), pool.cells[1, 1, 1:3, :, :128])
    pool.copy_slot(2, 0, 32)
    assert torch.equal(pool.cells[:, :, 0, :, :32], pool.cells[:, :, 2, :, :32])
    assert pool.token_bytes == 2 * 2 * 2 * 16 * 4
