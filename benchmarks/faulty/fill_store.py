"""`python -m rlhfspec.benchmarks.faulty.fill_store ADDRESS SECONDS`: fills a running object store for a while.

As a driver of its own it puts objects of a chunk each until they take the whole store, and keeps a view of every one:
Ray spills nothing that is looked at. Meanwhile a put of the run displaces the run's own objects to disk, or goes to
disk itself (Ray's fallback), and waits as long as that takes. It says `full` and by the machine's clock since when,
and after the seconds lets go.
"""

from __future__ import annotations

import sys
import time

import numpy as np
import ray

from ...cluster.ray_start.ray_session import joined_cluster

CHUNK_BYTES = 16 << 20


def main(address: str, seconds: float) -> None:
    """Fill, hold, let go; what was done goes to standard output, a line each."""
    with joined_cluster(address):
        have = int(ray.cluster_resources()["object_store_memory"])
        chunk = np.zeros(CHUNK_BYTES, dtype=np.uint8)
        views = []
        while len(views) * CHUNK_BYTES < have:
            ref = ray.put(chunk)
            views.append((ref, ray.get(ref)))
        sys.stdout.write(
            f"full at {time.monotonic()}: {len(views) * CHUNK_BYTES >> 20} of {have >> 20} MiB\n"
        )
        sys.stdout.flush()
        time.sleep(seconds)


if __name__ == "__main__":
    main(sys.argv[1], float(sys.argv[2]))
