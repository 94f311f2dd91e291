"""How the caches of one sample are cut into frames: both sides compute the same list from the same numbers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

DRAFT_FIRST = ("draft", "target")


@dataclass(frozen=True, slots=True, kw_only=True)
class Frame:
    """A token range of one cache."""

    part: str
    start: int
    stop: int
    num_bytes: int


def cut_into_frames(
    cached_tokens: Mapping[str, int], token_bytes: Mapping[str, int], *, frame_bytes: int
) -> tuple[Frame, ...]:
    """Cut every cache into whole tokens of at most about `frame_bytes`, the draft cache first."""
    frames: list[Frame] = []
    for part in DRAFT_FIRST:
        stop = cached_tokens.get(part, 0)
        step = max(1, frame_bytes // max(token_bytes.get(part, 1), 1))
        frames += [
            Frame(
                part=part,
                start=start,
                stop=min(start + step, stop),
                num_bytes=(min(start + step, stop) - start) * token_bytes[part],
            )
            for start in range(0, stop, step)
        ]
    return tuple(frames)
