"""Pages of a GPU behind a KV pool's slots, mapped by its driver as samples grow.

The driver maps pages of 2 MiB or so. For a token's page to be shared by all layers, cells lie slot by slot, head by
head, token by token, [S, H, C, L, 2, E]: 128 tokens a page and head for 32 layers of heads of 128 in bfloat16. Where no
sample has memory all addresses lead to one blank page: attention reads masked positions too, and padding is written
somewhere. Addresses never change, so recorded forwards stay good.
"""

from __future__ import annotations

from typing import Protocol, runtime_checkable

import numpy as np
from jaxtyping import Int
from torch import Tensor

from engine.kv_memory import Pages, PoolShape


@runtime_checkable
class PageDriver(Protocol):
    """What maps memory: `engine.cuda_pages`."""

    @property
    def page_bytes(self) -> int:
        """The smallest page."""
        ...

    def reserve(self, num_bytes: int) -> int:
        """Return the address of as many unmapped bytes."""
        ...

    def create(self) -> int:
        """Return a handle of a new page."""
        ...

    def map(self, address: int, page: int) -> None:
        """Put a page behind an address that has none; a page may lie behind several."""
        ...

    def unmap(self, address: int, num_pages: int) -> None:
        """Leave addresses without memory."""
        ...

    def allow(self, address: int, num_pages: int) -> None:
        """Make mapped pages readable and writable."""
        ...

    def bytes_at(self, address: int, num_bytes: int) -> Tensor:
        """Return a tensor, uint8 [num_bytes], over mapped memory."""
        ...

    def wait(self) -> None:
        """Return when nothing that was started reads or writes any more."""
        ...


class MappedMemory:
    """Cells whose pages come and go. Pages once made are kept for the next sample."""

    def __init__(self, shape: PoolShape, driver: PageDriver) -> None:
        token_bytes = shape.num_layers * 2 * shape.head_size * shape.dtype.itemsize
        self.pages = Pages(num_runs=shape.num_kv_heads, token_bytes=token_bytes, page_bytes=driver.page_bytes)
        capacity = self.pages.whole(shape.capacity)
        self._driver = driver
        self._pages_of_run = capacity * token_bytes // driver.page_bytes
        num_pages = shape.num_slots * shape.num_kv_heads * self._pages_of_run
        self._base = driver.reserve(num_pages * driver.page_bytes)
        self._blank = driver.create()
        for page in range(num_pages):
            driver.map(self._base + page * driver.page_bytes, self._blank)
        driver.allow(self._base, num_pages)
        self._bytes = driver.bytes_at(self._base, num_pages * driver.page_bytes)
        self._bytes[: driver.page_bytes].zero_()
        tokens = (shape.num_slots, shape.num_kv_heads, capacity, shape.num_layers, 2, shape.head_size)
        self.cells = self._bytes.view(shape.dtype).view(tokens).permute(3, 4, 0, 1, 2, 5)
        self._held: list[list[int]] = [[] for _ in range(shape.num_slots)]
        "pages of each slot, those of all heads together: page p of head h is entry p * H + h"
        self._spare: list[int] = []

    @property
    def growth_bytes(self) -> int:
        """See `KVMemory.growth_bytes`."""
        return self.pages.num_runs * self.pages.page_bytes

    def bytes_of(self, num_tokens: Int[np.ndarray, " B"]) -> int:
        """See `KVMemory.bytes_of`."""
        return self.pages.bytes_of(num_tokens)

    def hold(self, num_tokens: Int[np.ndarray, " B"]) -> None:
        """See `KVMemory.hold`."""
        wanted = [*(self.pages.count(num_tokens) * self.pages.num_runs).tolist()]
        wanted += [0] * (len(self._held) - len(wanted))
        changed = [slot for slot, count in enumerate(wanted) if count != len(self._held[slot])]
        if not changed:
            return
        self._driver.wait()
        # what shrinks gives to what grows
        for slot in sorted(changed, key=lambda slot: wanted[slot] - len(self._held[slot])):
            pages = self._held[slot]
            while len(pages) > wanted[slot]:
                self._put(slot, len(pages) - 1, self._blank)
                self._spare.append(pages.pop())
            while len(pages) < wanted[slot]:
                self._take_page(slot)

    def move(self, source: int, target: int, num_tokens: int) -> None:
        """See `KVMemory.move`: the two slots change pages, nothing is copied."""
        self._driver.wait()
        held = self._held
        held[source], held[target] = held[target], held[source]
        for slot in (source, target):
            for index in range(max(len(held[source]), len(held[target]))):
                self._put(slot, index, held[slot][index] if index < len(held[slot]) else self._blank)

    def _take_page(self, slot: int) -> None:
        """One page more at the end of a slot's."""
        is_new = not self._spare
        page = self._driver.create() if is_new else self._spare.pop()
        self._held[slot].append(page)
        start = self._put(slot, len(self._held[slot]) - 1, page) - self._base
        if is_new:
            # anything may be in it, and masked positions must be finite
            self._bytes[start : start + self.pages.page_bytes].zero_()

    def _put(self, slot: int, index: int, page: int) -> int:
        """Change what lies behind a slot's page; return its address."""
        number, head = divmod(index, self.pages.num_runs)
        run = slot * self.pages.num_runs + head
        address = self._base + (run * self._pages_of_run + number) * self.pages.page_bytes
        self._driver.unmap(address, 1)
        self._driver.map(address, page)
        self._driver.allow(address, 1)
        return address
