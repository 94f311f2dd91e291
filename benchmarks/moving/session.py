"""One Ray and one thread a process for the benchmarks that move samples."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from rlhfspec.cluster.placement.ray_session import ray_session
from rlhfspec.core.settings.cluster import ClusterConfig


@contextmanager
def bench_ray(name: str) -> Iterator[None]:
    """A local Ray without a dashboard."""
    with ray_session(ClusterConfig(dashboard=False), name):
        yield
