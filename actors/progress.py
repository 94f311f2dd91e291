"""Response tokens so far of many samples: a mapping that travels as a few arrays.

A poll of an instance with hundreds of samples would otherwise pickle hundreds of keys and arrays, for two milliseconds
in which its decode thread waits for the interpreter's lock.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from core.records import SampleKey, Stream


class Progress(dict[SampleKey, np.ndarray]):
    """Tokens [T] of each running sample's response."""

    def __reduce__(self) -> tuple[Callable[..., Progress], tuple[Any, ...]]:
        rows = list(self.values())
        return _unpack, (
            [key.run_seed for key in self],
            [key.stream for key in self],
            [key.sample_index for key in self],
            np.array([len(row) for row in rows], dtype=np.int64),
            np.concatenate(rows) if rows else np.zeros(0, dtype=np.int64),
        )


def _unpack(
    run_seeds: Sequence[int],
    streams: Sequence[Stream],
    sample_indices: Sequence[int],
    lengths: np.ndarray,
    tokens: np.ndarray,
) -> Progress:
    ends = [0, *lengths.cumsum().tolist()]
    named = zip(run_seeds, streams, sample_indices, ends[:-1], ends[1:], strict=True)
    return Progress(
        {
            SampleKey(run_seed=seed, stream=stream, sample_index=index): tokens[begin:end]
            for seed, stream, index, begin, end in named
        }
    )
