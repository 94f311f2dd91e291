"""The pool's samples in flat arrays, and room for more: what plans are made from."""

from __future__ import annotations

import heapq
from dataclasses import dataclass
from operator import attrgetter

import numpy as np

from ...core.records import SampleKey
from .pool_records import PoolView


@dataclass(frozen=True, slots=True, kw_only=True)
class FlatPool:
    """K instances in the view's order, n samples that may be moved, instance by instance."""

    names: tuple[str, ...]
    instance: np.ndarray
    "[n] number of each sample's instance"
    start: np.ndarray
    "[K + 1] where each instance's samples begin"
    response_tokens: np.ndarray
    "[n]"
    context_tokens: np.ndarray
    "[n]"
    num_arriving: np.ndarray
    "[K]"
    num_free: np.ndarray
    "[K] slots that moves may take: those the queue will fill are gone"
    num_from_queue: np.ndarray
    "[K] queued samples that will be bound there"
    goodput_tokens_per_s: np.ndarray
    "[K]; 0 when unknown"
    goodput_samples: np.ndarray
    "[K] samples that ran while it was measured, in the mean"

    @property
    def num_placed(self) -> np.ndarray:
        """[K] samples that stay or arrive at each instance."""
        return np.diff(self.start) + self.num_arriving + self.num_from_queue

    @property
    def mean_context_tokens(self) -> np.ndarray:
        """[K] of the samples that may be moved from there; 0 where there is none."""
        held = np.diff(self.start)
        total = np.bincount(self.instance, weights=self.context_tokens, minlength=len(held))
        return total / np.maximum(held, 1)


def flatten(view: PoolView) -> FlatPool:
    """Put a view into arrays; queued samples are bound to free slots as pull would do it."""

    def of(name: str, kind: type = np.int64) -> np.ndarray:
        return np.fromiter(map(attrgetter(name), view.instances), kind, len(view.instances))

    sizes = np.fromiter(map(len, map(attrgetter("keys"), view.instances)), np.int64, len(view.instances))
    running, arriving = sizes + of("num_leaving"), of("num_arriving")
    free = np.maximum(of("num_slots") - running - arriving, 0)
    names = tuple(map(attrgetter("instance"), view.instances))
    queued = _bind(view.num_queued, free, running + arriving, names)
    empty = np.zeros(0, dtype=np.int64)
    return FlatPool(
        names=names,
        instance=np.repeat(np.arange(len(sizes)), sizes),
        start=np.concatenate([[0], np.cumsum(sizes)]),
        response_tokens=np.concatenate([empty, *map(attrgetter("response_tokens"), view.instances)]),
        context_tokens=np.concatenate([empty, *map(attrgetter("context_tokens"), view.instances)]),
        num_arriving=arriving,
        num_free=free - queued,
        num_from_queue=queued,
        goodput_tokens_per_s=of("goodput_tokens_per_s", float),
        goodput_samples=of("goodput_samples", float),
    )


def key_of(view: PoolView, pool: FlatPool, sample: int) -> SampleKey:
    """The key of the sample with this number."""
    instance = int(pool.instance[sample])
    return view.instances[instance].keys[sample - int(pool.start[instance])]


def _bind(num_queued: int, free: np.ndarray, owned: np.ndarray, names: tuple[str, ...]) -> np.ndarray:
    """[K] queued samples that each instance will take: one after the other to the one that owns fewest."""
    taken = np.zeros(len(free), dtype=np.int64)
    if num_queued >= int(free.sum()):
        return free.copy()
    line = [(int(owned[k]), names[k], k) for k in np.nonzero(free)[0]] if num_queued else []
    heapq.heapify(line)
    for _ in range(num_queued):
        count, name, k = heapq.heappop(line)
        taken[k] += 1
        if taken[k] < free[k]:
            heapq.heappush(line, (count + 1, name, k))
    return taken
