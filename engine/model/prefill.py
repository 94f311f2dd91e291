"""Fills caches with committed tokens, samples packed into one forward up to a token limit.

Members of a group share their prompt: it is computed once and its keys and values are copied. With invariant
numerics the copy equals what would have been computed, bit by bit.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from ..upload import upload
from .prefill_plan import PrefillPiece, PrefillPlan, packed_inputs
from .runner import ModelRunner


def fill_committed(
    runner: ModelRunner,
    tokens: np.ndarray,
    pieces: Sequence[PrefillPiece],
    max_tokens: int,
    *,
    cached: np.ndarray,
) -> int:
    """Compute keys and values of runs of committed tokens.

    Args:
        runner: the model and its pool.
        tokens: committed tokens of every slot, int64 [S, T].
        pieces: the runs; long ones are cut, short ones share a forward.
        max_tokens: tokens in one forward.
        cached: tokens whose keys and values each of the running slots holds already, [B].

    Returns:
        The number of tokens computed.
    """
    computed, copies = share_prompts(tokens, pieces, cached)
    total = 0
    for pack in prefill_packs(computed, max_tokens):
        ids, positions = packed_inputs(tokens, pack)
        plan = PrefillPlan(pool=runner.pool, attention=runner.attention, pieces=pack)
        on_device = upload([ids, positions], runner.device)
        runner.fill(on_device[0], on_device[1], plan)
        if runner.taps is not None:
            runner.taps.note_filled(tokens, pack, len(ids))
        total += len(ids)
    for source, piece in copies:
        runner.pool.copy_slot(source, piece.slot, piece.length)
        for follower in runner.followers:
            follower.copied(source, piece)
    return total


def share_prompts(
    tokens: np.ndarray, pieces: Sequence[PrefillPiece], cached: np.ndarray
) -> tuple[list[PrefillPiece], list[tuple[int, PrefillPiece]]]:
    """Split the runs into those to compute and those to copy from a slot that holds, or will hold, their tokens.

    Only runs from the first token on are shared. Arguments as in `fill_committed`.

    Returns:
        The runs to compute, and (source slot, run) for each copy; copies follow the computation.
    """
    computed: list[PrefillPiece] = []
    copies: list[tuple[int, PrefillPiece]] = []
    filled = np.asarray(cached).copy()
    for piece in pieces:
        source = _holder(tokens, piece, filled) if piece.start == 0 and piece.length else None
        if source is None:
            computed.append(piece)
        else:
            copies.append((source, piece))
        if piece.length:
            filled[piece.slot] = max(filled[piece.slot], piece.start + piece.length)
    return computed, copies


def _holder(tokens: np.ndarray, piece: PrefillPiece, filled: np.ndarray) -> int | None:
    """The first slot that holds the run's tokens."""
    wanted = tokens[piece.slot, : piece.length]
    slots = np.nonzero(filled >= piece.length)[0]
    same = (tokens[slots, : piece.length] == wanted).all(1)
    return int(slots[same.argmax()]) if same.any() else None


def prefill_packs(pieces: Iterable[PrefillPiece], max_tokens: int) -> Iterable[list[PrefillPiece]]:
    """Cut and join runs of tokens, in their order, into forwards of at most `max_tokens`."""
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
