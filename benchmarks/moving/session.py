"""One Ray and one thread a process for the benchmarks that move samples."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from cluster.placement.ray_session import ray_session
from core.config import (
    ClusterConfig,
    Config,
    DataConfig,
    ModelsConfig,
)


@contextmanager
def bench_ray(name: str) -> Iterator[None]:
    """A local Ray without a dashboard."""
    config = Config(
        data=DataConfig(task="chain"),
        models=ModelsConfig(draft="demo"),
        cluster=ClusterConfig(dashboard=False),
    )
    with ray_session(config, name):
        yield
