"""How far many samples are: a mapping that is made, and travels, as a few lists.

Ten times a second the decode thread makes one of all its samples, and a poll pickles it: keys and tokens one by one
took up to two milliseconds of the interpreter's lock for some hundred samples.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any

from .records import SampleKey, Stream


class Progress(Mapping[SampleKey, int]):
    """Response tokens so far of each running sample; arrives as a plain dict."""

    def __init__(self, keys: Sequence[SampleKey] = (), num_tokens: Sequence[int] = ()) -> None:
        """Keep both, which must be equally long."""
        self._keys, self._num_tokens = keys, num_tokens

    @cached_property
    def _by_key(self) -> dict[SampleKey, int]:
        return dict(zip(self._keys, self._num_tokens, strict=True))

    def __getitem__(self, key: SampleKey) -> int:
        return self._by_key[key]

    def __iter__(self) -> Iterator[SampleKey]:
        return iter(self._keys)

    def __len__(self) -> int:
        return len(self._keys)

    def __reduce__(self) -> tuple[Callable[..., dict[SampleKey, int]], tuple[Any, ...]]:
        return _unpack, (
            [key.run_seed for key in self._keys],
            [key.stream for key in self._keys],
            [key.sample_index for key in self._keys],
            [key.turn for key in self._keys],
            self._num_tokens,
        )


def _unpack(
    run_seeds: Sequence[int],
    streams: Sequence[Stream],
    sample_indices: Sequence[int],
    turns: Sequence[int],
    num_tokens: Sequence[int],
) -> dict[SampleKey, int]:
    named = zip(run_seeds, streams, sample_indices, turns, num_tokens, strict=True)
    return {
        SampleKey(run_seed=seed, stream=stream, sample_index=index, turn=turn): count
        for seed, stream, index, turn, count in named
    }
