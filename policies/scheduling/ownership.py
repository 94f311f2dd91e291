"""The arbiter of moves: who owns a sample, under which epoch (design 3.4).

Ownership is (sample, epoch, owner). The destination's COMMIT of epoch + 1 and the source's TAKE_BACK of the old
epoch race here; the first wins and the other is told to let go. A sample that is taken back goes on under epoch + 2,
so that nothing the destination may still say under epoch + 1 counts.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum

from ...core.records import SampleKey
from ..migration.move_messages import MoveOrder, MoveOutcome, MoveReport
from ..reallocation.pool_records import Move, MoveMode
from .events import MoveEnded, MoveRecord

TAKEN_BACK_EPOCHS = 2


class Ruling(Enum):
    """What a claim comes to."""

    GRANTED = "granted"
    "the claimant owns the sample from now on"
    CONFIRMED = "confirmed"
    "it owned it already: the claim was repeated"
    DENIED = "denied"
    "another owns it, or it is complete"


def rule_on_commit(report: MoveReport, *, epoch: int, owner: str | None, is_ours: bool) -> Ruling:
    """The destination says the sample runs there under `report.epoch`.

    `is_ours`: the scheduler that rules has ordered the move. What a predecessor left open was settled when the new one
    counted what is held; of samples that nobody held epochs begin anew, and an old claim may fit one by chance.
    """
    if owner == report.destination and epoch == report.epoch:
        return Ruling.CONFIRMED
    if is_ours and owner == report.source and epoch + 1 == report.epoch:
        return Ruling.GRANTED
    return Ruling.DENIED


def rule_on_take_back(
    report: MoveReport, *, epoch: int, owner: str | None, taken_back: str, is_ours: bool
) -> Ruling:
    """The source wants back what it handed over under `report.epoch`; `is_ours` as above.

    `taken_back` is the move whose take-back gave the owner its epoch: a sample that came back by a second
    move has the same owner and epoch, and what the first one left behind is no copy to go on with.
    """
    if owner != report.source:
        return Ruling.DENIED
    if is_ours and epoch == report.epoch:
        return Ruling.GRANTED
    confirmed = epoch == report.epoch + TAKEN_BACK_EPOCHS and taken_back == report.move_id
    return Ruling.CONFIRMED if confirmed else Ruling.DENIED


@dataclass(frozen=True, slots=True)
class _OpenMove:
    order: MoveOrder
    why: str
    gain_s: float
    ordered_s: float


class OpenMoves:
    """Moves that have been ordered and not ended, at most one a sample."""

    def __init__(self, prefix: str) -> None:
        """`prefix` makes the names of moves unique in a run: schedulers replace one another."""
        self._prefix = prefix
        self._open: dict[SampleKey, _OpenMove] = {}
        self._num_ordered = 0
        self.arriving: Counter[str] = Counter()
        "samples on their way to each instance; to be read"
        self._warm: set[tuple[str, str]] = set()

    def __contains__(self, key: SampleKey) -> bool:
        return key in self._open

    def ordered(self, move_id: str) -> bool:
        """True for a move of this scheduler's, ended or not."""
        return move_id.startswith(self._prefix)

    def num_arriving(self, instance: str) -> int:
        """Samples on their way to an instance."""
        return self.arriving[instance]

    def leaving(self) -> dict[str, set[SampleKey]]:
        """Samples on their way from instances."""
        found: dict[str, set[SampleKey]] = {}
        for key, move in self._open.items():
            found.setdefault(move.order.source, set()).add(key)
        return found

    def start(self, move: Move, *, epoch: int, now_s: float) -> MoveOrder:
        """Note a move and return its order."""
        order = MoveOrder(
            move_id=f"{self._prefix}{self._num_ordered}",
            key=move.key,
            epoch=epoch,
            source=move.source,
            destination=move.destination,
            mode=move.mode,
        )
        self._num_ordered += 1
        self._open[move.key] = _OpenMove(order, move.reason, move.gain_s, now_s)
        self.arriving[move.destination] += 1
        return order

    def end(
        self,
        key: SampleKey,
        outcome: MoveOutcome,
        why: str,
        *,
        now_s: float,
        metrics: dict[str, float] | None = None,
    ) -> list[MoveEnded]:
        """End a sample's move; no order comes of a sample that is not being moved."""
        found = self._open.pop(key, None)
        if found is None:
            return []
        self.arriving[found.order.destination] -= 1
        if outcome == MoveOutcome.MOVED and found.order.mode is MoveMode.MIGRATE:
            self._warm.add((found.order.source, found.order.destination))
        record = MoveRecord(
            order=found.order,
            outcome=outcome,
            why_ordered=found.why,
            why_ended=why,
            gain_s=found.gain_s,
            ordered_s=found.ordered_s,
            ended_s=now_s,
            metrics=metrics or {},
        )
        return [MoveEnded(record=record)]

    @property
    def warm_pairs(self) -> frozenset[tuple[str, str]]:
        """(source, destination) between which a sample has been migrated: their channel is open."""
        return frozenset(self._warm)

    def silent(self, now_s: float, *, timeout_s: float) -> list[MoveOrder]:
        """Orders of which nothing has been heard for too long."""
        return [found.order for found in self._open.values() if now_s - found.ordered_s > timeout_s]

    def of(self, key: SampleKey) -> MoveOrder | None:
        """The order of a sample's move."""
        found = self._open.get(key)
        return found.order if found else None

    def touching(self, instance: str) -> Iterable[MoveOrder]:
        """Orders with this instance as source or destination."""
        return [
            found.order
            for found in self._open.values()
            if instance in (found.order.source, found.order.destination)
        ]
