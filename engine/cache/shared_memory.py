"""Memory that the ranks of a group see at once: the cache of an instance, of which each rank writes its heads.

A file without a name, which ends with the last process that has it open; the kernel's shared memory, not the limit of
`/dev/shm`.
"""

from __future__ import annotations

import os
import weakref

from ...core.errors import ConfigError


class SharedFile:
    """A descriptor of such a file, which goes to other ranks by `GroupRanks.give`; closed when nobody holds this."""

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor
        self._closes = weakref.finalize(self, os.close, descriptor)

    @staticmethod
    def new(name: str) -> SharedFile:
        """Make one, empty. Raises ConfigError where the system has none."""
        if not hasattr(os, "memfd_create"):
            raise ConfigError(
                "cluster.generation.tensor_parallel needs Linux: its ranks share one cache's memory"
            )
        return SharedFile(os.memfd_create(name))
