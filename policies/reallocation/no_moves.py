"""Policies that move nothing: what static and pulled samples have in common once they are bound."""

from __future__ import annotations

from rlhfspec.policies.reallocation.pool_records import Move, PoolView


class NoMoves:
    """The baselines `static` and `pull`: the scheduler binds samples differently, here both rest."""

    def __init__(self, name: str) -> None:
        self.name = name

    def plan(self, view: PoolView) -> tuple[Move, ...]:
        """Return no move."""
        del view
        return ()

    def note_finished(self, num_response_tokens: int) -> None:
        """Nothing to learn."""

    def note_transfer(self, *, num_bytes: int, seconds: float, cold: bool) -> None:
        """Nothing to learn."""

    def note_prefill(self, *, num_tokens: int, seconds: float) -> None:
        """Nothing to learn."""
