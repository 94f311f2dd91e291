"""The CUDA driver's virtual memory calls, by name (CUDA driver API, "Virtual Memory Management")."""

from __future__ import annotations

import ctypes
from typing import Any

import torch
from torch import Tensor

from ...core.errors import RlhfSpecError

_PINNED, _DEVICE, _READ_WRITE, _MINIMUM = 1, 1, 3, 0


class _Location(ctypes.Structure):
    _fields_ = (("type", ctypes.c_int), ("id", ctypes.c_int))


class _Allocation(ctypes.Structure):
    """CUmemAllocationProp."""

    _fields_ = (
        ("type", ctypes.c_int),
        ("handle_types", ctypes.c_int),
        ("location", _Location),
        ("metadata", ctypes.c_void_p),
        ("flags", ctypes.c_ubyte * 8),
    )


class _Access(ctypes.Structure):
    """CUmemAccessDesc."""

    _fields_ = (("location", _Location), ("flags", ctypes.c_int))


class _Memory:
    """Device memory that torch takes as a tensor without a copy."""

    def __init__(self, address: int, num_bytes: int, owner: object) -> None:
        # the tensor keeps this, and this what the memory belongs to
        self._owner = owner
        self.__cuda_array_interface__ = {
            "shape": (num_bytes,),
            "typestr": "|u1",
            "data": (address, False),
            "strides": None,
            "version": 3,
        }


class CudaPages:
    """See `engine.cache.cuda_memory.PageDriver`. To be used from threads in which torch has used the device."""

    def __init__(self, device: torch.device, driver: Any = None) -> None:
        """Ask for the page size. `driver`: a library of the same functions, for tests.

        Raises RlhfSpecError when the driver has no such calls, or one fails.
        """
        self._device = device
        self._driver = driver if driver is not None else ctypes.CDLL("libcuda.so.1")
        index = device.index if device.index is not None else torch.cuda.current_device()
        self._where = _Location(type=_DEVICE, id=index)
        self._kind = _Allocation(type=_PINNED, location=self._where)
        size = ctypes.c_size_t()
        self._call("cuMemGetAllocationGranularity", ctypes.byref(size), ctypes.byref(self._kind), _MINIMUM)
        self._page_bytes = size.value

    @property
    def page_bytes(self) -> int:
        """See `PageDriver.page_bytes`."""
        return self._page_bytes

    def reserve(self, num_bytes: int) -> int:
        """See `PageDriver.reserve`."""
        address, none = ctypes.c_uint64(), ctypes.c_uint64(0)
        size, anywhere = ctypes.c_size_t(num_bytes), ctypes.c_size_t(0)
        self._call("cuMemAddressReserve", ctypes.byref(address), size, anywhere, none, none)
        return address.value

    def create(self) -> int:
        """See `PageDriver.create`."""
        page = ctypes.c_uint64()
        size, flags = ctypes.c_size_t(self._page_bytes), ctypes.c_uint64(0)
        self._call("cuMemCreate", ctypes.byref(page), size, ctypes.byref(self._kind), flags)
        return page.value

    def map(self, address: int, page: int) -> None:
        """See `PageDriver.map`."""
        size, none = ctypes.c_size_t(self._page_bytes), ctypes.c_size_t(0)
        flags = ctypes.c_uint64(0)
        self._call("cuMemMap", ctypes.c_uint64(address), size, none, ctypes.c_uint64(page), flags)

    def unmap(self, address: int, num_pages: int) -> None:
        """See `PageDriver.unmap`."""
        self._call("cuMemUnmap", ctypes.c_uint64(address), ctypes.c_size_t(num_pages * self._page_bytes))

    def allow(self, address: int, num_pages: int) -> None:
        """See `PageDriver.allow`."""
        access = _Access(location=self._where, flags=_READ_WRITE)
        size = ctypes.c_size_t(num_pages * self._page_bytes)
        self._call("cuMemSetAccess", ctypes.c_uint64(address), size, ctypes.byref(access), ctypes.c_size_t(1))

    def bytes_at(self, address: int, num_bytes: int, owner: object) -> Tensor:
        """See `PageDriver.bytes_at`."""
        return torch.as_tensor(_Memory(address, num_bytes, owner), device=self._device)

    def release(self, page: int) -> None:
        """See `PageDriver.release`."""
        self._call("cuMemRelease", ctypes.c_uint64(page))

    def free(self, address: int, num_bytes: int) -> None:
        """See `PageDriver.free`."""
        self._call("cuMemAddressFree", ctypes.c_uint64(address), ctypes.c_size_t(num_bytes))

    def wait(self, *, for_all: bool = False) -> None:
        """See `PageDriver.wait`."""
        if for_all:
            torch.cuda.synchronize(self._device)
        else:
            torch.cuda.current_stream(self._device).synchronize()

    def _call(self, name: str, *arguments: Any) -> None:
        function = getattr(self._driver, name, None)
        if function is None:
            raise RlhfSpecError(
                f"engine.kv_cache_mb on CUDA: this driver has no {name}; it came with CUDA 10.2: update the driver, "
                "or leave engine.kv_cache_mb out"
            )
        status = function(*arguments)
        if status:
            raise RlhfSpecError(
                f"engine.kv_cache_mb on CUDA: {name} failed with CUDA driver error {status} (2 is out of memory); "
                "lower engine.kv_cache_mb, or leave it out"
            )
