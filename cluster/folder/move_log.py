"""`moves.jsonl`: every move that ended, a line each, with the reason it was ordered and the reason it ended."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rlhfspec.core.files import append_whole
from rlhfspec.policies.migration.move_messages import MoveOutcome
from rlhfspec.policies.scheduling.events import MoveRecord

_ODD = (MoveOutcome.TAKEN_BACK, MoveOutcome.LOST)
_LINES_SAID = 3


def append_moves(path: Path, iteration: int, moves: Sequence[MoveRecord]) -> None:
    """Append the moves of one iteration; without any, write nothing. Raises StorageError."""
    if moves:
        append_whole(path, "".join(json.dumps(_line(iteration, record)) + "\n" for record in moves))


def odd_moves(moves: Sequence[MoveRecord]) -> list[str]:
    """What a person should know: moves that were taken back or lost; no sample is lost with them."""
    odd = [record for record in moves if record.outcome in _ODD]
    lines = [
        f"move {record.order.move_id} of sample {record.order.key.sample_index} from {record.order.source} to "
        f"{record.order.destination} was {record.outcome}: {record.why_ended or 'no reason given'}"
        for record in odd[:_LINES_SAID]
    ]
    if len(odd) > _LINES_SAID:
        lines.append(f"{len(odd) - _LINES_SAID} more moves were taken back or lost; see moves.jsonl")
    return lines


def _line(iteration: int, record: MoveRecord) -> dict[str, Any]:
    order = record.order
    return {
        "iteration": iteration,
        "move": order.move_id,
        "stream": str(order.key.stream),
        "sample_index": order.key.sample_index,
        "epoch": order.epoch,
        "source": order.source,
        "destination": order.destination,
        "mode": str(order.mode),
        "why_ordered": record.why_ordered,
        "predicted_gain_s": record.gain_s,
        "outcome": record.outcome,
        "why_ended": record.why_ended,
        # by the scheduler's own clock: to be compared with each other only
        "ordered_s": record.ordered_s,
        "ended_s": record.ended_s,
        "figures": dict(record.figures),
    }
