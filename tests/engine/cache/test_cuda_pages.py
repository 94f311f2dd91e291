"""The driver's calls as its documentation has them: names, order and width of arguments, errors. No GPU is asked."""

import ctypes
from typing import Any

import numpy as np
import pytest
import torch

from rlhfspec.core.errors import RlhfSpecError
from rlhfspec.engine.cache.cuda_memory import MappedMemory
from rlhfspec.engine.cache.cuda_pages import (
    _DEVICE,
    _MINIMUM,
    _PINNED,
    _READ_WRITE,
    CudaPages,
    _Access,
    _Allocation,
    _Location,
)
from rlhfspec.engine.cache.kv_memory import PoolShape

DEVICE = torch.device("cuda", 1)


class Library:
    """Functions of libcuda by name; each notes what it was given and fails when told to."""

    def __init__(self, failing: str = "", status: int = 2) -> None:
        self.calls: list[tuple[str, list[Any]]] = []
        self._failing, self._status = failing, status

    def __getattr__(self, name: str) -> Any:
        if not name.startswith("cuMem"):
            raise AttributeError(name)

        def call(*arguments: Any) -> int:
            if name == self._failing:
                return self._status
            if name == "cuMemGetAllocationGranularity":
                arguments[0]._obj.value = 2 << 20
            elif name in ("cuMemAddressReserve", "cuMemCreate"):
                arguments[0]._obj.value = 1 << 40
            self.calls.append((name, [getattr(x, "_obj", x) for x in arguments]))
            return 0

        return call


def values(arguments: list[Any]) -> list[int]:
    """What plain integers say; 64 bits wide, as the driver reads them."""
    plain = [x for x in arguments if isinstance(x, ctypes.c_uint64 | ctypes.c_size_t)]
    assert all(ctypes.sizeof(x) == 8 for x in plain)
    return [x.value for x in plain]


def test_structures_have_the_drivers_layout() -> None:
    assert ctypes.sizeof(_Allocation) == 32 and _Allocation.metadata.offset == 16
    assert ctypes.sizeof(_Access) == 12 and _Access.flags.offset == 8


def test_structures_are_those_of_the_drivers_own_bindings() -> None:
    """NVIDIA's bindings write into our bytes and read them."""
    driver = pytest.importorskip("cuda.bindings.driver", reason="cuda-bindings is not installed: extra dev")
    kinds, places = driver.CUmemAllocationType, driver.CUmemLocationType
    theirs = driver.CUmemAllocationProp()
    theirs.type = kinds.CU_MEM_ALLOCATION_TYPE_PINNED
    theirs.location.type = places.CU_MEM_LOCATION_TYPE_DEVICE
    theirs.location.id = 3
    ours = _Allocation(type=_PINNED, location=_Location(type=_DEVICE, id=3))
    assert ctypes.string_at(theirs.getPtr(), ctypes.sizeof(_Allocation)) == bytes(ours)
    access = driver.CUmemAccessDesc()
    access.location.type, access.location.id = places.CU_MEM_LOCATION_TYPE_DEVICE, 3
    access.flags = driver.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
    mine = _Access(location=_Location(type=_DEVICE, id=3), flags=_READ_WRITE)
    assert ctypes.string_at(access.getPtr(), ctypes.sizeof(_Access)) == bytes(mine)
    assert int(driver.CUmemAllocationGranularity_flags.CU_MEM_ALLOC_GRANULARITY_MINIMUM) == _MINIMUM


def test_calls_carry_sizes_addresses_and_the_device() -> None:
    library = Library()
    pages = CudaPages(DEVICE, library)
    assert pages.page_bytes == 2 << 20
    kind = library.calls[0][1][1]
    assert (kind.type, kind.location.type, kind.location.id) == (1, 1, 1)
    assert pages.reserve(6 << 20) == 1 << 40 and pages.create() == 1 << 40
    pages.map(7 << 21, 5)
    pages.allow(7 << 21, 3)
    pages.unmap(7 << 21, 3)
    pages.release(5)
    pages.free(7 << 21, 6 << 20)
    called = {name: values(arguments) for name, arguments in library.calls[1:]}
    assert called == {
        "cuMemAddressReserve": [1 << 40, 6 << 20, 0, 0, 0],
        "cuMemCreate": [1 << 40, 2 << 20, 0],
        "cuMemMap": [7 << 21, 2 << 20, 0, 5, 0],
        "cuMemSetAccess": [7 << 21, 6 << 20, 1],
        "cuMemUnmap": [7 << 21, 6 << 20],
        "cuMemRelease": [5],
        "cuMemAddressFree": [7 << 21, 6 << 20],
    }
    access = next(arguments for name, arguments in library.calls if name == "cuMemSetAccess")[2]
    assert (access.location.id, access.flags) == (1, 3)


def test_a_call_that_fails_is_named_with_what_to_do() -> None:
    pages = CudaPages(DEVICE, Library("cuMemCreate"))
    with pytest.raises(
        RlhfSpecError, match=r"cuMemCreate failed with CUDA driver error 2.*lower engine\.kv_cache_mb"
    ):
        pages.create()


def test_an_old_driver_is_named() -> None:
    with pytest.raises(RlhfSpecError, match=r"has no cuMemGetAllocationGranularity.*update the driver"):
        CudaPages(DEVICE, object())


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="mapped pages need a GPU: not run")
def test_pages_of_a_gpu_serve_as_cells() -> None:
    shape = PoolShape(
        num_layers=4, num_slots=3, num_kv_heads=2, capacity=4096, head_size=64, dtype=torch.bfloat16
    )
    memory = MappedMemory(shape, CudaPages(torch.device("cuda", 0)))
    memory.hold(np.array([3000, 10]))
    written = torch.randn(4, 2, 2, 3000, 64, device="cuda").bfloat16()
    memory.cells[:, :, 0, :, :3000] = written
    memory.hold(np.array([3000, 4000]))
    memory.move(0, 2, 3000)
    assert torch.equal(memory.cells[:, :, 2, :, :3000], written)
    assert torch.isfinite(memory.cells).all()
