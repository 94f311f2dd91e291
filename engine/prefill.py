"""Fills caches with committed tokens, samples packed into one forward up to a token limit."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import torch

from engine.forward_plan import PrefillPiece, PrefillPlan
from engine.runner import ModelRunner


def fill_committed(
    runner: ModelRunner, tokens: np.ndarray, pieces: Iterable[PrefillPiece], max_tokens: int
) -> int:
    """Compute keys and values of runs of committed tokens.

    Args:
        runner: the model and its pool.
        tokens: committed tokens of every slot, int64 [S, T].
        pieces: the runs; long ones are cut, short ones share a forward.
        max_tokens: tokens in one forward.

    Returns:
        The number of tokens computed.
    """
    total = 0
    for pack in _packs(pieces, max_tokens):
        ids = np.concatenate([tokens[p.slot, p.start : p.start + p.length] for p in pack])
        positions = np.concatenate([np.arange(p.start, p.start + p.length) for p in pack])
        plan = PrefillPlan(pool=runner.pool, attention=runner.attention, pieces=pack)
        runner.fill(
            torch.from_numpy(ids).to(runner.device), torch.from_numpy(positions).to(runner.device), plan
        )
        total += len(ids)
    return total


def _packs(pieces: Iterable[PrefillPiece], max_tokens: int) -> Iterable[list[PrefillPiece]]:
    pack: list[PrefillPiece] = []
    room = max_tokens
    for piece in pieces:
        start, stop = piece.start, piece.start + piece.length
        while start < stop:
            length = min(room, stop - start)
            pack.append(PrefillPiece(slot=piece.slot, start=start, length=length))
            start, room = start + length, room - length
            if room == 0:
                yield pack
                pack, room = [], max_tokens
    if pack:
        yield pack
