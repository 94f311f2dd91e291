"""Pages of the host behind several addresses, as a GPU's driver maps them: for tests of `engine.cache.cuda_memory`.

Real mappings (Linux): a file in memory holds the pages, and `mmap` at fixed addresses puts them wherever they are asked
for, so one page read through two addresses is one page. Touching what is not mapped is a fault of the process.
"""

import ctypes
import mmap
import os

import torch
from torch import Tensor

_SHARED, _FIXED = mmap.MAP_SHARED, 0x10
_NO_ACCESS, _READ_WRITE = 0, mmap.PROT_READ | mmap.PROT_WRITE


class HostPages:
    """See `engine.cache.cuda_memory.PageDriver`; says what it was asked for wrongly."""

    def __init__(self, page_bytes: int = mmap.PAGESIZE) -> None:
        self.page_bytes = page_bytes
        self.num_created = 0
        self.num_waits = 0
        self.mapped: dict[int, int] = {}
        "page behind each address"
        self.released: set[int] = set()
        self._file = os.memfd_create("pages")
        self._libc = ctypes.CDLL(None, use_errno=True)
        self._libc.mmap.restype = ctypes.c_void_p
        self._libc.mmap.argtypes = (
            ctypes.c_void_p,
            ctypes.c_size_t,
            ctypes.c_int,
            ctypes.c_int,
            ctypes.c_int,
            ctypes.c_long,
        )

    def reserve(self, num_bytes: int) -> int:
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
        return self._checked(self._libc.mmap(None, num_bytes, _NO_ACCESS, flags, -1, 0))

    def create(self) -> int:
        page = self.num_created
        self.num_created += 1
        os.ftruncate(self._file, self.num_created * self.page_bytes)
        # what a new page of a GPU holds is anybody's guess
        os.pwrite(self._file, b"\xff" * self.page_bytes, page * self.page_bytes)
        return page

    def map(self, address: int, page: int) -> None:
        assert address not in self.mapped, "an address that has a page already"
        self.mapped[address] = page
        place = (self._file, page * self.page_bytes)
        self._checked(
            self._libc.mmap(address, self.page_bytes, _NO_ACCESS, _SHARED | _FIXED, *place), address
        )

    def unmap(self, address: int, num_pages: int) -> None:
        for number in range(num_pages):
            self.mapped.pop(address + number * self.page_bytes)
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _FIXED
        self._checked(
            self._libc.mmap(address, num_pages * self.page_bytes, _NO_ACCESS, flags, -1, 0), address
        )

    def allow(self, address: int, num_pages: int) -> None:
        for number in range(num_pages):
            assert address + number * self.page_bytes in self.mapped, "access to what is not mapped"
        size = ctypes.c_size_t(num_pages * self.page_bytes)
        assert not self._libc.mprotect(ctypes.c_void_p(address), size, _READ_WRITE)

    def bytes_at(self, address: int, num_bytes: int, owner: object) -> Tensor:
        class Bytes(ctypes.Array):
            _type_, _length_ = ctypes.c_ubyte, num_bytes

        array = Bytes.from_address(address)
        array.owner = owner
        return torch.frombuffer(array, dtype=torch.uint8)

    def release(self, page: int) -> None:
        assert page not in self.released and page not in self.mapped.values(), "a page in use"
        self.released.add(page)

    def free(self, address: int, num_bytes: int) -> None:
        assert not any(address <= at < address + num_bytes for at in self.mapped), "addresses in use"
        assert not self._libc.munmap(ctypes.c_void_p(address), ctypes.c_size_t(num_bytes))

    def wait(self, *, for_all: bool = False) -> None:
        self.num_waits += 1

    def _checked(self, address: int, wanted: int | None = None) -> int:
        assert address not in (None, ctypes.c_void_p(-1).value), os.strerror(ctypes.get_errno())
        assert wanted in (None, address)
        return address
