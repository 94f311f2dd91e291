"""Pages of a GPU behind a KV pool's slots, mapped by its driver as samples grow.

The driver maps pages of 2 MiB or so. For a token's page to be shared by all layers, cells lie slot by slot, head by
head, token by token, [S, H, C, L, 2, E]: 128 tokens a page and head for 32 layers of heads of 128 in bfloat16. Where no
sample has memory all addresses lead to one blank page: attention reads masked positions too, and padding is written
somewhere. Addresses never change, so recorded forwards stay good.
"""

from __future__ import annotations

import contextlib
from typing import Protocol, runtime_checkable

import numpy as np
from jaxtyping import Int
from torch import Tensor

from ...core.errors import RlhfSpecError
from .kv_memory import OnPages, Pages, PoolShape

SPARE_GROWTHS = 2
"Of how many growing samples the pages are kept; making one takes longer than mapping it."


@runtime_checkable
class PageDriver(Protocol):
    """What maps memory: `engine.cache.cuda_pages`."""

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

    def bytes_at(self, address: int, num_bytes: int, owner: object) -> Tensor:
        """Return a tensor, uint8 [num_bytes], over mapped memory, that keeps its owner alive."""
        ...

    def release(self, page: int) -> None:
        """Give a page back; it goes when nothing maps it any more."""
        ...

    def free(self, address: int, num_bytes: int) -> None:
        """Give unmapped addresses back."""
        ...

    def wait(self, *, for_all: bool = False) -> None:
        """Return when nothing that this thread's stream was told to do reads or writes any more.

        With `for_all` no stream of the device: that also waits for a receive that no peer has answered yet.
        """
        ...


def mapped_pages(num_layers: int, num_kv_heads: int, head_bytes: int, *, page_bytes: int) -> Pages:
    """Return how a slot lies on pages of a GPU: a run for each head, all layers of a token together."""
    return Pages(num_runs=num_kv_heads, token_bytes=num_layers * 2 * head_bytes, page_bytes=page_bytes)


class Mapping:
    """Addresses and the pages behind them; all go when the last tensor over them does."""

    def __init__(self, driver: PageDriver, num_pages: int) -> None:
        """Reserve the addresses and put one blank page behind all of them."""
        self._driver = driver
        self._num_pages = num_pages
        self.start = driver.reserve(num_pages * driver.page_bytes)
        self.blank = driver.create()
        self.pages = {self.blank}
        for page in range(num_pages):
            driver.map(self.start + page * driver.page_bytes, self.blank)
        driver.allow(self.start, num_pages)

    def create(self) -> int:
        """Return a new page."""
        page = self._driver.create()
        self.pages.add(page)
        return page

    def release(self, page: int) -> None:
        """Give a page back that lies nowhere any more."""
        self.pages.remove(page)
        self._driver.release(page)

    def __del__(self) -> None:
        # at the end of the process the driver may be gone, and everything with it
        with contextlib.suppress(RlhfSpecError, RuntimeError):
            self._driver.wait(for_all=True)
            self._driver.unmap(self.start, self._num_pages)
            for page in self.pages:
                self._driver.release(page)
            self._driver.free(self.start, self._num_pages * self._driver.page_bytes)


class MappedMemory(OnPages):
    """Cells whose pages come and go; a few are kept for the next sample that grows."""

    def __init__(self, shape: PoolShape, driver: PageDriver) -> None:
        self.pages = mapped_pages(
            shape.num_layers,
            shape.num_kv_heads,
            shape.head_size * shape.dtype.itemsize,
            page_bytes=driver.page_bytes,
        )
        token_bytes = self.pages.token_bytes
        capacity = self.pages.whole(shape.capacity)
        self._driver = driver
        self._pages_of_run = capacity * token_bytes // driver.page_bytes
        num_pages = shape.num_slots * shape.num_kv_heads * self._pages_of_run
        self._mapping = Mapping(driver, num_pages)
        self._bytes = driver.bytes_at(self._mapping.start, num_pages * driver.page_bytes, owner=self._mapping)
        self._bytes[: driver.page_bytes].zero_()
        tokens = (shape.num_slots, shape.num_kv_heads, capacity, shape.num_layers, 2, shape.head_size)
        self.cells = self._bytes.view(shape.dtype).view(tokens).permute(3, 4, 0, 1, 2, 5)
        self._held: list[list[int]] = [[] for _ in range(shape.num_slots)]
        "pages of each slot, those of all heads together: page p of head h is entry p * H + h"
        self._spare: list[int] = []

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
                self._put(slot, len(pages) - 1, self._mapping.blank)
                self._spare.append(pages.pop())
            while len(pages) < wanted[slot]:
                self._take_page(slot)
        while len(self._spare) > SPARE_GROWTHS * self.pages.num_runs:
            self._mapping.release(self._spare.pop())

    def move(self, source: int, target: int, num_tokens: int) -> None:
        """See `KVMemory.move`: the two slots change pages, nothing is copied."""
        self._driver.wait()
        held = self._held
        held[source], held[target] = held[target], held[source]
        for slot in (source, target):
            for index in range(max(len(held[source]), len(held[target]))):
                self._put(slot, index, held[slot][index] if index < len(held[slot]) else self._mapping.blank)

    def _take_page(self, slot: int) -> None:
        """One page more at the end of a slot's."""
        is_new = not self._spare
        page = self._mapping.create() if is_new else self._spare.pop()
        self._held[slot].append(page)
        start = self._put(slot, len(self._held[slot]) - 1, page) - self._mapping.start
        if is_new:
            # anything may be in it, and masked positions must be finite
            self._bytes[start : start + self.pages.page_bytes].zero_()

    def _put(self, slot: int, index: int, page: int) -> int:
        """Change what lies behind a slot's page; return its address."""
        number, head = divmod(index, self.pages.num_runs)
        run = slot * self.pages.num_runs + head
        address = self._mapping.start + (run * self._pages_of_run + number) * self.pages.page_bytes
        self._driver.unmap(address, 1)
        self._driver.map(address, page)
        self._driver.allow(address, 1)
        return address
